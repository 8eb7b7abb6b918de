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
        positions (Positions): Kept and dropped indices into the L positions, for all images alike, shapes (K,) and
            (D,), or for each image, shapes (N, K) and (N, D).

    Returns:
        Tensor: Shape (N, L, ...').
    """
    keep, drop = positions.keep, positions.drop
    # Kept positions first: under autocast the first call fills the cache of cast weights, and a cache that was filled
    # inside no_grad would cut the weights off from their gradients.
    kept = f(_select(x, keep))
    with torch.no_grad():
        outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
        outputs[_places(drop)] = f(_select(x, drop))
    outputs[_places(keep)] = kept
    return outputs


def _select(x, index):
    if index.dim() == 1:
        return x.index_select(1, index)
    return torch.stack([image.index_select(0, own) for image, own in zip(x, index, strict=True)])


def _places(index):
    images = slice(None) if index.dim() == 1 else torch.arange(len(index), device=index.device)[:, None]
    return images, index
