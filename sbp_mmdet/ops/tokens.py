"""Rows of tokens (N, L, C) by index, the index shared by the images, shape (K,), or one for each, shape (N, K)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import Nearest, Positions

__all__ = ['add_rows_', 'group_sizes', 'take', 'token_positions']


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """(N, L, C) -> (N, K, C), the rows of the index; None: all of them, not copied."""
    if index is None:
        return x
    if index.dim() == 1:
        return x.index_select(1, index)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def add_rows_(x: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Adds (N, K, C) to the rows of the index, in place; rows that share an index are summed."""
    if index is None:
        return x.add_(rows)
    if index.dim() == 1:
        return x.index_add_(1, index, rows)
    return x.scatter_add_(1, index[..., None].expand_as(rows), rows)


def group_sizes(pairs: Tensor | None, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """How many positions each kept one stands for, itself among them.

    Args:
        pairs (Tensor | None): ``Nearest.index``, shape (D,) or (N, D).
        keep (Tensor): ``Positions.keep``, shape (K,) or (N, K).
        dtype (torch.dtype): Of the result.

    Returns:
        Tensor: Shape (K, 1) or (N, K, 1).
    """
    sizes = torch.ones(keep.shape, dtype=dtype, device=keep.device)
    if pairs is None:
        sizes += 1
    else:
        sizes.scatter_add_(-1, pairs, torch.ones(pairs.shape, dtype=dtype, device=keep.device))
    return sizes[..., None]


def token_positions(positions: Positions, prefix: int) -> Positions:
    """Positions of a map as those of tokens, behind class and register tokens, which are always kept.

    Args:
        positions (Positions): On the grid of patches.
        prefix (int): How many tokens stand in front of the grid's.

    Returns:
        Positions: On all tokens. Tokens in front stand for themselves only.
    """
    if not prefix:
        return positions
    keep, drop, nearest = positions
    front = torch.arange(prefix, device=keep.device)
    if nearest is not None:
        index, starts = nearest
        index = torch.arange(drop.shape[-1], device=drop.device) if index is None else index
        nearest = Nearest(index + prefix, F.pad(starts, (prefix, 0)))
    return Positions(torch.cat([front.expand(*keep.shape[:-1], -1), keep + prefix], -1), drop + prefix, nearest)
