"""Algorithm 1 of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022) for any position-wise operation."""

from collections.abc import Callable

import torch
from torch import Tensor

from .masks import Positions

__all__ = ['pooled', 'sbp', 'take']


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
    kept = f(take(x, keep))
    with torch.no_grad():
        outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
        outputs[_places(drop)] = f(take(x, drop))
    outputs[_places(keep)] = kept
    return outputs


def pooled(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions) -> Tensor:
    """As :func:`sbp`, but dropped positions send gradients too: those of a kept position and of the dropped ones that
    go with it are summed and go back once, through the kept one.

    Each position of such a group gets the mean of its gradient. This is exact where the positions of a group are alike
    and get the same back. It stores what :func:`sbp` stores.

    Args:
        f (Callable): Maps (N, K, ...) to (N, K, ...'), each position independently of the others.
        x (Tensor): Shape (N, L, ...).
        positions (Positions): As for :func:`sbp`, with ``nearest``.

    Returns:
        Tensor: Shape (N, L, ...').

    Raises:
        ValueError: Without ``nearest``.
    """
    keep, drop, nearest = positions
    if nearest is None:
        raise ValueError('pooled needs positions with `nearest`: make them by positions(mask, nearest=True)')
    pairs = torch.arange(drop.shape[-1], device=drop.device) if nearest.index is None else nearest.index
    size = torch.ones(keep.shape, dtype=x.dtype, device=x.device)
    size = size.scatter_add(-1, pairs, size.new_ones(pairs.shape))
    share = (1 / size).view(-1, keep.shape[-1], *[1] * (x.dim() - 2))
    x_kept = take(x, keep)
    mean = _add(x_kept * share, pairs, take(x, drop) * take(share, pairs))
    kept = f(x_kept.detach() + (mean - mean.detach()))  # the kept position's value, the mean's gradient
    with torch.no_grad():
        dropped = f(take(x, drop))
    outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
    outputs[_places(drop)] = dropped + take(kept - kept.detach(), pairs)  # their value, the kept position's gradient
    outputs[_places(keep)] = kept
    return outputs


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows at some places.

    Args:
        x (Tensor): Shape (N, L, ...), of any strides.
        index (Tensor | None): Shape (K,) for all images alike or (N, K); None: all, not copied.

    Returns:
        Tensor: Shape (N, K, ...).
    """
    if index is None:
        return x
    if index.dim() == 1:
        return x.index_select(1, index)
    if torch.is_grad_enabled():  # autograd cannot follow rows into a tensor that is there already
        return torch.stack([image.index_select(0, own) for image, own in zip(x, index, strict=True)])
    out = x.new_empty(*index.shape, *x.shape[2:])
    for image, own, rows in zip(x, index, out, strict=True):
        torch.index_select(image, 0, own, out=rows)
    return out


def _add(x, index, rows):
    index = index[(..., *[None] * (x.dim() - 2))].expand_as(rows)
    return x.scatter_add(1, index, rows)  # unlike index_add, this stores no rows


def _places(index):
    images = slice(None) if index.dim() == 1 else torch.arange(len(index), device=index.device)[:, None]
    return images, index
