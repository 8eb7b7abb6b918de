"""Layer norm and linear layer: Swin's patch merging, and ConvNeXt's downsampling, where a token is a 2x2 patch."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import sbp, take
from ..stochastic_backprop.masks import Positions
from .common.autograd_function import Form, Operation, gradients_of, in_precision
from .common.precision import Stored, accumulate, column_sums, store
from .common.row_sampling import (
    draw,
    fold,
    in_shape,
    laid_out,
    layout_of,
    memory_format,
    normalise,
    normalise_backward,
    put_together,
    tokens_of,
    unfold,
)

__all__ = ['NormLinearSettings', 'NormLinearTensors', 'norm_linear']


@dataclasses.dataclass(frozen=True)
class NormLinearSettings:
    """Of :func:`norm_linear`."""

    form: Form = Form()
    eps: float = 1e-6  # of the layer norm
    dtype: torch.dtype | None = None  # of matrix products; None: what autocast says, or as x is


class NormLinearTensors(NamedTuple):
    """What it works on."""

    x: Tensor  # tokens (N, L, C), or a map (N, C, H, W)
    norm_weight: Tensor | None  # affine part of the layer norm, (C,)
    norm_bias: Tensor | None
    weight: Tensor  # linear layer, (C', C); for a map a 2x2/2 convolution, (C', C, 2, 2)
    bias: Tensor | None = None
    positions: Positions | None = None  # which positions of the output send gradients; None: all


NormLinearGradients = gradients_of(NormLinearTensors, 'positions')


class NormLinearSaved(NamedTuple):
    """What the backward pass needs: of the kept tokens x-hat (N, K, C) and its reciprocal deviation (N, K, 1), of kept
    patches (N, K, 4, C) and (N, K, 4, 1); what was given, without ``x``; and shape and layout of ``x``."""

    xhat: Stored | None
    rstd: Tensor | None
    keep: Tensor | None
    given: NormLinearTensors
    shape: torch.Size
    layout: torch.memory_format | None


def norm_linear(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """``LN(x) W^T + b`` with gradients from the kept positions.

    The 2x2 patches of a map do not overlap, so each position of the output is independent (section 3.2.2, the case
    s >= k).

    Args:
        settings (NormLinearSettings): See there.
        tensors (NormLinearTensors): See there.

    Returns:
        Tensor: Shape (N, L, C'), or (N, C', H // 2, W // 2), laid out as ``x``.
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _norm_linear(in_precision(settings, tensors.x), tensors)


def _reference(settings, tensors):
    """Plain autograd, by Algorithm 1; a plain convolution where all positions of a map send gradients."""
    t = tensors

    def norm(x):
        return F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps)

    if t.positions is None and t.x.dim() == 4:
        normed = norm(t.x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous(memory_format=memory_format(t.x))
        return F.conv2d(normed, t.weight, t.bias, stride=2)
    matrix = _matrix(t.weight)

    def f(x):
        return F.linear(norm(x).flatten(2), matrix, t.bias)

    x = _tokens(t.x)
    return _in_shape_of(t.x, f(x) if t.positions is None else sbp(f, x, t.positions))


def _forward(settings, tensors, needs):
    t, keep = tensors, settings.form.kept(tensors.positions)
    w, b = fold(*_layer(t), settings.dtype)
    xhat, rstd = normalise(_tokens(t.x), settings.eps, settings.dtype)
    out = laid_out(_in_shape_of(t.x, F.linear(xhat.flatten(2), w, b)), layout_of(t.x))
    if not any(needs):
        return out, None
    xhat, rstd = take(xhat, keep), take(rstd, keep)
    stored = store(xhat, settings.form.storage) if needs.x or needs.norm_weight or needs.weight else None
    rstd = rstd if needs.x else None
    given = t._replace(x=None, positions=None)
    return out, NormLinearSaved(stored, rstd, keep, given, t.x.shape, layout_of(t.x))


def _backward(settings, saved, grad, needs):
    layer = _layer(saved.given)
    w, _ = fold(*layer, settings.dtype)
    xhat = None if saved.xhat is None else saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, ..., C)
    tokens = tokens_of(grad)
    incoming = take(tokens, saved.keep).reshape(-1, tokens.shape[2])
    db = column_sums(incoming)
    incoming = incoming.to(settings.dtype)
    dw = None
    if needs.weight or needs.norm_weight:
        drawn = draw(settings.form.sample, incoming)
        dw = accumulate(None, drawn.divided(incoming), drawn.of(xhat.flatten(1)))
    dx = _input_gradient(saved, incoming, w, xhat, tokens.shape) if needs.x else None
    return NormLinearGradients(dx, *_parameter_gradients(saved.given, layer, dw, db))


def _input_gradient(saved, incoming, w, xhat, shape):
    # The product has no name: it is not held while the norm's backward pass works on a copy in fp32.
    rows = normalise_backward((incoming @ w).view_as(xhat), xhat, saved.rstd.flatten(0, 1))
    kept = shape[1] if saved.keep is None else len(saved.keep)
    tokens = put_together(rows.view(shape[0], kept, w.shape[1]), saved.keep, shape[1])
    if len(saved.shape) == 3:
        return tokens
    return _from_patches(tokens.unflatten(2, xhat.shape[1:]), saved.shape, saved.layout)


def _parameter_gradients(given, layer, dw, db):
    weight, _, *norm = layer
    dnw, dnb, dw, db = unfold(dw, db, weight, *norm)
    channels = given.weight.shape[1]
    if given.weight.dim() == 4 and dw is not None:
        dw = dw.view(len(dw), 2, 2, channels).permute(0, 3, 1, 2)
    # Every pixel of a patch is normalised with the same affine part.
    dnw, dnb = (None if d is None else d.view(-1, channels).sum(0) for d in (dnw, dnb))
    return dnw, dnb, dw, db


def _tokens(x):
    """(N, L, C), or of a map the 2x2 patches, (N, L, 4, C), row by row; an odd last row or column is left out."""
    if x.dim() == 3:
        return x
    n, c, h, w = x.shape
    if h % 2 or w % 2:
        x = x[:, :, : h // 2 * 2, : w // 2 * 2]
    x = x.reshape(n, c, h // 2, 2, w // 2, 2)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // 2) * (w // 2), 4, c)


def _from_patches(patches, shape, layout):
    """The reverse of :func:`_tokens` for a map, zero in an odd last row or column."""
    n, c, h, w = shape
    x = torch.empty(shape, dtype=patches.dtype, device=patches.device, memory_format=layout)
    x[:, :, h // 2 * 2 :].zero_()
    x[..., w // 2 * 2 :].zero_()
    place = x[:, :, : h // 2 * 2, : w // 2 * 2].unflatten(3, (w // 2, 2)).unflatten(2, (h // 2, 2))
    place.copy_(patches.view(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4))
    return x


def _in_shape_of(x, out):
    """The output for ``x``: tokens, or a map."""
    return out if x.dim() == 3 else in_shape(out, (*out.shape[:2], x.shape[2] // 2, x.shape[3] // 2))


def _matrix(weight):
    """The convolution as a linear layer on patches, in the order of :func:`_tokens`."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def _layer(t):
    """As :func:`.rows.fold` takes it; the norm's affine part is repeated for each pixel of a patch."""
    pixels = t.weight[0, 0].numel()
    bias = t.weight.new_zeros(len(t.weight)) if t.bias is None else t.bias
    return _matrix(t.weight), bias, *(None if p is None else p.repeat(pixels) for p in (t.norm_weight, t.norm_bias))


_norm_linear = Operation('NormLinear', _forward, _backward, NormLinearGradients)
