"""Assigners assign the same boxes in chunks of any size."""

import copy
import re

import pytest
import torch
from cases import Largest
from fake_cuda import simulate_gpu
from mmdet.models.task_modules.assigners import BboxOverlaps2D, MaxIoUAssigner
from mmdet.models.task_modules.assigners.iou2d_calculator import BboxOverlaps2D_GLIP
from mmdet.registry import TASK_UTILS
from mmdet.structures.bbox import HorizontalBoxes, bbox_overlaps
from mmengine.structures import InstanceData
from torch import nn

from sbp_mmdet.chunked_targets import assigners, overlaps, targets_in_chunks
from sbp_mmdet.plan.cuda_rules import cuda_kernels
from sbp_mmdet.plan.memory import LiveBytes

CONFIGS = [dict(type='DynamicSoftLabelAssigner', topk=13), dict(type='SimOTAAssigner', center_radius=2.5)]


def instances(boxes: int, classes: int = 7, size: int = 160, masks: bool = False):
    """Return priors of three strides with predictions, and ground-truth boxes, some of which overlap."""
    g = torch.Generator().manual_seed(boxes)
    priors = []
    for stride in (8, 16, 32):
        y, x = torch.meshgrid(*(torch.arange(size // stride) * float(stride),) * 2, indexing='ij')
        level = torch.full_like(x, stride)
        priors.append(torch.stack([x, y, level, level], -1).reshape(-1, 4))
    priors = torch.cat(priors)
    low = priors[:, :2] - 40 * torch.rand(len(priors), 2, generator=g)
    predicted = torch.cat([low, low + 20 + 60 * torch.rand(len(priors), 2, generator=g)], 1)
    scores = torch.randn(len(priors), classes, generator=g)
    corner = 100 * torch.rand(boxes, 2, generator=g)
    truth = torch.cat([corner, corner + 10 + 50 * torch.rand(boxes, 2, generator=g)], 1)
    gts = InstanceData(bboxes=truth, labels=torch.randint(classes, (boxes,), generator=g))
    if masks:
        gts.masks = (torch.rand(boxes, size, size, generator=g) > 0.5).float()
    return InstanceData(priors=priors, bboxes=predicted, scores=scores.sigmoid()), gts


def model(cfg) -> nn.Module:
    head = nn.Module()
    head.assigner = TASK_UTILS.build(cfg)
    return head


@pytest.mark.parametrize('boxes', [0, 1, 12])
@pytest.mark.parametrize(
    ('cfg', 'masks'),
    [(cfg, masks) for cfg in CONFIGS for masks in (False, True) if not (masks and cfg['type'] == 'SimOTAAssigner')],
    ids=lambda value: value['type'] if isinstance(value, dict) else f'masks={value}',
)
def test_same_assignment_in_less_memory(cfg, boxes, masks, monkeypatch):
    monkeypatch.setattr(assigners, '_COSTS', 40 * 12 * 7)
    head, (predicted, gts) = model(cfg), instances(boxes, masks=masks)
    with Largest() as before:
        expected = head.assigner.assign(copy.deepcopy(predicted), copy.deepcopy(gts))
    targets_in_chunks(head)
    targets_in_chunks(head)  # twice is once
    assert type(head.assigner).__name__ == cfg['type']
    with Largest() as after:
        actual = copy.deepcopy(head).assigner.assign(predicted, gts)
    for key in ('gt_inds', 'max_overlaps', 'labels'):
        assert torch.equal(getattr(actual, key), getattr(expected, key)), key
    assert actual.num_gts == expected.num_gts == boxes
    if boxes == 12:
        assert expected.gt_inds.max() > 0
        assert masks or after.most < 0.5 * before.most


@pytest.mark.parametrize('cfg', CONFIGS, ids=lambda cfg: cfg['type'])
def test_no_prior_in_a_box(cfg, monkeypatch):
    monkeypatch.setattr(assigners, '_COSTS', 1)
    head, (predicted, gts) = model(cfg), instances(2)
    gts.bboxes = torch.tensor([[1e4, 1e4, 1.1e4, 1.1e4]] * 2)
    expected = head.assigner.assign(predicted, gts)
    targets_in_chunks(head)
    assert torch.equal(head.assigner.assign(predicted, gts).gt_inds, expected.gt_inds)


def boxes_at(centres, sizes):
    return torch.cat([centres - sizes / 2, centres + sizes / 2], 1)


def crowd(priors=1500, boxes=400):
    """Return priors with predictions near them, and more ground-truth boxes than fit into one chunk."""
    g = torch.Generator().manual_seed(0)
    anchors = boxes_at(800 * torch.rand(priors, 2, generator=g), 60 * torch.rand(priors, 2, generator=g) + 8)
    truth = boxes_at(800 * torch.rand(boxes, 2, generator=g), 60 * torch.rand(boxes, 2, generator=g) + 8)
    predicted = InstanceData(
        priors=anchors,
        bboxes=anchors + torch.randn(priors, 4, generator=g),
        decoder_priors=anchors + torch.randn(priors, 4, generator=g),
        scores=torch.rand(priors, 3, generator=g),
        approxs=anchors[:, None] + torch.randn(priors, 2, 4, generator=g),
        responsible_flags=torch.rand(priors, generator=g) > 0.5,
    )
    ignored = InstanceData(bboxes=truth[:40] + 3)
    return predicted, InstanceData(bboxes=truth, labels=torch.randint(3, (boxes,), generator=g)), ignored


THRESHOLDS = dict(pos_iou_thr=0.5, neg_iou_thr=0.4)
WHICH = {  # assigner: arguments, and what it is given in front of the boxes
    'MaxIoUAssigner': (dict(THRESHOLDS, ignore_iof_thr=0.3), ()),
    'MaxIoUAssigner on candidates': (dict(THRESHOLDS, ignore_iof_thr=0.3, ignore_wrt_candidates=False), ()),
    'ApproxMaxIoUAssigner': (THRESHOLDS, ()),
    'GridAssigner': (THRESHOLDS, ()),
    'CenterRegionAssigner': (dict(pos_scale=0.2, neg_scale=0.2), ()),
    'ATSSAssigner': (dict(topk=9, ignore_iof_thr=0.3), ([1000, 400, 100],)),
    'ATSSAssigner of DDOD': (dict(topk=9, alpha=0.8), ([1000, 400, 100],)),
    'TaskAlignedAssigner': (dict(topk=13), ()),
    'UniformAssigner': (dict(pos_ignore_thr=0.15, neg_ignore_thr=0.7), ()),
}


@pytest.mark.parametrize('name', WHICH)
def test_a_crowd_is_assigned_the_same_in_less_memory(name):
    """Every assigner compares all priors with all boxes; some pass the priors first, others the boxes."""
    options, extra = WHICH[name]
    predicted, truth, ignored = crowd()
    extra = (*extra, truth, ignored if 'ignore_iof_thr' in options else None)

    def assign(assigner):
        with LiveBytes() as counter:
            result = assigner.assign(copy.deepcopy(predicted), *copy.deepcopy(extra))
        return result, counter.peak

    head = model(dict(type=name.split()[0], **options))
    expected, before = assign(head.assigner)
    assert 'overlaps in the model' in targets_in_chunks(head, pairs=20_000)
    actual, after = assign(head.assigner)
    assert expected.gt_inds.max() > 0
    for key, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(actual, key), value), key
    assert after < 0.85 * before


@pytest.mark.parametrize('pairs', [1, 7, 1000])
@pytest.mark.parametrize('shape', [(5, 40), (40, 5), (12, 12), (0, 4), (4, 0)], ids=str)
def test_pairs_are_compared_once(shape, pairs):
    """Chunks have at least one row or column, along the longer dimension; aligned boxes are not compared in pairs."""
    first, second = (torch.rand(n, 4).cumsum(1) for n in shape)
    head = model(dict(type='MaxIoUAssigner', **THRESHOLDS))
    targets_in_chunks(head, pairs=pairs)
    calculator = head.assigner.iou_calculator
    for mode in ('iou', 'iof', 'giou'):
        assert torch.equal(calculator(first, second, mode=mode), bbox_overlaps(first, second, mode))
        assert torch.equal(calculator(first, second, mode), bbox_overlaps(first, second, mode))
    with Largest() as largest:
        calculator(first, second)
    assert largest.most <= 4 * max(2 * max(pairs, *shape), first.numel(), second.numel(), len(first) * len(second))
    same = calculator(first, first + 1, is_aligned=True)
    assert torch.equal(same, bbox_overlaps(first, first + 1, is_aligned=True))
    assert type(calculator).__name__ == 'BboxOverlaps2D' and calculator.scale == 1.0


def boxes_of_any_kind(number, seed):
    """Return boxes among which some are empty, turned inside out, not finite or equal to others."""
    g = torch.Generator().manual_seed(seed)
    boxes = torch.rand(number, 4, generator=g) * 100
    boxes[:, 2:] += boxes[:, :2]
    boxes[:3, 2:] = boxes[:3, :2] - torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, -3.0]])
    boxes[3], boxes[4, 1], boxes[5, 3] = torch.tensor([10.0, 10.0, 60.0, 60.0]), torch.nan, torch.inf
    boxes[6] = torch.tensor([0.5, 0.5, 0.5004, 0.5004])  # its area is below the least one that mmdet divides by
    return boxes


