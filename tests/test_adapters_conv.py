"""Convolutional modules and detectors, changed in place, against the same modules unchanged."""

import copy
import pickle
from pathlib import Path

import mmdet
import numpy as np
import pytest
import torch
from mmcv.cnn import ConvModule, DepthwiseSeparableConvModule
from mmdet.models.backbones.resnet import BasicBlock
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import init_default_scope
from torch import nn
from torch.overrides import TorchFunctionMode

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.checkpointing import checkpoint_modules

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

# Backbone, and the most that it stores in proportion to the plain one: exact, and in eight bits (of fp64).
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
    'CSPDarknet': (dict(type='CSPDarknet', deepen_factor=0.33, widen_factor=0.125), 0.4, 0.15),
    'Darknet': (dict(type='Darknet', depth=53, norm_eval=False), 0.5, 0.15),
    'EfficientNet': (dict(type='EfficientNet', arch='b0', drop_path_rate=0.0), 0.55, 0.2),
    'plugins': (dict(type='ResNet', depth=50, base_channels=8, plugins=[CONTEXT]), 0.7, 0.55),
    'deformable': (dict(type='ResNet', depth=50, base_channels=8, **DCN), 0.6, 0.35),
}


def ordinary(model):
    """The model in fp64 and training mode, with no parameter and no statistic at its special first value."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
            for values in (module.weight, module.bias, getattr(module, 'running_mean', None)):
                values is None or values.data.normal_().mul_(0.2)
            module.weight.data.add_(0.5)
    model.double().train()  # mmdet's returns None
    return model


def build(cfg):
    init_default_scope('mmdet')
    return ordinary(MODELS.build(copy.deepcopy(cfg)))


def step(model, *inputs, **options):
    """Outputs, gradients, buffers and stored bytes of a training step; parameters and inputs do not count."""
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


def flat(grads):
    return torch.cat([g.flatten() for g in grads.values()])


def relative(a, b):
    return ((flat(a) - flat(b)).norm() / flat(b).norm()).item()


def assert_same(found, expected):
    outs, grads, buffers, _ = found
    torch.testing.assert_close(outs, expected[0], rtol=1e-10, atol=1e-10)
    assert grads.keys() == expected[1].keys()
    assert relative(grads, expected[1]) < 1e-11
    for name, values in buffers.items():
        assert torch.equal(values, expected[2][name]), name


@pytest.mark.parametrize('name', BACKBONES)
def test_backbones(name):
    cfg, exact, int8 = BACKBONES[name]
    stock = build(cfg)
    lean, rounded = copy.deepcopy(stock), copy.deepcopy(stock)
    apply_lean(lean)
    apply_lean(rounded, 'int8')
    x = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    expected, found, eight = step(stock, x), step(lean, x), step(rounded, x)
    assert_same(found, expected)
    assert found[3] <= exact * expected[3]
    assert eight[3] <= int8 * expected[3]
    torch.testing.assert_close(eight[0], expected[0], rtol=1e-10, atol=1e-10)
    assert relative(eight[1], expected[1]) < 0.05


def conv_module(**options):
    return ConvModule(8, 8, 3, **dict(padding=1, norm_cfg=dict(type='BN'), act_cfg=dict(type='ReLU')) | options)


class Gelu(nn.Module):
    """Unknown to the package."""

    def forward(self, x):
        return nn.functional.gelu(x)


class Row(nn.Module):
    """Layers one after the other between two convolutions, which is no nn.Sequential."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1), *layers, nn.Conv2d(8, 8, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sequence():
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Gelu(), nn.Conv2d(8, 8, 1), Gelu())


