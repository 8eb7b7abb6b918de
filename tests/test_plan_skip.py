"""What a count does not compute has the shapes, types and bytes of what it stands for."""

import pytest
import torch
from mmdet.models.task_modules.assigners import MaxIoUAssigner
from mmdet.structures.mask import BitmapMasks
from mmengine.structures import InstanceData
from torch import nn

from sbp_mmdet.plan.cuda_rules import cuda_kernels
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.parts import PartTracker
from sbp_mmdet.plan.skip_arithmetic import SkipArithmetic

SIDE = 512  # a map of one channel is large
ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ('operation', 'arguments'),
    [
        (ATEN.add.Tensor, [(1,), (2.5,), (True,)]),
        (ATEN.to.dtype, [(torch.float64,), (torch.float16,), (torch.float64,)]),
        (ATEN.sum.dim_IntList, [([0],), ([1],), ([0], True), ([0, 1],)]),
        (ATEN.topk.default, [(3,), (4,), (3, 0)]),
        (ATEN._foreach_mul.Scalar, [(2.0,)]),
    ],
)
def test_remembered_results_are_those_of_their_arguments(operation, arguments):
    """Maps and transposed maps take turns; the cached result of one is not used for the other."""
    for x in (torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE).t(), torch.ones(SIDE, SIDE, dtype=torch.bfloat16)) * 2:
        x = [x, x] if 'foreach' in str(operation) else x
        for more in arguments:
            with SkipArithmetic(lambda: True):
                actual = operation(x, *more)
            expected = operation(x, *more)
            pairs = zip(actual, expected, strict=True) if isinstance(actual, (list, tuple)) else [(actual, expected)]
            for one, other in pairs:
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def test_each_result_is_a_tensor_of_its_own():
    x = torch.ones(SIDE, SIDE)
    with SkipArithmetic(lambda: True):
        first, second = x + 1, x + 1
    assert not first.any() and first.data_ptr() != second.data_ptr()
    first.fill_(1)
    assert not second.any()


def test_a_product_of_unlike_tensors_is_one_storage():
    """Torch multiplies them as matrices and views the product by ``_unsafe_view``, whose schema is of no view."""
    a, b = torch.ones(4, SIDE, 8), torch.ones(2, 4, 8, SIDE)
    peaks = []
    for skipped in (False, True):
        counter = LiveBytes()
        with SkipArithmetic(lambda skipped=skipped: skipped), counter:
            torch.matmul(a, b)
        peaks.append(counter.peak)
    assert peaks[0] == peaks[1] > 4 * 2 * 4 * SIDE**2


@pytest.mark.parametrize('make', ['empty', 'new_empty', 'empty_like', 'empty_strided'])
def test_memory_that_nothing_is_written_to_is_zeros(make):
    """Torch fills such memory with NaN here; TOOD compares scores, which a skipped operation would have written."""
    x, large = torch.ones(4, 2), torch.ones(SIDE, SIDE)
    memory = dict(
        empty=lambda: torch.empty(4, 2),
        new_empty=lambda: x.new_empty(4, 2),
        empty_like=lambda: torch.empty_like(x),
        empty_strided=lambda: torch.empty_strided((4, 2), (1, 4)),
    )[make]
    torch.use_deterministic_algorithms(True)
    try:
        with SkipArithmetic(lambda: True):
            out = memory()
            ATEN.mean.out(large.view(4, 2, -1), [2], out=out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.tolist() == [[0, 0]] * 4 and out.stride() == memory().stride()


def measure_peak(run, compute):
    """Return the result, and the peak in bytes."""
    counter = LiveBytes()
    with cuda_kernels(counter, compute) as skipping:
        skip = SkipArithmetic(lambda: not compute and skipping())
        with skip, counter:
            return run(), counter.peak


def test_assignment_is_computed_in_chunks():
    """40 boxes and 30,000 anchors are 1.2 million pairs."""
    torch.manual_seed(0)
    corners = torch.rand(30_000, 2) * 300
    anchors = InstanceData(priors=torch.cat([corners, corners + torch.rand(30_000, 2) * 80], 1))
    truth = InstanceData(bboxes=anchors.priors[:40] + torch.rand(40, 4), labels=torch.arange(40))
    assigner = MaxIoUAssigner(pos_iou_thr=0.7, neg_iou_thr=0.3, min_pos_iou=0.3)
    (plain, peak), (chunks, same) = (
        measure_peak(lambda: assigner.assign(anchors, truth), how) for how in (True, False)
    )
    assert peak == same > 40 * 30_000 * 4
    assert torch.equal(plain.max_overlaps, chunks.max_overlaps) and plain.max_overlaps.unique().numel() > 100
    assert torch.equal(plain.gt_inds, chunks.gt_inds) and (plain.gt_inds > 0).sum() >= 40


def test_crops_of_masks_are_not_computed():
    masks = BitmapMasks(torch.ones(3, 400, 500).numpy().astype('uint8'), 400, 500)
    boxes, of_mask = torch.tensor([[0.0, 0, 100, 100]] * 8), torch.zeros(8, dtype=torch.long)

    def run():
        return masks.crop_and_resize(boxes, (28, 28), device='cpu', inds=of_mask).masks

    (plain, peak), (nothing, same) = (measure_peak(run, compute) for compute in (True, False))
    assert peak == same > 8 * 400 * 500 * 4 and plain.shape == nothing.shape
    assert plain.all() and not nothing.any()


def test_a_network_counts_alike_the_second_time():
    """The second count uses the cached results of the first."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, stride=2))
    x, peaks = torch.ones(1, 3, SIDE, SIDE), []
    for _ in range(2):
        counter = LiveBytes()
        with SkipArithmetic(lambda: True), counter:
            net(x).sum().backward()
        peaks.append(counter.peak)
        net.zero_grad()
    assert peaks[0] == peaks[1] > 2 * 16 * (SIDE - 2) ** 2 * 4


class Distilled(nn.Module):
    """Student that holds its teacher as a plain object, and another one in a list, as distillation does."""

    def __init__(self):
        super().__init__()
        self.student = make_network()
        object.__setattr__(self, 'teacher_model', make_network())
        self.others = [make_network()]
        self.teacher_model.loss_cls = nn.ReLU()

    def forward(self, x):
        with torch.no_grad():
            maps = [self.teacher_model.layers(x), self.others[0].layers(x), self.student.layers(x)]
        return maps, self.teacher_model.loss_cls(x)


def make_network():
    network = nn.Module()
    network.layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    nn.init.ones_(network.layers[0].weight)
    return network


def test_a_teacher_outside_of_the_tree_is_not_computed():
    """mmdet's teachers are no submodules. Their losses decide on the assignment (LAD), and are computed."""
    model, x = Distilled(), torch.ones(1, 1, SIDE, SIDE)
    computed, loss = model(x)
    assert all(one.any() for one in computed) and loss.all()
    tracker, counter, all_bytes = PartTracker(model), LiveBytes(), LiveBytes()
    with all_bytes:
        model(x)
    with SkipArithmetic(lambda: tracker.in_network), counter:
        skipped, loss = model(x)
    assert not any(one.any() for one in skipped) and loss.all()
    assert counter.peak == all_bytes.peak > 3 * 2 * SIDE**2 * 4
