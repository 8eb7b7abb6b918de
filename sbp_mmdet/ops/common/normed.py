"""Output of a layer norm that is not saved, but recomputed from the norm's input."""

from typing import NamedTuple

import torch
from torch import Tensor

from .precision import promoted

__all__ = ['Normed', 'norm']


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
    if x.dtype is not weight.dtype:  # CUDA's kernel takes one precision
        dtype = promoted(x.dtype, weight.dtype)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


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
