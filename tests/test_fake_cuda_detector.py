"""A training step of a detector on a GPU that is not there: networks, their losses, backward pass and optimizer.

Fake tensors have no numbers, so the step stops where shapes depend on them, and these places are stood in for: mmdet's
assigners and samplers (``nonzero``), which give the RoI heads fixed RoIs and targets; the choice of proposals (NMS);
which level of the pyramid an RoI is cut from (``nonzero``; here all RoIs are cut from each level); and RoIAlign's
kernel, which is C++ without a rule for fake tensors.
"""

import copy
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from fake_cuda import backward, draw_on_cpu, gpu_that_is_not_there, put_on_gpu, to_gpu
from helpers import CONFIGS
from mmcv.ops.roi_align import RoIAlignFunction
from torch._subclasses.fake_tensor import unset_fake_temporarily

from sbp_mmdet.analysis.detector import build_detector
from sbp_mmdet.analysis.variants import load_config, with_variant
from sbp_mmdet.shared_draws import MapDraws

ATTO = CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
VARIANTS = [
    'none',
    'recompute',
    'exact-block+cp-heads+cp-rpn+cp-neck',
    'int8-block+skip+targets+cp-heads+cp-rpn+cp-neck',
    'nearest+sbp-neck+sbp-rpn+sbp-masks',
    'pool+skip',
]
KERNEL = types.SimpleNamespace(roi_align_forward=lambda *a, **k: None, roi_align_backward=lambda *a, **k: None)


@pytest.fixture(scope='module')
def config():
    config = load_config(str(ATTO))
    config.model.backbone.update(arch=dict(depths=[1, 1, 2, 1], channels=[8, 16, 32, 64]), drop_path_rate=0.5)
    config.model.neck.in_channels = [8, 16, 32, 64]
    return config


@pytest.fixture
def mode(monkeypatch):
    of = MapDraws.of

    def on_cpu(self, x, as_backbone=False):
        with unset_fake_temporarily():
            found = of(self, torch.empty(()).expand(x.shape), as_backbone)
        return to_gpu(mode, found)

    monkeypatch.setattr(MapDraws, 'of', on_cpu)
    monkeypatch.setattr(sys.modules[RoIAlignFunction.__module__], 'ext_module', KERNEL)
    with gpu_that_is_not_there() as mode:
        yield mode


def losses(model, images, rois):
    """Of all networks, with targets that are given."""
    maps = model.extract_feat(images)
    found = [F.binary_cross_entropy_with_logits(s, s.detach().sigmoid()) for s in model.rpn_head(maps)[0]]
    found += [F.l1_loss(deltas, torch.zeros_like(deltas)) for deltas in model.rpn_head(maps)[1]]
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


@pytest.mark.filterwarnings('ignore:Accessing the data pointer')  # which tells passes apart, and is as good fake
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=['fp16', 'bf16'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_a_step(config, variant, dtype, mode):
    with unset_fake_temporarily(), mock.patch('mmdet.structures.mask.BitmapMasks.crop_and_resize'):
        changed = with_variant(copy.deepcopy(config), variant)
        model, _ = build_detector(changed, 'cpu')
    put_on_gpu(mode, model)
    draw_on_cpu(mode, model.backbone)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    images = torch.empty(2, 3, 75, 101, device='cuda')
    rois = torch.empty(9, 5, device='cuda')
    with torch.autocast('cuda', dtype):
        found = losses(model, images, rois)
    assert all(loss.dtype == torch.float32 and loss.is_cuda for loss in found)
    gradients = backward([torch.stack(found).sum()])
    assert set(gradients) == set(trained)
    for p, grad in gradients.items():
        assert grad.is_cuda and grad.dtype == p.dtype
        p.grad = grad
    optimizer.step()
    assert all(state['exp_avg'].is_cuda for state in optimizer.state.values())
