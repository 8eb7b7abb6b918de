"""Convolutions with norm and activation: mmcv's ``ConvModule``, sequences of such layers, and a convolution alone.

Their outputs depend on neighbouring positions, so no positions are dropped: no preset but ``int8`` changes gradients.
"""

import dataclasses
import functools
from collections.abc import Sequence

import mmcv.cnn
import torch
import torch.distributed as dist
from mmcv.cnn.bricks.conv2d_adaptive_padding import Conv2dAdaptivePadding
from mmcv.cnn.bricks.conv_ws import ConvAWS2d, ConvWS2d
from mmcv.cnn.bricks.swish import Swish
from mmdet.models.layers.brick_wrappers import FrozenBatchNorm2d
from torch import Tensor, nn

from ..ops.common.activations import Activation
from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm
from ..presets import Settings
from ..surgery import stock_class
from .base import LeanModule, adapter
from .bindings import Binding, Bypassed
from .copies import path_of
from .parameters import weights_and_biases
from .predicate import unsupported
from .roles import EFFICIENTDETS_CONVOLUTION, ROLES, add_to_role

__all__ = [
    'ConvNorm',
    'ConvNormActBinding',
    'LeanConv',
    'LeanConvModule',
    'activation_of',
    'add_shortcut',
    'count_batches',
    'layers_of',
]

for _role in ('norm of a map', 'norm of a chain'):
    add_to_role(_role, FrozenBatchNorm2d)
_activation = functools.cache(Activation)
_ACTIVATIONS = {
    nn.ReLU: lambda m: _activation('relu'),
    nn.ReLU6: lambda m: _activation('relu6'),
    nn.LeakyReLU: lambda m: _activation('leaky_relu', slope=m.negative_slope),
    nn.SiLU: lambda m: _activation('silu'),
    Swish: lambda m: _activation('swish'),
    nn.Hardswish: lambda m: _activation('hardswish'),
    nn.GELU: lambda m: _activation('gelu', approximate=m.approximate),
}


def activation_of(module: nn.Module) -> Activation:
    """Return the activation that operations compute for a module.

    Args:
        module (nn.Module): A module of a class with the role 'activation', see :data:`.ROLES`.
    """
    return _ACTIVATIONS[stock_class(type(module))](module)


