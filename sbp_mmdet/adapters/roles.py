"""Roles of modules in operations: which classes are known in a role, and which of their settings.

See :mod:`.predicate`, which asks. Adapters of further families add roles of their own.
"""

import numbers
from collections.abc import Callable

import torch
from mmcv.cnn.bricks.conv2d_adaptive_padding import Conv2dAdaptivePadding
from mmcv.cnn.bricks.conv_module import ConvModule
from mmcv.cnn.bricks.conv_ws import ConvAWS2d, ConvWS2d
from mmcv.cnn.bricks.drop import Dropout, DropPath
from mmcv.cnn.bricks.scale import LayerScale
from mmcv.cnn.bricks.swish import Swish
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.cnn.bricks.wrappers import Conv2d as MMCVConv2d
from mmcv.cnn.bricks.wrappers import Linear as MMCVLinear
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import resnext
from mmdet.models.backbones.res2net import Bottle2neck
from mmdet.models.backbones.resnet import BasicBlock, Bottleneck
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoderLayer
from mmengine.model import Sequential
from mmengine.model.utils import _BatchNormXd
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import nn

from .copies import problem_of_copy

__all__ = ['EFFICIENTDETS_CONVOLUTION', 'ROLES', 'add_to_role', 'any_setting', 'check_number_as_scale']

# Checks return why the settings of a module are unsupported, or `None` if they are supported.
Check = Callable[[nn.Module], str | None]


def any_setting(module: nn.Module) -> None:
    """Accept all settings of a module: a check that finds nothing."""


def _check_pairs(conv, *names):
    """Check settings that ``nn.Conv2d`` makes pairs. Its forward also takes the numbers and lists that users set."""
    for name in names:
        value = getattr(conv, name)
        if type(value) is not tuple or [*map(type, value)] != [int, int]:
            return f'its {name} is {value!r}, and only a tuple of two integers, such as (1, 1), is supported'
    return None


def _check_zero_padding(conv):
    if conv.padding_mode != 'zeros':
        return f'its padding_mode is {conv.padding_mode!r}, and only zero padding is supported'
    return _check_pairs(conv, 'padding', 'stride', 'dilation')


def _check_standardised(conv):
    # A tensor may be trained or changed, and operations read a number.
    eps = f'its eps is a {type(conv.eps).__name__}, not a number' if isinstance(conv.eps, torch.Tensor) else None
    return _check_zero_padding(conv) or eps


def _check_no_other_padding(conv):
    if conv.padding not in (0, (0, 0)):
        return f'its padding is {conv.padding!r}, beside that by the input'
    return _check_pairs(conv, 'kernel_size', 'stride', 'dilation')


def _check_bias(module):
    return 'it has no bias' if module.bias is None else None


def _check_zero_padding_and_bias(conv):
    return _check_zero_padding(conv) or _check_bias(conv)


def _check_pointwise(conv):
    geometry = conv.kernel_size, conv.stride, conv.padding, conv.groups
    known = geometry == ((1, 1), (1, 1), (0, 0), 1)
    return _check_zero_padding(conv) or (None if known else 'it is no 1x1 convolution')


def _check_patchwise(conv):
    geometry = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups
    known = geometry == ((2, 2), (2, 2), (0, 0), (1, 1), 1)
    return _check_zero_padding(conv) or (None if known else 'it is no 2x2 convolution of stride 2')


def _check_channel_norm(norm):
    return None if len(norm.normalized_shape) == 1 else f'it normalises over {len(norm.normalized_shape)} dimensions'


def _check_affine_norm(norm):
    if norm.weight is None or norm.bias is None:
        return 'it has no weight or no bias'
    return _check_channel_norm(norm)


def _check_no_dropout(dropout):
    return f'it drops {dropout.p:g} of the values; set its rate to 0 (drop_rate, attn_drop_rate)' if dropout.p else None


def _check_last_dimension(scale):
    last = getattr(scale, 'data_format', 'channels_last') == 'channels_last'
    return None if last else f'its data_format is {scale.data_format!r}'


def _check_softmax_dimension(softmax):
    return None if softmax.dim == -1 else f'its dim is {softmax.dim}'


def _check_bounds_of_relu6(act):
    bounds = act.min_val, act.max_val
    return None if bounds == (0, 6) else f'its bounds are {bounds[0]:g} and {bounds[1]:g}, and not 0 and 6'


