"""Training targets that are computed in chunks are the same targets."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import Largest, count_stored_bytes
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.registry import MODELS
from mmdet.structures.mask import BitmapMasks, PolygonMasks
from mmengine.config import ConfigDict
from mmengine.hub import get_config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData, PixelData

from sbp_mmdet.chunked_targets import targets_in_chunks
from sbp_mmdet.chunked_targets.mask_heads import CroppedInChunks
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.parts import PartTracker

FLOAT = 4


def mask_targets(masks, positives, *, soft=False):
    """Return a mask head and the inputs of its targets: an image with masks, and one without positive proposals."""
    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(-5, 45, (positives, 2, 2)), 1)  # (P, 2, 2) -> upper left, lower right
    sampled = []
    for number in (positives, 0):
        boxes = torch.from_numpy(corners.reshape(-1, 4)[:number]).float()
        chosen = torch.from_numpy(rng.integers(0, len(masks), number)) if number else torch.zeros(0, dtype=torch.long)
        sampled.append(SimpleNamespace(pos_priors=boxes, pos_assigned_gt_inds=chosen))
    head = MODELS.build(dict(type='FCNMaskHead', num_classes=2, in_channels=2, conv_out_channels=2))
    cfg = ConfigDict(mask_size=7, soft_mask_target=soft)
    return head, (sampled, [InstanceData(masks=masks)] * 2, cfg)


def bitmaps(dtype=np.uint8):
    rng = np.random.default_rng(1)
    masks = rng.integers(0, 2, (5, 40, 50)) if dtype is np.uint8 else rng.random((5, 40, 50))
    return BitmapMasks(masks.astype(dtype), 40, 50)


@pytest.mark.parametrize('dtype', [np.uint8, np.float32])
@pytest.mark.parametrize('positives', [0, 1, 3, 4, 11])
@pytest.mark.parametrize('number', [1, 2, 4])
def test_mask_targets_are_the_same(positives, number, dtype):
    """Targets in chunks are those of mmdet, also for soft masks and for more objects than are sent at a time."""
    masks = bitmaps(dtype)
    head, given = mask_targets(masks, positives, soft=dtype is np.float32)
    expected = head.get_targets(*given)
    for _ in range(2):  # twice is once
        assert 'masks in the model' in targets_in_chunks(head, masks=number)
    assert torch.equal(copy.deepcopy(head).get_targets(*given), expected)
    assert type(masks) is BitmapMasks and type(head).__name__ == 'FCNMaskHead'


def test_mask_targets_take_less_memory():
    head, given = mask_targets(bitmaps(), 40)
    peaks = []
    for change in (False, True):
        if change:
            targets_in_chunks(head, masks=4)
        with LiveBytes() as counter:
            head.get_targets(*given)
        peaks.append(counter.peak)
    assert peaks[0] > 40 * 40 * 50 * FLOAT and peaks[1] < 4 * 40 * 50 * (FLOAT + 2) + 40 * 500


def test_masks_exist_as_floats_one_chunk_at_a_time():
    """The masks that are sent take as much memory as the floats."""
    masks = BitmapMasks(np.ones((40, 40, 50), np.uint8), 40, 50)
    head, given = mask_targets(masks, 80)
    targets_in_chunks(head, masks=4)
    with LiveBytes() as counter:
        head.get_targets(*given)
    assert 4 * 40 * 50 * FLOAT < counter.peak < 2 * 4 * 40 * 50 * FLOAT + 80 * 500


@pytest.mark.parametrize('number', [-1, 5])
def test_an_object_that_is_not_there_is_refused(number):
    crops = CroppedInChunks(bitmaps(), 2)
    with pytest.raises(IndexError, match=f'{number} for 5 masks' if number > 0 else 'inds from -1'):
        crops.crop_and_resize(np.ones((1, 4), np.float32), (7, 7), np.array([number]))


def test_ground_truth_that_is_edited_in_place_is_read_again():
    """A cascade reads it in each stage."""
    masks = bitmaps()
    head, given = mask_targets(masks, 11)
    targets_in_chunks(head, masks=2)
    head.get_targets(*given)
    masks.masks[:] = 1 - masks.masks
    plain, _ = mask_targets(masks, 11)
    assert torch.equal(head.get_targets(*given), plain.get_targets(*given))


def test_only_this_model_is_changed():
    """Another model of the process, polygons, and a head with its own targets are unchanged."""

    class Head(FCNMaskHead):
        def get_targets(self, *args):
            return 'own'

    crop = BitmapMasks.crop_and_resize
    head, given = mask_targets(bitmaps(), 11)
    other = copy.deepcopy(head)
    targets_in_chunks(head, masks=2)
    assert BitmapMasks.crop_and_resize is crop and type(other) is FCNMaskHead
    own = Head(conv_out_channels=2, in_channels=2)
    assert 'no training targets in chunks' in targets_in_chunks(own) and own.get_targets() == 'own'
    polygons = PolygonMasks([[np.array([3.0, 3, 30, 3, 30, 20])]] * 5, 40, 50)
    given[1][0] = InstanceData(masks=polygons)
    assert torch.equal(head.get_targets(*given), other.get_targets(*given))


@pytest.mark.parametrize('semantic', [False, True])
def test_masks_of_mask2former_take_a_byte(semantic):
    """Losses and gradients are the same, and the masks are never integers of eight or four bytes."""
    model = get_config('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py').model
    init_default_scope('mmdet')
    train_cfg = dict(model.train_cfg, num_points=50)
    head = MODELS.build(dict(model.panoptic_head, num_queries=21, train_cfg=train_cfg, test_cfg=None))
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    given = []
    for _ in range(2):
        masks = BitmapMasks(rng.integers(0, 2, (10, 96, 128)).astype(np.uint8), 96, 128)
        given.append(InstanceData(labels=torch.randint(80, (10,), generator=generator), masks=masks))
    stuff = torch.randint(75, 133, (2, 1, 96, 128), generator=generator)
    maps = [PixelData(sem_seg=seg) if semantic else None for seg in stuff]
    scores, masks = (torch.randn(2, 21, *size, generator=generator) for size in ((134,), (24, 32)))

    def losses():
        torch.manual_seed(1)
        leaves = [t.clone().requires_grad_() for t in (scores, masks)]
        with Largest() as largest:
            truth = head.preprocess_gt(given, maps)
            actual = head._loss_by_feat_single(*leaves, truth, [{}] * 2)
        return [*actual, *torch.autograd.grad(sum(actual), leaves)], [t.masks for t in truth], largest.most

    expected, whole, before = losses()
    targets_in_chunks(head, masks=2)
    targets_in_chunks(head, masks=2)  # twice is once
    actual, bits, after = losses()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(
        t.dtype == torch.bool and torch.equal(t.as_subclass(torch.Tensor), w.bool())
        for t, w in zip(bits, whole, strict=True)
    )
    pixels = max(t.numel() for t in whole)
    assert before >= 8 * pixels and after < 4 * pixels
    assert type(given[0].masks) is BitmapMasks  # the batch stays as it was


def build_maskformer_head():
    """Return a head, its predictions and the ground truth of two images, of which one has no object."""
    model = get_config('mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py').model
    init_default_scope('mmdet')
    head = MODELS.build(dict(model.panoptic_head, num_queries=21, train_cfg=model.train_cfg, test_cfg=None))
    generator = torch.Generator().manual_seed(0)
    scores, masks = (torch.randn(2, 21, *size, generator=generator) for size in ((134,), (24, 32)))
    truth = [
        InstanceData(
            labels=torch.randint(133, (n,), generator=generator),
            masks=torch.randint(2, (n, 96, 128), generator=generator),
        )
        for n in (10, 0)
    ]
    return head, scores, masks, truth


@pytest.mark.parametrize('planned', [False, True])
def test_losses_of_maskformer_run_again(planned):
    """Each image is assigned once, and no map of the size of an image is held, not even where the planner looks."""
    head, scores, masks, truth = build_maskformer_head()
    assign = head.assigner.assign
    head.assigner.assign = lambda *args, **kwargs: calls.append(1) or assign(*args, **kwargs)

    def losses():
        leaves = [t.clone().requires_grad_() for t in (scores, masks)]
        stored = count_stored_bytes(lambda: head._loss_by_feat_single(*leaves, truth, [{}] * 2), leaves)
        calls.clear()
        actual = head._loss_by_feat_single(*leaves, truth, [{}] * 2)
        return [*actual, *torch.autograd.grad(sum(actual), leaves)], stored

    calls = []
    expected, before = losses()
    assert len(calls) == 2
    for _ in range(2):  # twice is once
        assert 'mask losses in the model' in targets_in_chunks(head)
    if planned:
        detector = torch.nn.Module()
        detector.panoptic_head = head
        PartTracker(detector)
    actual, after = losses()
    assert len(calls) == 2  # one for each image
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    maps = truth[0].masks.numel() * FLOAT
    assert before > 8 * maps and after < maps
    head.loss_mask.pairs_at_a_time = 2**10
    leaves = [t.clone().requires_grad_() for t in (scores, masks)]
    with LiveBytes() as counter:
        alive = head._loss_by_feat_single(*leaves, truth, [{}] * 2)
    assert counter.live < maps and alive


def test_losses_of_maskformer_may_change_before_the_backward_pass():
    """Settings of a loss, for example of each branch or step, are those of the forward pass."""
    head, scores, masks, truth = build_maskformer_head()
    expected = None
    for chunked in (False, True):
        if chunked:
            targets_in_chunks(head)
        leaves, total = [t.clone().requires_grad_() for t in (scores, masks)], 0
        for eps in (1.0, 50.0):
            head.loss_dice.eps = eps
            total = total + sum(head._loss_by_feat_single(*leaves, truth, [{}] * 2))
        gradients = torch.autograd.grad(total, leaves)
        assert head.loss_dice.eps == 50
        expected = expected or gradients
    for actual, gradient in zip(gradients, expected, strict=True):
        assert torch.equal(actual, gradient)


def test_losses_of_maskformer_with_hooks_run_once():
    head, scores, masks, truth = build_maskformer_head()
    targets_in_chunks(head)
    calls = []
    head.loss_dice.register_forward_hook(lambda *args: calls.append(1))
    leaves = [t.clone().requires_grad_() for t in (scores, masks)]
    sum(head._loss_by_feat_single(*leaves, truth, [{}] * 2)).backward()
    assert len(calls) == 1
