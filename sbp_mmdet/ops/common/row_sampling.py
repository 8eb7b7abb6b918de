"""What the fused operations share: rows of feature maps, in chunks; the norm without its affine part; folding.

A row is one position: C numbers. Rows of kept positions are contiguous, image after image.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd_function import Sample
from .precision import Sum, accumulator, multiplied

__all__ = [
    'CHUNK',
    'Chunk',
    'Drawn',
    'Incoming',
    'add_branch',
    'add_rows_',
    'chunks',
    'draw',
    'empty_tokens',
    'fold',
    'in_shape',
    'laid_out',
    'layout_of',
    'memory_format',
    'normalise',
    'normalise_backward',
    'put_together',
    'tokens_of',
    'unfold',
    'unit_statistics',
    'unscale',
]

# Elements of an operation's largest tensor that exist at a time: on a CPU what stays in its caches. On a GPU a launch
# costs more than memory: one image of 800 x 1344 in the first stage of ConvNeXt-B (34 million), and two in the others,
# are one chunk. Not by the memory that is free: the sums would be rounded differently from run to run.
CHUNK = {'cpu': 2**20, 'cuda': 36 * 2**20}
# Rows of a chunk at least, where nobody says how many elements: a product of fewer spends its time on reading weights.
_ROWS = 640
# Chunks of an image's rows are multiples of so many, as the tiles of a GPU's products are.
_TILE = 64


# Maps and tokens.


def memory_format(x: Tensor) -> torch.memory_format:
    """Channels last if ``x`` is laid out so, else contiguous."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def layout_of(x: Tensor) -> torch.memory_format | None:
    """:func:`memory_format` of a map; None for tokens."""
    return None if x.dim() == 3 else memory_format(x)


def laid_out(x: Tensor, layout: torch.memory_format | None) -> Tensor:
    """``x`` in the layout that :func:`layout_of` said; no copy where it is."""
    return x if layout is None else x.contiguous(memory_format=layout)


def tokens_of(x: Tensor) -> Tensor:
    """A feature map (N, C, H, W) as tokens (N, H * W, C), a view of it; tokens (N, L, C) are what they are."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def in_shape(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The reverse of :func:`tokens_of`, for a map or tokens of this shape: a view."""
    return tokens if len(shape) == 3 else tokens.transpose(1, 2).unflatten(2, shape[2:])


def empty_tokens(shape, layout, dtype, device):
    """Tokens (N, L, C) to be filled, which :func:`in_shape` makes a map of this layout without a copy."""
    n, length, channels = shape
    if layout == torch.contiguous_format:
        return torch.empty(n, channels, length, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)


def put_together(rows, index, length):
    """Tokens (N, L, C) of rows (N, K, C) and their positions (K,), zero elsewhere; None: all, in order."""
    if index is None:
        return rows
    return rows.new_zeros(len(rows), length, rows.shape[2]).index_copy_(1, index, rows)


