"""Layout and algebra that the fused operations share: rows of feature maps, the norm without its affine part, folding.

A row is one position: C numbers. Rows of kept positions are contiguous, image after image.
"""

import torch
from torch import Tensor

from ..functional import take
from .compiled import body

__all__ = [
    'add_rows_',
    'empty_tokens',
    'fold',
    'from_patches',
    'in_shape',
    'laid_out',
    'layout_of',
    'map_of',
    'memory_format',
    'normalise',
    'normalise_backward',
    'put_',
    'rows_of',
    'to_patches',
    'tokens_of',
    'unfold',
]


def to_patches(x: Tensor) -> Tensor:
    """Cuts a feature map into 2x2 patches; an odd last row or column is left out, as a 2x2/2 convolution does.

    Args:
        x (Tensor): Shape (N, C, H, W).

    Returns:
        Tensor: Shape (N, H/2 * W/2, 4, C), the four pixels of a patch row by row.
    """
    n, c, h, w = x.shape
    if h % 2 or w % 2:
        x = x[:, :, : h // 2 * 2, : w // 2 * 2]
    x = x.reshape(n, c, h // 2, 2, w // 2, 2)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // 2) * (w // 2), 4, c)


def from_patches(patches: Tensor, shape: tuple[int, int, int, int], layout: torch.memory_format) -> Tensor:
    """The reverse of :func:`to_patches`, zero in an odd last row or column.

    Args:
        patches (Tensor): Shape (N, H/2 * W/2, 4, C).
        shape (tuple): (N, C, H, W).
        layout (torch.memory_format): Of the result.
    """
    n, c, h, w = shape
    x = torch.empty(shape, dtype=patches.dtype, device=patches.device, memory_format=layout)
    x[:, :, h // 2 * 2 :].zero_()
    x[..., w // 2 * 2 :].zero_()
    place = x[:, :, : h // 2 * 2, : w // 2 * 2].unflatten(3, (w // 2, 2)).unflatten(2, (h // 2, 2))
    place.copy_(patches.view(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4))
    return x


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


def empty_tokens(
    shape: tuple[int, int, int], layout: torch.memory_format | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Tokens (N, L, C) to be filled, which :func:`in_shape` makes a map of this layout without a copy."""
    n, length, channels = shape
    if layout == torch.contiguous_format:
        return torch.empty(n, channels, length, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)


def tokens_of(x: Tensor) -> Tensor:
    """A feature map (N, C, H, W) as tokens (N, H * W, C), a view of it; tokens (N, L, C) are what they are."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def in_shape(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The reverse of :func:`tokens_of`, for a map or tokens of this shape: a view."""
    return tokens if len(shape) == 3 else tokens.transpose(1, 2).unflatten(2, shape[2:])


def rows_of(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of the given positions or of all, image after image.

    Args:
        x (Tensor): Tokens (N, L, C), of any strides, or a map (N, C, H, W).
        index (Tensor | None): Positions, shape (K,) for all images alike or (N, K); None: all.

    Returns:
        Tensor: Shape (N * K, C).
    """
    return take(tokens_of(x), index).reshape(-1, x.shape[2 if x.dim() == 3 else 1])


def put_(tokens: Tensor, index: Tensor, rows: Tensor) -> None:
    """Writes rows to the given positions.

    Args:
        tokens (Tensor): Shape (N, L, ...), changed.
        index (Tensor): Shape (K,) or (N, K).
        rows (Tensor): Shape (N * K, ...).
    """
    rows = rows.view(len(tokens), -1, *tokens.shape[2:])
    if index.dim() == 1:
        tokens.index_copy_(1, index, rows)
    else:
        for image, own, image_rows in zip(tokens, index, rows, strict=True):
            image.index_copy_(0, own, image_rows)


def add_rows_(tokens: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Adds rows to those of the given places, in place; rows of the same place are summed.

    Args:
        tokens (Tensor): Shape (N, L, ...), changed.
        index (Tensor | None): Shape (K,) for all images alike or (N, K); None: all, in order.
        rows (Tensor): Shape (N, K, ...).

    Returns:
        Tensor: ``tokens``.
    """
    if index is None:
        return tokens.add_(rows)
    if index.dim() == 1:
        return tokens.index_add_(1, index, rows)
    for image, own, image_rows in zip(tokens, index, rows, strict=True):
        image.index_add_(0, own, image_rows)
    return tokens


def map_of(
    rows: Tensor,
    index: Tensor | None,
    shape: tuple[int, ...],
    other_rows: Tensor | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """The reverse of :func:`rows_of`, zero at the positions that are neither in ``index`` nor in ``other``.

    Args:
        rows (Tensor): Shape (N * K, C).
        index (Tensor | None): Their positions, shape (K,) or (N, K); None: all.
        shape (tuple): Of the result: tokens (N, L, C) or a map (N, C, H, W).
        other_rows (Tensor | None): All rows that are not in ``index``. Default: None.
        other (Tensor | None): Their positions. Default: None.
    """
    if index is None:
        tokens = rows.view(shape[0], -1, rows.shape[1])
    else:
        # Either the kept positions alone, or the dropped ones as well.
        new = rows.new_zeros if other is None else rows.new_empty
        tokens = new(shape[0], shape[1] if len(shape) == 3 else shape[2] * shape[3], rows.shape[1])
        put_(tokens, index, rows)
        if other is not None:
            put_(tokens, other, other_rows)
    return in_shape(tokens, shape)


def normalise(x, eps, dtype):
    """x-hat in ``dtype`` and the reciprocal deviation, shape (..., 1), in full precision."""
    xhat, rstd = _normalise(x.reshape(-1, x.shape[-1]), eps, dtype)
    return xhat.view(x.shape), rstd.view(*x.shape[:-1], 1)


@body(cpu_from=2**20)
def _normalise(x, eps, dtype):
    reduced = (torch.float16, torch.bfloat16)
    if x.dtype in reduced and (x.device.type == 'cpu' or dtype not in reduced):
        # CUDA's kernel computes in full precision and rounds x-hat to x's; the CPU's would round the deviation too.
        x = x.float()
    xhat, _, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
    return xhat.to(dtype), rstd


def normalise_backward(grad, xhat, rstd):
    """Gradient of the layer norm's input from that of x-hat; statistics in full precision."""
    return _normalise_backward(*(x.reshape(-1, x.shape[-1]) for x in (grad, xhat, rstd))).view(grad.shape)


@body
def _normalise_backward(grad, xhat, rstd):
    dtype = grad.dtype
    if grad.device.type == 'cpu' and dtype != rstd.dtype:
        grad, xhat = grad.to(rstd.dtype), xhat.to(rstd.dtype)
    zero, one = torch.zeros_like(rstd), torch.ones_like(rstd)
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        grad, xhat, grad.shape[-1:], zero, one, None, None, [True, False, False]
    )
    return dx.mul_(rstd).to(dtype)


def fold(weight, bias, norm_weight, norm_bias, dtype):
    """The affine part of a norm folded into the linear layer that follows it: W1' and b1' of the package."""
    if norm_bias is not None:
        bias = torch.addmv(bias, weight, norm_bias)
    if norm_weight is not None:
        weight = weight * norm_weight
    return weight.to(dtype), bias.to(dtype)


def unfold(dw, db, weight, norm_weight, norm_bias, needs):
    """From the gradients of W1' and b1' those of (w_ln, b_ln, W1, b1), as far as they are needed."""
    needs_nw, needs_nb, needs_w, needs_b = needs
    dnw = (dw * weight).sum(0) if needs_nw else None
    dnb = weight.t().to(db.dtype) @ db if needs_nb else None
    if needs_w:
        dw = dw if norm_weight is None else dw * norm_weight
        dw = dw if norm_bias is None else torch.addr(dw, db, norm_bias.to(db.dtype))
    return dnw, dnb, dw if needs_w else None, db if needs_b else None
