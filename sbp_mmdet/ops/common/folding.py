"""Algebra of linear layers: the norm in front of a layer and the layer scale after it are folded into its weight.

Forward: :func:`normalise`, :func:`fold`, :func:`add_branch`. Backward: :func:`incoming_rows`,
:func:`normalise_backward`, :func:`unfold`, :func:`unscale`.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .layouts import Chunk, as_rows, empty_tokens, in_shape, layout_of, tokens_of
from .precision import accumulator, cast, multiply, promote
from .stochastic_depth import factor_for

__all__ = [
    'add_branch',
    'bias_or_zeros',
    'fold',
    'fold_bias',
    'fold_weight',
    'incoming_rows',
    'normalise',
    'normalise_backward',
    'scale_into_range',
    'unfold',
    'unit_of_channels',
    'unit_statistics',
    'unscale',
]


def incoming_rows(
    grad: Tensor, dtype: torch.dtype, factor: Tensor | float | None = None, by: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a branch as rows for matrix products, and its sum over them.

    Args:
        grad (Tensor): Gradient after stochastic depth: tokens (N, L, C) of any strides, or a map (N, C, H, W).
        dtype (torch.dtype): Precision of the rows.
        factor (Tensor | float | None): Factor of stochastic depth: of each image, shape (N,), if ``grad`` is tokens; or
            a number. If ``None``, 1. Default: None.
        by (Tensor | None): What each column of the rows is multiplied by, shape (C,); the sum is not. If ``None``, 1.
            Default: None.

    Returns:
        tuple[Tensor, Tensor]: Contiguous rows (K, C), and their sum (C,) in full precision.
    """
    full = accumulator(grad)
    if grad.dtype is dtype and factor is None and by is None:
        rows = as_rows(grad)
        return rows, rows.sum(0, dtype=full)
    grad = grad.permute(0, 2, 3, 1) if grad.dim() == 4 else grad
    if isinstance(factor, Tensor):
        total, factor = torch.mv(grad.sum(1, dtype=full).t(), factor.to(full)), factor_for(factor, 3)
    else:
        total = grad.sum(tuple(range(grad.dim() - 1)), dtype=full)
        total = total if factor is None else total.mul_(factor)
    if factor is not None:
        by = factor if by is None else factor * by
    rows = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    if by is None:
        rows.copy_(grad)
    else:
        torch.mul(grad, by, out=rows)
    return rows.view(-1, grad.shape[-1]), total


def unit_of_channels(grad: Tensor) -> Tensor:
    """Return what each channel of a gradient is divided by to be in the range of fp16: 16 times its maximum.

    Args:
        grad (Tensor): Tokens (N, L, C) or a feature map (N, C, H, W).

    Returns:
        Tensor: Shape (C,), positive, in fp32, because in fp16 a tiny maximum would be zero.
    """
    tiny = torch.finfo(torch.float32).tiny
    if not grad.numel():
        return grad.new_full((grad.shape[1 if grad.dim() == 4 else 2],), tiny, dtype=torch.float32)
    largest = torch.linalg.vector_norm(
        grad, torch.inf, (0, *range(grad.dim())[2:]) if grad.dim() == 4 else (0, 1), dtype=torch.float32
    )
    return largest.clamp_min_(tiny).mul_(16)