class ConvNorm:
    """A convolution with norm and activation, which gives the operation its settings and tensors.

    The settings are cached and made again when a setting of a module has changed. Copies and pickles have no cache.

    Args:
        conv (nn.Module): Convolution.
        norm (nn.Module | None): Norm. If ``None``, there is none. Default: None.
        act (nn.Module | None): Activation. If ``None``, there is none. Default: None.
    """

    def __init__(self, conv: nn.Module, norm: nn.Module | None = None, act: nn.Module | None = None):
        self.conv, self.norm, self.act = conv, norm, act
        self._adapts = _pads_itself(conv)
        kind = stock_class(type(conv))
        self._standardises, self._standardises_adaptively = kind is ConvWS2d, kind is ConvAWS2d
        self._activation = act and stock_class(type(act)) not in (nn.LeakyReLU, nn.GELU) and activation_of(act)
        self._last = None, None

    def __reduce__(self):
        return ConvNorm, (self.conv, self.norm, self.act)

    def inputs(
        self, form: Form, x: Tensor | None, dtype: torch.dtype, residual: Tensor | None = None, counts: bool = True
    ):
        """Return settings and tensors of :func:`.conv_norm`.

        Args:
            form (Form): Form of the operation.
            x (Tensor | None): Input. If ``None``, the padding must not depend on its size.
            dtype (torch.dtype): Precision of the convolution.
            residual (Tensor | None): See :class:`.ConvNormTensors`. Default: None.
            counts (bool): Whether to call :func:`count_batches` for the norm, too. Default: True.

        Returns:
            tuple[ConvNormSettings, ConvNormTensors]: Settings and tensors.
        """
        conv, norm, act = self.conv, self.norm, self.act
        if counts and norm is not None and norm.training:
            count_batches([norm])
        weight, bias, *of_norm = weights_and_biases((conv,) if norm is None else (conv, norm))
        options, tensors = ((), (None,) * 4) if norm is None else _norm_inputs(norm, *of_norm)
        padding, border = _own_padding(x, conv) if self._adapts else (conv.padding, (0, 0, 0, 0))
        activation = self._activation or (None if act is None else activation_of(act))
        eps = conv.eps if self._standardises else None
        made_of = form, conv.stride, padding, conv.dilation, conv.groups, *options, activation, dtype, border, eps
        last = self._last  # as in CachedSettings
        if made_of != last[0]:
            form, stride, padding, dilation, groups, *_ = made_of
            named = dict(zip(('norm', 'eps', 'momentum', 'num_groups', 'process_group'), options, strict=False))
            named |= dict(activation=activation, dtype=dtype, border=border, standardise=eps)
            self._last = last = made_of, ConvNormSettings(form, stride, padding, dilation, groups, **named)
        weight = conv._get_weight(weight) if self._standardises_adaptively else weight
        channels = weight.shape[0]
        for tensor in tensors:  # torch's kernels do not check the sizes, and would write to other memory
            if tensor is not None and tensor.shape[0] != channels:
                raise ValueError(
                    f'a {type(norm).__name__} of {tensor.shape[0]} channels follows a convolution of {channels}; make '
                    'them equal'
                )
        return last[1], ConvNormTensors(x, weight, bias, *tensors, residual)

    def __call__(self, form: Form, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Run the operation on (N, C, H, W); see :meth:`inputs`."""
        return conv_norm(*self.inputs(form, x, autocast_dtype(x) or x.dtype, residual))


def add_shortcut(x: Tensor, shortcut: Tensor | None) -> Tensor:
    """Add a shortcut to the output of a block's last layer in place, as the blocks' own code does.

    A hook of the user may keep this output, and sees what is written to it. The sum has the precision of the output.

    Args:
        x (Tensor): The output; changed in place.
        shortcut (Tensor | None): The shortcut, of the same shape. If ``None``, there is none.

    Returns:
        Tensor: The sum.
    """
    if shortcut is not None:
        x += shortcut
    return x


_ROLE_OF = dict(conv='convolution', norm='norm of a map', act='activation')


@dataclasses.dataclass(frozen=True, eq=False)
class ConvNormActBinding(Binding):
    """``act(norm(conv(x)) + residual)``. A norm or activation that may not be bypassed is called after the operation.

    Attributes:
        conv (nn.Module): Convolution.
        norm, act (nn.Module | None): Norm and activation. If ``None``, there is none. Default: None.
        fused (tuple[str, ...]): Which of 'conv', 'norm' and 'act' the operation computes. Default: all.
    """

    conv: nn.Module
    norm: nn.Module | None = None
    act: nn.Module | None = None
    fused: tuple[str, ...] = ('conv', 'norm', 'act')
    one_precision = False

    def __call__(self, form: Form, x: Tensor, residual: Tensor | None = None):
        """Run the layer on (N, C, H, W); ``residual`` has the shape of the output."""
        norm, act = self.norm, self.act
        # A single image (C, H, W) runs the modules' own code. So do no images, unless SyncBN needs all processes to
        # communicate alike.
        if x.dim() != 4 or (not x.numel() and _process_group(norm) is None):
            return self.run_own_code(x, residual)
        if norm is not None and 'norm' not in self.fused:
            x = add_shortcut(norm(self._layer(form, x)), residual)
            return x if act is None else act(x)
        x = self._layer(form, x, residual)
        return x if act is None or 'act' in self.fused else act(x)

    @functools.cached_property
    def _layer(self):
        norm = self.norm if 'norm' in self.fused else None
        behind = self.norm is None or norm is not None  # otherwise the norm stands between operation and activation
        return ConvNorm(self.conv, norm, self.act if behind and 'act' in self.fused else None)

    @property
    def num_members(self) -> int:
        """Number of consecutive members of a sequence that the layer consists of."""
        return 1 + (self.norm is not None) + (self.act is not None)

    def run_own_code(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Call the modules, with the arguments of the layer."""
        x = self.conv(x)
        x = add_shortcut(x if self.norm is None else self.norm(x), residual)
        return x if self.act is None else self.act(x)

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        bypassed = []
        for name in self.fused:
            if (module := getattr(self, name)) is not None:
                bypassed.append((module, _ROLE_OF[name]))
        return bypassed

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed):
        """See :meth:`.Binding.usable`. If the convolution may not be bypassed, there is no operation."""
        wrong = dict(self.problems(root, bypassed))
        if not wrong:
            return self, []
        fused = tuple(name for name in self.fused if getattr(self, name) not in wrong)
        usable = dataclasses.replace(self, fused=fused) if 'conv' in fused else None
        return usable, list(wrong.items())


def _pads_itself(conv):
    """Return whether a convolution pads its input by the input's size, as TensorFlow's padding "same" does."""
    kind = stock_class(type(conv))
    return kind is Conv2dAdaptivePadding or path_of(kind) == EFFICIENTDETS_CONVOLUTION


