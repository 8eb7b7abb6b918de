"""A linear layer whose weight is larger than its input, such as the first layer of a box head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import apply_function, differentiable_once
from .common.precision import accumulate, autocast_dtype, column_sums, no_autocast

__all__ = ['large_linear']


def large_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``, with a backward pass that frees the weight's gradient early.

    Two autograd nodes compute it. In the backward pass the gradient of the weight comes first. Where it is added to an
    existing ``weight.grad``, it is freed before the gradient of ``x`` is allocated. No copy of the weight in autocast's
    precision is saved.

    Args:
        x (Tensor): Shape (..., C).
        weight (Tensor): Shape (D, C).
        bias (Tensor | None): Shape (D,). If ``None``, there is none. Default: None.

    Returns:
        Tensor: Shape (..., D).

    Example:
        >>> y = large_linear(x, fc.weight, fc.bias)
    """
    dtype, shape = autocast_dtype(x) or x.dtype, x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    y = apply_function(_InputGradient, x, weight.detach(), None if bias is None else bias.detach(), dtype)
    y = apply_function(_WeightGradient, y, x.detach(), weight, bias, dtype)
    return y if len(shape) == 1 else y.view(*shape, -1)


class _InputGradient(torch.autograd.Function):
    """Linear layer whose backward pass computes the gradient of the input alone."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        with no_autocast(x):
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        with no_autocast(grad):
            return (grad @ weight.to(grad.dtype)).to(ctx.dtype), None, None, None


class _WeightGradient(torch.autograd.Function):
    """Identity on the layer's output, whose backward pass computes the gradients of weight and bias."""

    @staticmethod
    def forward(ctx, y, x, weight, bias, dtype):
        needed = ctx.needs_input_grad[2]
        ctx.save_for_backward(x.to(dtype) if needed else None)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(y)  # it stays as it is, and others may work on it in place, which a view would forbid
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        (x,), (dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        dweight = dbias = None
        with no_autocast(grad):
            if ctx.needs_input_grad[2]:
                dweight = accumulate(None, grad, x).to(dtype)
            if ctx.needs_input_grad[3]:
                dbias = column_sums(grad).to(bias_dtype)
        return grad if ctx.needs_input_grad[0] else None, None, dweight, dbias, None
