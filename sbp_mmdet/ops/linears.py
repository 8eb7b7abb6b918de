"""Layer norm and linear layer: Swin's patch merging, and ConvNeXt's downsampling, where a token is a 2x2 patch."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import pooled, sbp, take
from ..masks import Positions
from .neighbours import SavedPositions
from .operation import Operation, check_form
from .precision import accumulate, autocast_dtype, column_sums, zeros_for
from .rows import fold, in_shape, map_of, memory_format, normalise, normalise_backward, rows_of, to_patches, unfold
from .storage import Stored, store

__all__ = ['NormLinearSettings', 'NormLinearTensors', 'downsample', 'norm_linear']


@dataclasses.dataclass(frozen=True)
class NormLinearSettings:
    """Of :func:`norm_linear` and :func:`downsample`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-6.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped tokens send, see :class:`.mlp.MLPSettings`. Default: 'zero'.
        implementation (str): 'fused', or 'reference': Algorithm 1 as the paper writes it. Default: 'fused'.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.

    Raises:
        ValueError: For options that the reference does not have.
    """

    eps: float = 1e-6
    storage: str = 'native'
    dropped: str = 'zero'
    implementation: str = 'fused'
    dtype: torch.dtype | None = None

    def __post_init__(self):
        check_form(self.implementation, storage=self.storage, dropped=self.dropped)


class NormLinearTensors(NamedTuple):
    """What it works on.

    Attributes:
        x (Tensor): Tokens (N, L, C), or patches (N, L, 4, C): each of the four is normalised by itself. For
            :func:`downsample` a map (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight (Tensor): Linear layer, shape (C', C); for patches and maps the convolution's, (C', C, 2, 2).
        bias (Tensor | None): Shape (C',). Default: None.
        positions (Positions | None): Which tokens send gradients, see :class:`.mlp.MLPTensors`; None: all.
            Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None = None
    positions: Positions | None = None


class NormLinearGradients(NamedTuple):
    """Gradients of the tensors of these names."""

    x: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class NormLinearSaved(NamedTuple):
    """x-hat (N, K, ..., C) of the kept tokens, its reciprocal deviation (N, K, ..., 1), and what was given, without
    tokens."""

    xhat: Stored
    rstd: Tensor | None
    positions: SavedPositions
    given: NormLinearTensors


def norm_linear(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """``LN(x) W^T + b`` with gradients from the kept tokens.

    Args:
        settings (NormLinearSettings): See there.
        tensors (NormLinearTensors): See there.

    Returns:
        Tensor: Shape (N, L, C').
    """
    if settings.implementation == 'reference':
        return reference(settings, tensors)
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _norm_linear(dataclasses.replace(settings, dtype=dtype), tensors)


def downsample(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """Layer norm and 2x2/2 convolution with gradients from the kept output positions.

    Patches do not overlap, so each output position is independent (section 3.2.2, the case s >= k).

    Args:
        settings (NormLinearSettings): See there.
        tensors (NormLinearTensors): See there; ``x`` is a map.

    Returns:
        Tensor: Shape (N, C', H // 2, W // 2), laid out as ``x``.
    """
    x, norm_weight, norm_bias, weight, bias, positions = tensors
    layout = memory_format(x)
    if settings.implementation == 'reference' and positions is None:
        normed = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], norm_weight, norm_bias, settings.eps)
        return F.conv2d(normed.permute(0, 3, 1, 2).contiguous(memory_format=layout), weight, bias, stride=2)
    out = norm_linear(settings, tensors._replace(x=to_patches(x)))
    out = in_shape(out, (len(x), len(weight), x.shape[2] // 2, x.shape[3] // 2))
    return out if settings.implementation == 'reference' else out.contiguous(memory_format=layout)


def reference(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """:func:`norm_linear` in plain autograd, by Algorithm 1."""
    t = tensors
    matrix = _rows(t.weight)

    def f(x):
        normed = F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps)
        return F.linear(normed.flatten(2), matrix, t.bias)

    run = pooled if settings.dropped == 'pool' else sbp
    return f(t.x) if t.positions is None else run(f, t.x, t.positions)


def forward(
    settings: NormLinearSettings, tensors: NormLinearTensors, needs: NormLinearGradients
) -> tuple[Tensor, NormLinearSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t = tensors
    w, b = fold(*_layer(t), settings.dtype)
    xhat, rstd = normalise(t.x, settings.eps, settings.dtype)
    out = F.linear(xhat.flatten(2), w, b)
    if not any(needs):
        return out, None
    positions = SavedPositions.of(t.positions, settings.dropped)
    stored = Stored(None)
    if needs.x or needs.norm_weight or needs.weight:
        stored = store(take(xhat, positions.keep), settings.storage, 1)
    rstd = take(rstd, positions.keep) if needs.x else None
    return out, NormLinearSaved(stored, rstd, positions, t._replace(x=None, positions=None))


def backward(
    settings: NormLinearSettings, saved: NormLinearSaved, grad: Tensor, needs: NormLinearGradients
) -> NormLinearGradients:
    """See :mod:`sbp_mmdet.ops.operation`."""
    layer = _layer(saved.given)
    w, _ = fold(*layer, settings.dtype)
    xhat = saved.xhat.values
    if xhat is not None:
        xhat = saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, ..., C)
    near, groups = saved.positions.neighbours(len(grad)), saved.positions.groups
    incoming = [rows_of(grad, index) for index in saved.positions[: 2 if near or groups else 1]]
    db = sum(column_sums(g) for g in incoming)
    if groups:
        incoming = [groups.sum_(*(g.unflatten(0, (len(grad), -1)) for g in incoming)).flatten(0, 1)]
    incoming = [g.to(settings.dtype) for g in incoming]
    dw = zeros_for(layer[0])
    if needs.weight or needs.norm_weight:
        accumulate(dw, (near.pool_(incoming[0].clone(), incoming[1]) if near else incoming[0]).t(), xhat.flatten(1))
    dx = _input_gradient(saved, incoming, w, xhat, near, groups, grad) if needs.x else None
    return _parameter_gradients(saved.given, layer, dw, db, needs)._replace(x=dx)


def _input_gradient(saved, incoming, w, xhat, near, groups, grad):
    rstd = saved.rstd.flatten(0, 1)
    lent = [(xhat, rstd)] + ([near.lend(slice(0, len(xhat)), xhat, rstd)] if near else [])
    rows = [normalise_backward((g @ w).view_as(own[0]), *own).flatten(1) for g, own in zip(incoming, lent, strict=True)]
    if groups:
        rows = [part.flatten(0, 1) for part in groups.share_(rows[0].unflatten(0, (len(grad), -1)))]
    shape = (len(grad), grad.shape[1], w.shape[1])
    tokens = map_of(rows[0], saved.positions.keep, shape, *([rows[1], saved.positions.drop] if rows[1:] else []))
    return tokens.unflatten(2, xhat.shape[1:])


def _parameter_gradients(given, layer, dw, db, needs):
    weight, _, norm_weight, norm_bias = layer
    asked = (needs.norm_weight, needs.norm_bias, needs.weight, needs.bias)
    dnw, dnb, dw, db = unfold(dw, db, weight, norm_weight, norm_bias, asked)
    channels = given.weight.shape[1]
    if given.weight.dim() == 4 and dw is not None:
        dw = dw.view(len(dw), 2, 2, channels).permute(0, 3, 1, 2)
    # Every pixel of a patch is normalised with the same affine part.
    dnw, dnb = (None if d is None else d.view(-1, channels).sum(0) for d in (dnw, dnb))
    return NormLinearGradients(None, dnw, dnb, dw, db)


def _rows(weight):
    """The convolution as a linear layer on patches, in the order of :func:`.rows.to_patches`."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def _layer(t):
    """As :func:`.rows.fold` takes it; the norm's affine part is repeated for each pixel of a patch."""
    pixels = t.weight[0, 0].numel()
    bias = t.weight.new_zeros(len(t.weight)) if t.bias is None else t.bias
    return _rows(t.weight), bias, *(None if p is None else p.repeat(pixels) for p in (t.norm_weight, t.norm_bias))


_norm_linear = Operation('NormLinear', forward, backward, NormLinearGradients)