@pytest.mark.parametrize('pairs', [3, 100, 2**20])
@pytest.mark.parametrize('shape', [(9, 40), (40, 9)], ids=str)
@pytest.mark.parametrize(
    'kind', ['fp32', 'fp64', 'scores', 'containers', 'trained', 'fp16', 'half', 'both precisions', 'GLIP']
)
def test_overlaps_equal_those_of_mmdet(shape, kind, pairs):
    first, second = (boxes_of_any_kind(n, n) for n in shape)
    if kind in ('fp64', 'both precisions'):
        first, second = first.double(), second.double() if kind == 'fp64' else second
    if kind == 'scores':
        first = torch.cat([first, first[:, :1]], 1)
    if kind == 'containers':
        first, second = HorizontalBoxes(first), HorizontalBoxes(second)
    if kind == 'trained':
        first.requires_grad_()
    if kind == 'half':
        first, second = first.half(), second.half()
    head = model(dict(type='MaxIoUAssigner', **THRESHOLDS))
    calculators = dict(fp16=BboxOverlaps2D(100.0, 'fp16'), GLIP=BboxOverlaps2D_GLIP())
    head.assigner.iou_calculator = calculators.get(kind, BboxOverlaps2D())
    own = copy.copy(head.assigner.iou_calculator)
    targets_in_chunks(head, pairs=pairs)
    for mode in ('iou', 'iof', 'giou'):
        actual, expected = head.assigner.iou_calculator(first, second, mode), own(first, second, mode)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.requires_grad == expected.requires_grad and actual.dtype == expected.dtype
        for given in (dict(bboxes1=first, bboxes2=second, mode=mode), dict(bboxes2=second, bboxes1=first, mode=mode)):
            again = head.assigner.iou_calculator(is_aligned=False, **given)
            torch.testing.assert_close(again, expected, rtol=0, atol=0, equal_nan=True)
    empty = head.assigner.iou_calculator(first[:0], second)
    assert empty.shape == own(first[:0], second).shape == (0, len(second))


