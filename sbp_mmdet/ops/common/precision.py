"""Precision of computations, sums in full precision, and the form in which a tensor is saved for the backward pass.

Full precision is fp32, or fp64 for tensors in fp64 (:func:`accumulator`).
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    'FEW',
    'FULL',
    'ROUNDED',
    'Stored',
    'Sums',
    'accumulate',
    'accumulator',
    'autocast_dtype',
    'cast',
    'cast_all',
    'column_sums',
    'compute_in_parts',
    'multiply',
    'no_autocast',
    'promote',
    'store',
    'zeros_for',
]

# Number of rows that a product of fp16 matrices is summed over at a time. The result is in fp16 too, and its columns
# may have been scaled by their maximum, so a longer sum could exceed 65504 whatever the loss scale is.
_LONGEST_SUM = 8192
# Most elements that are rounded to eight bits at a time, by device. On a GPU, their copy in full precision takes 64 MB;
# on a CPU it stays in the cache of a core, which takes less than half of the time.
ROUNDED = dict(cpu=2**19, cuda=2**24)
# Elements that cost less than a call of torch.
FEW = 2**14
# Full precision.
FULL = torch.float32, torch.float64
_NOTHING = contextlib.nullcontext()

if hasattr(torch, 'get_autocast_dtype'):
    _is_autocast, _dtype_of_autocast = torch.is_autocast_enabled, torch.get_autocast_dtype
else:  # torch 2.3 and older

    def _is_autocast(kind):
        return torch.is_autocast_cpu_enabled() if kind == 'cpu' else torch.is_autocast_enabled()

    def _dtype_of_autocast(kind):
        return torch.get_autocast_cpu_dtype() if kind == 'cpu' else torch.get_autocast_gpu_dtype()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the precision in which autocast runs a matrix product of ``x``, or ``None`` if it leaves ``x`` unchanged.

    Args:
        x (Tensor): Input of the product.
    """
    kind = x.device.type
    try:
        return _dtype_of_autocast(kind) if x.dtype is not torch.float64 and _is_autocast(kind) else None
    except RuntimeError:  # a device without autocast, such as 'meta'
        return None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``.

    If it has this precision already, torch is not called: its check takes ten times as long.

    Args:
        x (Tensor): The tensor.
        dtype (torch.dtype): The precision.
    """
    return x if x.dtype is dtype else x.to(dtype)


def cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors to ``dtype``, all that have another precision in one launch.

    Args:
        tensors (Sequence[Tensor]): Tensors on one device.
        dtype (torch.dtype): Their precision.
    """
    given = [x for x in tensors if x.dtype is not dtype]
    if not given:
        return [*tensors]
    new = [torch.empty_like(x, dtype=dtype) for x in given]
    torch._foreach_copy_(new, given)
    if len(new) == len(tensors):
        return new
    others = iter(new)
    return [x if x.dtype is dtype else next(others) for x in tensors]


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Return a context manager that disables autocast on the device of ``x``, if it is enabled.

    Args:
        x (Tensor): A tensor on the device.
    """
    kind = x.device.type
    try:
        return torch.autocast(kind, enabled=False) if _is_autocast(kind) else _NOTHING
    except RuntimeError:  # a device without autocast
        return _NOTHING


def column_sums(rows: Tensor) -> Tensor:
    """Sum rows over the rows, in full precision.

    Args:
        rows (Tensor): Shape (K, C).

    Returns:
        Tensor: Shape (C,).
    """
    return rows.sum(0, dtype=accumulator(rows))


def zeros_for(parameter: Tensor) -> Tensor:
    """Return zeros in the shape of a parameter, in full precision, to sum its gradient in.

    Args:
        parameter (Tensor): The parameter.
    """
    return torch.zeros_like(parameter, dtype=accumulator(parameter))


def accumulator(x: Tensor) -> torch.dtype:
    """Return the precision of sums over many positions: fp64 for fp64, otherwise fp32.

    Args:
        x (Tensor): What is summed.
    """
    return torch.float64 if x.dtype is torch.float64 else torch.float32


@functools.cache
def promote(*dtypes: torch.dtype) -> torch.dtype:
    """Return the precision of a sum of tensors in these precisions.

    Args:
        *dtypes (torch.dtype): The precisions, at least one.
    """
    return functools.reduce(torch.promote_types, dtypes)


class Sums:
    """Gradients of an operation's parameters, summed over chunks of rows in full precision.

    The first term becomes the sum itself, so no zeros are allocated.

    Args:
        parameters (Mapping[Hashable, Tensor]): The parameters by name.

    Attributes:
        found (dict[Hashable, Tensor]): Sums that have terms, by name.
    """

    def __init__(self, parameters: Mapping[Hashable, Tensor]):
        self.parameters, self.found = parameters, {}

    def add(self, terms: Mapping[Hashable, Tensor | None]) -> None:
        """Add a term to each of several sums, in one kernel on a GPU.

        Args:
            terms (Mapping[Hashable, Tensor | None]): Terms by the name of the parameter, in any precision. Nothing else
                may use them: later terms may be added in place. ``None`` adds nothing.
        """
        found, sums, others = self.found, [], []
        for name, term in terms.items():
            if term is None:
                continue
            term = term if term.dtype in FULL else term.float()
            if name in found:
                sums.append(found[name])
                others.append(term)
            else:
                found[name] = term
        if sums:
            torch._foreach_add_(sums, others)

    def add_product(self, name: Hashable, a: Tensor, b: Tensor) -> None:
        """Add the product a^T b to a sum.

        Args:
            name (Hashable): Name of the parameter.
            a (Tensor): Rows, see :func:`accumulate`.
            b (Tensor): Rows, see :func:`accumulate`.
        """
        self.found[name] = accumulate(self.found.get(name), a, b)

    def gradients(self) -> dict[Hashable, Tensor]:
        """Return the sums of all parameters by name, zeros where nothing was added."""
        found = self.found
        return {name: found[name] if name in found else zeros_for(p) for name, p in self.parameters.items()}


def accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Compute ``total + a^T b`` in full precision, in place unless ``total`` is ``None``.

    Args:
        total (Tensor | None): Sum so far, shape (A, B). If ``None``, zero.
        a (Tensor): Rows, shape (K, A).
        b (Tensor): Rows, shape (K, B).

    Returns:
        Tensor: The sum, shape (A, B).
    """
    full = accumulator(a)
    if a.dtype == full:
        return torch.mm(a.t(), b) if total is None else total.addmm_(a.t(), b)
    if _sums_in_full(a.device, a.dtype) and not _accumulates_in_half(a.dtype):
        product = torch.mm(a.t(), b, out_dtype=full)
        return product if total is None else total.add_(product)
    if a.dtype != torch.float16 or len(a) <= _LONGEST_SUM:
        product = a.t() @ b
        return product.to(full) if total is None else total.add_(product)
    for part, rows in zip(a.split(_LONGEST_SUM), b.split(_LONGEST_SUM), strict=True):
        product = part.t() @ rows
        total = product.to(full) if total is None else total.add_(product)
    return total


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the product of ``a`` and ``b`` in ``dtype`` in one pass, in the layout of ``a``.

    Args:
        a (Tensor): First factor, of the shape of the product.
        b (Tensor): Second factor, which can be broadcast to that shape.
        dtype (torch.dtype): Precision of the product.
    """
    if a.dtype == b.dtype == dtype and a.dim() > 1 and a.is_contiguous():
        return torch.mul(a, b)  # its layout is that of a
    return torch.mul(a, b, out=torch.empty_like(a, dtype=dtype))


@functools.cache
def _sums_in_full(device, dtype):
    """Check whether matrix products in ``dtype`` may return full precision: on CUDA with torch 2.8 and newer."""
    if device.type != 'cuda':
        return False
    matrix = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except torch.cuda.OutOfMemoryError:  # of cuBLAS's workspace, which says nothing of the argument
        raise
    except (TypeError, RuntimeError):  # no such argument, or not for these
        return False
    return True


def _accumulates_in_half(dtype):
    """Return whether the user lets CUDA sum products in fp16, which then return no other precision."""
    return dtype is torch.float16 and getattr(torch.backends.cuda.matmul, 'allow_fp16_accumulation', False)


class Stored(NamedTuple):
    """A saved tensor, as it is or in eight bits.

    Attributes:
        values (Tensor): The tensor itself, or int8.
        scale (Tensor | None): Factor of the int8 values, broadcastable. If ``None``, ``values`` is the tensor itself.
    """

    values: Tensor
    scale: Tensor | None = None

    def part(self, images: slice, rows: slice) -> 'Stored':
        """Return some rows of some images of tokens (N, K, ...).

        Args:
            images (slice): The images.
            rows (slice): The rows of each.
        """
        return Stored(self.values[images, rows], None if self.scale is None else self.scale[images])

    def load(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor.

        Args:
            dtype (torch.dtype): Its precision.
        """
        if self.scale is None:
            return cast(self.values, dtype)
        return multiply(self.values, self.scale, dtype)


