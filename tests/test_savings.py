"""The pieces outside of the backbone change memory and nothing else."""

import copy
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Largest, stored_bytes
from helpers import make_project
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmdet.models.task_modules.assigners import BboxOverlaps2D, MaxIoUAssigner
from mmdet.registry import HOOKS, MODELS
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.model import BaseModule
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sbp_mmdet.apply import keep_ratios
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.chunked_targets import targets_in_chunks

FLOAT = 4


class Net(BaseModule):
    """Has all that makes checkpointing difficult: batch norm, dropout, lists as arguments, keyword arguments."""

    def __init__(self):
        super().__init__()
        self.neck = Neck()
        norm = lambda: nn.BatchNorm2d(4, momentum=0.3)  # noqa: E731
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3), norm(), nn.ReLU(), norm()) for _ in range(2))
        self.heads[1][1].momentum = None  # the mean of all batches

    def forward(self, x):
        a, b = self.neck([x, x * 2], scale=0.5)
        return self.heads[0](a).square().sum() + self.heads[1](b).sin().sum()


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, xs, scale=1.0):
        return tuple(self.drop(conv(x).exp()) * scale for conv, x in zip(self.convs, xs, strict=True))


@pytest.fixture
def nets():
    torch.manual_seed(0)
    plain = Net().train()
    lean = copy.deepcopy(plain)
    assert checkpoint_modules(lean, ['neck', 'heads']) == ['neck', 'heads.0', 'heads.1']
    return plain, lean


def two_steps(net, x):
    torch.manual_seed(1)
    for _ in range(2):
        net.zero_grad()
        net(x).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def test_gradients_and_running_statistics_are_those_without(nets):
    plain, lean = nets
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    expected, found = two_steps(plain, x), two_steps(lean, x)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    for name, buffer in plain.state_dict().items():
        assert torch.equal(lean.state_dict()[name], buffer), name
    assert lean.heads[0][1].num_batches_tracked == 2
    assert lean.heads[0][1].momentum == 0.3 and lean.heads[1][1].momentum is None


def test_stores_the_inputs_only(nets):
    plain, lean = nets
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    known = [x, *lean.parameters(), *lean.buffers()]
    # The second input of the neck, its outputs as the heads' inputs, and what square and sin need.
    positions, inner = 2 * 8 * 8, 2 * 6 * 6
    assert stored_bytes(lambda: lean(x), known) == (positions * (3 + 4 + 4) + inner * (4 + 4)) * FLOAT
    assert stored_bytes(lambda: plain(x), known) > 2 * stored_bytes(lambda: lean(x), known)


def test_evaluation_stays_plain(nets):
    plain, lean = nets
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(lean.eval()(x), plain.eval()(x))


def test_a_copy_runs_its_own_parameters(nets):
    """As EMA makes one."""
    lean = nets[1]
    other = copy.deepcopy(lean)
    for p in other.parameters():
        nn.init.zeros_(p)
    x = torch.randn(1, 3, 8, 8)
    assert other(x) == 0 and lean(x) != 0
    assert type(lean.neck).__name__ == 'Neck' and isinstance(lean.neck, Neck)


def test_the_hook_names_what_is_missing(nets):
    hook = HOOKS.build(dict(type='CheckpointModulesHook', modules='roi_head.bbox_head'))
    with pytest.raises(ValueError, match=r"no 'roi_head.bbox_head'.*'neck', 'heads'"):
        hook.apply(nets[0])


def test_what_is_never_called_is_refused_or_warned_of(nets, caplog):
    class Head(BaseRoIHead):
        def __init__(self):
            BaseModule.__init__(self)
            self.bbox_head = nn.Linear(2, 2)

        init_bbox_head = init_mask_head = init_assigner_sampler = loss = None

    plain, _ = nets
    plain.roi_head = Head()
    with pytest.raises(ValueError, match=r"the loss of roi_head.*its parts: \['roi_head.bbox_head'\]"):
        checkpoint_modules(plain, ['roi_head'])
    hook = HOOKS.build(dict(type='CheckpointModulesHook', modules=['neck', 'neck.convs', 'roi_head.bbox_head']))
    hook.apply(plain)
    plain(torch.randn(1, 3, 8, 8)).backward()
    runner = SimpleNamespace(model=plain, logger=logging.getLogger('test_savings'))
    for _ in range(2):
        hook.after_train_iter(runner, 0)
    (message,) = caplog.messages
    assert 'roi_head.bbox_head did not run in the first step' in message and 'neck' not in message


@pytest.fixture
def whole_masks():
    """As mmdet has them."""
    return BitmapMasks.crop_and_resize


@pytest.mark.parametrize('positives', [0, 3, 4, 11])
def test_mask_targets_are_the_same(whole_masks, positives):
    rng = np.random.default_rng(0)
    masks = BitmapMasks(rng.integers(0, 2, (5, 40, 50)).astype(np.uint8), 40, 50)
    corners = np.sort(rng.uniform(0, 40, (positives, 2, 2)), 1)  # (P, 2, 2) -> upper left, lower right
    boxes, chosen = corners.reshape(positives, 4).astype(np.float32), rng.integers(0, 5, positives)
    expected = whole_masks(masks, boxes, (7, 7), chosen, device='cpu')
    for _ in range(2):  # switching it on twice changes nothing
        targets_in_chunks(nn.Module(), masks=4)
    found = masks.crop_and_resize(boxes, (7, 7), chosen, device='cpu')
    assert np.array_equal(found.masks, expected.masks) and found.height == 7


