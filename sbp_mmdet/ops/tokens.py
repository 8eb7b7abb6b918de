"""Positions of a grid of patches as those of a transformer's tokens."""

import torch
import torch.nn.functional as F

from ..masks import Nearest, Positions

__all__ = ['token_positions']


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
        index = torch.arange(len(drop), device=drop.device) if index is None else index
        nearest = Nearest(index + prefix, F.pad(starts, (prefix, 0)))
    return Positions(torch.cat([front, keep + prefix]), drop + prefix, nearest)
