"""Feature maps that convolutions, norms and activations save for the backward pass, each of them once."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import Activation
from .eight_bits import in_groups, quantise, quantise_positive
from .precision import FEW, cast, compute_in_parts
from .shared_maps import find_shared_map, find_shared_maps_of, is_made_here, open_scope, share_map
from .uncompiled import uncompiled

__all__ = ['KeptCat', 'KeptMap', 'KeptProduct', 'add', 'affine', 'keep', 'keep_input', 'keep_term']

aten = torch.ops.aten

DEEPEST = 3  # largest number of maps that are added up in the backward pass; a sum of more maps is saved itself

_CONVERTED = 2**19  # elements that a CPU converts at a time, so that it makes no copy in full precision either
_LEAST_POSITIONS = 16  # in maps with fewer positions, the scales take as many bytes as eight bits save


class KeptMap(NamedTuple):
    """Saved form of a feature map y = act(u) + shortcut.

    Here u = scale * z + shift + residual and z = unit * values + base. Fields that are ``None`` are left out.

    Attributes:
        values (Tensor): z itself, or z in eight bits, shape (N, C, H, W).
        unit, base (Tensor | None): Step and offset of eight bits, shape (N, C, B, 1), for each of B groups of rows. If
            there is a step and no offset, the value -127 stands for zero.
        scale, shift (Tensor | None): Norm as an affine map, broadcastable.
        activation (Activation | None): Activation.
        residual, shortcut (KeptMap | None): Other saved feature maps.
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
        """Return step and offset of eight bits, shape (N, C, B, 1)."""
        if self.unit is None:
            return None, None
        return self.unit, 126.5 * self.unit if self.base is None else self.base

    @property
    def depth(self) -> int:
        """Number of maps that are read to load this one."""
        return 1 + sum(map.depth for map in (self.residual, self.shortcut) if map is not None)

    def rows(self, start: int, stop: int) -> 'KeptMap':
        """Return some rows of the map, as views.

        Args:
            start (int): Index of the first row.
            stop (int): Index after the last row.
        """
        height = self.values.shape[2]
        if (start, stop) == (0, height):
            return self

        def cut(x):
            if isinstance(x, _KEPT):
                return x.rows(start, stop)
            x = _of_rows(x, self.values) if isinstance(x, Tensor) else x
            return x[:, :, start:stop] if isinstance(x, Tensor) and x.shape[2] == height else x

        return KeptMap(*map(cut, self))

    @property
    def is_exact(self) -> bool:
        """Whether the values are not rounded to eight bits."""
        return self.values.is_floating_point()

    @property
    def width(self) -> int:
        """Number of channels."""
        return self.values.shape[1]

    def before_norm(self, dtype: torch.dtype) -> Tensor:
        """Return z, which must not be written to."""
        if self.unit is None:
            return cast(self.values, dtype)
        return affine(self.values, *self._steps(), dtype)

    def before_activation(self, dtype: torch.dtype) -> Tensor:
        """Return u, which must not be written to."""
        scale, shift = self.scale, self.shift
        if self.unit is not None:
            unit, base = self._steps()
            scale, shift = (unit, base) if scale is None else (unit * scale, torch.addcmul(shift, base, scale))
        u = cast(self.values, dtype) if scale is None else affine(self.values, scale, shift, dtype)
        return u if self.residual is None else u.add_(self.residual.load(dtype))

    def activation_backward(self, grad: Tensor) -> Tensor:
        """Compute the gradient of u from that of act(u)."""
        if self.activation.name == 'relu' and self.unit is not None and self.base is None and self.scale is None:
            return aten.threshold_backward.default(grad, self.values.to(grad.dtype), -127)  # see `keep`, positive
        return self.activation.backward(grad, self.before_activation(grad.dtype))

    def load(self, dtype: torch.dtype) -> Tensor:
        """Return y, which must not be written to."""
        y = self.before_activation(dtype)
        y = y if self.activation is None else self.activation(y, inplace=y is not self.values)
        return y if self.shortcut is None else y + self.shortcut.load(dtype)


