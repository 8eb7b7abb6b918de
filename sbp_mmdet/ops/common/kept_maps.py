"""Feature maps that wait for the backward pass of convolutions, each of them once, and handed on to the next layer."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .layouts import memory_format
from .precision import accumulator

__all__ = ['ACTIVATIONS', 'Activation', 'KeptMap', 'add', 'addend', 'hand_on', 'keep', 'kept']

aten = torch.ops.aten

DEEPEST = 3  # maps that are added up in the backward pass, at the most; the sum of more is stored

_LEAST_POSITIONS = 16  # with fewer in a map, its scales take what eight bits save
_GROUP = 32  # positions that share a scale, at the least: neighbours are alike, so their steps are finer


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation function; used as a value.

    Attributes:
        name (str): A key of ``ACTIVATIONS``.
        slope (float): Of leaky ReLU. Default: 0.01.
        approximate (str): Of GELU, 'none' or 'tanh'. Default: 'none'.

    Raises:
        ValueError: For an unknown name.
    """

    name: str
    slope: float = 0.01
    approximate: str = 'none'

    def __post_init__(self):
        if self.name not in ACTIVATIONS:
            raise ValueError(f'activation {self.name!r} is unknown; choose one of {", ".join(ACTIVATIONS)}')

    @property
    def by_sign(self) -> bool:
        """Its derivative depends on the sign alone."""
        return self.name in ('relu', 'leaky_relu')

    def __call__(self, x: Tensor, inplace: bool = False) -> Tensor:
        """The function; ``inplace`` permits to write over ``x``."""
        return ACTIVATIONS[self.name][0](self, x, inplace)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Gradient for ``x``, what the function was applied to."""
        return ACTIVATIONS[self.name][1](self, grad, x)


# Forward and backward pass.
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    'relu': (lambda a, x, inplace: F.relu(x, inplace), lambda a, g, x: aten.threshold_backward(g, x, 0)),
    'leaky_relu': (
        lambda a, x, inplace: F.leaky_relu(x, a.slope, inplace),
        lambda a, g, x: aten.leaky_relu_backward(g, x, a.slope, False),
    ),
    'silu': (lambda a, x, inplace: F.silu(x, inplace), lambda a, g, x: aten.silu_backward(g, x)),
    # mmcv's, which is SiLU but for the last bit.
    'swish': (lambda a, x, inplace: x * torch.sigmoid(x), lambda a, g, x: aten.silu_backward(g, x)),
    'hardswish': (lambda a, x, inplace: F.hardswish(x, inplace), lambda a, g, x: aten.hardswish_backward(g, x)),
    'gelu': (
        lambda a, x, inplace: F.gelu(x, approximate=a.approximate),
        lambda a, g, x: aten.gelu_backward(g, x, approximate=a.approximate),
    ),
}


class KeptMap(NamedTuple):
    """A map y = act(u) + shortcut, u = scale * z + shift + residual, z = unit * values + base. None is left out.

    Attributes:
        values (Tensor): Shape (N, C, H, W): z itself, or int8.
        unit, base (Tensor | None): Shape (N, C, B, 1), how eight bits are read in each of B groups of rows;
            without base zero is kept as -127.
        scale, shift (Tensor | None): Of a norm, broadcastable.
        activation (Activation | None): The activation.
        residual, shortcut (KeptMap | None): Other maps.
    """

    values: Tensor
    unit: Tensor | None = None
    base: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    activation: Activation | None = None
    residual: 'KeptMap | None' = None
    shortcut: 'KeptMap | None' = None

    def _steps(self):
        """How eight bits are read, broadcastable."""
        if self.unit is None:
            return None, None
        base = 126.5 * self.unit if self.base is None else self.base
        return _of_rows(self.unit, self.values), _of_rows(base, self.values)

    @property
    def depth(self) -> int:
        """Maps that are read one after the other."""
        return 1 + sum(map.depth for map in (self.residual, self.shortcut) if map is not None)

    def before_norm(self, dtype: torch.dtype) -> Tensor:
        """z; do not write to it."""
        return _affine(self.values, *self._steps(), dtype)

    def before_activation(self, dtype: torch.dtype) -> Tensor:
        """u; do not write to it."""
        scale, shift = self.scale, self.shift
        unit, base = self._steps()
        if scale is None:
            scale, shift = unit, base
        elif unit is not None:
            scale, shift = unit * scale, base * scale + shift
        u = _affine(self.values, scale, shift, dtype)
        return u if self.residual is None else u.add_(self.residual.load(dtype))

    def activation_backward(self, grad: Tensor) -> Tensor:
        """Gradient for u from that of act(u)."""
        if self.activation.name == 'relu' and self.unit is not None and self.scale is None:
            return aten.threshold_backward(grad, self.values.to(grad.dtype), -127)  # see `keep`, positive
        return self.activation.backward(grad, self.before_activation(grad.dtype))

    def load(self, dtype: torch.dtype) -> Tensor:
        """y; do not write to it."""
        y = self.before_activation(dtype)
        y = y if self.activation is None else self.activation(y, inplace=y is not self.values)
        return y if self.shortcut is None else y + self.shortcut.load(dtype)


def _affine(x, scale, shift, dtype):
    """scale * x + shift in ``dtype``; x itself where there is nothing to do."""
    if scale is None:
        return x.to(dtype)
    if x.is_cuda or memory_format(x) is torch.channels_last:
        return torch.addcmul(shift, x, scale).to(dtype)
    x = x.to(scale.dtype) * scale if x.is_floating_point() else x.to(scale.dtype).mul_(scale)
    return x.add_(shift).to(dtype)


def _of_rows(x, map):
    """Numbers of groups of rows as numbers of rows."""
    return x if x is None or x.shape[2] in (1, map.shape[2]) else x.repeat_interleave(map.shape[2] // x.shape[2], 2)


def _groups(x):
    """Groups of rows that share a scale."""
    height, width = x.shape[2:]
    return next(n for n in range(height, 0, -1) if n == 1 or (height % n == 0 and height // n * width >= _GROUP))


def keep(x: Tensor, storage: str, threshold: Tensor | float | None = None, positive: bool = False) -> KeptMap:
    """Keeps a map as it is or in eight bits, in steps of its own for each image and channel, and for each group of
    rows but behind a ReLU: what it puts out goes into weight gradients alone, whose errors do not add up over layers.

    Rounds to the nearest step. Where there is a threshold, it rounds up in steps that are counted from there, and
    reading gives the middle of a step: each value stays on its side of the threshold, and the mean error is zero. A
    value that is not finite makes its group NaN when it is read, so that gradient scaling skips the step.

    Args:
        x (Tensor): Shape (N, C, H, W).
        storage (str): 'native' or 'int8'.
        threshold (Tensor | float | None): What no value may change its side of, broadcastable. Default: None.
        positive (bool): It is what a ReLU puts out: zero is the threshold, and kept as -127. Default: False.

    Returns:
        KeptMap: Of ``x``, without norm and activation.
    """
    if storage == 'native' or not x.numel() or x.shape[2] * x.shape[3] < _LEAST_POSITIONS:
        return KeptMap(x)
    full = accumulator(x)
    if positive:
        unit = x.amax((2, 3), keepdim=True).to(full) / 252
        return KeptMap((x / unit.clamp_min(torch.finfo(full).tiny)).ceil_().sub_(127).to(torch.int8), unit)
    groups = x.unflatten(2, (_groups(x), -1))
    high, low = (limit((3, 4))[..., None].to(full) for limit in (groups.amax, groups.amin))
    unit = (high - low) / 252  # of 254 steps: counted from a threshold, both ends may lie within a step
    rate = unit.clamp_min(torch.finfo(full).tiny).reciprocal()
    if threshold is None:
        steps = (x * _of_rows(rate, x)).add_(_of_rows(-127 - low * rate, x)).round_()
        base = low + 127 * unit
    else:
        threshold = torch.as_tensor(threshold, dtype=full, device=x.device).clamp(low, high)
        lowest = ((low - threshold) * rate).floor_()
        steps = (x * _of_rows(rate, x)).sub_(_of_rows(threshold * rate, x)).ceil_().sub_(_of_rows(lowest + 127, x))
        base = threshold + (lowest + 126.5) * unit
    return KeptMap(steps.to(torch.int8), unit, base)


def hand_on(y: Tensor, map: KeptMap) -> None:
    """Says how a layer's output is read from what the layer keeps, so that the next layer need not keep it again.

    Args:
        y (Tensor): The output; what is written to later is not handed on.
        map (KeptMap): The same values.
    """
    y._sbp_kept = map, y._version, _hooks()


def kept(x: Tensor, cast: Tensor, storage: str) -> KeptMap:
    """What a layer keeps of its input: what the layer before handed on, or the input, for all layers that it goes to.

    Args:
        x (Tensor): Shape (N, C, H, W), as the layer got it.
        cast (Tensor): The same in what the layer runs in.
        storage (str): 'native' or 'int8'.

    Returns:
        KeptMap: Of ``x``.
    """
    map = handed_on(x)
    if map is not None and (storage == 'int8' or map.values.is_floating_point()):
        return map
    stored = type(x.grad_fn).__name__ == 'ReluBackward0'  # by torch, as it is
    map = keep(cast, 'native' if stored else storage)
    if map.values is not x and not (x.is_leaf and x.requires_grad):  # a parameter outlives the step
        hand_on(x, map)
    return map


def handed_on(x: Tensor) -> KeptMap | None:
    """What :func:`hand_on` said of a tensor; None: nothing, or it was written to since.

    Nothing goes into a checkpoint: what runs again there would not find it, and what was kept in another one is gone.
    """
    map, version, hooks = getattr(x, '_sbp_kept', (None, None, None))
    if map is not None and (version != x._version or hooks is not _hooks()):
        del x._sbp_kept
        map = None
    return map


def _hooks():
    """What autograd hands saved tensors to, which is another one in each checkpoint; None: nothing, or an old torch."""
    hooks = _TOP(False) if _TOP else None
    return hooks[0] if hooks else None


_TOP = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', None)


def forget(tree) -> None:
    """Torch before 2.8 does not tell of checkpoints: there a checkpoint takes what was handed on off all tensors that
    go into it or come out of it."""
    for x in () if _TOP else tree_flatten(tree)[0]:
        if hasattr(x, '_sbp_kept'):
            del x._sbp_kept


def add(x: Tensor, shortcut: Tensor, storage: str) -> Tensor:
    """A sum that the next layer need not keep, where both of its terms are kept.

    Args:
        x (Tensor): Shape (N, C, H, W), from a layer that hands on what it keeps.
        shortcut (Tensor): The same shape.
        storage (str): 'native' or 'int8'.

    Returns:
        Tensor: The sum.
    """
    out = x + shortcut
    first, second = handed_on(x), addend(shortcut, storage)
    if first is not None and second is not None and first.depth == 1 and out.dtype == x.dtype:
        hand_on(out, first._replace(shortcut=second))
    return out


def addend(x: Tensor, storage: str) -> KeptMap | None:
    """What a sum with a map is read from; None: the sum should be stored itself.

    Args:
        x (Tensor): Shape (N, C, H, W).
        storage (str): 'native' or 'int8'.
    """
    map = handed_on(x)
    if map is None and storage == 'native':
        map = KeptMap(x.detach())  # the next layer would keep as much
    return map if map is not None and map.depth < DEEPEST else None
