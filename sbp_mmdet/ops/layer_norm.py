"""The layer norms outside of the blocks."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of
from .common.folding import normalise, normalise_backward
from .common.layouts import laid_out, memory_format
from .common.precision import Stored, accumulator, autocast_dtype, store
from .common.rerun_conv import Conv

__all__ = ['NormSettings', 'NormTensors', 'layer_norm']


@dataclasses.dataclass(frozen=True)
class NormSettings:
    """Of :func:`layer_norm`."""

    form: Form = Form()  # no position is dropped
    eps: float = 1e-6  # added to the variance
    dtype: torch.dtype | None = None  # what x-hat is stored in, set by layer_norm under autocast; None: as x is


class NormTensors(NamedTuple):
    """What a layer norm works on."""

    x: Tensor  # (N, C, H, W)
    weight: Tensor | None  # affine part, (C,)
    bias: Tensor | None
    conv: Conv | None = None  # where x comes from, so that the fused form computes it again instead of storing it


NormGradients = gradients_of(NormTensors, 'conv')


class NormSaved(NamedTuple):
    """What the backward pass needs: x-hat (N, H, W, C) and its reciprocal deviation, or the convolution before."""

    xhat: Stored | None
    rstd: Tensor | None
    weight: Tensor
    conv: Conv | None
    input_dtype: torch.dtype
    layout: torch.memory_format  # of the input


def layer_norm(settings: NormSettings, tensors: NormTensors) -> Tensor:
    """Layer norm over the channels; under autocast it stores the normalised input in reduced precision.

    Args:
        settings (NormSettings): See there.
        tensors (NormTensors): See there.

    Returns:
        Tensor: Shape (N, C, H, W), laid out like ``x``; under autocast in full precision, as CUDA's autocast has it.
    """
    x, weight, bias, conv = tensors
    dtype = autocast_dtype(x)
    leaner = dtype is not None or conv is not None or settings.form.storage != 'native'
    if leaner and settings.form.implementation == 'fused' and weight is not None and bias is not None:
        out = _layer_norm(dataclasses.replace(settings, dtype=dtype), tensors)
    else:
        out = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, settings.eps).permute(0, 3, 1, 2)
    return out.contiguous(memory_format=memory_format(x))


def _forward(settings, tensors, needs):
    x, weight, bias, conv = tensors
    xhat, rstd = normalise(x.permute(0, 2, 3, 1), settings.eps, accumulator(x))
    stored = None
    if conv is None:
        stored = store(xhat.to(settings.dtype or x.dtype), settings.form.storage, (1, 2))
    out = torch.addcmul(bias, xhat, weight).permute(0, 3, 1, 2)
    saved = NormSaved(stored, None if conv is not None else rstd, weight, conv, x.dtype, memory_format(x))
    return out if settings.dtype is not None else out.to(x.dtype), saved


def _backward(settings, saved, grad, needs):
    grad = grad.permute(0, 2, 3, 1).to(accumulator(grad))  # (N, H, W, C)
    if saved.conv is None:
        xhat, rstd = saved.xhat.load(grad.dtype), saved.rstd
    else:
        xhat, rstd = normalise(saved.conv.run().permute(0, 2, 3, 1), settings.eps, grad.dtype)
    dx = None
    if needs.x:
        dx = normalise_backward(grad * saved.weight, xhat, rstd).to(saved.input_dtype)
        dx = laid_out(dx.permute(0, 3, 1, 2), saved.layout)
    return NormGradients(dx, (grad * xhat).sum((0, 1, 2)), grad.sum((0, 1, 2)))


_layer_norm = Operation('LayerNorm', _forward, _backward, NormGradients)
