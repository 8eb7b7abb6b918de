"""The channel MLP: layer norm, pointwise, GELU, pointwise, layer scale, residual connection.

It is that of a ConvNeXt block, which works on feature maps and has its depthwise convolution between shortcut and
norm, and that of a transformer's block, which works on tokens: ``x`` and ``shortcut`` are the same there.
"""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from ..functional import pooled, sbp
from .mlp_fused import backward, forward, per_image
from .mlp_tensors import MLPGradients, MLPSettings, MLPTensors
from .operation import Operation
from .precision import autocast_dtype
from .rows import in_shape, tokens_of

__all__ = ['MLPSettings', 'MLPTensors', 'channel_mlp']

_channel_mlp = Operation('ChannelMLP', forward, backward, MLPGradients)


def channel_mlp(settings: MLPSettings, tensors: MLPTensors) -> Tensor:
    """``shortcut + factor * gamma * (GELU(LN(x) W1^T + b1) W2^T + b2)`` with gradients from the kept positions.

    The shortcut's gradient is exact everywhere.

    Args:
        settings (MLPSettings): See there.
        tensors (MLPTensors): See there.

    Returns:
        Tensor: Of the shape of ``shortcut``, and laid out like it.
    """
    if settings.implementation == 'reference':
        return reference(settings, tensors)
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _channel_mlp(dataclasses.replace(settings, dtype=dtype), tensors)


def reference(settings: MLPSettings, tensors: MLPTensors) -> Tensor:
    """:func:`channel_mlp` in plain autograd, by Algorithm 1."""
    t = tensors

    def branch(x):
        x = F.linear(F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps), t.weight1, t.bias1)
        x = F.gelu(x, approximate=settings.approximate) if settings.activation is None else settings.activation(x)
        x = F.linear(x, t.weight2, t.bias2)
        return x if t.gamma is None else x * t.gamma

    x = tokens_of(t.x)
    if t.positions is None:
        out = branch(x)
    else:
        out = (pooled if settings.dropped == 'pool' else sbp)(branch, x, t.positions)
    out = in_shape(out, t.x.shape)
    return t.shortcut + (out if t.factor is None else out * per_image(t.factor.to(out.dtype), out))
