"""Convolutional modules, backbones and detectors train lean with the gradients of the unchanged ones."""

import copy
import pickle

import numpy as np
import pytest
import torch
from conv_models import (
    BACKBONES,
    DETECTORS,
    assert_same,
    build_detector,
    build_module,
    randomize_norms,
    relative_distance,
    run_step,
)
from mmcv.cnn import ConvModule, DepthwiseSeparableConvModule
from mmdet.models.backbones.resnet import BasicBlock
from mmdet.registry import MODELS
from oracles import DEVICE, OperationNames, assert_equal_statistics, random_images
from torch import nn

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.checkpointing import checkpoint_modules


@pytest.mark.parametrize('name', BACKBONES)
def test_backbones(name):
    cfg, exact, int8 = BACKBONES[name]
    stock = build_module(cfg)
    lean, rounded = copy.deepcopy(stock), copy.deepcopy(stock)
    apply_lean(lean)
    apply_lean(rounded, 'int8')
    x = random_images(2, 96, 96)
    expected, actual, eight = run_step(stock, x), run_step(lean, x), run_step(rounded, x)
    assert_same(actual, expected)
    assert actual[3] <= exact * expected[3]
    assert eight[3] <= int8 * expected[3]
    torch.testing.assert_close(eight[0], expected[0], rtol=1e-10, atol=1e-10)
    assert relative_distance(eight[1], expected[1]) < 0.05


def conv_module(**options):
    return ConvModule(8, 8, 3, **dict(padding=1, norm_cfg=dict(type='BN'), act_cfg=dict(type='ReLU')) | options)


def trained_eps():
    layer = conv_module(conv_cfg=dict(type='ConvWS'))
    layer.conv.eps = nn.Parameter(torch.tensor(0.1))
    return layer


class Gelu(nn.Module):
    """An activation that the package does not know."""

    def forward(self, x):
        return nn.functional.gelu(x)


