"""The signs of a feature map, one bit an element, for ReLUs whose output is recomputed in the backward pass.

A kernel may round differently when it runs again (``cudnn.benchmark``, other threads). An element near zero may then
change its sign, and the ReLU's gradient changes by the whole incoming gradient, not by a rounding error. The saved
signs keep each recomputed element on its side of zero.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['PackedSigns', 'SignBits', 'SignPacker', 'SignReader']

_BITS = 8
# Multiplies eight bytes, each 0 or 1, that lie side by side in an integer: the highest byte of the product has their
# bits, the first byte's lowest. Every other bit of the product goes to a place of its own, so that nothing is carried.
_GATHER = 0x0102040810204080
# Most elements of maps whose signs are packed together. Unpacked, each element takes a byte. With four times as many, a
# step of Mask R-CNN R-50 at 2 x 800 x 1333 would be counted 2 % higher; the signs of its large maps are packed alone.
_GROUP = 2**22


class SignBits(NamedTuple):
    """Bit mask of the positive elements of a ReLU's output.

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
        bits, channels_last = _bits_of(y)
        return cls(_pack(bits), channels_last)

    def relu_(self, u: Tensor) -> Tensor:
        """Apply the ReLU to a recomputed map in place.

        Args:
            u (Tensor): Input of the ReLU, shape (N, C, H, W).

        Returns:
            Tensor: The output, positive exactly where the first output was. It is ``u`` itself if the layout permits.
        """
        return _relu_(u, _unpack(self.packed, u.numel()), self.channels_last)

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


class PackedSigns(NamedTuple):
    """Signs of the outputs of several ReLUs, packed in groups of maps.

    Attributes:
        packed (tuple[Tensor, ...]): Bytes of each group, as in :class:`SignBits`, one map after the other.
        groups (list[tuple[int, ...]]): Numbers of the maps of each group, in order.
        maps (list[tuple[int, int, bool]]): For each map its group, its number of elements, and whether channels are its
            fastest dimension in memory.
    """

    packed: tuple[Tensor, ...]
    groups: list[tuple[int, ...]]
    maps: list[tuple[int, int, bool]]


class SignPacker:
    """Packer of the signs of several ReLUs' outputs. Small maps are packed together, which takes fewer calls."""

    def __init__(self):
        self._packed, self._groups, self._maps, self._waiting = [], [], [], {}

    def add(self, y: Tensor, kind: str) -> int:
        """Add the output of a ReLU, and return the number that :meth:`SignReader.relu_` takes.

        Args:
            y (Tensor): The output, shape (N, C, H, W). It is not needed afterwards.
            kind (str): A name. Maps of one kind may be packed together, so they should be read one after the other.
        """
        (bits, channels_last), number = _bits_of(y), len(self._maps)
        size = bits.shape[0]
        self._maps.append((None, size, channels_last))
        if 2 * size > _GROUP:
            self._close([(number, bits)])
            return number
        waiting = self._waiting.setdefault(kind, [])
        if size + sum([other.shape[0] for _, other in waiting]) > _GROUP:
            self._close(waiting)
            waiting.clear()
        waiting.append((number, bits))
        return number

    def finish(self) -> PackedSigns:
        """Return the signs of all maps that were added."""
        for waiting in self._waiting.values():
            self._close(waiting)
        return PackedSigns(tuple(self._packed), self._groups, self._maps)

    def _close(self, group):
        numbers, bits = zip(*group, strict=True)
        for number in numbers:
            self._maps[number] = len(self._groups), *self._maps[number][1:]
        self._groups.append(numbers)
        self._packed.append(_pack(bits[0] if len(bits) == 1 else torch.cat(bits)))


class SignReader:
    """Applies ReLUs to recomputed maps by the signs that a :class:`SignPacker` packed.

    A group of maps stays unpacked until each of them was read.

    Args:
        signs (PackedSigns): The signs.
    """

    def __init__(self, signs: PackedSigns):
        self._signs, self._unpacked = signs, {}

    def relu_(self, number: int, u: Tensor) -> Tensor:
        """Apply a ReLU in place, as :meth:`SignBits.relu_`.

        Args:
            number (int): What :meth:`SignPacker.add` returned for the ReLU's output.
            u (Tensor): Input of the ReLU, shape (N, C, H, W).
        """
        group, _, channels_last = self._signs.maps[number]
        if number not in self._unpacked:
            numbers = self._signs.groups[group]
            sizes = [self._signs.maps[i][1] for i in numbers]
            bits = torch.split_with_sizes(_unpack(self._signs.packed[group], sum(sizes)), sizes)
            self._unpacked.update(zip(numbers, bits, strict=True))
        return _relu_(u, self._unpacked.pop(number), channels_last)


def _bits_of(y):
    """Return the signs as bools in the order of memory, and whether channels are the fastest dimension there."""
    channels_last = not y.is_contiguous()
    # Not `y > 0`: plain ReLU passes the gradient of NaN, so that gradient scaling skips the step. A cast to bool asks
    # the same as `y != 0`, of which CPUs have no fast kernel.
    return (y.permute(0, 2, 3, 1) if channels_last else y).reshape(-1).bool(), channels_last


def _pack(bits):
    """Pack bools, which are overwritten, shape (K,), into bytes."""
    if rest := -bits.shape[0] % _BITS:
        bits = F.pad(bits, (0, rest))
    gathered = bits.view(torch.int64).mul_(_GATHER)
    return gathered.view(torch.uint8)[_BITS - 1 :: _BITS].contiguous()


def _unpack(packed, size):
    """Return what :func:`_relu_` multiplies or masks the elements by, shape (K,) with their number K."""
    masks = packed.device.type != 'cpu'  # on a CPU, multiplying by zeros and ones is ten times as fast as filling
    bits = _bytes_of_bits(packed.device, masks).index_select(0, packed.int())
    bits = bits.view(torch.bool if masks else torch.uint8)
    return bits if bits.shape[0] == size else bits[:size]


def _relu_(u, bits, channels_last):
    """Apply a ReLU in place whose signs :func:`_unpack` returned: make all elements positive, then set some to 0."""
    u = u.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    u.clamp_min_(torch.finfo(u.dtype).tiny)
    flat = (u.permute(0, 2, 3, 1) if channels_last else u).view(-1)
    if bits.dtype is torch.bool:
        flat.masked_fill_(bits, 0)
    else:
        flat.mul_(bits)
    return u


@functools.lru_cache(maxsize=8)
def _bytes_of_bits(device, inverted):
    """Return for each byte its eight bits, or their inverses, as the bytes 0 and 1 of an integer, shape (256,)."""
    numbers, places = torch.arange(1 << _BITS, device=device), torch.arange(_BITS, device=device)
    bits = torch.bitwise_right_shift(numbers[:, None], places)  # `>>` of torch 2.1 does not broadcast on meta tensors
    return (bits & 1 != int(inverted)).to(torch.uint8).view(torch.int64).flatten()
