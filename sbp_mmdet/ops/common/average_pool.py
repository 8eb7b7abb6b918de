"""Average pooling, and its backward pass as a function of its own."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ['AveragePool', 'average_pool', 'average_pool_backward']


class AveragePool(NamedTuple):
    """Settings of ``nn.AvgPool2d``."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool
    count_include_pad: bool


def average_pool(settings: AveragePool | None, x: Tensor) -> Tensor:
    """Return the average pooling of a map, or the map itself if there are no settings.

    Args:
        settings (AveragePool | None): Settings of the pooling.
        x (Tensor): Shape (N, C, H, W).
    """
    return x if settings is None else F.avg_pool2d(x, *settings)


def average_pool_backward(settings: AveragePool | None, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the input of :func:`average_pool`.

    Args:
        settings (AveragePool | None): Settings of the pooling.
        x (Tensor): Input.
        grad (Tensor): Gradient of the output.
    """
    if settings is None:
        return grad
    kernel_size, stride, padding, *how = settings
    return torch.ops.aten.avg_pool2d_backward.default(grad, x, [*kernel_size], [*stride], [*padding], *how, None)
