"""The signs of a feature map, one bit an element, for ReLUs whose output is recomputed in the backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ['SignBits']

_BITS = 8


class SignBits(NamedTuple):
    """Which elements of a ReLU's output are positive.

    A kernel may answer differently when it runs again (``cudnn.benchmark``, other threads): an element near zero then
    changes its sign, and the ReLU's gradient changes by the whole incoming gradient, not by a rounding error. The
    stored signs keep the recomputed output on the side of zero where it was.

    Attributes:
        packed (Tensor): Bytes, shape (ceil(numel / 8),). A set bit is an element that is zero. Bit i of all bytes
            belongs to the i-th of eight parts of the map in the order of its memory, so that packing is a few
            contiguous passes.
        channels_last (bool): Whether channels are the fastest dimension of that order.
    """

    packed: Tensor
    channels_last: bool

    @classmethod
    def pack(cls, y: Tensor) -> 'SignBits':
        """Stores the signs of a ReLU's output.

        Args:
            y (Tensor): Shape (N, C, H, W).

        Returns:
            SignBits: Its signs.
        """
        channels_last = not y.is_contiguous()
        flat = _flat(y, channels_last)
        packed = flat.new_zeros(-(-len(flat) // _BITS), dtype=torch.uint8)
        for i, part in enumerate(flat.split(len(packed)) if len(flat) else ()):
            # Not `part > 0`: plain ReLU passes the gradient of NaN, so that gradient scaling skips the step.
            packed[: len(part)].add_(torch.le(part, 0).view(torch.uint8), alpha=1 << i)
        return cls(packed, channels_last)

    def relu_(self, u: Tensor) -> Tensor:
        """Applies the ReLU to a recomputed map in place.

        Args:
            u (Tensor): What the ReLU is applied to, shape (N, C, H, W).

        Returns:
            Tensor: The output, positive exactly where the first output was. It is ``u`` where the layout permits.
        """
        u = u.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        flat = _flat(u.clamp_min_(torch.finfo(u.dtype).tiny), self.channels_last)
        for i, part in enumerate(flat.split(len(self.packed)) if len(flat) else ()):
            part.mul_(self.packed[: len(part)].bitwise_and(1 << i).eq_(0).to(part.dtype))
        return u


def _flat(x, channels_last):
    """Returns the elements in the order of their memory, as a view wherever they are dense."""
    return (x.permute(0, 2, 3, 1) if channels_last else x).reshape(-1)
