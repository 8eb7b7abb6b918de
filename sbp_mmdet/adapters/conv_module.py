"""Convolutions with norm and activation: mmcv's ``ConvModule``, sequences of such layers, and a convolution alone.

Unlike transformers' blocks they have no positions that could be dropped: they are exact with every preset.
"""

from collections.abc import Iterator

import mmcv.cnn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmcv.cnn.bricks.conv2d_adaptive_padding import Conv2dAdaptivePadding
from mmcv.cnn.bricks.conv_ws import ConvAWS2d, ConvWS2d
from mmcv.cnn.bricks.swish import Swish
from mmcv.cnn.bricks.wrappers import Conv2d as MMCVConv2d
from mmengine.model.utils import _BatchNormXd
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm
from torch import Tensor, nn

from ..ops.common.activations import Activation
from ..ops.common.autograd_function import Form
from ..ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm
from ..presets import Settings
from .base import Lean, Whole, adapter, kind_of

__all__ = ['ConvLean', 'conv_norm_act', 'known']

_CONVS = (nn.Conv2d, MMCVConv2d, ConvWS2d, ConvAWS2d, Conv2dAdaptivePadding)
_UNKNOWN = 'its convolution has hooks, or padding other than zeros'
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, SyncBatchNorm, _BatchNormXd, nn.GroupNorm)
_ACTS = {
    nn.ReLU: lambda m: Activation('relu'),
    nn.LeakyReLU: lambda m: Activation('leaky_relu', slope=m.negative_slope),
    nn.SiLU: lambda m: Activation('silu'),
    Swish: lambda m: Activation('swish'),
    nn.Hardswish: lambda m: Activation('hardswish'),
    nn.GELU: lambda m: Activation('gelu', approximate=m.approximate),
}


def _hooked(module):
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or 'forward' in vars(module)


def known(module: nn.Module | None, kinds: str) -> bool:
    """Whether the operation can stand in for a module.

    Args:
        module (nn.Module | None): A submodule.
        kinds (str): What it should be: 'conv', 'norm' or 'act'.
    """
    kind = kind_of(module)
    if kind not in dict(conv=_CONVS, norm=_NORMS, act=_ACTS)[kinds]:
        return False
    if _hooked(module):
        return False  # somebody's code would not run
    return kinds != 'conv' or (module.padding_mode == 'zeros' and not isinstance(module.padding, str))


