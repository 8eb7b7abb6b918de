"""Convolutional backbones and detectors of mmdet in small sizes, and a training step of them, for several tests."""

import copy
from pathlib import Path

import mmdet
import torch
from mmdet.models.backbones import Darknet, ResNet
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import init_default_scope
from oracles import DEVICE, assert_equal_statistics
from torch import nn

CONFIGS = Path(mmdet.__file__).parent / '.mim/configs'
HRNET = {
    f'stage{n}': dict(
        num_modules=1,
        num_branches=n,
        block='BOTTLENECK' if n == 1 else 'BASIC',
        num_blocks=(1,) * n,
        num_channels=tuple(8 * 2**i for i in range(n)),
    )
    for n in (1, 2, 3, 4)
}
GN = dict(type='GN', num_groups=4)
CONTEXT = dict(cfg=dict(type='ContextBlock', ratio=1 / 4), stages=(False, True, True, True), position='after_conv3')
DCN = dict(
    dcn=dict(type='DCNv2', deform_groups=1, fallback_on_stride=False), stage_with_dcn=(False, False, False, True)
)

# Darknet-53 has five stages of up to eight blocks and 1024 channels.
Darknet.arch_settings = Darknet.arch_settings | {9: ((1, 3), ((32, 64), (64, 64)))}

# Config of each backbone, and the largest ratios of stored bytes to plain (in fp64) that `exact` and `int8` may have.
BACKBONES = {
    'ResNet-18, training': (dict(type='ResNet', depth=18, base_channels=8, norm_eval=False), 0.75, 0.35),
    'ResNet-50': (dict(type='ResNet', depth=50, base_channels=8, frozen_stages=1), 0.53, 0.2),
    'ResNet-50, GN': (dict(type='ResNet', depth=50, base_channels=8, norm_cfg=GN), 0.75, 0.35),
    'ResNet-50, with_cp': (dict(type='ResNet', depth=50, base_channels=8, with_cp=True), 1.4, 0.6),
    'ResNetV1d-50': (dict(type='ResNetV1d', depth=50, stem_channels=16, base_channels=8), 0.53, 0.25),
    'ResNeXt-50': (dict(type='ResNeXt', depth=50, base_channels=8, groups=4, base_width=4), 0.53, 0.25),
    'RegNet': (dict(type='RegNet', arch='regnetx_400mf'), 0.53, 0.25),
    'Res2Net': (dict(type='Res2Net', depth=50, base_channels=16, scales=4, base_width=4, norm_eval=False), 0.8, 0.4),
    'ResNeSt': (dict(type='ResNeSt', depth=50, base_channels=16, radix=2, avg_down_stride=True), 0.6, 0.45),
    'HRNet': (dict(type='HRNet', extra=HRNET), 0.53, 0.2),
    'CSPNeXt': (dict(type='CSPNeXt', deepen_factor=0.167, widen_factor=0.125), 0.5, 0.25),
    'CSPNeXt, GN': (dict(type='CSPNeXt', deepen_factor=0.167, widen_factor=0.125, norm_cfg=GN), 0.5, 0.25),
    'CSPDarknet': (dict(type='CSPDarknet', deepen_factor=0.33, widen_factor=0.125), 0.4, 0.15),
    'Darknet': (dict(type='Darknet', depth=9, out_indices=(1, 2), norm_eval=False), 0.5, 0.15),
    'EfficientNet': (dict(type='EfficientNet', arch='b0', drop_path_rate=0.0), 0.55, 0.2),
    'plugins': (dict(type='ResNet', depth=50, base_channels=8, plugins=[CONTEXT]), 0.7, 0.55),
    'deformable': (dict(type='ResNet', depth=50, base_channels=8, **DCN), 0.6, 0.35),
}


