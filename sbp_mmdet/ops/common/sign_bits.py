"""The signs of a feature map, one bit an element, for ReLUs whose output is recomputed in the backward pass."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['SignBits']

_BITS = 8


class SignBits(NamedTuple):
    """Bit mask of the positive elements of a ReLU's output.

    A kernel may round differently when it runs again (``cudnn.benchmark``, other threads). An element near zero may
    then change its sign, and the ReLU's gradient changes by the whole incoming gradient, not by a rounding error. The
    saved signs keep each recomputed element on its side of zero.

    Attributes:
        packed (Tensor): Bytes, shape (ceil(numel / 8),). A set bit is an element that is zero. Bit i of all bytes
            belongs to the i-th of eight parts of the map in the order of its memory, so that packing is three
            contiguous sums, each half as long as the one before.
        channels_last (bool): Whether channels are the fastest dimension of that order.
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
        # Not `y > 0`: plain ReLU passes the gradient of NaN, so that gradient scaling skips the step.
        bits = torch.le(_flat(y, channels_last), 0).view(torch.uint8)
        if len(bits) % _BITS:
            bits = F.pad(bits, (0, -len(bits) % _BITS))
        for number in (4, 2, 1):
            first, second = bits.view(2, -1)
            bits = torch.add(first, second, alpha=1 << number)
        return cls(bits, channels_last)

    def relu_(self, u: Tensor) -> Tensor:
        """Apply the ReLU to a recomputed map in place.

        Args:
            u (Tensor): Input of the ReLU, shape (N, C, H, W).

        Returns:
            Tensor: The output, positive exactly where the first output was. It is ``u`` itself if the layout permits.
        """
        u = u.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        flat = _flat(u.clamp_min_(torch.finfo(u.dtype).tiny), self.channels_last)
        places = torch.arange(_BITS, dtype=torch.uint8, device=u.device)
        bits = self.packed.bitwise_right_shift(places[:, None]).bitwise_and_(1)
        flat.masked_fill_(bits.view(torch.bool).view(-1)[: len(flat)], 0)
        return u


def _flat(x, channels_last):
    """Return the elements in the order of their memory, as a view wherever they are dense."""
    return (x.permute(0, 2, 3, 1) if channels_last else x).reshape(-1)