class Row(nn.Module):
    """Layers between two convolutions, called one after the other, in a class that is no nn.Sequential."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1), *layers, nn.Conv2d(8, 8, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sequence():
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Gelu(), nn.Conv2d(8, 8, 1), Gelu())


# Modules, and the reason why they are left unchanged; '' if they are changed.
GN = dict(type='GN', num_groups=4)
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
        "the order of its layers is act, conv, norm, and only 'conv, norm, act' is supported",
    ),
    'spectral norm': (lambda: conv_module(with_spectral_norm=True), 'conv: it has hooks'),
    'ConvWS': (lambda: conv_module(conv_cfg=dict(type='ConvWS')), ''),
    'ConvWS, group norm': (lambda: conv_module(conv_cfg=dict(type='ConvWS'), norm_cfg=GN), ''),
    'ConvWS, trained eps': (trained_eps, 'conv: its eps is a Parameter'),
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
    stock = randomize_norms(Row(make()))
    for module in stock.modules():
        module.train(not (norm_eval and isinstance(module, nn.modules.batchnorm._BatchNorm)))
    lean = copy.deepcopy(stock)
    report = apply_lean(lean)
    assert report.left.get('layers.1', '').startswith(reason) and (reason or 'layers.1' not in report.left)
    x = image()
    for _ in range(2):  # running statistics move on
        assert_same(run_step(lean, x), run_step(stock, x))
    no_images = [model(x[:0]).sum() for model in (lean, stock)] if 'IN' not in name else [x.sum()] * 2
    assert torch.equal(*no_images)
    lean.load_state_dict(stock.state_dict())  # on a GPU, running statistics may differ by rounding
    lean.eval(), stock.eval()
    assert torch.equal(lean(x), stock(x))
    remove_lean(lean)
    assert not any(isinstance(module, LeanModule) for module in lean.modules())


def image(size=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, size, size, dtype=torch.float64, generator=generator).to(DEVICE)


def test_arguments_of_a_conv_module():
    stock = randomize_norms(conv_module())
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    for options in (dict(activate=False), dict(norm=False), dict(activate=False, norm=False)):
        assert_same(run_step(lean, image(), **options), run_step(stock, image(), **options))


def test_hooks_of_submodules_are_called():
    lean = randomize_norms(conv_module())
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


@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_a_bias_in_front_of_batch_statistics_has_no_gradient(preset):
    """Plain autograd sums rounding errors there; from rounded maps the sum would be a thousand times as large."""
    module = ConvModule(8, 8, 3, bias=True, norm_cfg=dict(type='BN')).to(DEVICE).train()
    apply_lean(module, preset, verify=False)
    module(torch.randn(2, 8, 24, 24).to(DEVICE)).square().sum().backward()
    assert not module.conv.bias.grad.any() and module.bn.bias.grad.any()


def test_checkpointing_of_the_module_is_off_and_said_so():
    model = MODELS.build(BACKBONES['ResNet-50, with_cp'][0])
    report = apply_lean(model)
    assert 'with_cp=True is switched off' in report.changed['layer1.0']


@pytest.mark.parametrize('preset', ['exact', 'int8'])
def test_checkpoints_around_lean_modules(preset):
    """Statistics are updated once, and nothing is stored beyond the inputs of the checkpoints."""
    stock = randomize_norms(Row(conv_module(), conv_module(act_cfg=dict(type='SiLU')), BasicBlock(8, 8)))
    around = copy.deepcopy(stock)
    apply_lean(around, preset)
    checkpoint_modules(around, ['layers'])
    x = image()
    expected, actual = run_step(stock, x), run_step(around, x)
    assert relative_distance(actual[1], expected[1]) < (1e-11 if preset == 'exact' else 0.05)
    assert_equal_statistics(actual[2], expected[2])
    assert actual[3] < 0.6 * expected[3]


def test_copies_and_pickles_are_lean_and_independent():
    """EMA makes such copies."""
    lean = randomize_norms(Row(conv_module()))
    apply_lean(lean)
    expected = run_step(lean, image())
    for other in (copy.deepcopy(lean), *[pickle.loads(pickle.dumps(lean, protocol)) for protocol in (0, 2, 5)]):
        other.load_state_dict(lean.state_dict())
        assert run_step(other, image())[3] == expected[3]
        assert all(p is not q for p, q in zip(other.parameters(), lean.parameters(), strict=True))


def test_two_outputs_of_one_layer_and_a_shared_layer():
    """A head runs on several maps, and several layers read the same map."""

    class Fork(Row):
        def forward(self, x):
            first, shared, left, right, last = self.layers
            maps = [shared(first(x)), shared(first(x[..., ::2, ::2]))]
            return [last(left(m) + right(m)) for m in maps]

    stock = randomize_norms(Fork(*(conv_module(act_cfg=dict(type='SiLU')) for _ in range(3))))
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    assert_same(run_step(lean, image()), run_step(stock, image()))


def test_named_modules_alone_are_changed():
    model = MODELS.build(BACKBONES['ResNet-50'][0])
    report = apply_lean(model, modules=['layer3'])
    assert report.changed and all(name.startswith('layer3') for name in report.changed)
    assert not isinstance(model.layer2[0], LeanModule)


def test_frozen_stages_fold_their_norms_while_the_rest_trains():
    """Frozen stages are in evaluation mode. In an evaluation of the whole model, all modules run their own code."""
    stock = build_module(dict(type='ResNet', depth=18, base_channels=16, frozen_stages=2, norm_eval=True))
    lean = copy.deepcopy(stock)
    apply_lean(lean)
    x = random_images()
    assert_same(run_step(lean, x), run_step(stock, x))
    for frozen in (lean.layer1, lean.layer2):
        x = x.new_zeros(2, frozen[0].conv1.in_channels, 64, 64)
        with OperationNames() as called:
            frozen(x)
            assert called.names and not any('batch_norm' in name for name in called.names)
            with torch.no_grad():
                frozen(x)
            assert any('batch_norm' in name for name in called.names)


def test_reference_is_plain_and_with_cp_checkpoints_blocks():
    for preset in ('reference', 'with_cp'):
        stock = build_module(BACKBONES['CSPNeXt'][0])
        other = copy.deepcopy(stock)
        if preset == 'reference':
            with pytest.raises(ValueError, match='drops positions'):
                apply_lean(other, preset)
            continue
        apply_lean(other, preset)
        x = random_images()
        expected, actual = run_step(stock, x), run_step(other, x)
        assert_same(actual, expected)
        assert actual[3] < 0.9 * expected[3]


@pytest.mark.parametrize('name', DETECTORS)
def test_whole_detectors(name):
    """With norms in training mode, the losses and the samples that they are computed from are bitwise the same.

    On a GPU, cuDNN is off, because it may choose another kernel for a map that lies elsewhere in memory.
    """
    config, options, most = DETECTORS[name]
    stock, batch = build_detector(config, **options)
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

    with torch.backends.cudnn.flags(enabled=False):
        expected, actual, eight = (run_step(Loss(model)) for model in (stock, lean, rounded))
    assert actual[0] == eight[0] == expected[0]
    assert relative_distance(actual[1], expected[1]) < 1e-3
    assert relative_distance(eight[1], expected[1]) < 0.1
    assert actual[3] < most * expected[3] and eight[3] < 0.85 * actual[3]


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', ['Res2Net', 'ResNeSt', 'plugins', 'ResNet-50', 'ResNet-18, training'])
def test_a_norm_on_both_paths_of_a_block(name, preset):
    """A norm that is on both paths is called in the block's own order, which decides its running statistics."""
    plain = build_module(BACKBONES[name][0])
    number = 2 if '18' in name else 3
    for index, hook in enumerate((False, True)):  # with a hook, the block is no part of a chain
        block = plain.get_submodule(f'layer{2 + index}.0')
        block.downsample[-1] = getattr(block, f'bn{number}').train()
        if hook:
            block.conv1.register_forward_hook(lambda *args: None)
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    found = []
    for model in (lean, plain):
        torch.manual_seed(0)
        outs = model(random_images())
        sum(out.square().mean() for out in outs).backward()
        found.append((dict(model.named_buffers()), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    for actual, expected in zip(*found, strict=True):
        for key, values in expected.items():
            torch.testing.assert_close(actual[key], values, rtol=1e-7, atol=1e-9, msg=key)