@pytest.mark.parametrize(('device', 'strips'), [('cuda', 3), ('cpu', 5)])
def test_a_gpu_compares_more_pairs_at_a_time(device, strips, monkeypatch):
    monkeypatch.setitem(assigners.LARGEST_STRIP, 'cpu', 2000)
    head = model(dict(type='MaxIoUAssigner', **THRESHOLDS))
    targets_in_chunks(head, pairs=1000)
    write, shapes = overlaps.write_overlaps, []
    monkeypatch.setattr(overlaps, 'write_overlaps', lambda out, *boxes: (shapes.append(out.shape), write(out, *boxes)))
    with simulate_gpu():
        first, second = (torch.empty(n, 4, device=device) for n in (900, 10))
        found = head.assigner.iou_calculator(first, second)
        assert found.device.type == device and found.shape == (900, 10)
    assert len(shapes) == strips and sum(rows for rows, _ in shapes) == 900


def test_the_planner_counts_the_strips_of_a_gpu(monkeypatch):
    """Two temporary matrices of as many pairs as a GPU compares at a time, beside the matrix of all pairs."""
    head = model(dict(type='MaxIoUAssigner', **THRESHOLDS))
    targets_in_chunks(head)
    first, second = boxes_of_any_kind(2**18, 0), boxes_of_any_kind(32, 1)
    expected = bbox_overlaps(first, second)
    with LiveBytes() as counter, cuda_kernels(counter, compute=False):
        found = head.assigner.iou_calculator(first, second)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    pairs = 2**23  # of all, and a strip has half of them
    assert 4 * 2 * pairs <= counter.peak < 4 * 2.2 * pairs


class Calculator:
    """Overlap calculator with two arguments, unlike mmdet's."""

    def __call__(self, first, second):
        return bbox_overlaps(first, second)


