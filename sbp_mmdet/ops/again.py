"""Position-wise layers whose outputs are used at few positions.

What is stored is the input. In the backward pass the layers run again for the rows that a gradient reached.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .precision import autocast_dtype

__all__ = ['rows_again']


def rows_again(run: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor) -> Tensor:
    """``run(x)``, exact.

    Args:
        run (Callable): Maps rows (..., C) to rows (..., C'), each independently of the others.
        parameters (Iterable[Tensor]): All tensors with gradients that it uses.
        x (Tensor): Shape (N, L, C).

    Returns:
        Tensor: Shape (N, L, C').
    """
    return _RowsAgain.apply(run, x, *parameters)


class _RowsAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.dtype = run, autocast_dtype(x)
        ctx.save_for_backward(x, *parameters)
        with _precision(x, ctx.dtype):
            return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        reached = grad.any(2)
        rows = x[reached].requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad(), _precision(x, ctx.dtype):
            out = ctx.run(rows)
        asked = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        leaves = [(rows, *parameters)[i] for i in asked]
        found = dict(zip(asked, torch.autograd.grad(out, leaves, grad[reached], allow_unused=True), strict=True))
        dx = found.pop(0, None)
        if dx is not None:
            dx = torch.zeros_like(x).index_put_((reached,), dx)
        return None, dx, *(found.get(i) for i in range(1, len(parameters) + 1))


def _precision(x, dtype):
    """Autocast as it was, without its cache: a weight that is cast without gradients must not be found there."""
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None, cache_enabled=False)
