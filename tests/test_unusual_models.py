"""Models that are not quite the stock ones train as they would plain: nothing is bypassed that is not known.

Each case changes a model in the way of a user, before or after ``apply_lean``. Outputs and all gradients have to be those
of the plain model in fp64, code of the user's has to run as often, and what runs its own code is named.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from cases import build
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import ResNet, ResNetV1d
from mmdet.models.backbones.resnet import Bottleneck
from mmdet.models.backbones.swin import SwinBlock
from mmengine.logging import MMLogger
from test_adapters_conv import ordinary
from test_adapters_transformer import LAYERS
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from sbp_mmdet import LeanHook, adapter, apply_lean, remove_lean
from sbp_mmdet.adapters import ADAPTERS, ChannelMLPBinding, LeanBlock, LeanModule
from sbp_mmdet.models.convnext import ConvNeXtBlock
from sbp_mmdet.models.layers import LayerNorm2d

CALLS = []  # of code of the user's


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()


# Modules and code of users.


class LoRA(nn.Module):
    """Takes the place of a linear layer or a convolution, whose weight and bias it shows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        kind = nn.Linear if isinstance(inner, nn.Linear) else functools.partial(nn.Conv2d, kernel_size=1)
        wide, narrow = inner.weight.shape[:2]
        self.down, self.up = (kind(*sizes, bias=False).to(inner.weight) for sizes in ((narrow, 2), (2, wide)))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__('inner'), name)

    def forward(self, x):
        CALLS.append('LoRA')
        return self.inner(x) + self.up(self.down(x))


class Doubling(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


class StochasticDepth(nn.Module):
    """As in torchvision: the rate is called otherwise."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        CALLS.append('depth')
        return x * torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype).bernoulli_(1 - self.p).div_(1 - self.p)


class UnscaledDropPath(DropPath):
    """As timm's with ``scale_by_keep=False``."""

    def forward(self, x):
        return super().forward(x) * (1 - self.drop_prob)


class DoubledNorm(nn.LayerNorm):
    def forward(self, x):
        CALLS.append('norm')
        return 2 * super().forward(x)


class DoubledNorm2d(LayerNorm2d):
    def tokens(self, x):
        CALLS.append('norm')
        return 2 * super().tokens(x)


class ShiftedGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) + 1


class SteepGELU(nn.GELU):
    def forward(self, x):
        CALLS.append('act')
        return super().forward(1.5 * x)


class SteepReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(1.5 * x - 0.1)


class DoubledBlock(ConvNeXtBlock):
    def forward(self, x):
        CALLS.append('block')
        return 2 * super().forward(x)


class BlockWithOtherHelper(ConvNeXtBlock):
    def _forward(self, x):
        return 3 * super()._forward(x)


class DoubledSwinBlock(SwinBlock):
    def forward(self, x, hw_shape):
        return 2 * super().forward(x, hw_shape)


class PaddedBottleneck(Bottleneck):
    @property
    def norm2(self):
        return nn.Sequential(super().norm2, nn.Softplus())


class Deep(ResNetV1d):
    """A deep stem, and a layer more."""

    def __init__(self, **options):
        super().__init__(**options)
        self.auxiliary = nn.Conv2d(3, 4, 1)


def call_noted(*args):
    CALLS.append('hook')


def doubled(module, args, out):
    CALLS.append('hook')
    return 2 * out


# Models, small, in fp64, with their inputs.


def image(size=64):
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def resnet(depth=50, **options):
    return ordinary(ResNet(depth, base_channels=8, norm_eval=False, **options))


def deep():
    return ordinary(Deep(depth=18, stem_channels=8, base_channels=8))


