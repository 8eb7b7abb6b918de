"""Output of a layer norm that is not saved, but recomputed from the norm's input."""

from typing import NamedTuple

import torch
from torch import Tensor

from .precision import promote

__all__ = ['Normed', 'norm', 'norm_backward']


def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
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
    """Compute the gradients of :func:`norm`.

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
    backward = torch.ops.aten.native_layer_norm_backward.default
    return backward(grad.to(x.dtype), x, x.shape[-1:], *statistics, weight, bias, [True, True, True])


def _in_one_precision(x, weight, bias):
    """Cast input, weight and bias to the higher precision of the first two, because CUDA's kernel takes only one."""
    dtype = promote(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


class Normed(NamedTuple):
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
        return norm(self.x, self.weight, self.bias, self.eps)[0].to(self.dtype)