def store(x: Tensor, storage: str, positions: int | tuple[int, ...] = 1) -> Stored:
    """Return the form in which a tensor is saved: unchanged, or rounded to eight bits.

    With m the largest magnitude of an image and channel, values are rounded to the nearest of the 255 multiples of
    m / 127 from -m to m. The scale belongs to a channel and not to a position, because trained ConvNeXts have channels
    that are far larger than the rest, which would be rounded to zero beside them. A value that is not finite makes its
    channel NaN when it is loaded, so that gradient scaling skips the step as it does without rounding.

    Args:
        x (Tensor): Shape (N, ...).
        storage (str): 'native' or 'int8'.
        positions (int | tuple[int, ...]): Dimensions that share a scale; not the first. Default: 1.

    Returns:
        Stored: The saved form.
    """
    if storage == 'native' or not x.numel():
        return Stored(x)
    scale = cast(_magnitude(x, positions), accumulator(x)) / 127
    divisor = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return Stored(compute_in_parts(_rounded, x, divisor), scale)


def compute_in_parts(
    compute: Callable, x: Tensor, *numbers: Tensor, dtype: torch.dtype = torch.int8, most: int | None = None
) -> Tensor:
    """Return ``compute(x, *numbers)`` in ``dtype``, in parts if ``x`` is large.

    Args:
        compute (Callable): Function of a part of each tensor, which returns a tensor of any precision.
        x (Tensor): Shape (N, ...), with two dimensions or more.
        *numbers (Tensor): Broadcastable to ``x``, with as many dimensions.
        dtype (torch.dtype): Precision of the result. Default: int8, for integers between -128 and 127.
        most (int | None): Number of elements of a part at most. If ``None``, that of :data:`ROUNDED`. Default: None.
    """
    most, size = most or ROUNDED['cuda' if x.is_cuda else 'cpu'], x.numel()
    if size <= most:
        return compute(x, *numbers).to(dtype)
    values, inner = torch.empty_like(x, dtype=dtype), range(1, x.dim())
    # The dimension that is outermost in memory within an image, so that parts have few gaps.
    dim = max(inner, key=lambda i: x.stride(i) if x.shape[i] > 1 else 0)
    images = max(most * x.shape[0] // size, 1)
    length = max(most * x.shape[0] * x.shape[dim] // size, 1)

    def cut(tensor, n, k):
        tensor = tensor if tensor.shape[0] == 1 else tensor[n : n + images]
        return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, k, min(length, x.shape[dim] - k))

    for n in range(0, x.shape[0], images):
        for k in range(0, x.shape[dim], length):
            cut(values, n, k).copy_(compute(*[cut(tensor, n, k) for tensor in (x, *numbers)]))
    return values


def _rounded(rows, unit):
    return (rows / unit).round_()


def _magnitude(x, positions):
    if x.is_cuda or x.numel() < FEW:  # one pass; on a CPU this takes five times as long as the two passes below
        return torch.linalg.vector_norm(x, torch.inf, positions, keepdim=True)
    return torch.maximum(x.amax(positions, keepdim=True), -x.amin(positions, keepdim=True))