def _own_padding(x, conv):
    """Return padding and border of TensorFlow's "same" for a map; the border is for opposite sides that differ."""
    pads = []
    adaptive = stock_class(type(conv)) is Conv2dAdaptivePadding
    windows = conv.weight.shape[2:] if adaptive else conv.kernel_size
    for size, stride, kernel, dilation in zip(x.shape[2:], conv.stride, windows, conv.dilation, strict=True):
        if adaptive:
            pads.append(max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0))
        else:  # EfficientDet's knows no dilation, and crops where windows are smaller than their stride
            pads.append((-(-size // stride) - 1) * stride + kernel - size)
    (top, left), (bottom, right) = ([pad // 2 for pad in pads], [pad - pad // 2 for pad in pads])
    if (top, left) == (bottom, right):
        return (top, left), (0, 0, 0, 0)
    return (0, 0), (left, right, top, bottom)


def count_batches(norms: Sequence[nn.Module]) -> bool:
    """Increase the number of batches that batch norms in training mode have tracked, as their own code does.

    Args:
        norms (Sequence[nn.Module]): Norms of any kind.

    Returns:
        bool: Whether the batches were counted. They are not if a norm that averages over all batches is used twice,
        because its average depends on the count at each use.
    """
    counters, averages = [], False
    for norm in norms:
        own = norm.__dict__
        if own['training'] and own.get('track_running_stats'):
            counter = own['_buffers'].get('num_batches_tracked')
            counters += [] if counter is None else [counter]
            averages = averages or own['momentum'] is None
    if len({*map(id, counters)}) < len(counters):
        if averages:
            return False
        for counter in counters:  # together, a GPU would count one of them once
            counter.add_(1)
    elif len(counters) == 1:
        counters[0].add_(1)
    elif counters:
        torch._foreach_add_(counters, 1)
    return True


def _norm_inputs(norm, weight, bias):
    """Return the settings of a norm for :class:`.ConvNormSettings`, and its tensors, given its parameters.

    Returns:
        tuple[tuple, tuple]: (norm, eps, momentum, num_groups, process_group), of which the last ones may be missing,
        and (weight, bias, running mean, running variance).
    """
    own = norm.__dict__
    buffers = own['_buffers']
    if 'running_mean' not in buffers:
        return ('group', norm.eps, 0.1, norm.num_groups), (weight, bias, None, None)
    mean, var = buffers['running_mean'], buffers['running_var']
    if 'momentum' not in own:  # mmdet's FrozenBatchNorm2d
        return ('fixed', norm.eps), (buffers['weight'], buffers['bias'], mean, var)
    training, momentum, track = own['training'], norm.momentum or 0.0, norm.track_running_stats
    train = training or mean is None
    if training and track and norm.momentum is None and buffers['num_batches_tracked'] is not None:
        momentum = 1.0 / float(buffers['num_batches_tracked'])
    running = (mean, var) if track or not train else (None, None)
    group = _process_group(norm) if training and 'process_group' in own else None
    return ('batch' if train else 'fixed', norm.eps, momentum, 1, group), (weight, bias, *running)


def _process_group(norm):
    """Return the process group over which a SyncBN computes its statistics, or ``None`` if it does not synchronise."""
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training or not dist.is_available():
        return None
    if not dist.is_initialized():
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


@adapter(*ROLES['convolution'])
class LeanConv(LeanModule):
    """A convolution alone. It shares its saved input with the layer in front and with layers of the same input."""

    dims = 4
    samples = has_reference = False
    folds_frozen_norms = shares_maps = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(conv=ConvNormActBinding(self))

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the convolution on (N, C, H, W)."""
        return self.binding('conv')(self.form, x) if x.numel() else super(LeanModule, self).forward(x)


@adapter(mmcv.cnn.ConvModule)
class LeanConvModule(LeanModule):
    """mmcv's ``ConvModule``: convolution, norm and activation."""

    samples = has_reference = False
    folds_frozen_norms = shares_maps = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        norm, act = self.norm if self.with_norm else None, self.activate if self.with_activation else None
        return dict(layer=ConvNormActBinding(self.conv, norm, act))

    def lean_forward(self, x: Tensor, activate: bool = True, norm: bool = True) -> Tensor:
        """Run the layer on (N, C, H, W); see mmcv's ``ConvModule``."""
        layer = self.binding('layer')
        if not (norm and activate):
            layer = dataclasses.replace(layer, norm=layer.norm if norm else None, act=layer.act if activate else None)
        return layer(self.form, self.padding_layer(x) if self.with_explicit_padding else x)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        if tuple(module.order) != ('conv', 'norm', 'act'):
            order = ', '.join(module.order)
            return f"the order of its layers is {order}, and only 'conv, norm, act' is supported"
        return None


def layers_of(sequence: nn.Sequential) -> dict[str, ConvNormActBinding]:
    """Find the convolutions of a sequence, each with the norm and activation after it, by their names.

    Args:
        sequence (nn.Sequential): The sequence.
    """
    layers, members = {}, [*sequence._modules.items()]
    while members:
        name, conv = members.pop(0)
        if unsupported(conv, 'convolution', called=True):
            continue
        layer = [conv]
        for role in ('norm of a map', 'activation'):
            known = members and not unsupported(members[0][1], role, called=True)
            layer.append(members.pop(0)[1] if known else None)
        if any(layer[1:]):
            layers[name] = ConvNormActBinding(*layer)
    return layers
