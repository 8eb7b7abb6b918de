"""Convolutions that can be run again in the backward pass, and what they store for it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .precision import no_autocast
from .storage import Stored, store

__all__ = ['Conv', 'convolve']


class Conv(NamedTuple):
    """A convolution that can be run again in the backward pass.

    Its input is stored anyway, for the gradient of the convolution's weight.

    Attributes:
        input (Stored): Shape (N, C, H, W).
        weight (Tensor): Uncast.
        bias (Tensor): Uncast.
        options (tuple): ``stride``, ``padding``, ``dilation``, ``groups``, and the precision to run in.
    """

    input: Stored
    weight: Tensor
    bias: Tensor
    options: tuple

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """What has to be saved to run it again."""
        return *self.input, self.weight, self.bias

    @classmethod
    def of_tensors(cls, tensors, options: tuple) -> 'Conv':
        """The reverse of ``tensors``."""
        values, scale, weight, bias = tensors
        return cls(Stored(values, scale), weight, bias, options)

    def run(self) -> Tensor:
        """The convolution of what is stored."""
        *geometry, dtype = self.options
        return F.conv2d(self.input.load(dtype), self.weight.to(dtype), self.bias.to(dtype), *geometry)


def convolve(conv: torch.nn.Conv2d, x: Tensor, storage: str = 'native') -> tuple[Tensor, Conv]:
    """Runs a convolution.

    Args:
        conv (torch.nn.Conv2d): The module.
        x (Tensor): Shape (N, C, H, W), cast before, so that what the convolution saves can be shared.
        storage (str): How ``x`` is stored, see :func:`sbp_mmdet.ops.storage.store`. Default: 'native'.

    Returns:
        tuple[Tensor, Conv]: The output, and how to compute it again.
    """
    options = (conv.stride, conv.padding, conv.dilation, conv.groups, x.dtype)
    if storage == 'native':
        return conv(x), Conv(Stored(x), conv.weight, conv.bias, options)
    with torch.no_grad():
        source = Conv(store(x, storage, (2, 3)), conv.weight, conv.bias, options)
    return _Conv.apply(x, *source.tensors, options), source


class _Conv(torch.autograd.Function):
    """Its weight's gradient is that for the stored input; all others are exact."""

    @staticmethod
    def forward(ctx, x, values, scale, weight, bias, options):
        ctx.options = options
        ctx.save_for_backward(values, scale, weight, bias)
        with no_autocast(x):
            return Conv(Stored(x), weight, bias, options).run()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        source = Conv.of_tensors(ctx.saved_tensors, ctx.options)
        stride, padding, dilation, groups, dtype = ctx.options
        needs_x, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with no_autocast(grad):
            dx, dweight, dbias = torch.ops.aten.convolution_backward(
                grad,
                source.input.load(dtype),
                source.weight.to(dtype),
                [len(source.bias)],
                *(stride, padding, dilation, False, [0, 0], groups),
                [needs_x, needs_weight, needs_bias],
            )
            dweight = dweight.to(source.weight.dtype) if needs_weight else None
            dbias = dbias.to(source.bias.dtype) if needs_bias else None
        return dx, None, None, dweight, dbias, None
