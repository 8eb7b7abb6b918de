"""Table of changes that users make to models: the model, the change, and what the report has to name."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, spectral_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm
from unusual_models import (
    CALLS,
    BlockWithOtherHelper,
    DoubledBlock,
    DoubledNorm,
    DoubledNorm2d,
    DoubledSwinBlock,
    DoubledWeight,
    Doubling,
    LoRA,
    PaddedBottleneck,
    ShiftedGroupNorm,
    SteepGELU,
    SteepReLU,
    StochasticDepth,
    UnscaledDropPath,
    doubled,
    note_call,
)

from sbp_mmdet.models.layers import LayerNorm2d

# A change takes the model.


def replace_module(name, make):
    """Return a change that replaces a module by ``make(module)``."""

    def change(model):
        parent, _, child = name.rpartition('.')
        module = make(model.get_submodule(name)).to(torch.float64)
        module.train()
        setattr(model.get_submodule(parent), child, module)

    return change


def add_hook(name, function=doubled, kind='forward'):
    return lambda model: getattr(model.get_submodule(name), f'register_{kind}_hook')(function)


def apply_to(name, function):
    return lambda model: function(model.get_submodule(name))


def apply_to_all(kind, function):
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


class _Doubled:
    """Front of a class that somebody derives from that of a module, whatever this was changed to."""

    def forward(self, *args):
        CALLS.append('derived')
        return 2 * super().forward(*args)


def derive_class(module):
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Doubled, kind), {'__module__': __name__})


def circular(conv):
    conv.padding_mode = 'circular'
    conv._reversed_padding_repeated_twice = [1, 1, 1, 1]


def set_attributes(**values):
    """Return a function that sets attributes of a module."""

    def change(module):
        for name, value in values.items():
            assert getattr(module, name) != value
            setattr(module, name, value)

    return change


def geometry_of(kind):
    """Return a function that sets the pairs of a convolution as numbers or lists, which its forward takes too."""

    def change(conv):
        for name in ('stride', 'padding', 'dilation'):
            pair = getattr(conv, name)
            setattr(conv, name, pair[0] if kind is int else kind(pair))

    return change


def doubled_weight(module):
    module.weight = DoubledWeight(module.weight.detach())


def without_bias(module):
    module.bias = None


def own_forward_for_an_attribute(module):
    """Set a forward on the instance and delete an attribute, so that the number of attributes is unchanged."""
    del module.approximate
    module.forward = lambda x: CALLS.append('own') or F.gelu(1.5 * x)


def own_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: CALLS.append('own') or 1.5 * forward(*args, **kwargs)


def own_helper(module):
    helper = module._forward
    module._forward = lambda x: CALLS.append('own') or 1.5 * helper(x)


def buffer_as_weight(module):
    """Freeze a weight by registering it as a buffer."""
    weight = module._parameters.pop('weight')
    module.register_buffer('weight', weight.detach().clone())


def wrapped_weight(module):
    """Replace a weight by a parameter of another class, as quantisation does."""

    class Quantised(nn.Parameter):
        pass

    module.weight = Quantised(module.weight.detach())


def scripted(module):
    """Compile a copy of a convolution without padding of mmcv."""
    plain = nn.Conv2d(module.in_channels, module.out_channels, 1, bias=False)
    plain.weight = module.weight
    return torch.jit.script(plain)


BLOCK = 'stages.1.blocks.0'
# Model, what is done to it, and what of it has to be named; '': it may be lean.
BEFORE = {
    'LoRA in qkv of Swin': ('Swin', replace_module(f'{BLOCK}.attn.w_msa.qkv', LoRA), f'{BLOCK}.attn.w_msa.qkv'),
    'LoRA in proj of Swin': ('Swin', replace_module(f'{BLOCK}.attn.w_msa.proj', LoRA), f'{BLOCK}.attn.w_msa.proj'),
    'LoRA in FFN of Swin': ('Swin', replace_module(f'{BLOCK}.ffn.layers.1', LoRA), f'{BLOCK}.ffn.layers.1'),
    'LoRA in patch merging': ('Swin', replace_module('stages.0.downsample.reduction', LoRA), 'stages.0.downsample'),
    'LoRA in qkv of ViT': ('ViT', replace_module('blocks.1.attn.qkv', LoRA), 'blocks.1.attn.qkv'),
    'LoRA in qkv of mmpretrain': ('ViT of mmpretrain', replace_module('layers.1.attn.qkv', LoRA), 'layers.1.attn.qkv'),
    'LoRA in MLP of ViT': ('ViT', replace_module('blocks.1.mlp.fc1', LoRA), 'blocks.1.mlp.fc1'),
    'LoRA in pointwise convolution': ('ConvNeXt', replace_module('stages.0.0.pointwise_conv1', LoRA), 'stages.0.0'),
    'scripted convolution in a bottleneck': (
        'ResNet',
        replace_module('layer2.1.conv1', scripted),
        'layer2.1.conv1',
    ),
    'LoRA in a bottleneck': ('ResNet', replace_module('layer2.1.conv1', LoRA), 'layer2.1.conv1'),
    'LoRA in FFN': ('FFN', replace_module('layers.0.layers.1', LoRA), 'layers.0'),
    'LoRA in deformable attention': (
        'deformable',
        replace_module('layer.self_attn.value_proj', LoRA),
        'layer.self_attn',
    ),
    'hook in window attention': ('Swin', add_hook(f'{BLOCK}.attn.w_msa'), f'{BLOCK}.attn.w_msa'),
    'hook on a norm of Swin': ('Swin', add_hook(f'{BLOCK}.norm2'), f'{BLOCK}.norm2'),
    'hook on an FFN of Swin': ('Swin', add_hook(f'{BLOCK}.ffn'), ''),
    'hook on a softmax': ('Swin', add_hook(f'{BLOCK}.attn.w_msa.softmax'), f'{BLOCK}.attn.w_msa.softmax'),
    'hook on a block': ('ConvNeXt', add_hook('stages.0.0'), ''),
    'hook in a ConvNeXt block': ('ConvNeXt', add_hook('stages.0.0.act'), 'stages.0.0'),
    'pre-hook in a ViT': ('ViT', add_hook('blocks.0.norm1', lambda m, a: (2 * a[0],), 'forward_pre'), 'blocks.0.norm1'),
    'backward hook in a ViT': (
        'ViT',
        add_hook('blocks.0.norm1', lambda m, i, o: CALLS.append('back') or (2 * i[0],), 'full_backward'),
        'blocks.0.norm1',
    ),
    'hook on a norm of a bottleneck': ('ResNet', add_hook('layer1.0.bn2'), 'layer1.0.bn2'),
    'hook on a stage': ('ResNet', add_hook('layer2'), ''),
    'hook on a block of a chain': ('ResNet', add_hook('layer2.1'), ''),
    'hook on a shortcut': ('ResNet', add_hook('layer2.0.downsample'), ''),
    'hook in a shortcut': ('ResNet', add_hook('layer2.0.downsample.1'), 'layer2.0.downsample.1'),
    'hook in FFN': ('FFN', add_hook('layers.0.layers.0.1'), 'layers.0'),
    'hook in multi-head attention': ('attention', add_hook('layers.0.attn', note_call), 'layers.0'),
    'hook in deformable attention': ('deformable', add_hook('layer.self_attn.sampling_offsets'), 'layer.self_attn'),
    'circular padding': (
        'ConvNeXt',
        replace_module('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding_mode='circular')),
        'stages.0.0.depthwise_conv',
    ),
    'reflected padding in a bottleneck': (
        'ResNet',
        replace_module('layer1.0.conv2', lambda conv: padded(conv, padding_mode='reflect')),
        'layer1.0.conv2',
    ),
    'padding of another kind set in place': ('ResNet', apply_to('layer2.1.conv2', circular), 'layer2.1.conv2'),
    'padding by name': (
        'ConvNeXt',
        replace_module('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding='same')),
        'stages.0.0.depthwise_conv',
    ),
    'depthwise convolution without bias': (
        'ConvNeXt',
        replace_module('stages.0.0.depthwise_conv', lambda conv: padded(conv, bias=False)),
        '',
    ),
    'patch embedding without bias': (
        'ConvNeXt',
        replace_module('downsample_layers.0.0', lambda conv: padded(conv, bias=False)),
        'downsample_layers.0',
    ),
    'dilated depthwise convolution': (
        'ConvNeXt',
        replace_module('stages.0.0.depthwise_conv', lambda conv: padded(conv, padding=6, dilation=2)),
        '',
    ),
    'pointwise convolution of another size': (
        'ConvNeXt',
        replace_module('downsample_layers.1.1', lambda conv: nn.Conv2d(conv.in_channels, conv.out_channels, 3, 2, 1)),
        'downsample_layers.1',
    ),
    'stochastic depth of torchvision': (
        'ConvNeXt',
        replace_module('stages.1.0.drop_path', lambda m: StochasticDepth(0.5)),
        'stages.1.0',
    ),
    'drop path without scale': (
        'ConvNeXt',
        replace_module('stages.1.0.drop_path', lambda m: UnscaledDropPath(0.5)),
        'stages.1.0',
    ),
    'dropout as drop path': (
        'ConvNeXt',
        replace_module('stages.1.0.drop_path', lambda m: nn.Dropout(0.5)),
        'stages.1.0',
    ),
    'dropout of rate 0 as drop path': (
        'ConvNeXt',
        replace_module('stages.1.0.drop_path', lambda m: nn.Dropout(0.0)),
        '',
    ),
    'drop path of Swin': (
        'Swin',
        replace_module(f'{BLOCK}.attn.drop', lambda m: StochasticDepth(0.5)),
        f'{BLOCK}.attn.drop',
    ),
    'shared weights': ('ConvNeXt', share('stages.1.0.pointwise_conv1', 'stages.1.1.pointwise_conv1'), ''),
    'weights shared in a block': ('ViT', share('blocks.0.norm1', 'blocks.0.norm2'), ''),
    'a block called twice': ('ConvNeXt', same_module('stages.1.0', 'stages.1.1'), ''),
    'a convolution called twice': ('ResNet', same_module('layer2.2.conv2', 'layer2.1.conv2'), ''),
    'frozen norms': ('ResNet', apply_to_all(nn.BatchNorm2d, lambda m: m.requires_grad_(False)), ''),
    'half frozen': ('Swin', apply_to(f'{BLOCK}.attn', lambda m: m.requires_grad_(False)), ''),
    'frozen first layers': ('ConvNeXt', apply_to('downsample_layers', lambda m: m.requires_grad_(False)), ''),
    'norms in evaluation mode': ('ResNet', apply_to_all(nn.BatchNorm2d, lambda m: m.eval()), ''),
    'a norm in evaluation mode': ('ResNet', apply_to('layer2.1.bn2', lambda m: m.eval()), ''),
    'a block in evaluation mode': ('ResNet', apply_to('layer2.1', lambda m: m.eval()), ''),
    'a part in evaluation mode': ('Swin', apply_to(BLOCK, lambda m: m.eval()), ''),
    'parametrized convolution': (
        'ResNet',
        apply_to('layer2.1.conv2', lambda m: parametrize.register_parametrization(m, 'weight', Doubling())),
        'layer2.1.conv2',
    ),
    'parametrized layer scale': (
        'ConvNeXt',
        apply_to('stages.1.0', lambda m: parametrize.register_parametrization(m, 'gamma', Doubling())),
        'stages.1.0',
    ),
    'parametrized linear layer': (
        'Swin',
        apply_to(f'{BLOCK}.ffn.layers.0.0', parametrized_weight_norm),
        f'{BLOCK}.ffn.layers.0.0',
    ),
    'weight norm': ('ConvModule', apply_to('0.conv', weight_norm), '0'),
    'spectral norm': ('ViT', apply_to('blocks.0.mlp.fc1', spectral_norm), 'blocks.0.mlp.fc1'),
    'forward of the instance': ('ConvNeXt', apply_to('stages.1.0', own_forward), 'stages.1.0'),
    'forward of a submodule': ('Swin', apply_to(f'{BLOCK}.attn.w_msa.qkv', own_forward), f'{BLOCK}.attn.w_msa.qkv'),
    'helper of the instance': ('ConvNeXt', apply_to('stages.1.0', own_helper), 'stages.1.0'),
    'subclass of a norm': ('Swin', as_class(f'{BLOCK}.norm1', DoubledNorm), f'{BLOCK}.norm1'),
    'subclass of a norm of maps': ('ConvNeXt', as_class('stages.1.0.norm', DoubledNorm2d), 'stages.1.0'),
    'subclass of group norm': ('ConvModule', as_class('1.gn', ShiftedGroupNorm), '1.gn'),
    'subclass of GELU': ('ViT', as_class('blocks.2.act', SteepGELU), 'blocks.2.act'),
    'subclass of ReLU': ('ResNet', as_class('layer1.1.relu', SteepReLU), 'layer1.1.relu'),
    'subclass of a block': ('ConvNeXt', as_class('stages.1.0', DoubledBlock), 'stages.1.0'),
    'subclass with another helper': ('ConvNeXt', as_class('stages.1.0', BlockWithOtherHelper), 'stages.1.0'),
    'subclass of a Swin block': ('Swin', as_class(BLOCK, DoubledSwinBlock), BLOCK),
    'subclass with another property': ('ResNet', as_class('layer1.1', PaddedBottleneck), 'layer1.1'),
    'class derived from that of a bottleneck': ('ResNet', apply_to('layer1.1', derive_class), 'layer1.1'),
    'class derived from that of a stage': ('ResNet', apply_to('layer2', derive_class), ''),
    'class derived from that of a convolution': ('ResNet', apply_to('layer2.1.conv2', derive_class), 'layer2.1.conv2'),
    'class derived from that of a CSP block': ('CSP layer', apply_to('1.blocks.0', derive_class), '1.blocks.0'),
    'class derived from that of a CSP layer': ('CSP layer', apply_to('1', derive_class), '1'),
    'class derived from that of a ConvNeXt block': ('ConvNeXt', apply_to('stages.1.0', derive_class), 'stages.1.0'),
    'class derived from that of a linear layer': (
        'ViT',
        apply_to('blocks.0.attn.proj', derive_class),
        'blocks.0.attn.proj',
    ),
    'deep stem and a layer more': ('deep stem', lambda model: None, ''),
    'norm without affine part': (
        'Swin',
        replace_module(f'{BLOCK}.norm1', lambda m: nn.LayerNorm(m.normalized_shape, elementwise_affine=False)),
        '',
    ),
    'norm without affine part in deformable DETR': (
        'deformable',
        replace_module('layer.norms.0', lambda m: nn.LayerNorm(m.normalized_shape, elementwise_affine=False)),
        'layer',
    ),
    'norm of a ConvNeXt block without affine part': (
        'ConvNeXt',
        replace_module('stages.1.0.norm', lambda m: LayerNorm2d(m.normalized_shape[0], elementwise_affine=False)),
        '',
    ),
    'Mish in a ConvNeXt block': ('ConvNeXt', replace_module('stages.1.0.act', lambda m: nn.Mish()), 'stages.1.0'),
    'Mish in Swin': ('Swin', replace_module(f'{BLOCK}.ffn.layers.0.1', lambda m: nn.Mish()), f'{BLOCK}.ffn.layers.0.1'),
    'Mish behind a convolution': ('ConvModule', replace_module('0.activate', lambda m: nn.Mish()), '0.activate'),
    'tanh GELU': ('ConvNeXt', replace_module('stages.1.0.act', lambda m: nn.GELU('tanh')), ''),
    'instance norm': ('ConvModule', replace_module('1.gn', lambda m: nn.InstanceNorm2d(8, affine=True)), '1.gn'),
    'weight of a class with another product': (
        'ViT',
        apply_to('blocks.0.attn.proj', doubled_weight),
        'blocks.0.attn.proj',
    ),
    'such a weight in Swin': ('Swin', apply_to(f'{BLOCK}.attn.w_msa.qkv', doubled_weight), f'{BLOCK}.attn.w_msa.qkv'),
    'such a weight in a bottleneck': ('ResNet', apply_to('layer2.1.conv2', doubled_weight), 'layer2.1.conv2'),
    'rate of a dropout': ('Swin', apply_to(f'{BLOCK}.ffn.layers.2', set_attributes(p=0.3)), f'{BLOCK}.ffn.layers.2'),
    'rate of a dropout of attention': (
        'Swin',
        apply_to(f'{BLOCK}.attn.w_msa.attn_drop', set_attributes(p=0.3)),
        f'{BLOCK}.attn.w_msa.attn_drop',
    ),
    'dimension of a softmax': (
        'Swin',
        apply_to(f'{BLOCK}.attn.w_msa.softmax', set_attributes(dim=-2)),
        f'{BLOCK}.attn.w_msa.softmax',
    ),
    'FFN without shortcut': ('Swin', apply_to(f'{BLOCK}.ffn', set_attributes(add_identity=False)), ''),
    'layer without activation': ('ConvModule', apply_to('0', set_attributes(with_activation=False)), ''),
    'layer without norm': ('ConvModule', apply_to('1', set_attributes(with_norm=False)), ''),
    'order of a layer': ('ConvModule', apply_to('1', set_attributes(order=('norm', 'conv', 'act'))), '1'),
    'padding by name, set in place': (
        'ResNet',
        apply_to('layer1.1.conv2', set_attributes(padding='same')),
        'layer1.1.conv2',
    ),
    'numbers as settings': ('ResNet', apply_to('layer2.1.conv2', geometry_of(int)), 'layer2.1.conv2'),
    'lists as settings': ('Swin', apply_to('patch_embed.projection', geometry_of(list)), 'patch_embed.projection'),
    'lists as settings of a pyramid': ('FPN', apply_to('neck.fpn_convs.1.conv', geometry_of(list)), 'neck.fpn_convs.1'),
    'bias that goes': ('ConvNeXt', apply_to('stages.1.0.pointwise_conv1', without_bias), 'stages.1.0'),
    'CSP layer without attention': ('CSP layer', apply_to('1', set_attributes(channel_attention=False)), ''),
    'CSP block without shortcut': ('CSP layer', apply_to('1.blocks.0', set_attributes(add_identity=False)), ''),
    'layer of a CSP block without activation': (
        'CSP layer',
        apply_to('1.blocks.1.conv2', set_attributes(with_activation=False)),
        '',
    ),
    'interpolation of a pyramid': (
        'FPN',
        apply_to('neck', set_attributes(upsample_cfg=dict(mode='bilinear', align_corners=False))),
        '',
    ),
    'a forward instead of an attribute': (
        'ViT',
        apply_to('blocks.2.act', own_forward_for_an_attribute),
        'blocks.2.act',
    ),
    'a parameter of another class': ('ViT', apply_to('blocks.0.attn.proj', wrapped_weight), 'blocks.0.attn.proj'),
    'a buffer as weight': ('ResNet', apply_to('layer2.1.conv2', buffer_as_weight), 'layer2.1.conv2'),
    'a buffer as weight of a norm': ('Swin', apply_to(f'{BLOCK}.norm1', buffer_as_weight), f'{BLOCK}.norm1'),
    'dropout in an FFN': ('Swin', replace_module(f'{BLOCK}.ffn.layers.2', lambda m: nn.Dropout(0.0)), ''),
}
