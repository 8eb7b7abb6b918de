"""Algorithm 1 of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022) for any position-wise operation."""

from collections.abc import Callable

import torch
from torch import Tensor

from .masks import Positions

__all__ = ['sbp', 'take']


def sbp(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions) -> Tensor:
    """Run ``f`` on every position and keep the graph for the kept positions only (Algorithm 1, section 3.4).

    The value is that of ``f(x)``; the gradient is that of ``torch.where(kept, f(x), f(x).detach())``.

    Args:
        f (Callable): Maps (N, K, ...) to (N, K, ...'), each position independently of the others.
        x (Tensor): Shape (N, L, ...).
        positions (Positions): Kept and dropped indices into the L positions, shapes (K,) and (D,).

    Returns:
        Tensor: Shape (N, L, ...').

    Raises:
        TypeError: If ``positions`` are none, for example a mask.

    Example:
        >>> kept = positions(mask)  # see stochastic_backprop.masks
        >>> y = sbp(torch.nn.Linear(96, 384), x, kept)  # a PW-Conv on tokens (N, L, 96)
    """
    if not isinstance(positions, Positions):
        raise TypeError(
            f'positions is a {type(positions).__name__}, and must be Positions; of a mask of bool, take '
            'sbp_mmdet.positions(mask)'
        )
    keep, drop = positions
    # Kept positions first: under autocast the first call fills the cache of cast weights, and a cache that was filled
    # inside no_grad would cut the weights off from their gradients.
    kept = f(take(x, keep))
    with torch.no_grad():
        outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
        outputs[:, drop] = f(take(x, drop))
    outputs[:, keep] = kept
    return outputs


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Gather the same positions of all images.

    Args:
        x (Tensor): Shape (N, L, ...), of any strides.
        index (Tensor | None): Shape (K,). If ``None``, all positions, without a copy.

    Returns:
        Tensor: Shape (N, K, ...).
    """
    return x if index is None else x.index_select(1, index)