def conv_module(**options):
    options = dict(padding=1, norm_cfg=dict(type='GN', num_groups=2), act_cfg=dict(type='SiLU')) | options
    return ordinary(nn.Sequential(ConvModule(3, 8, 3, **options), ConvModule(8, 8, 3, **options)))


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Tokens(nn.Module):
    """Modules on tokens, one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = tokens(2, 6, 8) + x.mean()
        for layer in self.layers:
            x = layer(x)
        return x


def ffn(**options):
    return Tokens(*(FFN(8, 16, **options) for _ in range(2))).double().train()


def attention():
    return Tokens(*(MultiheadAttention(8, 2, batch_first=True) for _ in range(2))).double().train()


class Deformable(nn.Module):
    """An encoder layer of Deformable DETR."""

    def __init__(self):
        super().__init__()
        make, self._inputs = LAYERS['deformable encoder']
        self.layer = make()

    def forward(self, x):
        torch.manual_seed(0)
        return self.layer(**self._inputs())


def deformable():
    return ordinary(Deformable())


MODELS = {
    'Swin': lambda: build('stock Swin'),
    'ConvNeXt': lambda: build('stock ConvNeXt'),
    'ViT': lambda: build('SBPViT'),
    'ViT of mmpretrain': lambda: build('stock ViT'),
    'ResNet': resnet,
    'deep stem': deep,
    'ConvModule': conv_module,
    'FFN': ffn,
    'attention': attention,
    'deformable': deformable,
}


# What users do. A change takes the model.


def put(name, make):
    """Puts another module in a place; ``make`` gets what stood there."""

    def change(model):
        parent, _, child = name.rpartition('.')
        found = make(model.get_submodule(name)).to(torch.float64)
        found.train()
        setattr(model.get_submodule(parent), child, found)

    return change


def hook(name, function=doubled, kind='forward'):
    return lambda model: getattr(model.get_submodule(name), f'register_{kind}_hook')(function)


def on(name, function):
    return lambda model: function(model.get_submodule(name))


def every(kind, function):
    def change(model):
        for module in [m for m in model.modules() if type(m).__mro__[-3:] and isinstance(m, kind)]:
            function(module)

    return change


def padded(conv, **options):
    geometry = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride)
    options = dict(padding=conv.padding, groups=conv.groups, bias=conv.bias is not None) | options
    return nn.Conv2d(*geometry, **options)


def share(first, second):
    return lambda model: setattr(model.get_submodule(second), 'weight', model.get_submodule(first).weight)


def same_module(first, second):
    def change(model):
        parent, _, child = second.rpartition('.')
        setattr(model.get_submodule(parent), child, model.get_submodule(first))

    return change


def as_class(name, kind):
    def change(model):
        model.get_submodule(name).__class__ = kind

    return change


def own_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: CALLS.append('own') or 1.5 * forward(*args, **kwargs)


def own_helper(module):
    helper = module._forward
    module._forward = lambda x: CALLS.append('own') or 1.5 * helper(x)


def wrapped_weight(module):
    """As quantisation does it: a parameter of another class."""

    class Quantised(nn.Parameter):
        pass

    module.weight = Quantised(module.weight.detach())


BLOCK = 'stages.1.blocks.0'
# Model, what is done to it, and what of it has to be named; '': it may be lean.
BEFORE = {
    'LoRA in qkv of Swin': ('Swin', put(f'{BLOCK}.attn.w_msa.qkv', LoRA), f'{BLOCK}.attn.w_msa.qkv'),
    'LoRA in proj of Swin': ('Swin', put(f'{BLOCK}.attn.w_msa.proj', LoRA), f'{BLOCK}.attn.w_msa.proj'),
    'LoRA in FFN of Swin': ('Swin', put(f'{BLOCK}.ffn.layers.1', LoRA), f'{BLOCK}.ffn.layers.1'),
    'LoRA in patch merging': ('Swin', put('stages.0.downsample.reduction', LoRA), 'stages.0.downsample'),
    'LoRA in qkv of ViT': ('ViT', put('blocks.1.attn.qkv', LoRA), 'blocks.1.attn.qkv'),
    'LoRA in qkv of mmpretrain': ('ViT of mmpretrain', put('layers.1.attn.qkv', LoRA), 'layers.1.attn.qkv'),
    'LoRA in MLP of ViT': ('ViT', put('blocks.1.mlp.fc1', LoRA), 'blocks.1.mlp.fc1'),
    'LoRA in pointwise convolution': ('ConvNeXt', put('stages.0.0.pointwise_conv1', LoRA), 'stages.0.0'),
    'LoRA in a bottleneck': ('ResNet', put('layer2.1.conv1', LoRA), 'layer2.1.conv1'),
    'LoRA in FFN': ('FFN', put('layers.0.layers.1', LoRA), 'layers.0'),
    'LoRA in deformable attention': ('deformable', put('layer.self_attn.value_proj', LoRA), 'layer.self_attn'),
    'hook in window attention': ('Swin', hook(f'{BLOCK}.attn.w_msa'), f'{BLOCK}.attn.w_msa'),
    'hook on a norm of Swin': ('Swin', hook(f'{BLOCK}.norm2'), f'{BLOCK}.norm2'),
    'hook on an FFN of Swin': ('Swin', hook(f'{BLOCK}.ffn'), ''),
    'hook on a softmax': ('Swin', hook(f'{BLOCK}.attn.w_msa.softmax'), f'{BLOCK}.attn.w_msa.softmax'),
    'hook on a block': ('ConvNeXt', hook('stages.0.0'), ''),
    'hook in a ConvNeXt block': ('ConvNeXt', hook('stages.0.0.act'), 'stages.0.0'),
    'pre-hook in a ViT': ('ViT', hook('blocks.0.norm1', lambda m, a: (2 * a[0],), 'forward_pre'), 'blocks.0.norm1'),
    'backward hook in a ViT': (
        'ViT',
        hook('blocks.0.norm1', lambda m, i, o: CALLS.append('back') or (2 * i[0],), 'full_backward'),
        'blocks.0.norm1',
    ),
    'hook on a norm of a bottleneck': ('ResNet', hook('layer1.0.bn2'), 'layer1.0.bn2'),
    'hook on a stage': ('ResNet', hook('layer2'), ''),
    'hook on a block of a chain': ('ResNet', hook('layer2.1'), ''),
    'hook on a shortcut': ('ResNet', hook('layer2.0.downsample'), ''),
    'hook in a shortcut': ('ResNet', hook('layer2.0.downsample.1'), 'layer2.0.downsample.1'),
    'hook in FFN': ('FFN', hook('layers.0.layers.0.1'), 'layers.0'),
    'hook in multi-head attention': ('attention', hook('layers.0.attn', call_noted), 'layers.0'),
    'hook in deformable attention': ('deformable', hook('layer.self_attn.sampling_offsets'), 'layer.self_attn'),
    'circular padding': (
        'ConvNeXt',
        put('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding_mode='circular')),
        'stages.0.0.depthwise_conv',
    ),
    'reflected padding in a bottleneck': (
        'ResNet',
        put('layer1.0.conv2', lambda conv: padded(conv, padding_mode='reflect')),
        'layer1.0.conv2',
    ),
    'padding by name': (
        'ConvNeXt',
        put('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding='same')),
        'stages.0.0.depthwise_conv',
    ),
    'depthwise convolution without bias': (
        'ConvNeXt',
        put('stages.0.0.depthwise_conv', lambda conv: padded(conv, bias=False)),
        '',
    ),
    'patch embedding without bias': (
        'ConvNeXt',
        put('downsample_layers.0.0', lambda conv: padded(conv, bias=False)),
        'downsample_layers.0',
    ),
    'dilated depthwise convolution': (
        'ConvNeXt',
        put('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding=6, dilation=2)),
        '',
    ),
    'pointwise convolution of another size': (
        'ConvNeXt',
        put('downsample_layers.1.1', lambda conv: nn.Conv2d(conv.in_channels, conv.out_channels, 3, 2, 1)),
        'downsample_layers.1',
    ),
    'stochastic depth of torchvision': (
        'ConvNeXt',
        put('stages.1.0.drop_path', lambda m: StochasticDepth(0.5)),
        'stages.1.0',
    ),
    'drop path without scale': ('ConvNeXt', put('stages.1.0.drop_path', lambda m: UnscaledDropPath(0.5)), 'stages.1.0'),
    'dropout as drop path': ('ConvNeXt', put('stages.1.0.drop_path', lambda m: nn.Dropout(0.5)), 'stages.1.0'),
    'dropout of rate 0 as drop path': ('ConvNeXt', put('stages.1.0.drop_path', lambda m: nn.Dropout(0.0)), ''),
    'drop path of Swin': ('Swin', put(f'{BLOCK}.attn.drop', lambda m: StochasticDepth(0.5)), f'{BLOCK}.attn.drop'),
    'shared weights': ('ConvNeXt', share('stages.1.0.pointwise_conv1', 'stages.1.1.pointwise_conv1'), ''),
    'weights shared in a block': ('ViT', share('blocks.0.norm1', 'blocks.0.norm2'), ''),
    'a block called twice': ('ConvNeXt', same_module('stages.1.0', 'stages.1.1'), ''),
    'a convolution called twice': ('ResNet', same_module('layer2.2.conv2', 'layer2.1.conv2'), ''),
    'frozen norms': ('ResNet', every(nn.BatchNorm2d, lambda m: m.requires_grad_(False)), ''),
    'half frozen': ('Swin', on(f'{BLOCK}.attn', lambda m: m.requires_grad_(False)), ''),
    'frozen first layers': ('ConvNeXt', on('downsample_layers', lambda m: m.requires_grad_(False)), ''),
    'norms in evaluation mode': ('ResNet', every(nn.BatchNorm2d, lambda m: m.eval()), ''),
    'a norm in evaluation mode': ('ResNet', on('layer2.1.bn2', lambda m: m.eval()), ''),
    'a block in evaluation mode': ('ResNet', on('layer2.1', lambda m: m.eval()), ''),
    'a part in evaluation mode': ('Swin', on(BLOCK, lambda m: m.eval()), ''),
    'parametrized convolution': (
        'ResNet',
        on('layer2.1.conv2', lambda m: parametrize.register_parametrization(m, 'weight', Doubling())),
        'layer2.1.conv2',
    ),
    'parametrized layer scale': (
        'ConvNeXt',
        on('stages.1.0', lambda m: parametrize.register_parametrization(m, 'gamma', Doubling())),
        'stages.1.0',
    ),
    'parametrized linear layer': (
        'Swin',
        on(f'{BLOCK}.ffn.layers.0.0', parametrized_weight_norm),
        f'{BLOCK}.ffn.layers.0.0',
    ),
    'weight norm': ('ConvModule', on('0.conv', weight_norm), '0'),
    'spectral norm': ('ViT', on('blocks.0.mlp.fc1', spectral_norm), 'blocks.0.mlp.fc1'),
    'forward of the instance': ('ConvNeXt', on('stages.1.0', own_forward), 'stages.1.0'),
    'forward of a submodule': ('Swin', on(f'{BLOCK}.attn.w_msa.qkv', own_forward), f'{BLOCK}.attn.w_msa.qkv'),
    'helper of the instance': ('ConvNeXt', on('stages.1.0', own_helper), 'stages.1.0'),
    'subclass of a norm': ('Swin', as_class(f'{BLOCK}.norm1', DoubledNorm), f'{BLOCK}.norm1'),
    'subclass of a norm of maps': ('ConvNeXt', as_class('stages.1.0.norm', DoubledNorm2d), 'stages.1.0'),
    'subclass of group norm': ('ConvModule', as_class('1.gn', ShiftedGroupNorm), '1.gn'),
    'subclass of GELU': ('ViT', as_class('blocks.2.act', SteepGELU), 'blocks.2.act'),
    'subclass of ReLU': ('ResNet', as_class('layer1.1.relu', SteepReLU), 'layer1.1.relu'),
    'subclass of a block': ('ConvNeXt', as_class('stages.1.0', DoubledBlock), 'stages.1.0'),
    'subclass with another helper': ('ConvNeXt', as_class('stages.1.0', BlockWithOtherHelper), 'stages.1.0'),
    'subclass of a Swin block': ('Swin', as_class(BLOCK, DoubledSwinBlock), BLOCK),
    'subclass with another property': ('ResNet', as_class('layer1.1', PaddedBottleneck), 'layer1.1'),
    'deep stem and a layer more': ('deep stem', lambda model: None, ''),
    'norm without affine part': (
        'Swin',
        put(f'{BLOCK}.norm1', lambda m: nn.LayerNorm(m.normalized_shape, elementwise_affine=False)),
        '',
    ),
    'norm without affine part in deformable DETR': (
        'deformable',
        put('layer.norms.0', lambda m: nn.LayerNorm(m.normalized_shape, elementwise_affine=False)),
        'layer',
    ),
    'norm of a ConvNeXt block without affine part': (
        'ConvNeXt',
        put('stages.1.0.norm', lambda m: LayerNorm2d(m.normalized_shape[0], elementwise_affine=False)),
        '',
    ),
    'Mish in a ConvNeXt block': ('ConvNeXt', put('stages.1.0.act', lambda m: nn.Mish()), 'stages.1.0'),
    'Mish in Swin': ('Swin', put(f'{BLOCK}.ffn.layers.0.1', lambda m: nn.Mish()), f'{BLOCK}.ffn.layers.0.1'),
    'Mish behind a convolution': ('ConvModule', put('0.activate', lambda m: nn.Mish()), '0.activate'),
    'tanh GELU': ('ConvNeXt', put('stages.1.0.act', lambda m: nn.GELU('tanh')), ''),
    'instance norm': ('ConvModule', put('1.gn', lambda m: nn.InstanceNorm2d(8, affine=True)), '1.gn'),
    'a parameter of another class': ('ViT', on('blocks.0.attn.proj', wrapped_weight), 'blocks.0.attn.proj'),
    'dropout in an FFN': ('Swin', put(f'{BLOCK}.ffn.layers.2', lambda m: nn.Dropout(0.0)), ''),
}
PLUGIN = dict(cfg=dict(type='ContextBlock', ratio=1 / 4), stages=(False, True, True, True), position='after_conv2')


@pytest.fixture(autouse=True, scope='module')
def quiet():
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


def step(model, x):
    """Outputs and gradients of the images and all parameters; and how often code of the user's ran."""
    CALLS.clear()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    outs = model(x)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view_as(out)).sum() for out in outs)
    wanted = dict(images=x, **{name: p for name, p in model.named_parameters() if p.requires_grad})
    found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return [out.detach() for out in outs], dict(zip(wanted, found, strict=True)), sorted(CALLS), buffers


