"""Layer norm over the channels of a feature map, as ConvNeXt has it outside of its blocks.

The backward pass needs the normalised input x-hat alone, because with y = w x-hat + b

    dw = sum of dy * x-hat,   db = sum of dy,   dx = LN'(w dy; x-hat) / deviation.

So x-hat may be saved in the precision of the layers around it, in eight bits, or not at all where the convolution in
front is rerun.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of
from .common.folding import normalise, normalise_backward
from .common.layouts import memory_format, to_layout
from .common.precision import Stored, accumulator, autocast_dtype, store
from .common.rerun_conv import Conv

__all__ = ['NormSettings', 'NormTensors', 'layer_norm']


@dataclasses.dataclass(frozen=True)
class NormSettings:
    """Settings of :func:`layer_norm`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        eps (float): Added to the variance. Default: 1e-6.
        dtype (torch.dtype | None): Precision in which x-hat is saved; set under autocast. If ``None``, that of ``x``.
            Default: None.
    """

    form: Form = Form()
    eps: float = 1e-6
    dtype: torch.dtype | None = None


class NormTensors(NamedTuple):
    """Inputs of :func:`layer_norm`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
        weight, bias (Tensor | None): Affine part, shape (C,).
        conv (Conv | None): Convolution that made ``x``. If given, it is rerun instead of saving x-hat. Default: None.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    conv: Conv | None = None


NormGradients = gradients_of(NormTensors, 'conv')


class NormSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        xhat (Stored | None): Normalised input, shape (N, H, W, C). If ``None``, the convolution is rerun.
        rstd (Tensor | None): Its reciprocal deviation, shape (N, H, W, 1).
        weight (Tensor): Weight of the affine part, shape (C,).
        conv (Conv | None): Convolution that made the input.
        input_dtype (torch.dtype): Precision of the input.
        layout (torch.memory_format): Layout of the input.
    """

    xhat: Stored | None
    rstd: Tensor | None
    weight: Tensor
    conv: Conv | None
    input_dtype: torch.dtype
    layout: torch.memory_format


def layer_norm(settings: NormSettings, tensors: NormTensors) -> Tensor:
    """Compute the layer norm over the channels of a feature map.

    Args:
        settings (NormSettings): Settings.
        tensors (NormTensors): Inputs.

    Returns:
        Tensor: Shape (N, C, H, W), in the layout of ``x``; under autocast in fp32, as with CUDA's autocast.

    Example:
        >>> y = layer_norm(NormSettings(), NormTensors(x, norm.weight, norm.bias))
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
        dx = normalise_backward(grad * saved.weight, xhat, rstd, saved.input_dtype)
        dx = to_layout(dx.permute(0, 3, 1, 2), saved.layout)
    return NormGradients(dx, (grad * xhat).sum((0, 1, 2)), grad.sum((0, 1, 2)))


_layer_norm = Operation('LayerNorm', _forward, _backward, NormGradients)
