"""A training step of a whole detector runs on a fake GPU.

Fake tensors have no numbers, so the step stops where shapes depend on them, and these places are stood in for: mmdet's
assigners and samplers (``nonzero``), which give the RoI heads fixed RoIs and targets; the choice of proposals (NMS);
which level of the pyramid an RoI is cut from (``nonzero``; here all RoIs are cut from each level); and RoIAlign's
kernel, which is C++ without a rule for fake tensors.
"""

import sys
import types
from pathlib import Path

import mmdet
import pytest
import torch
import torch.nn.functional as F
from cases import CONVNEXT
from fake_cuda import backward, move_to_gpu, simulate_gpu, unset_fake_temporarily
from mmcv.ops.roi_align import RoIAlignFunction
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from sbp_mmdet.surgery import model_hooks

HEADS = dict(type='CheckpointModulesHook', modules=['neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'])
HOOKS = [
    [],
    [dict(type='LeanHook', preset='exact')],
    [dict(type='LeanHook', preset='sbp'), HEADS],
    [dict(type='LeanHook', preset='int8'), HEADS],
    [dict(type='LeanHook', preset='sampled', skip_dropped_images=False)],
]
KERNEL = types.SimpleNamespace(roi_align_forward=lambda *a, **k: None, roi_align_backward=lambda *a, **k: None)


@pytest.fixture
def mode(monkeypatch):
    monkeypatch.setattr(sys.modules[RoIAlignFunction.__module__], 'ext_module', KERNEL)
    with simulate_gpu() as mode:
        yield mode


def build_detector(hooks):
    """Return mmdet's Mask R-CNN with a small ConvNeXt, changed by a config's hooks."""
    init_default_scope('mmdet')
    config = Config.fromfile(Path(mmdet.__file__).parent / '.mim/configs/_base_/models/mask-rcnn_r50_fpn.py').model
    arch = dict(depths=[1, 1, 1, 1], channels=[8, 12, 16, 20])
    config.backbone = dict(type='SBPConvNeXt', drop_path_rate=0.5, **CONVNEXT | dict(arch=arch))
    config.neck.in_channels = arch['channels']
    config.roi_head.mask_head.num_convs, config.roi_head.bbox_head.fc_out_channels = 1, 64
    model = MODELS.build(config).train()
    for hook in model_hooks(hooks):
        hook.apply(model)
    return model


def compute_losses(model, images, rois):
    """Compute the losses of all networks with given targets."""
    maps = model.extract_feat(images)
    scores, boxes = model.rpn_head(maps)
    found = [F.binary_cross_entropy_with_logits(s, s.detach().sigmoid()) for s in scores]
    found += [F.l1_loss(deltas, torch.zeros_like(deltas)) for deltas in boxes]
    head = model.roi_head
    for boxes, extractor in ((True, head.bbox_roi_extractor), (False, head.mask_roi_extractor)):
        regions = sum(layer(level, rois) for layer, level in zip(extractor.roi_layers, maps, strict=False))
        if boxes:
            scores, deltas = head.bbox_head(regions)
            labels = torch.empty(len(rois), dtype=torch.int64, device='cuda')
            found += [F.cross_entropy(scores, labels), F.smooth_l1_loss(deltas, torch.zeros_like(deltas))]
        else:
            masks = head.mask_head(regions)
            found.append(F.binary_cross_entropy_with_logits(masks, torch.zeros_like(masks)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ('hooks', 'dtype'),
    [*((hooks, torch.float16) for hooks in HOOKS), *((HOOKS[i], torch.bfloat16) for i in (1, 2))],
    ids=lambda value: '+'.join(hook.get('preset', 'cp') for hook in value) or 'none' if type(value) is list else None,
)
def test_a_step(hooks, dtype, mode):
    with unset_fake_temporarily():
        model = build_detector(hooks)
    move_to_gpu(mode, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    images = torch.empty(2, 3, 75, 101, device='cuda')
    rois = torch.empty(9, 5, device='cuda')
    with torch.autocast('cuda', dtype):
        losses = compute_losses(model, images, rois)
    assert all(loss.dtype == torch.float32 and loss.is_cuda for loss in losses)
    gradients = backward([torch.stack(losses).sum()])
    assert set(gradients) == set(trained)
    for p, grad in gradients.items():
        assert grad.is_cuda and grad.dtype == p.dtype
        p.grad = grad
    optimizer.step()
    assert all(state['exp_avg'].is_cuda for state in optimizer.state.values())