def conv_norm_act(
    form: Form,
    x: Tensor,
    conv: nn.Module,
    norm: nn.Module | None = None,
    act: nn.Module | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``act(norm(conv(x)) + residual)``. Modules that the operation does not know run their own code.

    Args:
        form (Form): How the operation stores.
        x (Tensor): Shape (N, C, H, W).
        conv (nn.Module): The convolution.
        norm, act (nn.Module | None): None: none. Default: None.
        residual (Tensor | None): Shape of the output. Default: None.

    Returns:
        Tensor: Shape (N, D, H', W').
    """
    # Without images the module's own code runs, but where the processes of a SyncBN have to do the same.
    taken = known(conv, 'conv') and (bool(x.numel()) or _process_group(norm) is not None)
    if taken and (norm is None or known(norm, 'norm')):
        inside = act if act is not None and known(act, 'act') else None
        x = _operation(form, x, conv, norm, inside, residual)
        return x if act is inside else act(x)
    x = _operation(form, x, conv) if taken else conv(x)
    x = x if norm is None else norm(x)
    x = x if residual is None else x + residual
    return x if act is None else act(x)


def _operation(form, x, conv, norm=None, act=None, residual=None):
    settings, tensors = (dict(norm='none'), {}) if norm is None else _norm(norm)
    if act is not None:
        settings['activation'] = _ACTS[kind_of(act)](act)
    x, padding = _padded(x, conv) if kind_of(conv) is Conv2dAdaptivePadding else (x, conv.padding)
    geometry = conv.stride, padding, conv.dilation, conv.groups
    tensors = ConvNormTensors(x, _weight(conv), conv.bias, **tensors, residual=residual)
    return conv_norm(ConvNormSettings(form, *geometry, **settings), tensors)


def _weight(conv):
    """What a convolution multiplies with: with weight standardisation a function of its parameter."""
    if kind_of(conv) is ConvAWS2d:
        return conv._get_weight(conv.weight)
    if kind_of(conv) is ConvWS2d:
        mean, std = (of(conv.weight.flatten(1), 1).view(-1, 1, 1, 1) for of in (torch.mean, torch.std))
        return (conv.weight - mean) / (std + conv.eps)
    return conv.weight


def _padded(x, conv):
    """The map and its padding as TensorFlow's "same". A map is copied only where its sides get different ones."""
    pads = []
    for size, stride, kernel, dilation in zip(x.shape[2:], conv.stride, conv.kernel_size, conv.dilation, strict=True):
        pads.append(max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0))
    (top, left), (bottom, right) = ([pad // 2 for pad in pads], [pad - pad // 2 for pad in pads])
    if (top, left) == (bottom, right):
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), (0, 0)


def _norm(norm):
    """Settings and tensors of a norm; counts a batch as the module itself does."""
    tensors = dict(norm_weight=norm.weight, norm_bias=norm.bias)
    if isinstance(norm, nn.GroupNorm):
        return dict(norm='group', eps=norm.eps, num_groups=norm.num_groups), tensors
    momentum, track = norm.momentum or 0.0, norm.track_running_stats
    if norm.training and track and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    train = norm.training or norm.running_mean is None
    if track or not train:
        tensors.update(running_mean=norm.running_mean, running_var=norm.running_var)
    group = _process_group(norm)
    return dict(norm='batch' if train else 'fixed', eps=norm.eps, momentum=momentum, process_group=group), tensors


def _process_group(norm):
    """Who shares the statistics of a norm; None: nobody."""
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training or not dist.is_available():
        return None
    if not dist.is_initialized():
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


class ConvLean(Whole):
    """Base of adapters of convolutional modules, which are exact in every preset."""

    hands_on = True

    def forward(self, *args, **kwargs):
        """As of others. What is frozen, and so in evaluation mode, folds its norms too while the rest trains."""
        if torch.is_grad_enabled() and not (self.training or any(p.requires_grad for p in self.parameters())):
            if self.form.implementation == 'fused':
                return self.lean_forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        """The module, and its convolutions, norms and activations."""
        kinds = ('conv', 'norm', 'act')
        yield from (module, *(m for m in module.children() if any(known(m, kind) for kind in kinds)))

    @classmethod
    def aside(cls, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for inside in module.modules():
            if kind_of(inside) in (*_NORMS, *_ACTS) and _hooked(inside):
                yield inside, 'it has hooks, which run; its layer stores what torch stores'

    def layer(self, x: Tensor, *modules: nn.Module | None, residual: Tensor | None = None) -> Tensor:
        """:func:`conv_norm_act` in this module's form."""
        return conv_norm_act(self.form, x, *modules, residual=residual)


@adapter(*_CONVS)
class Conv(ConvLean):
    """A convolution alone: it shares what the layer before stores, and what it stores with its siblings."""

    def lean_forward(self, x: Tensor) -> Tensor:
        return _operation(self.form, x, self) if x.dim() == 4 and x.numel() else super(Lean, self).forward(x)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        if not known(module, 'conv') and cls.has_stock_forward(module):
            return _UNKNOWN
        return super().refusal(module, settings)


@adapter(mmcv.cnn.ConvModule)
class ConvModule(ConvLean):
    """Convolution, norm and activation."""

    def lean_forward(self, x: Tensor, activate: bool = True, norm: bool = True) -> Tensor:
        if self.with_explicit_padding:
            x = self.padding_layer(x)
        act = self.activate if activate and self.with_activation else None
        return self.layer(x, self.conv, self.norm if norm and self.with_norm else None, act)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        if tuple(module.order) != ('conv', 'norm', 'act'):
            return f'its layers stand in the order {module.order}'
        if not known(module.conv, 'conv'):
            kind = kind_of(module.conv)
            return _UNKNOWN if kind in _CONVS else f'its convolution is a {kind.__name__}'
        return super().refusal(module, settings)


@adapter(nn.Sequential)
class Sequence(ConvLean):
    """Convolutions that are followed by a norm or an activation; other members run their own code."""

    def lean_forward(self, x: Tensor) -> Tensor:
        for layer in _runs(self):
            x = layer[0](x) if len(layer) == 1 else self.layer(x, *layer)
        return x

    @classmethod
    def members(cls, module: nn.Module) -> Iterator[nn.Module]:
        found = [m for layer in _runs(module) if len(layer) > 1 for m in layer if m is not None]
        if found and cls.has_stock_forward(module):
            yield from (module, *found)


def _runs(sequence):
    """(convolution, norm, activation), the last two or None; or (module,)."""
    found, modules = [], [*sequence]
    while modules:
        layer = [modules.pop(0)]
        if known(layer[0], 'conv'):
            for kinds in ('norm', 'act'):
                layer.append(modules.pop(0) if modules and known(modules[0], kinds) else None)
        found.append(layer if any(layer[1:]) else layer[:1])
    return found