class Ranked(BboxOverlaps2D):
    """Overlap calculator whose entries depend on other pairs."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs).argsort(0).argsort(0).float()


class Relative(BboxOverlaps2D):
    """Overlap calculator that divides by the largest overlap of all pairs."""

    def __call__(self, *args, **kwargs):
        overlaps = super().__call__(*args, **kwargs)
        return overlaps / overlaps.max().clamp(min=1e-6)


@pytest.mark.parametrize('how', ['calculator', 'function'])
@pytest.mark.parametrize('cfg', CONFIGS, ids=lambda cfg: cfg['type'])
def test_costs_that_depend_on_other_priors_are_computed_at_once(cfg, how, monkeypatch):
    """A calculator that compares overlaps, or a function of the instance that takes the first half of the priors."""
    monkeypatch.setattr(assigners, '_COSTS', 40 * 12 * 7)
    (predicted, gts), name = instances(12), 'get_in_gt_and_in_center_info'
    if how == 'function' and cfg['type'] != 'SimOTAAssigner':
        pytest.skip('it has no such function')
    found = []
    for chunks in (False, True):
        head = model(cfg)
        if how == 'calculator':
            head.assigner.iou_calculator = Relative()
        else:
            own = getattr(head.assigner, name)

            def half(priors, boxes, own=own):
                inside, both = own(priors, boxes)
                first = inside & (torch.arange(len(priors)) < len(priors) // 2)
                return first, both[first[inside]]

            setattr(head.assigner, name, half)
        if chunks:
            targets_in_chunks(head)
        found.append(head.assigner.assign(copy.deepcopy(predicted), copy.deepcopy(gts)))
    assert torch.equal(found[0].gt_inds, found[1].gt_inds) and torch.equal(found[0].max_overlaps, found[1].max_overlaps)


@pytest.mark.parametrize('kind', [Calculator, Ranked])
def test_a_calculator_of_ones_own_stays_as_it_is(kind):
    predicted, truth, _ = crowd(50, 20)
    head = nn.Module()
    head.rpn_head = model(dict(type='MaxIoUAssigner', **THRESHOLDS))
    head.rpn_head.assigner.iou_calculator = kind()
    expected = head.rpn_head.assigner.assign(predicted, truth)
    said = targets_in_chunks(head, pairs=1)
    assert (
        'no training targets in chunks' in said and f'rpn_head.assigner (iou_calculator is a {kind.__name__})' in said
    )
    actual = head.rpn_head.assigner.assign(predicted, truth)
    assert torch.equal(actual.gt_inds, expected.gt_inds) and type(head.rpn_head.assigner.iou_calculator) is kind


def test_assigners_are_found_under_any_name_and_the_log_names_their_heads():
    """TOOD and DDOD have two assigners, a cascade has a list of them, and that of a DETR compares no priors."""
    whole = nn.Module()
    whole.tood, whole.roi_head, whole.detr, whole.by_name = nn.Module(), nn.Module(), nn.Module(), nn.Module()
    whole.by_name.assigners = {'a': MaxIoUAssigner(0.5, 0.5)}
    whole.tood.alignment_assigner = TASK_UTILS.build(dict(type='TaskAlignedAssigner', topk=13))
    whole.roi_head.bbox_assigner = [MaxIoUAssigner(0.5, 0.5), None, MaxIoUAssigner(0.6, 0.6)]
    whole.detr.assigner = TASK_UTILS.build(dict(type='HungarianAssigner', match_costs=[dict(type='BBoxL1Cost')]))
    said = targets_in_chunks(whole)
    assert said.startswith('training targets are computed in chunks: overlaps in tood, roi_head, by_name.')
    assert re.search(r'as before: detr.assigner \(.*HungarianAssigner .*no priors', said)
    assert 'no training targets in chunks' in targets_in_chunks(nn.Module())


def test_members_of_a_list_share_an_entry_in_the_log():
    model = nn.Module()
    model.heads, model.rpn = nn.ModuleList(nn.Module() for _ in range(3)), nn.Module()
    for head in (*model.heads, model.rpn):
        head.assigner = MaxIoUAssigner(0.5, 0.5)
    assert targets_in_chunks(model).endswith(': overlaps in heads.{0,1,2}, rpn')


@pytest.mark.parametrize('options', [dict(masks=0), dict(pairs=0), dict(pairs=True), dict(masks=2.0)], ids=str)
def test_sizes_of_chunks_are_positive(options):
    (name, value), *_ = options.items()
    with pytest.raises(ValueError, match=f'{name}={value!r} must be a positive integer'):
        targets_in_chunks(nn.Module(), **options)