def scale_into_range(g: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scale the rows g into the range of ``dtype``, for the product A = g^T GELU(h).

    In fp16, a small gamma keeps the gradients of plain code in range, but A is computed without gamma. So each channel
    of g is divided by 16 times its maximum instead, which leaves room for the sum over the positions of a chunk.

    Args:
        g (Tensor): Gradient of the branch, shape (K, C).
        gamma (Tensor | None): Layer scale, shape (C,).
        dtype (torch.dtype): Precision of matrix products.

    Returns:
        tuple[Tensor, Tensor | None]: The rows in ``dtype``, and what each channel of them was divided by, shape (C,),
            which is also the factor of each row of A (``unit`` of :func:`unscale`); ``None`` if they were not scaled.
    """
    if gamma is None or dtype != torch.float16 or not len(g):
        return g.to(dtype), None
    unit = unit_of_channels(g.unsqueeze(0))
    return (g / unit).to(dtype), unit


def add_branch(
    shortcut: Tensor,
    branch: Iterable[tuple[Chunk, Tensor]],
    gamma: Tensor | None,
    factor: Tensor | float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``shortcut + factor * gamma * branch``, laid out like the shortcut, in the dtype of torch's own sum.

    Args:
        shortcut (Tensor): Map (N, C, H, W) or tokens (N, L, C).
        branch (Iterable[tuple[Chunk, Tensor]]): Chunks of the branch with their rows.
        gamma (Tensor | None): Layer scale, (C,).
        factor (Tensor | float | None): Factor of stochastic depth for each image, (N,), or a number for all of them.
        dtype (torch.dtype): Dtype of the branch's rows.
    """
    scale, number = gamma, 1 if factor is None or isinstance(factor, Tensor) else factor
    if isinstance(factor, Tensor):
        scale = factor[:, None, None] if gamma is None else gamma * factor[:, None, None]
    kinds = [dtype] + ([] if gamma is None else [gamma.dtype])  # the factor is in full precision, and a scalar
    dtype = promote(shortcut.dtype, *kinds)
    tokens = tokens_of(shortcut)
    if shortcut.dim() == 3:  # tokens may be a view of a map (N, C, H, W), and mmcv's RoIAlign reads no other layout
        out = torch.empty_like(tokens, dtype=dtype)
    else:
        out = empty_tokens(tokens.shape, layout_of(shortcut), dtype, shortcut.device)
    for chunk, rows in branch:
        own, place = tokens[chunk.images, chunk.rows], out[chunk.images, chunk.rows]
        rows = rows.view(own.shape)
        if scale is None:
            torch.add(own, rows, alpha=number, out=place)
        else:
            _addcmul(own, rows, scale if scale.dim() == 1 else scale[chunk.images], place, number)
    return in_shape(out, shortcut.shape)


def _addcmul(own, rows, scale, out, number):
    operands = own, rows, scale
    kinds = {t.dtype for t in (*operands, out)}
    if out.device.type == 'cpu' and len(kinds) > 1:  # torch 2.1 fails there
        kind = promote(*kinds)
        out.copy_(torch.addcmul(*(t.to(kind) for t in operands), value=number))
    else:
        torch.addcmul(*operands, value=number, out=out)


def normalise(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x-hat = (x - mean) * rstd in ``dtype``, and rstd = 1 / sqrt(var + eps), shape (..., 1), in full precision.

    Args:
        x (Tensor): Input of the norm, shape (..., C); mean and variance are over the channels.
        eps (float): Added to the variance.
        dtype (torch.dtype): Precision of x-hat.

    Returns:
        tuple[Tensor, Tensor]: x-hat and rstd.
    """
    rows, reduced = x.reshape(-1, x.shape[-1]), (torch.float16, torch.bfloat16)
    if x.dtype in reduced and (x.device.type == 'cpu' or dtype not in reduced):
        # CUDA's kernel computes in full precision and rounds x-hat to x's; the CPU's would round the deviation too.
        rows = rows.float()
    xhat, _, rstd = torch.native_layer_norm(rows, rows.shape[1:], None, None, eps)
    return xhat.to(dtype).view(x.shape), rstd.view(*x.shape[:-1], 1)


def unit_statistics(number: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the means and the reciprocal deviations of rows of x-hat itself, shape (number, 1): zeros and ones."""
    # Powers of two, so that images of many sizes share a few of these tensors.
    return [x[:number] for x in _zeros_and_ones(1 << (number - 1).bit_length(), dtype, device)]


@functools.lru_cache(maxsize=8)
def _zeros_and_ones(number, dtype, device):
    zeros = torch.zeros(number, 1, dtype=dtype, device=device)
    return zeros, torch.ones_like(zeros)


def normalise_backward(
    grad: Tensor, xhat: Tensor, rstd: Tensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Compute the gradient of a norm's input from that of x-hat.

        dx = rstd * (dx-hat - mean(dx-hat) - x-hat * mean(dx-hat * x-hat)),   means over the channels

    x-hat has mean 0 and deviation 1, so torch's kernel with these statistics computes the part in parentheses.

    Args:
        grad (Tensor): Gradient of x-hat, (..., C).
        xhat (Tensor): The normalised input, of the same shape.
        rstd (Tensor): Reciprocal deviation in full precision, (..., 1).
        dtype (torch.dtype): Precision of the norm's input, and so of the result.
        out (Tensor | None): Where the result is written, of any strides. If ``None``, a new tensor. Default: None.

    Returns:
        Tensor: Gradient of the norm's input, (..., C).
    """
    out = torch.empty_like(grad, dtype=dtype) if out is None else out
    channels = grad.shape[-1]
    if grad.dim() > 2:
        grad, xhat = grad.reshape(-1, channels), xhat.reshape(-1, channels)
    if grad.device.type == 'cpu' and grad.dtype != rstd.dtype:
        grad, xhat = grad.to(rstd.dtype), xhat.to(rstd.dtype)
    zero, one = unit_statistics(grad.shape[0], rstd.dtype, rstd.device)
    dx, _, _ = torch.ops.aten.native_layer_norm_backward.default(
        grad, xhat, grad.shape[1:], zero, one, None, None, [True, False, False]
    )
    dx, rstd = dx.view(out.shape), rstd.view(*out.shape[:-1], 1)
    # A CPU's copy turns rows into columns faster than its product does.
    return torch.mul(dx, rstd, out=out) if out.is_cuda else out.copy_(dx.mul_(rstd))


def fold(
    weight: Tensor, bias: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fold the affine part of a norm into the linear layer after it: W' = W diag(w_ln), b' = b + W b_ln.

    Args:
        weight (Tensor): W, shape (D, C).
        bias (Tensor): b, shape (D,).
        norm_weight (Tensor | None): w_ln, shape (C,). If ``None``, 1.
        norm_bias (Tensor | None): b_ln, shape (C,). If ``None``, 0.
        dtype (torch.dtype): Precision of the result.

    Returns:
        tuple[Tensor, Tensor]: W' and b'.
    """
    return fold_weight(weight, norm_weight, dtype), cast(fold_bias(weight, bias, norm_bias), dtype)


def fold_weight(weight: Tensor, norm_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return W' of :func:`fold`, whose arguments these are."""
    _check_width(weight, norm_weight)
    return cast(weight, dtype) if norm_weight is None else multiply(weight, norm_weight, dtype)


def fold_bias(weight: Tensor, bias: Tensor, norm_bias: Tensor | None) -> Tensor:
    """Return b' of :func:`fold`, whose arguments these are, in the highest precision among them."""
    _check_width(weight, norm_bias)
    if norm_bias is None:
        return bias
    kind = promote(weight.dtype, bias.dtype, norm_bias.dtype)  # a model in half precision may keep its norms in fp32
    return torch.addmv(cast(bias, kind), cast(weight, kind), cast(norm_bias, kind))


def _check_width(weight, parameter):
    """Raise an error if norm and layer differ in width. A norm of one channel would be broadcast silently."""
    if parameter is not None and parameter.shape[0] != weight.shape[1]:
        raise ValueError(
            f'a layer norm of {parameter.shape[0]} channels precedes a layer of {weight.shape[1]}; make them equal'
        )


def bias_or_zeros(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the bias of a linear layer or a convolution, or zeros if it has none.

    Args:
        weight (Tensor): Weight, shape (D, ...).
        bias (Tensor | None): Bias, shape (D,), or ``None``.
    """
    return weight.new_zeros(len(weight)) if bias is None else bias


def unfold(
    dw: Tensor | None, db: Tensor, weight: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Compute the gradients of (w_ln, b_ln, W, b) from those of :func:`fold`'s W' and b'.

    With W' = W diag(w_ln) and b' = b + W b_ln: dw_ln = sum over rows of dW' * W, db_ln = W^T db',
    dW = dW' diag(w_ln) + db' b_ln^T, db = db'.

    Args:
        dw (Tensor | None): dW', shape (D, C). If ``None``, only the gradients of the biases are computed.
        db (Tensor): db', shape (D,).
        weight (Tensor): W, shape (D, C).
        norm_weight (Tensor | None): w_ln, shape (C,).
        norm_bias (Tensor | None): b_ln, shape (C,).

    Returns:
        tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]: Gradients of w_ln, b_ln, W and b.
    """
    dnb = None if norm_bias is None else weight.t().to(db.dtype) @ db
    if dw is None:
        return None, dnb, None, db
    dnw = None if norm_weight is None else (dw * weight).sum(0)
    dw = dw if norm_weight is None else dw * norm_weight
    return dnw, dnb, dw if norm_bias is None else torch.addr(dw, db, norm_bias.to(db.dtype)), db


def unscale(
    outer: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    gamma: Tensor | None,
    unit: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Compute the gradients of (W2, b2, gamma) of ``y = gamma * (W2 h + b2)``.

    With A = g^T h and s the sum of g over all rows: dW2 = diag(gamma) A, db2 = gamma s, dgamma = sum_d A W2 + s b2.

    Args:
        outer (Tensor | None): A, its rows divided by ``unit``. If ``None``, only the bias has a gradient.
        total (Tensor): s.
        weight (Tensor | None): W2, shape (C, D). It is not read if ``gamma`` is ``None``.
        bias (Tensor): b2, shape (C,).
        gamma (Tensor | None): Layer scale, shape (C,). If ``None``, there is none.
        unit (Tensor | None): Second result of :func:`scale_into_range`. If ``None``, 1.

    Returns:
        tuple[Tensor | None, Tensor, Tensor | None]: Gradients of W2, b2 and gamma.
    """
    if gamma is None:
        return outer, total, None
    if outer is None:
        return None, total * gamma, None
    by_weight = (outer * weight).sum(1)
    if unit is not None:
        by_weight = by_weight.mul_(unit)
    outer = outer * (gamma if unit is None else unit * gamma)[:, None]
    return outer, total * gamma, by_weight.addcmul_(total, cast(bias, total.dtype))
