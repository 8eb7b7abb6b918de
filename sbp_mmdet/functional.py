"""Algorithm 1 of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022) for any position-wise operation."""

from collections.abc import Callable

import torch
from torch import Tensor

from .masks import Positions

__all__ = ['sbp']


def sbp(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions) -> Tensor:
    """Runs ``f`` on every position and keeps the graph for the kept positions only (Algorithm 1, section 3.4).

    The value is that of ``f(x)``; the gradient is that of ``torch.where(kept, f(x), f(x).detach())``.

    Args:
        f (Callable): Maps (N, K, ...) to (N, K, ...'), each position independently of the others.
        x (Tensor): Shape (N, L, ...).
        positions (Positions): Kept and dropped indices into the L positions.

    Returns:
        Tensor: Shape (N, L, ...').
    """
    keep, drop = positions.keep, positions.drop
    # Kept positions first: under autocast the first call fills the cache of cast weights, and a cache that was filled
    # inside no_grad would cut the weights off from their gradients.
    kept = f(x.index_select(1, keep))
    with torch.no_grad():
        dropped = f(x.index_select(1, drop))
        outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
        outputs.index_copy_(1, drop, dropped)
    outputs[:, keep] = kept
    return outputs