_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, Swish, nn.Hardswish, nn.GELU)
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, SyncBatchNorm, _BatchNormXd, nn.GroupNorm)
_LINEARS = (nn.Linear, MMCVLinear)
EFFICIENTDETS_CONVOLUTION = 'projects.EfficientDet.efficientdet.utils.Conv2dSamePadding'
_CONVOLUTIONS = (nn.Conv2d, MMCVConv2d)
_LAYER_NORMS = (
    nn.LayerNorm,
    'sbp_mmdet.models.layers.LayerNorm2d',
    'mmpretrain.models.utils.norm.LayerNorm2d',
)
_SCALES = (LayerScale, 'sbp_mmdet.models.vit.LayerScale', 'mmpretrain.models.utils.layer_scale.LayerScale')


def _check_no_plugins(block):
    # Blocks of a stage without plugins say `with_plugins`, too, if another stage has some.
    plugged = getattr(block, 'with_plugins', False) and any(vars(block).get(names, True) for names in _PLUGIN_NAMES)
    return 'it has plugins' if plugged else problem_of_copy(block)


_PLUGIN_NAMES = 'after_conv1_plugin_names', 'after_conv2_plugin_names', 'after_conv3_plugin_names'


def _check_all_tensors(norm):
    if norm.weight is None or norm.bias is None or getattr(norm, 'running_mean', norm.weight) is None:
        return 'it has no weight, bias or running statistics'
    return None


def _check_pool_and_layer(sequence):
    return None if len(sequence) in (2, 3) else f'it has {len(sequence)} members'


def _check_same_size(conv):
    if wrong := _check_zero_padding(conv) or _check_pairs(conv, 'kernel_size'):
        return wrong
    sizes = zip(conv.padding, conv.dilation, conv.kernel_size, strict=True)
    same = conv.stride == (1, 1) and all(2 * padding == dilation * (size - 1) for padding, dilation, size in sizes)
    return None if same else 'its output has another size than its input'


def _check_lone_convolution(layer):
    if layer.with_norm or layer.with_activation or layer.with_explicit_padding:
        return 'it has a norm, an activation or a padding layer'
    return None


def _check_convolution_and_norm(layer):
    plain = tuple(layer.order) == ('conv', 'norm', 'act') and not layer.with_explicit_padding
    return None if plain and layer.with_norm and not layer.with_activation else 'it is not a convolution and a norm'


def check_number_as_scale(attention: nn.Module) -> str | None:
    """Check that the scale of an attention is a number: operations compute no gradient of a scale.

    Args:
        attention (nn.Module): The attention.

    Returns:
        str | None: Why the scale is unsupported, or ``None``.
    """
    scale = getattr(attention, 'scale', None)
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    return None if scale is None or is_number else f'its scale is a {type(scale).__name__}, not a number'


def _check_divisor(pool):
    return 'it divides by a number of its own' if pool.divisor_override else None


def _check_groups_of_res2net(block):
    if wrong := _check_no_plugins(block):
        return wrong
    if block.stage_type not in ('normal', 'stage'):
        return f'its stage_type is {block.stage_type!r}'
    if not len(block.convs) == len(block.bns) == block.scales - 1:
        return 'it does not have one convolution and one norm for each group of channels but the last'
    # Convolutions that are not known, such as wrappers without these attributes, are named by their own role.
    widths = {getattr(conv, side, block.width) for conv in block.convs for side in ('in_channels', 'out_channels')}
    total = getattr(block.conv1, 'out_channels', block.width * block.scales)
    alike = widths == {block.width} and total == block.width * block.scales
    return None if alike else f'its groups of channels are not {block.scales} of {block.width} channels'


