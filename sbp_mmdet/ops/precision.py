"""What is computed in which precision."""

import torch
from torch import Tensor

from .compiled import body

__all__ = ['accumulate', 'accumulator', 'autocast_dtype', 'column_sums', 'in_range', 'no_autocast', 'zeros_for']


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


# Rows that a product of fp16 matrices is summed over at a time. The result is in fp16 too, and its rows may have been
# scaled by their maximum, so that no loss scale keeps a longer sum below 65504.
_LONGEST_SUM = 8192


def accumulate(total, a, b, unit=None):
    """total += unit * (a @ b), in the precision of ``total``; ``unit`` has a number for each row, None: ones."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    each = _LONGEST_SUM if a.dtype == torch.float16 else max(len(b), 1)
    for columns, rows in zip(a.split(each, 1), b.split(each), strict=True):
        product = columns @ rows
        total.add_(product) if unit is None else total.addcmul_(product, unit[:, None])


def in_range(g, gamma, dtype):
    """The rows g that the package's A is formed from, in ``dtype``, and what A has to be multiplied by, row by row.

    In fp16 a small gamma keeps the plain block's gradients in range; A is formed without gamma. Each channel is brought
    below 1/16 instead, which leaves room for the sum over the positions of a chunk.
    """
    if gamma is None or dtype != torch.float16 or not len(g):
        return g.to(dtype), None
    return _in_range(g, dtype)


@body
def _in_range(g, dtype):
    largest = torch.linalg.vector_norm(g, torch.inf, 0, dtype=torch.float32)  # in fp16, tiny would be zero
    unit = 16 * largest.clamp_min(torch.finfo(torch.float32).tiny)
    return (g / unit).to(dtype), unit
