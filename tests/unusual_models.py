"""Models that are not quite the stock ones: what users do to models, as a table."""

import functools

import torch
from cases import build
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmdet.models.backbones import ResNet, ResNetV1d
from mmdet.models.backbones.resnet import Bottleneck
from mmdet.models.backbones.swin import SwinBlock
from test_adapters_conv import ordinary
from test_adapters_transformer import LAYERS
from torch import nn
from torch.nn.utils import parametrize, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm

from sbp_mmdet.models.convnext import ConvNeXtBlock
from sbp_mmdet.models.layers import LayerNorm2d

CALLS = []  # of code of users


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


def circular(conv):
    conv.padding_mode = 'circular'
    conv._reversed_padding_repeated_twice = [1, 1, 1, 1]


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
    'padding of another kind set in place': ('ResNet', on('layer2.1.conv2', circular), 'layer2.1.conv2'),
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
