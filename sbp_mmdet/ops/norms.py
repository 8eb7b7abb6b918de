"""The layer norms outside of the blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .convs import Conv
from .precision import accumulator, autocast_dtype, no_autocast
from .rows import memory_format, normalise, normalise_backward
from .storage import Stored, store

__all__ = ['layer_norm']


@torch.compiler.disable
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float = 1e-6,
    source: Conv | None = None,
    storage: str = 'native',
) -> Tensor:
    """Layer norm over the channels; under autocast it stores the normalised input in reduced precision.

    Args:
        x (Tensor): Shape (N, C, H, W).
        weight, bias (Tensor | None): Affine part, shape (C,).
        eps (float): Added to the variance. Default: 1e-6.
        source (Conv | None): Where ``x`` comes from, to compute it again instead of storing it. Default: None.
        storage (str): How the normalised input is stored, 'native' or 'int8'. Default: 'native'.

    Returns:
        Tensor: Shape (N, C, H, W); under autocast in full precision, as CUDA's autocast has it.
    """
    dtype = autocast_dtype(x)
    if weight is None or bias is None or (dtype is None and source is None and storage == 'native'):
        out = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)
    else:
        out = _LayerNorm.apply(x, weight, bias, eps, source, storage, dtype)
    return out.contiguous(memory_format=memory_format(x))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, source, storage, dtype):
        with no_autocast(x):
            xhat, rstd = normalise(x.permute(0, 2, 3, 1), eps, accumulator(x))
            ctx.options = (eps, source and source.options, x.dtype)
            stored = (Stored(None), None)
            if source is None:
                stored = (store(xhat.to(dtype or x.dtype), storage, (1, 2)), rstd)
            ctx.save_for_backward(*stored[0], stored[1], weight, *(source.tensors if source else [None] * 4))
            out = torch.addcmul(bias, xhat, weight).permute(0, 3, 1, 2)
            return out if dtype is not None else out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        xhat, scale, rstd, weight, *source = ctx.saved_tensors
        eps, conv_options, dtype = ctx.options
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with no_autocast(grad):
            grad = grad.permute(0, 2, 3, 1).to(accumulator(grad))  # (N, H, W, C)
            if conv_options is None:
                xhat = Stored(xhat, scale).load(grad.dtype)
            else:
                x = Conv.of_tensors(source, conv_options).run()
                xhat, rstd = normalise(x.permute(0, 2, 3, 1), eps, grad.dtype)
            dx = dweight = dbias = None
            if needs_x:
                dx = normalise_backward(grad * weight, xhat, rstd).to(dtype).permute(0, 3, 1, 2)
            if needs_weight:
                dweight = (grad * xhat).sum((0, 1, 2))
            if needs_bias:
                dbias = grad.sum((0, 1, 2))
        return dx, dweight, dbias, None, None, None, None