def test_masks_of_an_image_are_sent_once(whole_masks, monkeypatch):
    """For all pieces, and all stages of a cascade: a byte holds eight pixels."""
    rng = np.random.default_rng(0)
    masks = BitmapMasks(rng.integers(0, 2, (5, 40, 50)).astype(np.uint8), 40, 50)
    boxes = np.tile(np.array([[3, 4, 30, 20]], np.float32), (20, 1))
    sent = []
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, 'from_numpy', lambda array: (sent.append(array.nbytes), from_numpy(array))[1])
    targets_in_chunks(nn.Module(), masks=4)
    for _ in range(3):
        masks.crop_and_resize(boxes, (7, 7), rng.integers(0, 5, 20), device='cpu')
    assert [n for n in sent if n > 1000] == [5 * 40 * 7]
    masks.masks = 1 - masks.masks  # others
    found = masks.crop_and_resize(boxes, (7, 7), np.zeros(20, int), device='cpu')
    assert np.array_equal(found.masks, whole_masks(masks, boxes, (7, 7), np.zeros(20, int), device='cpu').masks)


def test_assigners_compare_the_same():
    model = nn.Module()
    model.head = nn.Module()
    model.head.assigner = MaxIoUAssigner(0.5, 0.5)
    model.head.bbox_assigner = [MaxIoUAssigner(0.5, 0.5), None]
    targets_in_chunks(model, priors=100)
    boxes = torch.rand(257, 4).cumsum(1)
    expected = BboxOverlaps2D()(boxes[:9], boxes)
    for assigner in (model.head.assigner, model.head.bbox_assigner[0]):
        assert torch.equal(assigner.iou_calculator(boxes[:9], boxes), expected)
        assert assigner.iou_calculator(boxes[:0], boxes).shape == (0, 257)
    with pytest.raises(ValueError, match='masks=0'):
        targets_in_chunks(model, masks=0)


def test_in_mmengines_runner(tmp_path, monkeypatch):
    """Two steps of the quick start's detector."""
    config = Config.fromfile(make_project(tmp_path, train=4, size=64))
    monkeypatch.chdir(tmp_path)
    config.merge_from_dict(dict(work_dir='out', train_cfg=dict(max_epochs=1), launcher='none'))
    config.custom_hooks = [
        dict(type='CheckpointModulesHook', modules=['neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head']),
        dict(type='TargetsInChunksHook', masks=2),
        dict(type='LeanHook', preset='sbp'),
        dict(type='EMAHook'),
    ]
    config.model.backbone.sbp_cfg = None
    config.default_hooks.checkpoint = None
    for split in ('val', 'test'):
        for key in ('dataloader', 'evaluator', 'cfg'):
            config[f'{split}_{key}'] = None
    seen = []
    forward = FPN.forward
    monkeypatch.setattr(FPN, 'forward', lambda self, x: (seen.append(torch.is_grad_enabled()), forward(self, x))[1])
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.iter == 2 and len(seen) == 4  # each step runs the neck twice
    assert isinstance(runner.model.neck, FPN) and keep_ratios(runner.model)


def test_distributed_with_gradients_in_the_buckets(nets, tmp_path):
    plain, lean = nets
    dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path / 'store'), 1), rank=0, world_size=1)
    try:
        net = DistributedDataParallel(lean, gradient_as_bucket_view=True)
        x = torch.randn(2, 3, 8, 8)
        expected, found = two_steps(plain, x), two_steps(net, x)
    finally:
        dist.destroy_process_group()
    for name, gradient in expected.items():
        assert torch.equal(found[f'module.{name}'], gradient), name


@pytest.mark.parametrize('semantic', [False, True])
def test_masks_of_mask2former_take_a_byte(semantic):
    """The same losses and gradients from masks that are never whole numbers of eight or four bytes."""
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
            found = head._loss_by_feat_single(*leaves, truth, [{}] * 2)
        return [*found, *torch.autograd.grad(sum(found), leaves)], [t.masks for t in truth], largest.most

    expected, whole, before = losses()
    targets_in_chunks(head, masks=2)
    targets_in_chunks(head, masks=2)  # twice is once
    found, bits, after = losses()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(
        t.dtype == torch.bool and torch.equal(t.as_subclass(torch.Tensor), w.bool())
        for t, w in zip(bits, whole, strict=True)
    )
    pixels = max(t.numel() for t in whole)
    assert before >= 8 * pixels and after < 4 * pixels
    assert type(given[0].masks) is BitmapMasks  # the batch stays as it was


def test_losses_of_maskformer_run_again():
    """From one assignment for each image, and without maps of the size of an image."""
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
    assign = head.assigner.assign
    head.assigner.assign = lambda *args, **kwargs: calls.append(1) or assign(*args, **kwargs)

    def losses():
        leaves = [t.clone().requires_grad_() for t in (scores, masks)]
        stored = stored_bytes(lambda: head._loss_by_feat_single(*leaves, truth, [{}] * 2), leaves)
        calls.clear()
        found = head._loss_by_feat_single(*leaves, truth, [{}] * 2)
        return [*found, *torch.autograd.grad(sum(found), leaves)], stored

    calls = []
    expected, before = losses()
    assert len(calls) == 2
    for _ in range(2):  # twice is once
        assert 'losses of masks run again' in targets_in_chunks(head)
    found, after = losses()
    assert len(calls) == 2  # one for each image
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    maps = truth[0].masks.numel() * FLOAT
    assert before > 8 * maps and after < maps
