"""Resizing of position embeddings from files trained with another image size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['fit_positions', 'interpolate_positions']


def interpolate_positions(patches: Tensor, grid: tuple[int, int], size: tuple[int, int], mode: str) -> Tensor:
    """Interpolate a position embedding to another grid.

    Args:
        patches (Tensor): Embedding of the patches, row by row, shape (1, h * w, C).
        grid (tuple[int, int]): h and w.
        size (tuple[int, int]): Rows and columns of the result.
        mode (str): See ``torch.nn.functional.interpolate``.

    Returns:
        Tensor: Shape (1, rows * columns, C).
    """
    if tuple(grid) == tuple(size):
        return patches
    rows = patches.transpose(1, 2).unflatten(2, grid)
    align = {} if mode in ('nearest', 'nearest-exact', 'area') else dict(align_corners=False)
    return F.interpolate(rows, size, mode=mode, **align).flatten(2).transpose(1, 2)


def fit_positions(
    given: Tensor, own: Tensor, grid: tuple[int, int], pretrained_grid: tuple[int, int] | None, mode: str
) -> Tensor:
    """Resize the position embedding of a file to that of a model.

    Args:
        given (Tensor): Embedding in the file, with or without one for the class token, shape (1, L, C).
        own (Tensor): Embedding of the model, shape (1, L', C).
        grid (tuple[int, int]): Rows and columns of the model's patches.
        pretrained_grid (tuple[int, int] | None): Rows and columns of the file's patches. If ``None``, inferred.
        mode (str): See ``torch.nn.functional.interpolate``.

    Returns:
        Tensor: Embedding of shape (1, L', C), zero for a class token that the file lacks; ``given`` if the grid of its
        patches is unknown.

    Raises:
        ValueError: If the grid of the file is ambiguous.
    """
    tokens = own.shape[1] - math.prod(grid)  # in front of the patches
    if given.shape[2] != own.shape[2]:
        return given
    for front in dict.fromkeys((tokens, 0)):
        if own_grid := _grid_of(given.shape[1] - front, grid, pretrained_grid):
            patches = interpolate_positions(given[:, front:], own_grid, grid, mode)
            first = given[:, :front] if front else given.new_zeros(1, tokens, given.shape[2])
            return torch.cat([first, patches], 1)
    return given


def _grid_of(number, grid, pretrained_grid):
    """Return rows and columns of a number of patches in a file, or ``None`` if they form no rectangle."""
    if pretrained_grid is not None:
        return pretrained_grid if math.prod(pretrained_grid) == number else None
    height, width = grid
    if number == height * width:
        return grid
    side = math.isqrt(max(number, 0))
    if not number or side * side != number:
        return None
    rows = math.isqrt(number * height // width)  # of a grid with the proportions of the model's
    if height != width and rows * rows * width == number * height:
        columns = number // rows
        raise ValueError(
            f'the position embedding of the file has {number} patches, in {side} x {side} or in {rows} x {columns}; '
            f'write pretrained_grid=({side}, {side}) or pretrained_grid=({rows}, {columns}) in the backbone'
        )
    return side, side