class KeptCat(NamedTuple):
    """Saved form of a feature map that is the concatenation of others along the channels.

    Attributes:
        maps (tuple[KeptMap | KeptCat | KeptProduct, ...]): The saved forms of the others.
    """

    maps: tuple

    @property
    def depth(self) -> int:
        """See :attr:`KeptMap.depth`."""
        return sum(map.depth for map in self.maps)

    @property
    def is_exact(self) -> bool:
        """See :attr:`KeptMap.is_exact`."""
        return all(map.is_exact for map in self.maps)

    @property
    def width(self) -> int:
        """Number of channels."""
        return sum(map.width for map in self.maps)

    def rows(self, start: int, stop: int) -> 'KeptCat':
        """See :meth:`KeptMap.rows`."""
        return KeptCat(tuple(map.rows(start, stop) for map in self.maps))

    def load(self, dtype: torch.dtype) -> Tensor:
        """See :meth:`KeptMap.load`."""
        return torch.cat([map.load(dtype) for map in self.maps], 1)


class KeptProduct(NamedTuple):
    """Saved form of a feature map whose channels are multiplied with a number each.

    Attributes:
        map (KeptMap | KeptCat | KeptProduct): The saved form of the map without the numbers.
        factor (Tensor): The numbers, shape (N, C, 1, 1).
    """

    map: tuple
    factor: Tensor

    @property
    def depth(self) -> int:
        """See :attr:`KeptMap.depth`. It is no single map, so it counts as one more."""
        return 1 + self.map.depth

    @property
    def is_exact(self) -> bool:
        """See :attr:`KeptMap.is_exact`."""
        return self.map.is_exact

    @property
    def width(self) -> int:
        """Number of channels."""
        return self.map.width

    def rows(self, start: int, stop: int) -> 'KeptProduct':
        """See :meth:`KeptMap.rows`."""
        return KeptProduct(self.map.rows(start, stop), self.factor)

    def load(self, dtype: torch.dtype) -> Tensor:
        """See :meth:`KeptMap.load`."""
        return self.map.load(dtype) * cast(self.factor, dtype)


_KEPT = (KeptMap, KeptCat, KeptProduct)