# Role of a module in an operation -> classes that are known in this role -> check of their settings.
ROLES: dict[str, dict[type | str, Check]] = {
    'convolution': dict.fromkeys((*_CONVOLUTIONS, ConvAWS2d), _check_zero_padding)
    | {ConvWS2d: _check_standardised}
    | dict.fromkeys((Conv2dAdaptivePadding, EFFICIENTDETS_CONVOLUTION), _check_no_other_padding),
    'norm of a map': dict.fromkeys(_NORMS, any_setting),
    'convolution that keeps the size': dict.fromkeys(_CONVOLUTIONS, _check_same_size),
    'pointwise convolution': dict.fromkeys(_CONVOLUTIONS, _check_pointwise),
    'convolution alone': {ConvModule: _check_lone_convolution},
    'convolution and norm': {ConvModule: _check_convolution_and_norm},
    'residual block': dict.fromkeys((BasicBlock, Bottleneck, resnext.Bottleneck), _check_no_plugins)
    | {Bottle2neck: _check_groups_of_res2net},
    'convolution of a chain': dict.fromkeys(_CONVOLUTIONS, _check_zero_padding) | {ConvWS2d: _check_standardised},
    'norm of a chain': dict.fromkeys(_NORMS, _check_all_tensors),
    'shortcut of a chain': {nn.Sequential: _check_pool_and_layer},
    'average pool': {nn.AvgPool2d: _check_divisor},
    'ReLU': {nn.ReLU: any_setting},
    'activation': dict.fromkeys(_ACTIVATIONS, any_setting) | {nn.ReLU6: _check_bounds_of_relu6},
    'GELU': {nn.GELU: any_setting},
    # A convolution in front of a norm, which the backward pass recomputes.
    'recomputed convolution': dict.fromkeys(_CONVOLUTIONS, _check_zero_padding_and_bias),
    'linear': dict.fromkeys(_LINEARS, any_setting),
    'linear with bias': dict.fromkeys(_LINEARS, _check_bias),
    'pointwise with bias': dict.fromkeys(_LINEARS, _check_bias)
    | dict.fromkeys(_CONVOLUTIONS, lambda conv: _check_pointwise(conv) or _check_bias(conv)),
    'linear or 2x2 convolution': dict.fromkeys(_LINEARS, any_setting) | dict.fromkeys(_CONVOLUTIONS, _check_patchwise),
    'layer norm': dict.fromkeys(_LAYER_NORMS, _check_channel_norm),
    'affine layer norm': dict.fromkeys(_LAYER_NORMS, _check_affine_norm),
    'GRN': dict.fromkeys(('sbp_mmdet.models.layers.GRN', 'mmpretrain.models.utils.norm.GRN'), any_setting),
    'dropout of rate 0': dict.fromkeys((nn.Dropout, Dropout), _check_no_dropout) | {nn.Identity: any_setting},
    'dropout': dict.fromkeys((nn.Dropout, Dropout, nn.Identity), any_setting),
    'stochastic depth': dict.fromkeys((nn.Dropout, Dropout), _check_no_dropout)
    | {nn.Identity: any_setting, DropPath: any_setting},
    'layer scale': dict.fromkeys(_SCALES, _check_last_dimension) | {nn.Identity: any_setting},
    'identity': {nn.Identity: any_setting},
    'softmax': {nn.Softmax: _check_softmax_dimension},
    'patches': {nn.Unfold: any_setting},
    'list of layers': dict.fromkeys((nn.Sequential, Sequential), any_setting),
    'holder': dict.fromkeys(('sbp_mmdet.models.vit.Holder',), any_setting),
    'FFN': {FFN: any_setting},
    'encoder layer': {DetrTransformerEncoderLayer: any_setting},
    'multi-head attention': {nn.MultiheadAttention: any_setting},
    'multi-head attention of mmcv': {MultiheadAttention: any_setting},
    'deformable attention': {MultiScaleDeformableAttention: any_setting},
    'shifted-window attention': dict.fromkeys(
        ('mmdet.models.backbones.swin.ShiftWindowMSA', 'mmpretrain.models.utils.attention.ShiftWindowMSA'), any_setting
    ),
    'window attention': dict.fromkeys(
        ('mmdet.models.backbones.swin.WindowMSA', 'mmpretrain.models.utils.attention.WindowMSA'), check_number_as_scale
    ),
    'attention': dict.fromkeys(('mmpretrain.models.utils.attention.MultiheadAttention',), check_number_as_scale),
}
_RECOMPUTABLE_MODULES = (
    *(*_LINEARS, nn.modules.linear.NonDynamicallyQuantizableLinear, *_CONVOLUTIONS, nn.LayerNorm, DropPath, Dropout),
    *(nn.Dropout, nn.Identity, nn.Sequential, Sequential, nn.ModuleList, nn.MultiheadAttention, Swish),
)
# Modules that may be called twice, by checkpointing: a second call leaves the same state behind as one call.
ROLES['recomputable'] = dict.fromkeys((*_RECOMPUTABLE_MODULES, *_ACTIVATIONS), any_setting) | {
    getattr(nn, name): any_setting for name in torch.nn.modules.activation.__all__
}


def add_to_role(role: str, *kinds: type | str) -> None:
    """Add classes to a role of :data:`ROLES`: their forward computes exactly what that of the role's classes computes.

    Args:
        role (str): A key of :data:`ROLES`.
        *kinds (type | str): The classes, or strings of their modules and names.

    Example:
        >>> add_to_role('layer norm', MyLayerNorm)
    """
    ROLES[role].update(dict.fromkeys(kinds, next(iter(ROLES[role].values()))))
