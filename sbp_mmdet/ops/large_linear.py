"""A linear layer whose weight is larger than its input, such as the first layer of a box head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import apply_function, differentiable_once, saved_tensors_of
from .common.precision import accumulate, autocast_dtype, column_sums, no_autocast

__all__ = ['large_linear']

_CAST = 2**21  # elements of the weight that the backward pass casts at a time


def large_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias``, with a backward pass that frees the input early.

    The backward pass computes the gradient of the weight first and frees ``x`` before it allocates the gradient of
    ``x``. No copy of the weight in autocast's precision is saved or made as a whole.

    Args:
        x (Tensor): Shape (..., C).
        weight (Tensor): Shape (D, C).
        bias (Tensor | None): Shape (D,). If ``None``, there is none.

    Returns:
        Tensor: Shape (..., D).

    Example:
        >>> y = large_linear(x, fc.weight, fc.bias)
    """
    dtype, shape = autocast_dtype(x) or x.dtype, x.shape[:-1]
    y = apply_function(_LargeLinear, x.reshape(-1, x.shape[-1]), weight, bias, dtype)
    return y if len(shape) == 1 else y.view(*shape, -1)


class _LargeLinear(torch.autograd.Function):
    # One node computes all gradients: a hook on the weight, such as an optimizer step in the backward pass, runs as
    # soon as autograd has the gradient of the weight, and the gradient of the input is computed from the weight.

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        needs_x, needs_weight, _, _ = ctx.needs_input_grad
        with no_autocast(x):
            source = x.to(dtype)
            y = F.linear(source, weight.to(dtype), None if bias is None else bias.to(dtype))
        ctx.save_for_backward(source if needs_weight else None, weight if needs_x else None)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        x, weight = saved_tensors_of(ctx)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_dtype, dtype, bias_dtype = ctx.dtypes
        dx = dweight = dbias = None
        with no_autocast(grad):
            if needs_weight:
                dweight = accumulate(None, grad, x).to(dtype)
            del x  # its memory is free for its gradient, unless others hold it
            if needs_bias:
                dbias = column_sums(grad).to(bias_dtype)
            if needs_x:
                dx = _input_gradient(grad, weight, x_dtype)
        return dx, dweight, dbias, None


def _input_gradient(grad, weight, dtype):
    """Return the gradient of the input, with a part of the weight in another precision at a time."""
    if weight.dtype is grad.dtype:
        return (grad @ weight).to(dtype)
    columns = max(_CAST // len(weight), 1)
    dx = grad.new_empty(len(grad), weight.shape[1], dtype=dtype)
    for part, some in zip(dx.split(columns, 1), weight.split(columns, 1), strict=True):
        part.copy_(grad @ some.to(grad.dtype))
    return dx