def randomize_norms(model):
    """Return the model in fp64 and training mode on ``DEVICE``, with random values in norms instead of zeros and
    ones."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
            for values in (module.weight, module.bias, getattr(module, 'running_mean', None)):
                values is None or values.data.normal_().mul_(0.2)
            module.weight.data.add_(0.5)
    model.double().to(DEVICE).train()  # mmdet's returns None
    return model


def build_module(cfg):
    """Build a module of mmdet in the state of :func:`randomize_norms`.

    Of a ResNet's stages, the first keeps three blocks at most and the others two: the first block, which changes the
    number of channels or the size, one behind it, and in one stage, one in the middle.
    """
    init_default_scope('mmdet')
    model = MODELS.build(copy.deepcopy(cfg))
    for number, name in enumerate(model.res_layers if isinstance(model, ResNet) else ()):
        del getattr(model, name)[2 if number else 3 :]
    return randomize_norms(model)


def run_step(model, *inputs, **options):
    """Return outputs, gradients, buffers and stored bytes (without parameters and inputs) of a training step."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs, **options)
    stored = sum(size for place, (size, _) in seen.items() if place not in known)
    model.zero_grad()
    outs = out if isinstance(out, (list, tuple)) else [out]
    sum(o.square().mean() for o in outs).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [o.detach() for o in outs], grads, dict(model.named_buffers()), stored


def flatten_gradients(grads):
    """Return all gradients as one vector."""
    return torch.cat([g.flatten() for g in grads.values()])


def relative_distance(a, b):
    """Return the norm of the difference between two sets of gradients, relative to the norm of the second."""
    return ((flatten_gradients(a) - flatten_gradients(b)).norm() / flatten_gradients(b).norm()).item()


def assert_same(actual, expected):
    """Assert that two results of :func:`run_step` in fp64 agree, apart from rounding and stored bytes."""
    outs, grads, buffers, _ = actual
    torch.testing.assert_close(outs, expected[0], rtol=1e-10, atol=1e-10)
    assert grads.keys() == expected[1].keys()
    assert relative_distance(grads, expected[1]) < 1e-11
    assert_equal_statistics(buffers, expected[2])


def build_detector(config, **options):
    """Return a small detector with one of mmdet's configs, and a batch of two images with objects."""
    init_default_scope('mmdet')
    MessageHub.get_current_instance().update_info('iter', 0)
    cfg = Config.fromfile(CONFIGS / config)
    cfg.merge_from_dict({f'model.{key}': value for key, value in options.items()})
    cfg = cfg.model
    for part in ('backbone', 'neck'):
        cfg[part].pop('init_cfg', None)
    torch.manual_seed(0)
    model = randomize_norms(MODELS.build(cfg)).float()
    batch = demo_mm_inputs(2, [[3, 128, 128]] * 2, num_classes=2, with_mask=True)
    return model, model.data_preprocessor(batch, True)


MASK_RCNN = {
    'backbone.base_channels': 8,
    'backbone.depth': 18,
    'neck.in_channels': [8, 16, 32, 64],
    'neck.out_channels': 16,
    'rpn_head.in_channels': 16,
    'rpn_head.feat_channels': 16,
    'rpn_head.num_convs': 2,
    'roi_head.bbox_roi_extractor.out_channels': 16,
    'roi_head.bbox_head.in_channels': 16,
    'roi_head.bbox_head.fc_out_channels': 32,
    'roi_head.mask_roi_extractor.out_channels': 16,
    'roi_head.mask_head.in_channels': 16,
    'roi_head.mask_head.conv_out_channels': 16,
}
RTMDET = {'backbone.widen_factor': 0.125, 'neck.in_channels': [32, 64, 128], 'neck.out_channels': 16}
RTMDET |= {'bbox_head.in_channels': 16, 'bbox_head.feat_channels': 16}
FCOS = {'backbone.base_channels': 8, 'backbone.depth': 18, 'neck.in_channels': [8, 16, 32, 64]}
FCOS |= {'neck.out_channels': 32, 'bbox_head.in_channels': 32, 'bbox_head.feat_channels': 32}
TRAINED = {'backbone.norm_eval': False, 'backbone.norm_cfg.requires_grad': True, 'backbone.frozen_stages': -1}
# Config of each detector, overrides that make it small, and the largest ratio of stored bytes that `exact` may have.
DETECTORS = {
    'Mask R-CNN': ('mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', MASK_RCNN | TRAINED, 0.97),
    'RTMDet-Ins': ('rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py', RTMDET, 0.6),
    'FCOS': ('fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', FCOS | TRAINED, 0.8),
    'YOLOX': ('yolox/yolox_tiny_8xb8-300e_coco.py', {}, 0.5),
}