def affine(x: Tensor, scale: Tensor | None, shift: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute scale * x + shift in ``dtype``; x itself is returned if there is nothing to do.

    Args:
        x (Tensor): Shape (N, C, H, W).
        scale (Tensor | None): Broadcastable, or with a row for each group of rows of x. If ``None``, 1.
        shift (Tensor | None): The same. If ``None``, 0.
        dtype (torch.dtype): Precision of the result.
    """
    if scale is None:
        return cast(x, dtype)
    if scale.shape[2] not in (1, x.shape[2]):
        rows = in_groups(x, scale.shape[2])
        if rows.dim() == 5:
            scale, shift = scale.unsqueeze(4), shift.unsqueeze(4)
        return affine(rows, scale, shift, dtype).reshape(x.shape)
    if x.is_cuda:  # in one pass, in the layout of x, without a copy in full precision
        return torch.addcmul(shift, x, scale, out=torch.empty_like(x, dtype=dtype))
    if scale.dtype is not dtype:
        if x.numel() > _CONVERTED:
            in_full = functools.partial(affine, dtype=scale.dtype)
            return compute_in_parts(in_full, x, scale, shift, dtype=dtype, most=_CONVERTED)
        return affine(x, scale, shift, scale.dtype).to(dtype)
    if x.numel() < FEW or (x.is_floating_point() and not x.is_contiguous()):
        return torch.addcmul(shift, x, scale)
    x = cast(x, dtype) * scale if x.is_floating_point() else x.to(dtype).mul_(scale)
    return x.add_(shift)


def _of_rows(x, map):
    """Repeat numbers of groups of rows, shape (N, C, B, 1), for each row of a map: (N, C, H, 1)."""
    return x if x is None or x.shape[2] in (1, map.shape[2]) else x.repeat_interleave(map.shape[2] // x.shape[2], 2)


def keep(x: Tensor, storage: str, threshold: Tensor | float | None = None, positive: bool = False) -> KeptMap:
    """Return the saved form of a feature map: unchanged or in eight bits, see :func:`.quantise`.

    Args:
        x (Tensor): Shape (N, C, H, W).
        storage (str): 'native' or 'int8'.
        threshold (Tensor | float | None): Threshold, broadcastable. If ``None``, there is none. Default: None.
        positive (bool): Whether x is the output of a ReLU: zero is the threshold, and is kept as -127. Default: False.

    Returns:
        KeptMap: The feature map, without norm and activation.
    """
    if storage == 'native' or not x.numel() or x.shape[2] * x.shape[3] < _LEAST_POSITIONS:
        return KeptMap(x)
    return KeptMap(*(quantise_positive(x) if positive else quantise(x, threshold)))


def keep_input(x: Tensor, x_cast: Tensor, storage: str) -> KeptMap | KeptCat | KeptProduct:
    """Return the saved form of a layer's input: the map that the previous layer shares, or the input itself.

    Args:
        x (Tensor): The input, shape (N, C, H, W).
        x_cast (Tensor): The input in the precision of the layer.
        storage (str): 'native' or 'int8'.

    Returns:
        KeptMap | KeptCat | KeptProduct: The saved form.
    """
    map = find_shared_map(x)
    if map is not None and (storage == 'int8' or map.is_exact):
        return map
    stored = type(x.grad_fn).__name__ == 'ReluBackward0'  # torch keeps the output of its own ReLU
    map = _concatenated(x, x_cast, storage) or keep(x_cast, 'native' if stored else storage)
    if getattr(map, 'values', None) is not x and is_made_here(x):
        share_map(x, map)  # for the other layers that x goes to
    return map


def _concatenated(x: Tensor, x_cast: Tensor, storage: str) -> KeptCat | None:
    """Return the saved form of an output of ``torch.cat`` if most of its channels are shared maps, else ``None``.

    Channels of other maps are copied, so that the whole concatenation is not saved.
    """
    node = x.grad_fn
    if type(node).__name__ != 'CatBackward0' or x.dim() != 4 or node._saved_dim not in (1, 2**64 - 3):
        return None
    maps = find_shared_maps_of(node.next_functions)
    known = ((map, isinstance(map, _KEPT) and (storage == 'int8' or map.is_exact)) for map in maps)
    maps = [map if is_known else None for map, is_known in known]
    widths = [map.width if map is not None else None for map in maps]
    rest = x.shape[1] - sum(filter(None, widths))
    if not any(widths) or widths.count(None) > 1 or 2 * rest > x.shape[1]:
        return None
    parts, start = [], 0
    for map, width in zip(maps, widths, strict=True):
        width = rest if map is None else width
        parts.append(keep(x_cast[:, start : start + width].clone(), storage) if map is None else map)
        start += width
    return KeptCat(tuple(parts))


def add(x: Tensor, shortcut: Tensor, storage: str) -> Tensor:
    """Add two feature maps. If both terms are saved, the next layer need not save the sum.

    Args:
        x (Tensor): Output of a layer that shares its map, shape (N, C, H, W).
        shortcut (Tensor): Feature map of the same shape.
        storage (str): 'native' or 'int8'.

    Returns:
        Tensor: The sum.
    """
    out = x + shortcut
    _share_sum(out, x, shortcut, storage)
    return out


@uncompiled
def _share_sum(out, x, shortcut, storage):
    first, second = find_shared_map(x), keep_term(shortcut, storage)
    if first is not None and second is not None and first.depth == 1 and out.dtype == x.dtype:
        share_map(out, first._replace(shortcut=second))


def keep_term(x: Tensor, storage: str) -> KeptMap | None:
    """Return the saved form of a term of a sum. If it is ``None``, the sum itself should be saved.

    Args:
        x (Tensor): The term, shape (N, C, H, W).
        storage (str): 'native' or 'int8'.

    Returns:
        KeptMap | None: The saved form.
    """
    map = find_shared_map(x)
    if map is None and storage == 'native' and open_scope() is not None:
        map = KeptMap(x.detach())  # the next layer would keep as much
    return map if map is not None and map.depth < DEEPEST else None
