"""Max pooling of a feature map, optionally after a ReLU, which saves one byte for each window."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of
from .common.layouts import memory_format

__all__ = ['LARGEST_WINDOW', 'PoolSettings', 'PoolTensors', 'max_pool']

aten = torch.ops.aten
_NOWHERE = 255  # stands for the place of a maximum that is not positive, whose gradient the ReLU stops
LARGEST_WINDOW = _NOWHERE  # number of places that a byte can count from 0, besides _NOWHERE


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Settings of :func:`max_pool`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        kernel, stride (tuple[int, int]): Size and distance of the windows, in pixels. Default: (2, 2).
        padding, dilation (tuple[int, int]): Padding and dilation of the windows. Default: (0, 0), (1, 1).
        ceil_mode (bool): Whether windows may end outside of the map. Default: False.
        relu (bool): Whether a ReLU is applied to the input first. Default: False.

    Raises:
        ValueError: If a window has more than :data:`LARGEST_WINDOW` places.
    """

    form: Form = Form()
    kernel: tuple[int, int] = (2, 2)
    stride: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    relu: bool = False

    def __post_init__(self):
        if self.kernel[0] * self.kernel[1] > LARGEST_WINDOW:
            raise ValueError(
                f'kernel={self.kernel} has more than {LARGEST_WINDOW} places, which one byte cannot count; '
                'use torch.nn.functional.max_pool2d'
            )


class PoolTensors(NamedTuple):
    """Input of :func:`max_pool`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
    """

    x: Tensor


PoolGradients = gradients_of(PoolTensors)


class PoolSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        places (Tensor): Place of each maximum in its window, row * kernel width + column, uint8, shape (N, C, H', W').
        shape (tuple[int, ...]): Shape of the input.
        layout (torch.memory_format): Memory layout of the input.
    """

    places: Tensor
    shape: tuple[int, ...]
    layout: torch.memory_format


def max_pool(settings: PoolSettings, tensors: PoolTensors) -> Tensor:
    """Compute ``maxpool(x)`` or ``maxpool(relu(x))``.

    torch saves the input, although its backward pass reads only the shape, and the index of each maximum in eight
    bytes. Here one byte holds the place of the maximum in its window. A ReLU commutes with the maximum and stops the
    gradient of windows whose maximum is not positive, so one more value of this byte is all that its backward pass
    needs.

    Args:
        settings (PoolSettings): Settings.
        tensors (PoolTensors): Input.

    Returns:
        Tensor: Shape (N, C, H', W').
    """
    if settings.form.implementation == 'reference':
        x = F.relu(tensors.x) if settings.relu else tensors.x
        return F.max_pool2d(x, *_geometry(settings))
    return _max_pool(settings, tensors)


def _geometry(s):
    return s.kernel, s.stride, s.padding, s.dilation, s.ceil_mode


def _forward(settings, tensors, needs):
    x = tensors.x
    out, indices = aten.max_pool2d_with_indices.default(x, *_geometry(settings))
    out = out.relu_() if settings.relu else out
    if not needs.x:
        return out, None
    # An index is row * W + column of the map, and H * W is below 2^31.
    indices, width, across = indices.to(torch.int32), x.shape[3], settings.kernel[1]
    rows = indices.floor_divide(width)
    if settings.dilation == (1, 1):
        # With p and q the first row and column of the window, and column = index - row * W, the place is
        # (row - p) * across + column - q = index - row * (W - across) - (p * across + q).
        places = indices.sub_(rows.mul_(width - across)).sub_(_first_places(settings, indices, across, torch.int32))
    else:
        columns, (down, right) = indices.sub_(rows * width), settings.dilation
        rows.sub_(_first_lines(settings, rows, 0, 1, torch.int32).view(-1, 1)).floor_divide_(down)
        columns.sub_(_first_lines(settings, rows, 1, 1, torch.int32)).floor_divide_(right)
        places = rows.mul_(across).add_(columns)
    places = places.to(torch.uint8)
    if settings.relu:
        places.masked_fill_(out <= 0, _NOWHERE)
    return out, PoolSaved(places, x.shape, memory_format(x))


def _first_lines(s, windows, i, by, dtype):
    """Return the first row (i = 0) or column (i = 1) of each window, multiplied by a number."""
    start, step = -s.padding[i] * by, s.stride[i] * by
    return torch.arange(start, start + windows.shape[2 + i] * step, step, device=windows.device, dtype=dtype)


def _first_places(s, windows, width, dtype):
    """Return row * width + column of the first place of each window, shape (H', W')."""
    return _first_lines(s, windows, 0, width, dtype).view(-1, 1) + _first_lines(s, windows, 1, 1, dtype)


def _backward(settings, saved, grad, needs):
    places = saved.places
    if settings.relu:
        stopped = places == _NOWHERE
        grad, places = grad.masked_fill(stopped, 0), places.masked_fill(stopped, 0)
    (_, across), (down, right), width = settings.kernel, settings.dilation, saved.shape[3]
    # With place = i * across + j, the index is that of the first place + i * down * W + j * right.
    places = places.to(torch.int32)
    rows = places.floor_divide(across)
    places = places if right == 1 else places.mul_(right)
    places = places.add_(rows, alpha=down * width - right * across)
    indices = places + _first_places(settings, places, width, torch.int64)
    if settings.relu:
        # The first place of a stopped window may be in the padding. Its gradient of 0 is added to another element then,
        # since torch's kernels write wherever an index points to.
        indices.clamp_min_(0)
    # The backward pass reads the shape and the layout of the input, and none of its values.
    like = torch.empty(saved.shape, dtype=grad.dtype, device=grad.device, memory_format=saved.layout)
    return PoolGradients(aten.max_pool2d_with_indices_backward.default(grad, like, *_geometry(settings), indices))


_max_pool = Operation('MaxPool', _forward, _backward, PoolGradients)
