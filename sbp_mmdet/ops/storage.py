"""How a tensor waits for the backward pass: as it is, or rounded to eight bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK
from .precision import accumulator

__all__ = ['STORAGES', 'Stored', 'store']

STORAGES = ('native', 'int8')


class Stored(NamedTuple):
    """A tensor in its stored form.

    Attributes:
        values (Tensor | None): The tensor itself, or int8.
        scale (Tensor | None): What the int8 values are multiplied by, broadcastable; None: nothing.
    """

    values: Tensor | None
    scale: Tensor | None = None

    def part(self, images: slice, rows: slice) -> 'Stored':
        """Some rows of some images of tokens (N, K, ...)."""
        return Stored(self.values[images, rows], None if self.scale is None else self.scale[images])

    def load(self, dtype: torch.dtype) -> Tensor:
        """The tensor in ``dtype``."""
        if self.scale is None:
            return self.values.to(dtype)
        return torch.mul(self.values, self.scale, out=torch.empty_like(self.values, dtype=dtype))


def store(x: Tensor, storage: str, positions: int | tuple[int, ...]) -> Stored:
    """Rounds to the nearest of 255 steps between the largest magnitude of each image and channel and its negative.

    One scale for each channel and not for each position: trained ConvNeXts have channels that are far larger than the
    rest, next to which the others would be rounded away. A value that is not finite makes its channel NaN when it is
    loaded, so that gradient scaling skips the step as it does without rounding.

    Args:
        x (Tensor): Shape (N, ...).
        storage (str): 'native' or 'int8'.
        positions (int | tuple[int, ...]): The dimensions of the positions, which share a scale; not the first.

    Returns:
        Stored: The stored form.
    """
    if storage == 'native' or not x.numel():
        return Stored(x)
    scale = torch.maximum(x.amax(positions, keepdim=True), -x.amin(positions, keepdim=True)).to(accumulator(x)) / 127
    divisor = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    values = torch.empty_like(x, dtype=torch.int8)
    together = max(CHUNK['cuda'] // 4 // x[0].numel(), 1)  # some images at a time: the quotient is in full precision
    for part, rows, unit in zip(values.split(together), x.split(together), divisor.split(together), strict=True):
        part.copy_((rows / unit).round_())
    return Stored(values, scale)
