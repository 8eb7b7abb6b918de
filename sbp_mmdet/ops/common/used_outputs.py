"""Outputs of one operation, of which a loss may use some only.

Parameters that only an unused output depends on get no gradient then, as in modules that run one by one. With zeros in
the place of no gradient, an optimizer would decay these parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .autograd_function import apply_function

__all__ = ['UsedOutputs']


class UsedOutputs:
    """Record of which outputs of an operation have a gradient. It is made in each forward pass.

    Args:
        number (int): Number of outputs.

    Example:
        >>> used = UsedOutputs(2)
        >>> weights = [*used.only_for(0, [first.weight]), *used.only_for(1, [second.weight])]
        >>> scores, boxes = used.split(F.conv2d(x, torch.cat(weights)), [*map(len, weights)])
    """

    def __init__(self, number: int):
        self._used = [True] * number

    def only_for(self, index: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors that only one output depends on. They get no gradient where that output has none.

        Args:
            index (int): Index of the output.
            tensors (Sequence[Tensor]): The tensors.
        """
        return apply_function(_OnlyFor, self._used, index, *tensors)

    def split(self, out: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Cut the common result (N, D, ...) of an operation into its outputs, each in memory of its own.

        Args:
            out (Tensor): The result.
            sizes (Sequence[int]): Sizes of the outputs in the second dimension.
        """
        return apply_function(_Split, self._used, sizes, out)


class _OnlyFor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, used, index, *tensors):
        ctx.used, ctx.index = used, index
        outs = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(
            *[out for out, needed in zip(outs, ctx.needs_input_grad[2:], strict=True) if not needed]
        )
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *(grads if ctx.used[ctx.index] else [None] * len(grads))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, used, sizes, out):
        ctx.used, ctx.sizes = used, sizes
        ctx.set_materialize_grads(False)
        return tuple(part.clone() for part in out.split(sizes, 1))

    @staticmethod
    def backward(ctx, *grads):
        ctx.used[:] = [grad is not None for grad in grads]  # gradients of parameters follow in the same backward pass
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None
        sizes = zip(grads, ctx.sizes, strict=True)
        filled = [given.new_zeros(1).expand(len(given), n, *given.shape[2:]) if g is None else g for g, n in sizes]
        return None, None, torch.cat(filled, 1)
