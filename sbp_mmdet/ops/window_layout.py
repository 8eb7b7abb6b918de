"""Order of the tokens of a feature map in shifted windows, for :mod:`.window_attention`."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.layouts import elements_at_a_time

__all__ = ['CollectedRows', 'WindowLayout', 'window_layout']


class WindowLayout(NamedTuple):
    """Order of the tokens once the feature map is padded, shifted and cut into windows: P places, window by window.

    Windows at the lower and right edge come last (the last one or two rows and columns), because only these have
    padding, or parts that do not attend to each other.

    Attributes:
        order (Tensor): Token of each place, shape (P,); any token where the place is padding.
        places (Tensor): Place of each token, shape (L,).
        simple (int): Number of places in windows that are not at the edge.
        pads (Tensor | None): Whether each of the other places is padding, bool, shape (P - simple, 1). If ``None``,
            there is no padding.
        apart (Tensor | None): Pairs of tokens of a window at the edge that do not attend to each other, bool, shape
            (n, 1, window^2, window^2). If ``None``, all attend to all.
    """

    order: Tensor
    places: Tensor
    simple: int
    pads: Tensor | None
    apart: Tensor | None

    def part(self, places: Tensor, chunk: slice) -> Tensor:
        """Return the places of a chunk; where it has all of them, torch is not called.

        Args:
            places (Tensor): A number for each place, such as ``order``.
            chunk (slice): The chunk.
        """
        return places if chunk.stop - chunk.start == places.shape[0] else places[chunk]

    def chunks(self, settings, images: int, channels: int) -> list[slice]:
        """Return slices of the places: whole windows, about the same number in each.

        Args:
            settings (WindowSettings): Settings of the attention, whose ``chunk`` bounds the numbers of a slice.
            images (int): Number of images.
            channels (int): Number of channels.
        """
        area = settings.window**2
        budget = settings.chunk or elements_at_a_time(self.order.device, settings.form)
        most = max(budget // (max(images, 1) * area * max(3 * channels, settings.num_heads * area)), 1)
        windows = len(self.order) // area
        step = -(-windows // -(-windows // most)) * area
        return [slice(i, min(i + step, len(self.order))) for i in range(0, len(self.order), step)]


# Two for each stage and size of images. One takes 3 MB for the largest size, and making it dozens of launches.
@functools.lru_cache(maxsize=64)
def window_layout(size: tuple[int, int], side: int, shift: int, device: torch.device) -> WindowLayout:
    """Return the order of a map's tokens in which those of a window follow each other.

    Args:
        size (tuple[int, int]): Height and width of the map.
        side (int): Side of a window.
        shift (int): Number of tokens by which windows are shifted.
        device (torch.device): Device of the order.

    Returns:
        WindowLayout: The order, and which windows have padding or tokens from opposite sides of the map.
    """
    height, width = size
    tokens = height * width
    below, right = -height % side, -width % side
    # Windows before these rows and columns hold neither padding nor tokens from the other side of the map.
    down, along = (max(n - shift, 0) // side for n in (height, width))
    simple = down * along * side**2

    def windows_of(x):  # a map
        windows = x.unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        parts = windows[:down, :along], windows[:down, along:], windows[down:]
        return torch.cat([part.reshape(-1) for part in parts])

    numbers = torch.arange(tokens, device=device).view(height, width)
    numbers = F.pad(numbers, (0, right, 0, below), value=tokens)
    order = windows_of(numbers.roll((-shift, -shift), (0, 1)))
    places = order.new_empty(tokens + 1)  # the last one stands for padding
    places[order] = torch.arange(len(order), device=device)
    pads = (order[simple:, None] == tokens) if below or right else None
    apart = None
    if shift:
        rows, columns = (_bands(n, side, shift, device) for n in (height + below, width + right))
        regions = windows_of(3 * rows[:, None] + columns)[simple:].view(-1, 1, 1, side * side)
        apart = regions != regions.mT
    return WindowLayout(order.clamp_(max=tokens - 1), places[:-1], simple, pads, apart)


def _bands(length, side, shift, device):
    """Return the number of the part of each token in a row: whole windows, and the two parts of the last one."""
    i = torch.arange(length, device=device)
    return (i >= length - side).long() + (i >= length - shift)


class CollectedRows:
    """Rows of all places, (N, P, ...), that are collected chunk by chunk. A chunk of all places is not copied.

    Args:
        places (int): Number of places P.

    Attributes:
        whole (Tensor | None): The rows, ``None`` before the first chunk.
    """

    def __init__(self, places: int):
        self._places, self.whole = places, None

    def put(self, chunk: slice, rows: Tensor) -> None:
        """Add the rows of a chunk.

        Args:
            chunk (slice): Places of the rows.
            rows (Tensor): The rows, shape (N, P', ...).
        """
        if rows.shape[1] == self._places:
            self.whole = rows
            return
        if self.whole is None:
            self.whole = rows.new_empty(rows.shape[0], self._places, *rows.shape[2:])
        self.whole[:, chunk] = rows
