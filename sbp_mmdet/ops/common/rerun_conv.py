"""Convolutions whose output is recomputed in the backward pass, from the input that their weight's gradient needs."""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd_function import Operation, gradients_of
from .precision import Stored, cast, store

__all__ = ['Conv', 'ConvSettings', 'convolve']


@dataclasses.dataclass(frozen=True)
class ConvSettings:
    """Settings of a convolution with a bias and zero padding.

    Attributes:
        stride, padding, dilation (tuple[int, int]): Geometry, in pixels.
        groups (int): Number of groups.
        dtype (torch.dtype): Precision of the convolution.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    dtype: torch.dtype


_settings = functools.lru_cache(maxsize=256)(ConvSettings)


class Conv(NamedTuple):
    """A convolution with its saved input, which is saved anyway for the gradient of the weight.

    Attributes:
        input (Stored): Saved input, shape (N, C, H, W).
        weight, bias (Tensor): Parameters, in the precision of the convolution if the input is not rounded.
        settings (ConvSettings): Settings.
    """

    input: Stored
    weight: Tensor
    bias: Tensor
    settings: ConvSettings

    def run(self) -> Tensor:
        """Return the output of the convolution, computed from its stored input."""
        return _run(self.settings, self.input.load(self.settings.dtype), self.weight, self.bias)


def convolve(
    conv: torch.nn.Conv2d, parameters: tuple[Tensor, Tensor], x: Tensor, storage: str = 'native'
) -> tuple[Tensor, Conv]:
    """Run a convolution whose output can be recomputed.

    Args:
        conv (torch.nn.Conv2d): The module, whose settings are read.
        parameters (tuple[Tensor, Tensor]): Its weight and bias.
        x (Tensor): Input, shape (N, C, H, W), in the precision of the convolution, so that autograd and the result
            share one saved tensor.
        storage (str): How ``x`` is saved, 'native' or 'int8', see :class:`.autograd_function.Form`. Default: 'native'.

    Returns:
        tuple[Tensor, Conv]: The output, and the convolution that recomputes it.
    """
    own, (weight, bias) = conv.__dict__, parameters
    s = _settings(own['stride'], own['padding'], own['dilation'], own['groups'], x.dtype)
    if storage == 'native':  # not by calling the module, which calls five functions
        # Autograd saves the weight in this precision for the input's gradient.
        weight, bias = cast(weight, s.dtype), cast(bias, s.dtype)
        out = torch.conv2d(x, weight, bias, s.stride, s.padding, s.dilation, s.groups)
        return out, Conv(Stored(x), weight, bias, s)
    with torch.no_grad():
        rerun = Conv(store(x, storage, (2, 3)), weight, bias, s)
    return _convolution(s, _Tensors(x, weight, bias, rerun.input)), rerun


class _Tensors(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    stored: Stored


_Gradients = gradients_of(_Tensors, 'stored')


def _run(settings, x, weight, bias):
    s = settings
    weight, bias = cast(weight, s.dtype), cast(bias, s.dtype)
    return torch.conv2d(x, weight, bias, s.stride, s.padding, s.dilation, s.groups)


def _forward(settings, tensors, needs):
    return _run(settings, *tensors[:3]), Conv(tensors.stored, tensors.weight, tensors.bias, settings)


def _backward(settings, saved, grad, needs):
    """Compute the gradients. In eight bits the weight gradient is that of the rounded input; all others are exact."""
    dx, dweight, dbias = torch.ops.aten.convolution_backward.default(
        grad,
        saved.input.load(settings.dtype),
        saved.weight.to(settings.dtype),
        [len(saved.bias)],
        *(settings.stride, settings.padding, settings.dilation, False, [0, 0], settings.groups),
        list(needs),
    )
    dweight = dweight.to(saved.weight.dtype) if needs.weight else None
    return _Gradients(dx, dweight, dbias.to(saved.bias.dtype) if needs.bias else None)


_convolution = Operation('Convolution', _forward, _backward, _Gradients)