# What is built, and its reason to stay as it is; '': it is taken.
MODULES = {
    'ConvModule': (conv_module, ''),
    'SyncBN': (lambda: conv_module(norm_cfg=dict(type='SyncBN')), ''),
    'GN': (lambda: conv_module(norm_cfg=dict(type='GN', num_groups=2)), ''),
    'no norm': (lambda: conv_module(norm_cfg=None, act_cfg=dict(type='HSwish')), ''),
    'no activation': (lambda: conv_module(act_cfg=None), ''),
    'momentum=None': (lambda: conv_module(norm_cfg=dict(type='BN', momentum=None)), ''),
    'no statistics': (lambda: conv_module(norm_cfg=dict(type='BN', track_running_stats=False)), ''),
    'reflect': (lambda: conv_module(padding_mode='reflect'), ''),
    'other norm': (lambda: conv_module(norm_cfg=dict(type='IN')), ''),
    'other activation': (lambda: conv_module(act_cfg=dict(type='Sigmoid')), ''),
    'circular': (lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode='circular'), "its padding_mode is 'circular'"),
    'order': (
        lambda: conv_module(order=('act', 'conv', 'norm')),
        "its layers stand in the order ('act', 'conv', 'norm')",
    ),
    'spectral norm': (lambda: conv_module(with_spectral_norm=True), 'conv: it has hooks'),
    'ConvWS': (lambda: conv_module(conv_cfg=dict(type='ConvWS')), ''),
    'ConvAWS': (lambda: conv_module(conv_cfg=dict(type='ConvAWS')), ''),
    'same': (lambda: conv_module(conv_cfg=dict(type='Conv2dAdaptivePadding'), dilation=(2, 1)), ''),
    'same, strided': (lambda: conv_module(conv_cfg=dict(type='Conv2dAdaptivePadding'), stride=(1, 2)), ''),
    'transposed': (lambda: conv_module(conv_cfg=dict(type='deconv')), 'conv: it is a ConvTranspose2d'),
    'separable': (lambda: DepthwiseSeparableConvModule(8, 8, 3, padding=1, norm_cfg=dict(type='BN')), ''),
    'sequence': (sequence, ''),
    'BasicBlock': (lambda: BasicBlock(8, 8), ''),
}


@pytest.mark.parametrize('name', MODULES)
@pytest.mark.parametrize('norm_eval', [False, True])
def test_modules(name, norm_eval):
    make, reason = MODULES[name]
    stock = ordinary(Row(make()))
    for module in stock.modules():
        module.train(not (norm_eval and isinstance(module, nn.modules.batchnorm._BatchNorm)))
    lean = copy.deepcopy(stock)
    report = apply_lean(lean)
    assert report.left.get('layers.1', '').startswith(reason) and (reason or 'layers.1' not in report.left)
    x = image()
    for _ in range(2):  # running statistics move on
        assert_same(step(lean, x), step(stock, x))
    no_images = [model(x[:0]).sum() for model in (lean, stock)] if 'IN' not in name else [x.sum()] * 2
    assert torch.equal(*no_images)
    lean.eval(), stock.eval()
    assert torch.equal(lean(x), stock(x))
    remove_lean(lean)
    assert not any(isinstance(module, LeanModule) for module in lean.modules())


def image(size=12):
    return torch.randn(2, 8, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_arguments_of_a_conv_module():
    stock = ordinary(conv_module())
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    for options in (dict(activate=False), dict(norm=False), dict(activate=False, norm=False)):
        assert_same(step(lean, image(), **options), step(stock, image(), **options))


def test_hooks_of_submodules_are_called():
    lean = ordinary(conv_module())
    apply_lean(lean)
    for part in ('conv', 'bn', 'activate'):
        called = []
        handle = lean.get_submodule(part).register_forward_hook(lambda *args, called=called: called.append(args))
        lean(image())
        assert len(called) == 1
        handle.remove()


@pytest.mark.parametrize('part', ['conv1', 'bn2', 'relu'])
@pytest.mark.parametrize('kind', ['forward', 'forward_pre', 'full_backward'])
def test_the_report_names_what_has_hooks(part, kind):
    block = BasicBlock(8, 8)
    model = Row(block)
    getattr(block.get_submodule(part), f'register_{kind}_hook')(lambda *args: None)
    report = apply_lean(model)
    if part == 'conv1':  # it is called, so its hooks run, and is lean itself
        assert 'layers.1.conv1' in report.changed
    else:
        assert {name for name, reason in report.left.items() if 'hooks' in reason} == {f'layers.1.{part}'}
    assert 'layers.1' in report.changed


def test_checkpointing_of_the_module_is_off_and_said_so():
    model = MODELS.build(BACKBONES['ResNet-50, with_cp'][0])
    report = apply_lean(model)
    assert 'with_cp=True is off' in report.changed['layer1.0']


@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_checkpoints_around_lean_modules(preset):
    """Statistics are updated once, and nothing more is stored than what the checkpoints store."""
    stock = ordinary(Row(conv_module(), conv_module(act_cfg=dict(type='SiLU')), BasicBlock(8, 8)))
    around = copy.deepcopy(stock)
    apply_lean(around, preset)
    checkpoint_modules(around, ['layers'])
    x = image()
    expected, found = step(stock, x), step(around, x)
    assert relative(found[1], expected[1]) < (1e-11 if preset == 'exact' else 0.05)
    assert all(torch.equal(found[2][name], values) for name, values in expected[2].items())
    assert found[3] < 0.6 * expected[3]


def test_copies_and_pickles_are_lean_and_independent():
    """As EMA copies a model."""
    lean = ordinary(Row(conv_module()))
    apply_lean(lean)
    expected = step(lean, image())
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean))):
        other.load_state_dict(lean.state_dict())
        assert step(other, image())[3] == expected[3]
        assert all(p is not q for p, q in zip(other.parameters(), lean.parameters(), strict=True))