def add_rows_(tokens: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Adds rows (N, K, C) to those of the given places (K,) of tokens (N, L, C), in place; None: to all, in order."""
    return tokens.add_(rows) if index is None else tokens.index_add_(1, index, rows)


# Chunks, so that what is larger than a row exists for one chunk at a time.


class Chunk(NamedTuple):
    """Some whole images, or some rows of one image: so it is a view of a tensor (N, K, ...), whatever its strides.

    Attributes:
        images, rows (slice): All images, or all rows, unless the chunk is of one image.
        each (int): Rows of each image.
    """

    images: slice
    rows: slice
    each: int

    @classmethod
    def whole(cls, x: Tensor) -> 'Chunk':
        """All rows of ``x``, shape (N, K, ...)."""
        return cls(slice(0, len(x)), slice(0, x.shape[1]), x.shape[1])

    @property
    def number(self) -> int:
        """Of images."""
        return self.images.stop - self.images.start

    @property
    def flat(self) -> slice:
        """The same rows where they are numbered image after image."""
        first, last = self.images.start * self.each, (self.images.stop - 1) * self.each
        return slice(first + self.rows.start, last + self.rows.stop)

    def rows_of(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Its rows as a matrix, not copied if they lie one after another in ``x``.

        Args:
            x (Tensor): Shape (N, K, C); with ``index`` (N, L, C).
            index (Tensor | None): Of the K rows among those of ``x``, shape (K,). Default: None.
        """
        if index is None:
            return x[self.images, self.rows].reshape(-1, x.shape[2])
        if self.number == 1:  # a CPU takes nine times as long where there is a dimension for images
            return x[self.images.start].index_select(0, index[self.rows])
        return x[self.images].index_select(1, index[self.rows]).flatten(0, 1)

    def put_(self, x: Tensor, rows: Tensor, index: Tensor | None = None) -> None:
        """Writes its rows to their places in ``x``, shape (N, K, C); with ``index`` as :meth:`rows_of` reads them."""
        place = x[self.images, self.rows] if index is None else x[self.images]
        if index is None:
            place.copy_(rows.view(place.shape))
        else:
            place.index_copy_(1, index[self.rows], rows.view(self.number, -1, x.shape[2]))


def chunks(images: int, each: int, width: int, device: torch.device, elements: int | None = None) -> list[Chunk]:
    """Cuts rows into chunks of about the same size: a short last one costs a GPU as many launches as a whole one.

    Args:
        images (int): N.
        each (int): Rows of each image.
        width (int): Elements that a row needs, of those that are counted by ``elements``.
        device (torch.device): Where they are.
        elements (int | None): At most so many elements at a time, but at least one row; None: by the device, but at
            least 640 rows. Default: None.

    Returns:
        list[Chunk]: All rows in order.
    """
    most = max(elements // width, 1) if elements else max(CHUNK.get(device.type, CHUNK['cuda']) // width, _ROWS)
    if each <= most:
        return [Chunk(part, slice(0, each), each) for part in _cut(images, most // max(each, 1)) if each]
    return [Chunk(slice(i, i + 1), part, each) for i in range(images) for part in _cut(each, most)]


def _cut(number, most):
    size = -(-number // max(-(-number // most), 1))
    if most >= _TILE:
        size = min(-(-size // _TILE) * _TILE, most // _TILE * _TILE)
    return [slice(start, min(start + size, number)) for start in range(0, number, max(size, 1))]


class Incoming:
    """Rows of ``factor * g`` for the gradient g of a branch, in the precision of matrix products.

    On a GPU they lie one after another.

    Two products need them: A of the package's docstring, and the gradient in front of the second layer, behind layer
    scale. Where gamma can be folded into that layer's weight, the same rows serve both. In fp16 it cannot: a small
    gamma keeps the plain block's gradients in range. There each channel is brought below 1/16, which leaves room for
    sums over positions, and A is multiplied by ``unit`` afterwards.

    Args:
        grad (Tensor): Tokens (N, L, C), of any strides.
        bias (Tensor): Of the second layer, (C,).
        gamma (Tensor | None): Layer scale, (C,).
        factor (Tensor | None): Of each image, (N,).
        dtype (torch.dtype): Of matrix products.

    Attributes:
        unit (Tensor | None): What a column of the rows has to be multiplied by, (C,); None: nothing.
    """

    def __init__(self, grad: Tensor, bias: Tensor, gamma: Tensor | None, factor: Tensor | None, dtype: torch.dtype):
        self.grad, self.gamma, self.dtype, self.unit = grad, gamma, dtype, None
        self.factor, self._total = factor, Sum(bias)
        self._by = None if factor is None else factor[:, None, None]
        if gamma is not None and dtype == torch.float16 and grad.numel():
            largest = torch.linalg.vector_norm(grad, torch.inf, 1, dtype=torch.float32)  # in fp16, tiny would be zero
            largest = largest if factor is None else largest * factor[:, None]
            self.unit = 16 * largest.amax(0).clamp_min(torch.finfo(torch.float32).tiny)
            rate = self.unit.reciprocal().expand(len(grad), 1, -1)
            self._by = rate if factor is None else rate * self._by
            self._behind = self.unit * gamma

    def rows(self, chunk: Chunk, index: Tensor | None = None) -> Tensor:
        """Those of a chunk, (K, C), which count in the sum; ``index`` as for :meth:`Chunk.rows_of`."""
        part = self.grad[chunk.images, chunk.rows]
        if index is not None:
            part = chunk.rows_of(self.grad, index).view(chunk.number, -1, self.grad.shape[2])
        self._add(part, chunk)
        as_it_is = part.is_contiguous() or not part.is_cuda  # a CPU's products read columns as fast as rows
        if self._by is None and part.dtype == self.dtype and as_it_is:
            return part.flatten(0, 1)
        layout = torch.preserve_format if as_it_is else torch.contiguous_format
        rows = torch.empty_like(part, dtype=self.dtype, memory_format=layout)
        rows = rows.copy_(part) if self._by is None else torch.mul(part, self._by[chunk.images], out=rows)
        return rows.flatten(0, 1)

    def _add(self, part, chunk):
        full = accumulator(part)
        if self.factor is None:
            self._total.add(part.sum((0, 1), dtype=full))
        else:
            self._total.add(torch.mv(part.sum(1, dtype=full).t(), self.factor[chunk.images].to(full)))

    @property
    def total(self) -> Tensor:
        """Sum over all rows that were asked for, in full precision."""
        return self._total.value

    def second(self, weight: Tensor) -> Tensor:
        """The second layer's weight (C, D), for :meth:`behind`."""
        if self.gamma is None or self.unit is not None:
            return weight.to(self.dtype)
        return multiplied(weight, self.gamma[:, None], self.dtype)

    def behind(self, rows: Tensor) -> Tensor:
        """The rows whose product with :meth:`second` is the gradient of the second layer's input."""
        return rows if self.unit is None else multiplied(rows, self._behind, self.dtype)


def add_branch(shortcut, branch, gamma, factor, dtype):
    """The shortcut and the branch's rows times layer scale (C,) and stochastic depth's factor (N,), laid out like it.

    The branch comes in chunks, an iterable of ``(Chunk, rows)``, which are in ``dtype``; the result is in the precision
    that torch's own sum would have.
    """
    scale = gamma
    if factor is not None:
        scale = factor[:, None, None] if gamma is None else gamma * factor[:, None, None]
    kinds = [dtype] + ([] if gamma is None else [gamma.dtype])  # the factor is in full precision, and a scalar
    dtype = functools.reduce(torch.promote_types, kinds, shortcut.dtype)
    tokens = tokens_of(shortcut)
    out = empty_tokens(tokens.shape, layout_of(shortcut), dtype, shortcut.device)
    for chunk, rows in branch:
        own, place = tokens[chunk.images, chunk.rows], out[chunk.images, chunk.rows]
        rows = rows.view(own.shape)
        if scale is None:
            torch.add(own, rows, out=place)
        else:
            _addcmul(own, rows, scale if scale.dim() == 1 else scale[chunk.images], place)
    return in_shape(out, shortcut.shape)


def _addcmul(*operands_and_out):
    *operands, out = operands_and_out
    kinds = {t.dtype for t in operands_and_out}
    if out.device.type == 'cpu' and len(kinds) > 1:  # torch 2.1 fails there
        kind = functools.reduce(torch.promote_types, kinds)
        out.copy_(torch.addcmul(*(t.to(kind) for t in operands)))
    else:
        torch.addcmul(*operands, out=out)


# The norm without its affine part, which is folded into the linear layer that follows.


def normalise(x, eps, dtype):
    """x-hat in ``dtype`` and the reciprocal deviation, shape (..., 1), in full precision."""
    rows, reduced = x.reshape(-1, x.shape[-1]), (torch.float16, torch.bfloat16)
    if x.dtype in reduced and (x.device.type == 'cpu' or dtype not in reduced):
        # CUDA's kernel computes in full precision and rounds x-hat to x's; the CPU's would round the deviation too.
        rows = rows.float()
    xhat, _, rstd = torch.native_layer_norm(rows, rows.shape[1:], None, None, eps)
    return xhat.to(dtype).view(x.shape), rstd.view(*x.shape[:-1], 1)


def unit_statistics(rstd):
    """Mean 0 and deviation 1 of as many rows, in two launches; see :func:`normalise_backward`."""
    return torch.zeros_like(rstd), torch.ones_like(rstd)


def normalise_backward(grad, xhat, rstd, out=None, statistics=None):
    """Gradient of the layer norm's input from that of x-hat; statistics in full precision.

    It is written to ``out``, of any strides, if that is given; ``statistics`` are those of x-hat, of as many rows or
    more, where many calls can share them."""
    out = torch.empty_like(grad) if out is None else out
    dtype = grad.dtype
    grad, xhat, rstd = (x.reshape(-1, x.shape[-1]) for x in (grad, xhat, rstd))
    if grad.device.type == 'cpu' and dtype != rstd.dtype:
        grad, xhat = grad.to(rstd.dtype), xhat.to(rstd.dtype)
    zero, one = (s.view(-1, 1)[: len(rstd)] for s in statistics or unit_statistics(rstd))
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad, xhat, grad.shape[1:], zero, one, None, None, [True, False, False]
    )
    dx, rstd = dx.view(out.shape), rstd.view(*out.shape[:-1], 1)
    # A CPU's copy turns rows into columns faster than its product does.
    return torch.mul(dx, rstd, out=out) if out.is_cuda else out.copy_(dx.mul_(rstd))


def fold(weight, bias, norm_weight, norm_bias, dtype):
    """The affine part of a norm folded into the linear layer that follows it: W1' and b1' of the package."""
    if norm_bias is not None:  # in the higher precision where a model in half precision keeps its norms in fp32
        kind = functools.reduce(torch.promote_types, (bias.dtype, norm_bias.dtype), weight.dtype)
        bias = torch.addmv(bias.to(kind), weight.to(kind), norm_bias.to(kind))
    weight = weight.to(dtype) if norm_weight is None else multiplied(weight, norm_weight, dtype)
    return weight, bias.to(dtype)


def unfold(dw, db, weight, norm_weight, norm_bias):
    """From the gradients of W1' (None: nobody asks) and b1' those of (w_ln, b_ln, W1, b1)."""
    dnb = None if norm_bias is None else weight.t().to(db.dtype) @ db
    if dw is None:
        return None, dnb, None, db
    dnw = None if norm_weight is None else (dw * weight).sum(0)
    dw = dw if norm_weight is None else dw * norm_weight
    return dnw, dnb, dw if norm_bias is None else torch.addr(dw, db, norm_bias.to(db.dtype)), db


def unscale(outer, total, weight, bias, gamma):
    """Gradients of the layer in front of layer scale, (W2, b2, gamma), from A of the package's docstring (None: nobody
    asks) and the column sums of the output's gradient."""
    if gamma is None:
        return outer, total, None
    if outer is None:
        return None, total * gamma, None
    return outer * gamma[:, None], total * gamma, (outer * weight).sum(1) + total * bias


# Gradients of weights from a sample of the rows.

# A row's chance is that of its norm, in units of the mean norm over _UNITS, plus _LEAST units. Whole numbers, because
# their sums are the same in every order: so a GPU's are deterministic, and chances are exactly what they are taken for.
_UNITS, _LEAST = 2**16, 2**13


class Drawn(NamedTuple):
    """Rows that the gradients of weights are estimated from; None: all of them."""

    index: Tensor | None  # of the rows, (n,)
    factor: Tensor | None  # what each is multiplied by, (n, 1)

    def of(self, rows: Tensor) -> Tensor:
        """Those among rows (K, ...)."""
        return rows if self.index is None else rows[self.index]

    def divided(self, rows: Tensor) -> Tensor:
        """The same, divided: the left factor of an estimate."""
        return rows if self.index is None else rows[self.index].mul_(self.factor)


def draw(sample: Sample | None, *parts: Tensor) -> Drawn:
    """Rows that gradients of weights are estimated from; all rows send gradients to the input.

    The gradient is the sum over rows of outer products of the gradient's row and the activation's. Its estimate is the
    sum over n draws, each divided by n times its row's chance; so its mean is the gradient, except for rounding. A
    row's chance follows the norm of its gradient, since rows with large ones carry most of the sum, and n draws stand
    at even distances on the line of all chances (systematic sampling). Rows that would be drawn more than once get
    the chance of one draw, and others the draws that this spares. Gradients of inputs and biases are exact: the error
    stays in the layer where it arises, and averages out over steps as that of a minibatch does.

    Args:
        sample (Sample | None): None: all rows.
        *parts (Tensor): Gradients, shape (K, ...), whose norms are added. Where one of their numbers is not finite, no
            estimate is.
    """
    if sample is None or not len(parts[0]):
        return Drawn(None, None)
    rows = len(parts[0])
    number = max(round(sample.ratio * rows), 1)
    norms, *others = (torch.linalg.vector_norm(part, dim=1, dtype=accumulator(part)) for part in parts)
    norms = sum(others, norms)
    mean = norms.mean(dtype=torch.float64).clamp_min(torch.finfo(norms.dtype).tiny)
    sizes = (norms / mean).mul_(_UNITS).long().add_(_LEAST)
    most = (_UNITS + _LEAST) * rows // number  # about the distance between draws: a larger row is sure to be drawn
    for _ in range(2):  # the draws that the first pass spares may reach further rows; the second leaves hardly any
        small = sizes <= most
        most = (sizes * small).sum() // (small.sum() + (number - rows)).clamp_min(1)  # 0 where a row is not finite
    sizes = torch.where(small, sizes, most)
    ends = sizes.cumsum(0)
    apart = ends[-1] * (mean / mean) / number  # NaN where a row is not finite
    at = (torch.arange(number, dtype=torch.float64, device=sizes.device) + sample.at) * apart
    index = torch.searchsorted(ends, at.long(), right=True).clamp_(0, rows - 1)
    return Drawn(index, (apart / sizes[index]).to(norms.dtype)[:, None])
