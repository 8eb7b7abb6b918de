"""Backward pass of a convolution whose output has a gradient at few positions only.

The loss of a region proposal network reads some sampled anchors. At all other positions the gradient of its outputs is
exactly zero, so the products of the backward pass have as many rows as there are positions with a gradient, not as
many as the map has.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .row_strips import Convolution, Strip, zeros_in

__all__ = ['GradientPositions', 'scatter_gradient']

# Largest number of elements of the rows that a part of the input's gradient is computed from.
_ELEMENTS = 2**22


class GradientPositions(NamedTuple):
    """Positions of a feature map that have a gradient, sorted by row.

    Attributes:
        rows, images, columns (Tensor): Indices of the positions, shape (K,).
    """

    rows: Tensor
    images: Tensor
    columns: Tensor

    @classmethod
    def with_gradient(cls, grad: Tensor) -> 'GradientPositions':
        """Return the positions where a gradient is not zero. On a GPU, this waits for the gradient.

        Args:
            grad (Tensor): The gradient, shape (N, C, H, W).
        """
        return cls(*grad.any(1).transpose(0, 1).nonzero(as_tuple=True))

    def in_strips(self, strips: list[Strip]) -> list['GradientPositions']:
        """Return the positions of each strip of rows.

        Args:
            strips (list[Strip]): All strips of the map, in order.
        """
        if len(strips) == 1:
            return [self]
        ends = self.rows.new_tensor([strip.stop for strip in strips])
        ends = [0, *torch.searchsorted(self.rows, ends).tolist()]
        return [GradientPositions(*(x[a:b] for x in self)) for a, b in zip(ends, ends[1:], strict=False)]

    def gather(self, x: Tensor, start: int = 0) -> Tensor:
        """Gather the channels of a map at the positions, shape (K, C).

        Args:
            x (Tensor): Rows of the map, shape (N, C, h, W).
            start (int): Index of the first one. Default: 0.
        """
        return x.permute(0, 2, 3, 1)[self.images, self.rows - start, self.columns]

    def gather_patches(self, x: Tensor, start: int, height: int, conv: Convolution, size: tuple[int, int]) -> Tensor:
        """Gather the patches that a convolution reads for its outputs at the positions.

        Args:
            x (Tensor): Rows of the input that hold all of it, shape (N, C, h, W).
            start (int): Index of the first one.
            height (int): Number of rows of the whole map.
            conv (Convolution): Geometry of the convolution.
            size (tuple[int, int]): Height and width of its kernel.

        Returns:
            Tensor: Shape (K, *size, C).
        """
        (rows, outside_rows), (columns, outside_columns) = self._read(conv, size, (height, x.shape[3]))
        if start:
            rows = rows - start
        found = x.permute(0, 2, 3, 1)[self.images[:, None, None], rows[:, :, None], columns[:, None]]
        outside = outside_rows[:, :, None] | outside_columns[:, None]
        return found.masked_fill_(outside.unsqueeze(3), 0)

    def _read(self, conv, size, shape):
        """Return the rows and the columns that a convolution reads, shapes (K, size), and which of them lie outside.

        Those outside of a map of height and width ``shape`` are replaced by the nearest ones inside.
        """
        found = []
        for at, *geometry, length in zip(
            (self.rows, self.columns), size, conv.padding, conv.dilation, shape, strict=True
        ):
            index = at[:, None] + _offsets(at.device, *geometry)
            inside = index.clamp(0, length - 1)
            found.append((inside, inside != index))
        return found


@functools.lru_cache(maxsize=16)
def _offsets(device, number, padding, dilation):
    """Return the distances from the position of an output to what a convolution reads along an axis."""
    return torch.arange(number, device=device) * dilation - padding


def scatter_gradient(
    grad: Tensor,
    positions: GradientPositions,
    weight: Tensor,
    conv: Convolution,
    shape: tuple[int, ...],
    layout: torch.memory_format,
) -> Tensor:
    """Compute the gradient of a convolution's input.

    Each position of the input gathers the gradients of the outputs that read it, so that nothing is added up in an
    order that differs from run to run.

    Args:
        grad (Tensor): Gradient of the output at the positions, shape (K, D).
        positions (GradientPositions): The positions.
        weight (Tensor): Weight of the convolution, shape (D, C, h, w).
        conv (Convolution): Its geometry.
        shape (tuple[int, ...]): Shape of the input, (N, C, H, W).
        layout (torch.memory_format): Memory layout of the input.

    Returns:
        Tensor: The gradient, of that shape.
    """
    out, (n, _, height, width), size = zeros_in(shape, grad, layout), shape, weight.shape[2:]
    if not len(grad):
        return out
    above, left = conv.padding
    number = torch.full((n, height + 2 * above, width + 2 * left), len(grad), device=grad.device)
    number[positions.images, positions.rows + above, positions.columns + left] = torch.arange(
        len(grad), device=grad.device
    )
    (rows, _), (columns, _) = positions._read(conv, size, (height, width))  # reading one position too many does no harm
    reached = torch.zeros((n, height, width), dtype=torch.bool, device=grad.device)
    reached[positions.images[:, None, None], rows[:, :, None], columns[:, None]] = True
    grad = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])  # the last one is that of all other outputs
    weight = weight.permute(2, 3, 0, 1).flatten(0, 2)
    for images, rows, columns in zip(
        *(x.split(max(_ELEMENTS // len(weight), 1)) for x in reached.nonzero(as_tuple=True)), strict=True
    ):
        # The output at h reads the input at h + offset, so the input at h is read by the outputs at h - offset.
        from_rows = rows[:, None] - _offsets(rows.device, size[0], 2 * above, conv.dilation[0])
        from_columns = columns[:, None] - _offsets(columns.device, size[1], 2 * left, conv.dilation[1])
        readers = number[images[:, None, None], from_rows[:, :, None], from_columns[:, None]]
        out.permute(0, 2, 3, 1)[images, rows, columns] = grad[readers].flatten(1) @ weight
    return out