def test_two_outputs_of_one_layer_and_a_shared_layer():
    """A head that runs on several maps, and maps that several layers read."""

    class Fork(Row):
        def forward(self, x):
            first, shared, left, right, last = self.layers
            maps = [shared(first(x)), shared(first(x[..., ::2, ::2]))]
            return [last(left(m) + right(m)) for m in maps]

    stock = ordinary(Fork(*(conv_module(act_cfg=dict(type='SiLU')) for _ in range(3))))
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    assert_same(step(lean, image()), step(stock, image()))


def test_named_modules_alone_are_changed():
    model = MODELS.build(BACKBONES['ResNet-50'][0])
    report = apply_lean(model, modules=['layer3'])
    assert report.changed and all(name.startswith('layer3') for name in report.changed)
    assert not isinstance(model.layer2[0], LeanModule)


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.add(function)
        return function(*args, **(kwargs or {}))


def test_frozen_stages_fold_their_norms_while_the_rest_trains():
    """They are in evaluation mode; a real evaluation runs the modules' own code."""
    stock = build(dict(type='ResNet', depth=18, base_channels=16, frozen_stages=2, norm_eval=True))
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_same(step(lean, x), step(stock, x))
    for frozen in (lean.layer1, lean.layer2):
        x = x.new_zeros(2, frozen[0].conv1.in_channels, 64, 64)
        with Called() as found:
            frozen(x)
            assert nn.functional.batch_norm not in found.functions
            with torch.no_grad():
                frozen(x)
            assert nn.functional.batch_norm in found.functions


def test_reference_is_plain_and_with_cp_checkpoints_blocks():
    for preset in ('reference', 'with_cp'):
        stock = build(BACKBONES['CSPNeXt'][0])
        other = copy.deepcopy(stock)
        if preset == 'reference':
            with pytest.raises(ValueError, match='drops positions'):
                apply_lean(other, preset)
            continue
        apply_lean(other, preset)
        x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        expected, found = step(stock, x), step(other, x)
        assert_same(found, expected)
        assert found[3] < 0.9 * expected[3]


def detector(config, **options):
    """A detector of mmdet's configs with few channels, and two images with objects."""
    init_default_scope('mmdet')
    MessageHub.get_current_instance().update_info('iter', 0)
    cfg = Config.fromfile(CONFIGS / config)
    cfg.merge_from_dict({f'model.{key}': value for key, value in options.items()})
    cfg = cfg.model
    for part in ('backbone', 'neck'):
        cfg[part].pop('init_cfg', None)
    torch.manual_seed(0)
    model = ordinary(MODELS.build(cfg)).float()
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
# Config, its smaller sizes, and the most that is stored in proportion to the plain one.
DETECTORS = {
    'Mask R-CNN': ('mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', MASK_RCNN | TRAINED, 0.97),
    'RTMDet-Ins': ('rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py', RTMDET, 0.6),
    'FCOS': ('fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py', FCOS | TRAINED, 0.8),
    'YOLOX': ('yolox/yolox_tiny_8xb8-300e_coco.py', {}, 0.5),
}


@pytest.mark.parametrize('name', DETECTORS)
def test_whole_detectors(name):
    """Norms in training mode: the losses are the same to the bit, and so are the samples that they are made of."""
    config, options, most = DETECTORS[name]
    stock, batch = detector(config, **options)
    lean, rounded = copy.deepcopy(stock), copy.deepcopy(stock)
    apply_lean(lean)
    apply_lean(rounded, 'int8')

    class Loss(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self):
            torch.manual_seed(1)
            np.random.seed(1)
            losses = self.model(**copy.deepcopy(batch), mode='loss')
            return sum(sum(v) if isinstance(v, list) else v for k, v in losses.items() if 'loss' in k)

    expected, found, eight = (step(Loss(model)) for model in (stock, lean, rounded))
    assert found[0] == eight[0] == expected[0]
    assert relative(found[1], expected[1]) < 1e-3
    assert relative(eight[1], expected[1]) < 0.1
    assert found[3] < most * expected[3] and eight[3] < 0.85 * found[3]