def assert_same(lean, plain, x):
    (outs, grads, calls, buffers), expected = step(lean, x), step(plain, x)
    for a, b in zip(outs, expected[0], strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm().clamp_min(1e-9)
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (grads[name] is None) == (grad is None), name
        assert grad is None or (grads[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name
    assert calls == expected[2]
    for name, values in expected[3].items():
        torch.testing.assert_close(buffers[name], values, rtol=1e-9, atol=1e-9)


def lean_modules(model):
    return [name for name, module in model.named_modules() if isinstance(module, LeanModule)]


@pytest.mark.parametrize('name', BEFORE)
def test_changed_before(name):
    family, change, named = BEFORE[name]
    stock = MODELS[family]()
    torch.manual_seed(0)
    change(stock)
    parametrized = any(map(parametrize.is_parametrized, stock.modules()))
    if (
        parametrized or 'own' in name or 'instance' in name or 'forward of' in name or 'norm' in name
    ):  # copies would share closures
        plain = MODELS[family]()
        torch.manual_seed(0)
        change(plain)
        plain.load_state_dict(stock.state_dict())
    else:
        plain = copy.deepcopy(stock)
    report = apply_lean(stock, verify=False)
    assert lean_modules(stock), 'the rest is lean'
    assert_same(stock, plain, image())
    assert_same(stock, plain, image())
    assert not named or named in report.left, report
    assert report.left.keys().isdisjoint(report.changed)


AFTER = {name: case for name, case in BEFORE.items() if 'subclass' not in name}


@pytest.mark.parametrize('name', AFTER)
def test_changed_after_a_step(name):
    """What comes later is seen in the next step."""
    family, change, _ = AFTER[name]
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    apply_lean(lean, verify=False)
    assert_same(lean, plain, image())
    if family == 'ResNet' or family == 'deep stem':
        plain.load_state_dict(lean.state_dict())
    for model in (lean, plain):
        torch.manual_seed(0)
        change(model)
    plain.load_state_dict(lean.state_dict())
    assert_same(lean, plain, image())
    assert_same(lean, plain, image())


def test_a_hook_that_goes_leaves_the_module_lean():
    lean, plain = MODELS['Swin'](), MODELS['Swin']()
    apply_lean(lean, verify=False)
    norm = lean.get_submodule(f'{BLOCK}.norm1')
    handle = norm.register_forward_hook(call_noted)
    step(lean, image())
    assert_same(plain, plain, image())
    handle.remove()
    ran = []
    forward, nn.LayerNorm.forward = nn.LayerNorm.forward, lambda self, x: ran.append(self) or forward(self, x)
    try:
        lean(image())
    finally:
        nn.LayerNorm.forward = forward
    assert norm not in ran


@pytest.mark.parametrize('family', MODELS)
def test_hooks_of_every_module(family):
    """Profilers and trackers register them; nothing may be hidden from them."""
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    apply_lean(lean, verify=False)
    names = {id(m): name for model in (lean, plain) for name, m in model.named_modules()}
    handle = register_module_forward_hook(lambda module, args, out: CALLS.append(names[id(module)]))
    try:
        assert_same(lean, plain, image())
    finally:
        handle.remove()
    plain.load_state_dict(lean.state_dict())
    assert_same(lean, plain, image())


@pytest.mark.parametrize('family', ['Swin', 'ConvNeXt', 'ResNet'])
def test_compiled_blocks(family):
    """A compiled block is one whose call is not that of its class."""
    torch._dynamo.reset()
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    name = dict(Swin=f'{BLOCK}.ffn', ConvNeXt='stages.0.0.act', ResNet='layer1.0.relu')[family]
    apply_lean(lean, verify=False)
    lean.get_submodule(name).compile(backend='eager')
    assert_same(lean, plain, image())


def test_plugins_run_their_own_code():
    lean = resnet(plugins=[PLUGIN])
    plain = copy.deepcopy(lean)
    assert any(name.startswith('layer2.0.') for name in apply_lean(lean, verify=False).changed) or lean_modules(lean)
    hook('layer2.0.context_block')(lean), hook('layer2.0.context_block')(plain)
    assert_same(lean, plain, image())


class FlatBlock(nn.Module):
    """A block of somebody's, with an adapter of somebody's, whose stochastic depth is torchvision's."""

    def __init__(self, width, rate):
        super().__init__()
        self.norm, self.act, self.depth = nn.LayerNorm(width), nn.GELU(), StochasticDepth(rate)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.depth(self.down(self.act(self.up(self.norm(x)))))


def test_an_adapter_of_somebody_is_asked_too():
    @adapter(FlatBlock)
    class LeanFlatBlock(LeanBlock):
        def parts(self):
            return dict(mlp=ChannelMLPBinding(self.norm, self.up, self.act, self.down, drop=self.depth))

    try:
        model = Tokens(FlatBlock(8, 0.5), nn.Conv1d(6, 6, 1), nn.Sequential()).double().train()
        model.conv = nn.Conv2d(1, 1, 1)
        report = apply_lean(model, verify=False)
        assert 'StochasticDepth' in report.left['layers.0']
        assert_same(model, copy.deepcopy(model), image())
    finally:
        del ADAPTERS[f'{__name__}.FlatBlock']


# Precision.


@pytest.mark.parametrize('family', ['ConvNeXt', 'Swin', 'ViT'])
def test_norms_in_full_precision(family):
    """A model in bf16 whose layer norms stay in fp32, under autocast: own code for what folds them."""
    lean = MODELS[family]().bfloat16()
    for module in lean.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    plain, x = copy.deepcopy(lean), image().bfloat16()
    report = apply_lean(lean, verify=False)
    found = []
    for model in (plain, lean):
        try:
            with torch.autocast('cpu', torch.bfloat16):
                out = model(x)
            found.append([o.float() for o in out])
            sum(o.square().mean() for o in found[-1]).backward()
        except RuntimeError as error:
            found.append(type(error))
    if isinstance(found[0], list):
        for a, b in zip(found[1], found[0], strict=True):
            assert F.mse_loss(a, b) < 1e-3 * b.square().mean()
    assert any('float32' in reason for reason in report.left.values())


# The model is the user's.


def test_nothing_is_frozen_for_the_user():
    """mmpretrain's VisionTransformer freezes its embeddings whenever this method is called."""

    class Freezing(type(MODELS['ViT of mmpretrain']())):
        def _freeze_stages(self):
            self.cls_token.requires_grad = False
            self.patch_embed.requires_grad_(False).eval()

        def train(self, mode=True):
            super().train(mode)
            self._freeze_stages()

    model = Freezing().double()
    before = [(p.requires_grad, m.training) for m in model.modules() for p in m.parameters(recurse=False)]
    report = apply_lean(model, verify=False)
    after = [(p.requires_grad, m.training) for m in model.modules() for p in m.parameters(recurse=False)]
    assert before == after
    assert report.left['patch_embed.projection'] == 'frozen'


def test_a_failed_change_keeps_the_preset_that_was_there():
    model = build('stock Swin', dict(preset='exact', verify=False), drop_path_rate=0.5)
    kinds = [*map(type, model.modules())]
    with pytest.raises(ValueError, match='neck'):
        apply_lean(model, 'sbp', modules=['neck'])
    assert [*map(type, model.modules())] == kinds
    block = model.get_submodule(BLOCK)
    assert "preset='exact'" in f'{block}'


def test_a_change_that_fails_half_way_is_taken_back(monkeypatch):
    model = build('stock Swin', dict(preset='exact', verify=False))
    kinds = [*map(type, model.modules())]

    def fail(model):
        raise ValueError('half way')

    monkeypatch.setattr('sbp_mmdet.apply.hand_on_within', fail)
    with pytest.raises(ValueError, match='half way'):
        apply_lean(model, 'int8', verify=False)
    assert [*map(type, model.modules())] == kinds
    assert "preset='exact'" in f'{model.get_submodule(BLOCK)}'


def test_parametrized_after_the_change_and_back():
    model = MODELS['ResNet']()
    apply_lean(model, verify=False)
    conv = model.get_submodule('layer2.1.conv2')
    parametrize.register_parametrization(conv, 'weight', Doubling())
    copied = copy.deepcopy(model)
    remove_lean(model)
    remove_lean(copied)
    assert not lean_modules(model) and not lean_modules(copied)
    plain = copy.deepcopy(model)
    assert_same(model, plain, image())
    parametrize.remove_parametrizations(conv, 'weight')
    assert type(conv) is nn.Conv2d


def test_efficient_conv_bn_eval_is_off_where_norms_are_folded():
    """mmengine would trace the changed modules, and its graph would run in their place."""

    class Log:
        def __getattr__(self, name):
            return lambda *args: None

    class Runner:
        cfg, hooks, logger = type('Cfg', (dict,), dict(__setattr__=dict.__setitem__))(), [], Log()
        model = nn.ModuleDict(dict(backbone=ResNet(18, base_channels=8), neck=nn.Identity()))

    Runner.cfg['efficient_conv_bn_eval'] = ['backbone', 'neck']
    LeanHook('exact').before_run(Runner())
    assert Runner.cfg['efficient_conv_bn_eval'] == ['neck']


def test_tracing_in_training_mode_is_an_error_that_says_what_to_do():
    model = nn.ModuleList([conv_module()])
    apply_lean(model, verify=False)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model[0][0]

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match='efficient_conv_bn_eval'):
        torch.fx.symbolic_trace(Outer())


def test_modules_of_deformable_detr_are_asked_one_by_one():
    """The layer is refused, and its parts are changed alone."""
    layer = Deformable().double().train()
    layer.layer.norms[0] = DoubledNorm(layer.layer.norms[0].normalized_shape).double()
    report = apply_lean(layer, verify=False)
    assert 'DoubledNorm' in report.left['layer']
    assert {type(layer.get_submodule(name)).__mro__[1].__name__ for name in report.changed} >= {
        'LeanFFN',
        'LeanDeformableAttention',
    }
    assert isinstance(layer.layer.self_attn, MultiScaleDeformableAttention)
