"""Max pooling of a feature map, optionally behind a ReLU, which saves one byte for each window."""

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
    out, indices = aten.max_pool2d_with_indices(x, *_geometry(settings))
    out = out.relu_() if settings.relu else out
    if not needs.x:
        return out, None
    # An index is row * W + column of the map; H * W is below 2^31.
    rows = indices.to(torch.int32)
    columns = rows.remainder(x.shape[3])
    rows = rows.sub_(columns).floor_divide_(x.shape[3])
    places = _within(rows, 2, settings).mul_(settings.kernel[1]).add_(_within(columns, 3, settings)).to(torch.uint8)
    if settings.relu:
        places.masked_fill_(out <= 0, _NOWHERE)
    return out, PoolSaved(places, x.shape, memory_format(x))


def _within(positions, dim, s):
    """Turn rows (``dim`` 2) or columns (3) of the map into rows or columns of their windows, in place."""
    return positions.sub_(_starts(positions, dim, s)).floor_divide_(s.dilation[dim - 2])


def _starts(windows, dim, s):
    """Return the first row or column of each window, broadcastable."""
    i, count = dim - 2, windows.shape[dim]
    starts = torch.arange(count, device=windows.device, dtype=torch.int32).mul_(s.stride[i]).sub_(s.padding[i])
    return starts.view(-1, 1) if dim == 2 else starts


def _backward(settings, saved, grad, needs):
    places = saved.places
    if settings.relu:
        stopped = places == _NOWHERE
        grad, places = grad.masked_fill(stopped, 0), places.masked_fill(stopped, 0)
    (_, across), (down, right) = settings.kernel, settings.dilation
    rows = places.to(torch.int32).floor_divide_(across)
    columns = places.to(torch.int32).remainder_(across).mul_(right).add_(_starts(places, 3, settings))
    rows.mul_(down).add_(_starts(places, 2, settings))
    indices = rows.mul_(saved.shape[3]).add_(columns).long()
    # The backward pass reads the shape and the layout of the input, and none of its values.
    like = torch.empty(saved.shape, dtype=grad.dtype, device=grad.device, memory_format=saved.layout)
    return PoolGradients(aten.max_pool2d_with_indices_backward(grad, like, *_geometry(settings), indices))


_max_pool = Operation('MaxPool', _forward, _backward, PoolGradients)
