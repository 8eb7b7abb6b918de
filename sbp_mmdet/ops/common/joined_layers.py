"""Layers of the same input that run as one layer, of whose outputs a loss may use some only.

Their weights are concatenated, and the output is cut into those of the layers. A layer whose output no loss uses gets
no gradient then, as if the layers ran one by one. With zeros, an optimizer would decay its weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .autograd_function import apply_function
from .folding import bias_or_zeros

__all__ = ['JoinedLayers']


class JoinedLayers:
    """Linear layers or convolutions of the same input, with one weight and one bias. It is made in each forward pass.

    Args:
        weights (Sequence[Tensor]): Weights, shapes (D, ...), in one precision.
        biases (Sequence[Tensor | None]): Biases, shapes (D,). If ``None``, zeros.

    Attributes:
        weight, bias (Tensor): Weight and bias of all layers.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]):
        biases = [bias_or_zeros(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        self._sizes, self._used = [*map(len, weights)], [True] * len(weights)
        self.weight, self.bias = (apply_function(_Join, self._used, *tensors) for tensors in (weights, biases))

    def split(self, out: Tensor) -> list[Tensor]:
        """Cut the output (N, D, ...) of all layers into those of each, in memory of their own.

        Args:
            out (Tensor): The output.
        """
        return [*apply_function(_Split, self._used, self._sizes, out)]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, used, *tensors):
        ctx.used, ctx.sizes = used, [*map(len, tensors)]
        return torch.cat(tensors)

    @staticmethod
    def backward(ctx, grad):
        parts = zip(ctx.used, grad.split(ctx.sizes), strict=True)
        return None, *[part if used else None for used, part in parts]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, used, sizes, out):
        ctx.used, ctx.sizes = used, sizes
        ctx.set_materialize_grads(False)
        return tuple(part.clone() for part in out.split(sizes, 1))

    @staticmethod
    def backward(ctx, *grads):
        ctx.used[:] = [grad is not None for grad in grads]  # the layers' gradients follow in the same backward pass
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None
        sizes = zip(grads, ctx.sizes, strict=True)
        filled = [given.new_zeros(1).expand(len(given), n, *given.shape[2:]) if g is None else g for g, n in sizes]
        return None, None, torch.cat(filled, 1)
