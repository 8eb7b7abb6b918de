"""What is computed in which precision, and how a tensor waits for the backward pass."""

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    'Stored',
    'Sum',
    'accumulate',
    'accumulator',
    'autocast_dtype',
    'column_sums',
    'in_range',
    'multiplied',
    'no_autocast',
    'store',
    'zeros_for',
]

# Rows that a product of fp16 matrices is summed over at a time. The result is in fp16 too, and its rows may have been
# scaled by their maximum, so that no loss scale keeps a longer sum below 65504.
_LONGEST_SUM = 8192
# Entries whose quotients in full precision exist at a time while they are rounded to eight bits.
_ROUNDED = 2**22


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast runs a matrix product of ``x`` in; None where autocast is off or leaves ``x`` alone."""
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    if hasattr(torch, 'get_autocast_dtype'):  # torch 2.4 and newer
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == 'cpu':
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def no_autocast(x):
    """A context in which every operation runs in the precision of its inputs."""
    off = x.dtype != torch.float64 and autocast_dtype(x) is None
    return contextlib.nullcontext() if off else torch.autocast(x.device.type, enabled=False)


def column_sums(rows):
    """Sum over the rows, in full precision."""
    return rows.sum(0, dtype=accumulator(rows))


def zeros_for(parameter):
    """Where the gradient of a parameter is accumulated."""
    return torch.zeros_like(parameter, dtype=accumulator(parameter))


def accumulator(x):
    """The precision that sums over many positions are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Sum:
    """A sum over rows in full precision. Nothing is allocated and filled with zeros before the first rows come.

    Args:
        like (Tensor): The parameter that it is the gradient of.
    """

    def __init__(self, like: Tensor):
        self.like, self._total = like, None

    def add(self, part: Tensor) -> None:
        """Adds a new tensor, which is written to later."""
        self._total = part if self._total is None else self._total.add_(part)

    def add_product(self, a: Tensor, b: Tensor, unit: Tensor | None = None) -> None:
        """Adds as :func:`accumulate`."""
        self._total = accumulate(self._total, a, b, unit)

    @property
    def value(self) -> Tensor:
        """The sum."""
        return zeros_for(self.like) if self._total is None else self._total


def accumulate(total, a, b, unit=None):
    """total += unit * (a^T b) for rows a and b, in full precision; the sum, new where ``total`` is None. ``unit`` has a
    number for each of a's columns, where they are fp16; None: ones."""
    full = accumulator(a)
    if a.dtype == full:
        return torch.mm(a.t(), b) if total is None else total.addmm_(a.t(), b)
    if _sums_in_full(a.device, a.dtype):
        return _add_product(total, torch.mm(a.t(), b, out_dtype=full), unit, full)
    each = _LONGEST_SUM if a.dtype == torch.float16 else max(len(b), 1)
    for part, rows in zip(a.split(each), b.split(each), strict=True):
        total = _add_product(total, part.t() @ rows, unit, full)
    return total


def _add_product(total, product, unit, full):
    if total is None:
        return product.to(full) if unit is None else product * unit[:, None]
    return total.add_(product) if unit is None else total.addcmul_(product, unit[:, None])


def multiplied(a, b, dtype):
    """The product of a and b in ``dtype``, in one pass; laid out like a."""
    return torch.mul(a, b, out=torch.empty_like(a, dtype=dtype))


@functools.cache
def _sums_in_full(device, dtype):
    """Whether products of matrices in ``dtype`` have results in full precision there: on CUDA, torch 2.8 and newer."""
    if device.type != 'cuda':
        return False
    matrix = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # no such argument, or not for these
        return False
    return True


def in_range(g, gamma, dtype):
    """The rows g that the package's A is formed from, in ``dtype``, and what A has to be multiplied by, row by row.

    In fp16 a small gamma keeps the plain block's gradients in range; A is formed without gamma. Each channel is brought
    below 1/16 instead, which leaves room for the sum over the positions of a chunk.
    """
    if gamma is None or dtype != torch.float16 or not len(g):
        return g.to(dtype), None
    largest = torch.linalg.vector_norm(g, torch.inf, 0, dtype=torch.float32)  # in fp16, tiny would be zero
    unit = 16 * largest.clamp_min(torch.finfo(torch.float32).tiny)
    return (g / unit).to(dtype), unit


class Stored(NamedTuple):
    """A tensor in its stored form.

    Attributes:
        values (Tensor): The tensor itself, or int8.
        scale (Tensor | None): What the int8 values are multiplied by, broadcastable; None: nothing.
    """

    values: Tensor
    scale: Tensor | None = None

    def part(self, images: slice, rows: slice) -> 'Stored':
        """Some rows of some images of tokens (N, K, ...)."""
        return Stored(self.values[images, rows], None if self.scale is None else self.scale[images])

    def load(self, dtype: torch.dtype) -> Tensor:
        """The tensor in ``dtype``."""
        if self.scale is None:
            return self.values.to(dtype)
        return multiplied(self.values, self.scale, dtype)


def store(x: Tensor, storage: str, positions: int | tuple[int, ...] = 1) -> Stored:
    """Stores a tensor as it is, or in eight bits: rounded to the nearest of 255 steps between the largest magnitude of
    each image and channel and its negative.

    One scale for each channel and not for each position: trained ConvNeXts have channels that are far larger than the
    rest, next to which the others would be rounded away. A value that is not finite makes its channel NaN when it is
    loaded, so that gradient scaling skips the step as it does without rounding.

    Args:
        x (Tensor): Shape (N, ...).
        storage (str): 'native' or 'int8'.
        positions (int | tuple[int, ...]): The dimensions of the positions, which share a scale; not the first.
            Default: 1.

    Returns:
        Stored: The stored form.
    """
    if storage == 'native' or not x.numel():
        return Stored(x)
    scale = torch.maximum(x.amax(positions, keepdim=True), -x.amin(positions, keepdim=True)).to(accumulator(x)) / 127
    divisor = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    values = torch.empty_like(x, dtype=torch.int8)
    together = max(_ROUNDED // x[0].numel(), 1)  # images
    for part, rows, unit in zip(values.split(together), x.split(together), divisor.split(together), strict=True):
        part.copy_((rows / unit).round_())
    return Stored(values, scale)
