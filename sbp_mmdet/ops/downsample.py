"""Layer norm and linear layer: Swin's patch merging, and ConvNeXt's downsampling, where a token is a 2x2 patch.

The patches of a 2x2 convolution with stride 2 do not overlap, so each output token depends on its own patch alone: the
case s >= k of section 3.2.2, in which a convolution is as independent as a PW-Conv. With ``positions`` the operation is
Algorithm 1 with f(x) = LN(x) W^T + b.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import sbp, take
from ..stochastic_backprop.masks import Positions
from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.folding import bias_or_zeros, fold, fold_weight, normalise, normalise_backward, unfold
from .common.layouts import in_shape, layout_of, memory_format, scatter_rows, to_layout, tokens_of
from .common.precision import Stored, accumulate, column_sums, store
from .common.row_sampling import sample_rows

__all__ = ['NormLinearSettings', 'NormLinearTensors', 'norm_linear']


@dataclasses.dataclass(frozen=True)
class NormLinearSettings:
    """Settings of :func:`norm_linear`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        eps (float): Added to the variance of the layer norm. Default: 1e-6.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.
    """

    form: Form = Form()
    eps: float = 1e-6
    dtype: torch.dtype | None = None


class NormLinearTensors(NamedTuple):
    """Inputs of :func:`norm_linear`.

    Attributes:
        x (Tensor): Tokens (N, L, C), or a feature map (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight (Tensor): Linear layer, shape (C', C); for a feature map a 2x2 convolution with stride 2, (C', C, 2, 2).
        bias (Tensor | None): Shape (C',). Default: None.
        positions (Positions | None): Kept and dropped tokens of the output. If ``None``, all are kept. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None = None
    positions: Positions | None = None


NormLinearGradients = gradients_of(NormLinearTensors, 'positions')


class NormLinearSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        xhat (Stored | None): Normalised kept tokens, shape (N, K, C), or kept patches, shape (N, K, 4, C).
        rstd (Tensor | None): Its reciprocal deviation, shape (N, K, 1) or (N, K, 4, 1).
        keep (Tensor | None): Indices of the kept tokens.
        given (NormLinearTensors): Parameters.
        shape (torch.Size): Shape of ``x``.
        layout (torch.memory_format | None): Layout of ``x``, if it is a feature map.
        dtype (torch.dtype): Precision of ``x``.
    """

    xhat: Stored | None
    rstd: Tensor | None
    keep: Tensor | None
    given: NormLinearTensors
    shape: torch.Size
    layout: torch.memory_format | None
    dtype: torch.dtype


def norm_linear(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """Compute ``LN(x) W^T + b``, with gradients of the kept tokens (Algorithm 1, section 3.4).

    Args:
        settings (NormLinearSettings): Settings.
        tensors (NormLinearTensors): Inputs.

    Returns:
        Tensor: Shape (N, L, C'), or (N, C', H // 2, W // 2) in the layout of ``x``.

    Example:
        >>> y = norm_linear(NormLinearSettings(), NormLinearTensors(x, norm.weight, norm.bias, conv.weight, conv.bias))
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _norm_linear(with_dtype(settings, tensors.x), tensors)


def _reference(settings, tensors):
    """Run the layer in plain autograd, by Algorithm 1, or as a plain convolution if all tokens are kept."""
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
    out = to_layout(_in_shape_of(t.x, F.linear(xhat.flatten(2), w, b)), layout_of(t.x))
    if not any(needs):
        return out, None
    xhat, rstd = take(xhat, keep), take(rstd, keep)
    stored = store(xhat, settings.form.storage) if needs.x or needs.norm_weight or needs.weight else None
    rstd = rstd if needs.x else None
    given = t._replace(x=None, positions=None)
    return out, NormLinearSaved(stored, rstd, keep, given, t.x.shape, layout_of(t.x), t.x.dtype)


def _backward(settings, saved, grad, needs):
    layer = _layer(saved.given)
    w = fold_weight(layer[0], layer[2], settings.dtype)
    xhat = None if saved.xhat is None else saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, ..., C)
    tokens = tokens_of(grad)
    incoming = take(tokens, saved.keep).reshape(-1, tokens.shape[2])
    db = column_sums(incoming)
    incoming = incoming.to(settings.dtype)
    dw = None
    if needs.weight or needs.norm_weight:
        sampled = sample_rows(settings.form.sample, incoming)
        dw = accumulate(None, sampled.take_weighted(incoming), sampled.take(xhat.flatten(1)))
    dx = _input_gradient(saved, incoming, w, xhat, tokens.shape) if needs.x else None
    return NormLinearGradients(dx, *_parameter_gradients(saved.given, layer, dw, db))


def _input_gradient(saved, incoming, w, xhat, shape):
    # The product has no name, so it is freed while the backward pass of the norm works on a copy in fp32.
    rows = normalise_backward((incoming @ w).view_as(xhat), xhat, saved.rstd.flatten(0, 1), saved.dtype)
    kept = shape[1] if saved.keep is None else len(saved.keep)
    tokens = scatter_rows(rows.view(shape[0], kept, w.shape[1]), saved.keep, shape[1])
    if len(saved.shape) == 3:
        return tokens
    return _from_patches(tokens.unflatten(2, xhat.shape[1:]), saved.shape, saved.layout)


def _parameter_gradients(given, layer, dw, db):
    weight, _, *norm = layer
    dnw, dnb, dw, db = unfold(dw, db, weight, *norm)
    channels = given.weight.shape[1]
    if given.weight.dim() == 4 and dw is not None:
        dw = dw.view(len(dw), 2, 2, channels).permute(0, 3, 1, 2)
    # The affine part is the same for every pixel of a patch, so its gradient is the sum over the pixels.
    dnw, dnb = (None if d is None else d.view(-1, channels).sum(0) for d in (dnw, dnb))
    return dnw, dnb, dw, db


def _tokens(x):
    """Return tokens (N, L, C), or the 2x2 patches of a feature map (N, L, 4, C), row by row.

    An odd last row or column belongs to no patch, as in the convolution.
    """
    if x.dim() == 3:
        return x
    n, c, h, w = x.shape
    if h % 2 or w % 2:
        x = x[:, :, : h // 2 * 2, : w // 2 * 2]
    x = x.reshape(n, c, h // 2, 2, w // 2, 2)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // 2) * (w // 2), 4, c)


def _from_patches(patches, shape, layout):
    """Return the feature map of patches, the reverse of :func:`_tokens`; zero in an odd last row or column."""
    n, c, h, w = shape
    x = torch.empty(shape, dtype=patches.dtype, device=patches.device, memory_format=layout)
    x[:, :, h // 2 * 2 :].zero_()
    x[..., w // 2 * 2 :].zero_()
    place = x[:, :, : h // 2 * 2, : w // 2 * 2].unflatten(3, (w // 2, 2)).unflatten(2, (h // 2, 2))
    place.copy_(patches.view(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4))
    return x


def _in_shape_of(x, out):
    """Return the output in the form of ``x``: tokens, or a feature map."""
    return out if x.dim() == 3 else in_shape(out, (*out.shape[:2], x.shape[2] // 2, x.shape[3] // 2))


def _matrix(weight):
    """Return the weight of the convolution as a linear layer on patches, in the order of :func:`_tokens`."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def _layer(t):
    """Return weight, bias and affine part for :func:`fold`; the affine part is repeated for each pixel of a patch."""
    norm, bias = (t.norm_weight, t.norm_bias), bias_or_zeros(t.weight, t.bias)
    if t.weight.dim() == 2:
        return t.weight, bias, *norm
    pixels = t.weight.shape[2:].numel()
    return _matrix(t.weight), bias, *[None if p is None else torch.cat([p] * pixels) for p in norm]


_norm_linear = Operation('NormLinear', _forward, _backward, NormLinearGradients)
