"""Layer norms over the last dimension, inside of operations: in front of linear layers, or recomputed."""

from typing import NamedTuple

import torch
from torch import Tensor

from .folding import unit_statistics
from .precision import cast, promote

__all__ = ['RecomputedNorm', 'TokenNorm', 'norm_backward', 'run_norm']

_backward = torch.ops.aten.native_layer_norm_backward.default


class TokenNorm:
    """Layer norm over the channels of rows (..., C), as autocast computes it on a GPU, and its backward pass.

    Args:
        weight, bias (Tensor | None): Affine part, shape (C,).
        eps (float): Added to the variance.
        dtype (torch.dtype): Precision of the normalised rows.

    Attributes:
        full (torch.dtype): Full precision, in which the norm is computed.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype):
        self.dtype, self.eps = dtype, eps
        self.full = full = torch.float64 if dtype is torch.float64 else torch.float32
        self.weight = weight if weight is None or weight.dtype is full else weight.to(full)
        self.bias = bias if bias is None or bias.dtype is full else bias.to(full)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the norm.

        Args:
            x (Tensor): Rows in full precision, shape (..., C).

        Returns:
            tuple[Tensor, Tensor, Tensor]: The rows after the norm in ``dtype``, and mean and reciprocal deviation of
            ``x``, shape (..., 1).
        """
        rows, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return rows if rows.dtype is self.dtype else rows.to(self.dtype), mean, rstd

    def scale(self, xhat: Tensor) -> Tensor:
        """Apply the affine part of the norm alone.

        Args:
            xhat (Tensor): Rows before it, shape (..., C), in any precision.

        Returns:
            Tensor: The rows after the norm in ``dtype``.
        """
        if self.weight is None:
            return cast(xhat, self.dtype)
        if xhat.is_cuda and self.bias is not None:  # one launch
            return torch.addcmul(self.bias, xhat, self.weight, out=torch.empty_like(xhat, dtype=self.dtype))
        xhat = cast(xhat, self.full)
        rows = xhat * self.weight if self.bias is None else torch.addcmul(self.bias, xhat, self.weight)
        return rows if rows.dtype is self.dtype else rows.to(self.dtype)

    def backward(
        self, grad: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor] | None, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients of input, weight and bias, in full precision.

        Args:
            grad (Tensor): Gradient of the rows after the norm, shape (..., C).
            x (Tensor): Input of the norm, or x-hat, in any precision.
            statistics (tuple[Tensor, Tensor] | None): Mean and reciprocal deviation of ``x``. If ``None``, ``x`` is
                x-hat, whose mean is 0 and whose deviation is 1; the gradient is that of x-hat through the norm, to be
                multiplied by the reciprocal deviation of the input.
            needs (tuple[bool, bool, bool]): Which gradients are needed.
        """
        grad = grad if grad.dtype is self.full else grad.to(self.full)
        x = x if x.dtype is self.full else x.to(self.full)
        if statistics is None:
            numbers = unit_statistics(x.shape[:-1].numel(), self.full, x.device)
            statistics = numbers if x.dim() == 2 else [number.view(*x.shape[:-1], 1) for number in numbers]
        return _backward(grad, x, x.shape[-1:], *statistics, self.weight, self.bias, needs)


def run_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer norm over the last dimension in the higher precision of input and weight.

    Args:
        x (Tensor): Input, shape (..., C).
        weight (Tensor): Shape (C,).
        bias (Tensor): Shape (C,).
        eps (float): Added to the variance.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Output, mean, reciprocal deviation.
    """
    if x.dtype is not weight.dtype:
        x, weight, bias = _in_one_precision(x, weight, bias)
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def norm_backward(
    grad: Tensor, x: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`run_norm`.

    Args:
        grad (Tensor): Gradient of the output, shape (..., C).
        x (Tensor): Input, of the same shape.
        statistics (tuple[Tensor, Tensor]): Mean and reciprocal deviation.
        weight (Tensor): Shape (C,).
        bias (Tensor): Shape (C,).

    Returns:
        tuple[Tensor, Tensor, Tensor]: Gradients of input, weight and bias.
    """
    if x.dtype is not weight.dtype:
        x, weight, bias = _in_one_precision(x, weight, bias)
    return _backward(grad.to(x.dtype), x, x.shape[-1:], *statistics, weight, bias, [True, True, True])


def _in_one_precision(x, weight, bias):
    """Cast input, weight and bias to the higher precision of the first two, because CUDA's kernel takes only one."""
    dtype = promote(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


class RecomputedNorm(NamedTuple):
    """Output of a layer norm, recomputed from the norm's input.

    Attributes:
        x (Tensor): Input of the norm.
        weight, bias (Tensor): Affine part.
        eps (float): Added to the variance.
        dtype (torch.dtype): Precision of the output.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    dtype: torch.dtype

    def load(self) -> Tensor:
        """Compute the output."""
        return run_norm(self.x, self.weight, self.bias, self.eps)[0].to(self.dtype)
