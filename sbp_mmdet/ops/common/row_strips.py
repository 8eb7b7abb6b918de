"""Convolutions that keep the size of a map, computed in strips of rows.

A strip of the output is computed from the same rows of the input and some rows above and below, the halo. Zeros are
padded only at the border of the image. In the backward pass each strip sends the gradients of its own rows, halo
included, into the gradient of the whole map, so nothing is computed twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd_function import Form

__all__ = ['Convolution', 'Strip', 'StripSettings', 'cut_into_strips', 'zeros_in']

aten = torch.ops.aten
# Largest number of elements of a strip's map. On a GPU a launch costs more than memory.
_ELEMENTS = {'cpu': 2**21, 'cuda': 2**23}


class Strip(NamedTuple):
    """Strip of rows of a feature map.

    Attributes:
        start (int): Index of the first row.
        stop (int): Index after the last row.
    """

    start: int
    stop: int

    def of(self, x: Tensor) -> Tensor:
        """Return these rows of a map (N, C, H, W), as a view."""
        return x if (self.start, self.stop) == (0, x.shape[2]) else x[:, :, self.start : self.stop]


def cut_into_strips(shape: Sequence[int], device: torch.device) -> list[Strip]:
    """Cut the rows of a map into strips of about the same height.

    Args:
        shape (Sequence[int]): Shape of the map, (N, C, H, W).
        device (torch.device): Device of the map.

    Returns:
        list[Strip]: The strips in order.
    """
    n, channels, height, width = shape
    most = max(_ELEMENTS.get(device.type, _ELEMENTS['cuda']) // max(n * channels * width, 1), 1)
    each = -(-height // max(-(-height // most), 1))
    return [Strip(start, min(start + each, height)) for start in range(0, height, max(each, 1))]


def zeros_in(shape: Sequence[int], like: Tensor, layout: torch.memory_format) -> Tensor:
    """Return zeros in the precision and on the device of a tensor.

    Args:
        shape (Sequence[int]): Shape of the zeros.
        like (Tensor): Tensor whose precision and device they have.
        layout (torch.memory_format): Memory layout of the zeros.
    """
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout).zero_()


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Geometry of a convolution of stride 1 that keeps the size of a map.

    Attributes:
        padding, dilation (tuple[int, int]): Padding and dilation of rows and columns, with
            2 * padding = dilation * (kernel - 1). Default: (0, 0), (1, 1).
        groups (int): Number of groups. Default: 1.
    """

    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def reads(self, strip: Strip, height: int) -> Strip:
        """Return the rows of the input that rows of the output are computed from.

        Args:
            strip (Strip): Rows of the output.
            height (int): Number of rows of the map.
        """
        return Strip(max(strip.start - self.padding[0], 0), min(strip.stop + self.padding[0], height))

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, strip: Strip, height: int) -> Tensor:
        """Compute rows of the output.

        Args:
            x (Tensor): Rows of the input, those of :meth:`reads`.
            weight (Tensor): Weight of the convolution.
            bias (Tensor | None): Bias of the convolution.
            strip (Strip): Rows of the output.
            height (int): Number of rows of the map.

        Returns:
            Tensor: The rows of the output.
        """
        x, padding, _ = self._padded(x, strip, height)
        return F.conv2d(x, weight, bias, 1, padding, self.dilation, self.groups)

    def run_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, strip: Strip, height: int, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients that come from some rows of the output.

        Args:
            grad (Tensor): Gradient of the rows of the output.
            x (Tensor): Rows of the input, those of :meth:`reads`.
            weight (Tensor): Weight of the convolution.
            strip (Strip): Rows of the output.
            height (int): Number of rows of the map.
            needs (Sequence[bool]): Whether input, weight and bias need a gradient.

        Returns:
            tuple[Tensor | None, ...]: Gradients of ``x``, the weight and the bias.
        """
        rows = x.shape[2]
        x, padding, above = self._padded(x, strip, height)
        sizes = [len(weight)] if needs[2] else None
        geometry = (1, 1), padding, self.dilation, False, [0, 0], self.groups
        dx, dweight, dbias = aten.convolution_backward(grad, x, weight, sizes, *geometry, [*needs])
        return dx[:, :, above : above + rows] if needs[0] else None, dweight, dbias

    def _padded(self, x, strip, height):
        """Pad rows of the input with zeros where the map ends.

        Returns:
            tuple[Tensor, tuple[int, int], int]: The rows, the padding that is left to the convolution, and the number
            of rows of zeros above.
        """
        above = max(self.padding[0] - strip.start, 0)
        below = max(strip.stop + self.padding[0] - height, 0)
        if above == below:  # the whole map, or none of its ends
            return x, (above, self.padding[1]), 0
        return F.pad(x, (0, 0, above, below)), (0, self.padding[1]), above


@dataclasses.dataclass(frozen=True)
class StripSettings:
    """Settings of an operation with one convolution, besides 1x1 convolutions, whose backward pass runs in strips.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        conv (Convolution): Geometry of the convolution. Default: 3x3.
        dtype (torch.dtype | None): Precision of the convolutions. If ``None``, that of autocast, or of ``x``. Default:
            None.
    """

    form: Form = Form()
    conv: Convolution = Convolution(padding=(1, 1))
    dtype: torch.dtype | None = None
