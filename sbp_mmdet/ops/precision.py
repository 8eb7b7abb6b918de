"""What is computed in which precision, and how a tensor waits for the backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    'Stored',
    'accumulate',
    'accumulator',
    'autocast_dtype',
    'column_sums',
    'in_range',
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
    return torch.autocast(x.device.type, enabled=False)


def column_sums(rows):
    """Sum over the rows, in full precision."""
    return rows.sum(0, dtype=accumulator(rows))


def zeros_for(parameter):
    """Where the gradient of a parameter is accumulated."""
    return torch.zeros_like(parameter, dtype=accumulator(parameter))


def accumulator(x):
    """The precision that sums over many positions are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def accumulate(total, a, b, unit=None):
    """total += unit * (a^T b) for rows a and b; in the precision of ``total``. ``unit`` has a number for each of a's
    columns, None: ones."""
    if a.dtype == total.dtype:
        total.addmm_(a.t(), b)
        return
    each = _LONGEST_SUM if a.dtype == torch.float16 else max(len(b), 1)
    for part, rows in zip(a.split(each), b.split(each), strict=True):
        product = part.t() @ rows
        total.add_(product) if unit is None else total.addcmul_(product, unit[:, None])


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
        return torch.mul(self.values, self.scale, out=torch.empty_like(self.values, dtype=dtype))


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
