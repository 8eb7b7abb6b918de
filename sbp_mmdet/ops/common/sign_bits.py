"""The signs of a feature map, one bit an element, for ReLUs whose output is recomputed in the backward pass."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['SignBits']

_BITS = 8
# Multiplies eight bytes, each 0 or 1, that lie side by side in an integer: the highest byte of the product has their
# bits, the first byte's lowest. Every other bit of the product goes to a place of its own, so that nothing is carried.
_GATHER = 0x0102040810204080


class SignBits(NamedTuple):
    """Bit mask of the positive elements of a ReLU's output.

    A kernel may round differently when it runs again (``cudnn.benchmark``, other threads). An element near zero may
    then change its sign, and the ReLU's gradient changes by the whole incoming gradient, not by a rounding error. The
    saved signs keep each recomputed element on its side of zero.

    Attributes:
        packed (Tensor): Bytes, shape (ceil(numel / 8),). A set bit is an element that is positive. A byte holds eight
            elements that lie side by side in memory, the first in its lowest bit.
        channels_last (bool): Whether channels are the fastest dimension in memory.
    """

    packed: Tensor
    channels_last: bool

    @classmethod
    def pack(cls, y: Tensor) -> 'SignBits':
        """Return the signs of a ReLU's output.

        Args:
            y (Tensor): The output, shape (N, C, H, W).

        Returns:
            SignBits: The signs.
        """
        channels_last = not y.is_contiguous()
        # Not `y > 0`: plain ReLU passes the gradient of NaN, so that gradient scaling skips the step. A cast to bool
        # asks the same as `y != 0`, of which CPUs have no fast kernel.
        bits = (y.permute(0, 2, 3, 1) if channels_last else y).reshape(-1).bool()
        if rest := -bits.shape[0] % _BITS:
            bits = F.pad(bits, (0, rest))
        gathered = bits.view(torch.int64).mul_(_GATHER)
        return cls(gathered.view(torch.uint8)[_BITS - 1 :: _BITS].contiguous(), channels_last)

    def relu_(self, u: Tensor) -> Tensor:
        """Apply the ReLU to a recomputed map in place.

        Args:
            u (Tensor): Input of the ReLU, shape (N, C, H, W).

        Returns:
            Tensor: The output, positive exactly where the first output was. It is ``u`` itself if the layout permits.
        """
        u = u.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        u.clamp_min_(torch.finfo(u.dtype).tiny)
        # A CPU multiplies ten times faster than it fills by a mask; a GPU multiplies two data types in a slow kernel.
        masks = u.device.type != 'cpu'
        bits = _bytes_of_bits(u.device, masks).index_select(0, self.packed.int()).view(torch.uint8)
        if rest := -u.numel() % _BITS:
            bits = bits[:-rest]
        flat = (u.permute(0, 2, 3, 1) if self.channels_last else u).view(-1)
        if masks:
            flat.masked_fill_(bits.view(torch.bool), 0)
        else:
            flat.mul_(bits)
        return u

    def at(self, shape: tuple, images: Tensor, rows: Tensor, columns: Tensor, first: Tensor | int = 0) -> Tensor:
        """Return whether the elements at some positions are positive.

        Args:
            shape (tuple): Shape of the map, (N, C, H, W). H may be a tensor with a number for each position, shape
                (K, 1).
            images (Tensor): Index of the image of each position, shape (K, 1).
            rows (Tensor): Index of its row, shape (K, 1).
            columns (Tensor): Index of its column, shape (K, 1).
            first (Tensor | int): Index of the map's first bit, which may have shape (K, 1). Default: 0.

        Returns:
            Tensor: Bools, shape (K, C).
        """
        _, c, h, w = shape
        channels = torch.arange(c, device=rows.device)
        if self.channels_last:
            index = ((images * h + rows) * w + columns) * c + first + channels
        else:
            index = (images * c + channels) * (h * w) + (rows * w + columns + first)
        return (self.packed[index // _BITS] >> (index % _BITS) & 1).to(torch.bool)

    @classmethod
    def at_in_strips(
        cls, signs: Sequence['SignBits'], strip_height: int, shape: tuple, images: Tensor, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """Like :meth:`at`, for a map whose strips of rows were packed one by one.

        Args:
            signs (Sequence[SignBits]): Signs of all strips, in order.
            strip_height (int): Number of rows of each strip; the last one may have fewer.
            shape (tuple): Shape of the whole map.
            images (Tensor): Index of the image of each position, shape (K,).
            rows (Tensor): Index of its row in the whole map, shape (K,).
            columns (Tensor): Index of its column, shape (K,).
        """
        images, rows, columns = (x[:, None] for x in (images, rows, columns))
        if len(signs) == 1:
            return signs[0].at(shape, images, rows, columns)
        n, c, height, width = shape
        strips = rows.div(strip_height, rounding_mode='floor')
        start, bits = strips * strip_height, _BITS * len(signs[0].packed)
        joined = cls(torch.cat([one.packed for one in signs]), signs[0].channels_last)
        shape = n, c, (height - start).clamp_max_(strip_height), width
        return joined.at(shape, images, rows - start, columns, strips * bits)


@functools.lru_cache(maxsize=8)
def _bytes_of_bits(device, inverted):
    """Return for each byte its eight bits, or their inverses, as the bytes 0 and 1 of an integer, shape (256,)."""
    bits = torch.arange(1 << _BITS, device=device)[:, None] >> torch.arange(_BITS, device=device)
    return (bits & 1 ^ int(inverted)).to(torch.uint8).view(torch.int64).flatten()
