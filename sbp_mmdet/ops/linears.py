"""Layer norm and linear layer: Swin's patch merging, and ConvNeXt's downsampling, where a token is a 2x2 patch."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import pooled, sbp, take
from ..masks import Positions
from .neighbours import SavedPositions
from .operation import Operation, check_form, gradients_of
from .precision import accumulate, autocast_dtype, column_sums, zeros_for
from .rows import (
    fold,
    from_patches,
    in_shape,
    laid_out,
    layout_of,
    map_of,
    memory_format,
    normalise,
    normalise_backward,
    rows_of,
    to_patches,
    tokens_of,
    unfold,
)
from .storage import Stored, store

__all__ = ['NormLinearSettings', 'NormLinearTensors', 'norm_linear']


@dataclasses.dataclass(frozen=True)
class NormLinearSettings:
    """Of :func:`norm_linear`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-6.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped tokens send, see :class:`.mlp.MLPSettings`. Default: 'zero'.
        implementation (str): 'fused', or 'reference': Algorithm 1 as the paper writes it. Default: 'fused'.
        compile (bool): Compile the bodies, see :mod:`.compiled`. Default: False.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.

    Raises:
        ValueError: For options that the reference does not have.
    """

    eps: float = 1e-6
    storage: str = 'native'
    dropped: str = 'zero'
    implementation: str = 'fused'
    compile: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self):
        check_form(self.implementation, storage=self.storage, dropped=self.dropped)


class NormLinearTensors(NamedTuple):
    """What it works on.

    Attributes:
        x (Tensor): Tokens, shape (N, L, C), or a map, shape (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight (Tensor): Linear layer, shape (C', C); for a map a 2x2/2 convolution, shape (C', C, 2, 2).
        bias (Tensor | None): Shape (C',). Default: None.
        positions (Positions | None): Which positions of the output send gradients, see :class:`.mlp.MLPTensors`;
            None: all. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None = None
    positions: Positions | None = None


NormLinearGradients = gradients_of(NormLinearTensors, 'positions')


class NormLinearSaved(NamedTuple):
    """What the backward pass needs: of the kept tokens x-hat (N, K, C) and its reciprocal deviation (N, K, 1), of kept
    patches (N, K, 4, C) and (N, K, 4, 1); what was given, without ``x``; and shape and layout of
    ``x``."""

    xhat: Stored
    rstd: Tensor | None
    positions: SavedPositions
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
    if settings.implementation == 'reference':
        return reference(settings, tensors)
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _norm_linear(dataclasses.replace(settings, dtype=dtype), tensors)


def reference(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """:func:`norm_linear` in plain autograd, by Algorithm 1; a plain convolution where all positions of a map send
    gradients."""
    t = tensors

    def norm(x):
        return F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps)

    if t.positions is None and t.x.dim() == 4:
        normed = norm(t.x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous(memory_format=memory_format(t.x))
        return F.conv2d(normed, t.weight, t.bias, stride=2)
    matrix = _matrix(t.weight)

    def f(x):
        return F.linear(norm(x).flatten(2), matrix, t.bias)

    run = pooled if settings.dropped == 'pool' else sbp
    x = _tokens(t.x)
    return _in_shape_of(t.x, f(x) if t.positions is None else run(f, x, t.positions))


def forward(
    settings: NormLinearSettings, tensors: NormLinearTensors, needs: NormLinearGradients
) -> tuple[Tensor, NormLinearSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t = tensors
    w, b = fold(*_layer(t), settings.dtype)
    xhat, rstd = normalise(_tokens(t.x), settings.eps, settings.dtype)
    out = laid_out(_in_shape_of(t.x, F.linear(xhat.flatten(2), w, b)), layout_of(t.x))
    if not any(needs):
        return out, None
    positions = SavedPositions.of(t.positions, settings.dropped)
    if positions.groups:
        xhat, rstd = normalise(positions.groups.centres(_tokens(t.x)), settings.eps, settings.dtype)
    else:
        xhat, rstd = take(xhat, positions.keep), take(rstd, positions.keep)
    stored = Stored(None)
    if needs.x or needs.norm_weight or needs.weight:
        stored = store(xhat, settings.storage, 1)
    rstd = rstd if needs.x else None
    given = t._replace(x=None, positions=None)
    return out, NormLinearSaved(stored, rstd, positions, given, t.x.shape, layout_of(t.x))


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
    shares = None
    if groups:
        parts = [g.unflatten(0, (len(grad), -1)) for g in incoming]
        incoming = [groups.sum_(*parts).flatten(0, 1)]
        shares = groups.shares(*parts) if needs.x else None
        del parts
    incoming = [g.to(settings.dtype) for g in incoming]
    dw = zeros_for(layer[0])
    if needs.weight or needs.norm_weight:
        accumulate(dw, (near.pool_(incoming[0].clone(), incoming[1]) if near else incoming[0]).t(), xhat.flatten(1))
    dx = _input_gradient(saved, incoming, w, xhat, near, groups, shares, grad) if needs.x else None
    return _parameter_gradients(saved.given, layer, dw, db, needs)._replace(x=dx)


def _input_gradient(saved, incoming, w, xhat, near, groups, shares, grad):
    rstd = saved.rstd.flatten(0, 1)
    lent = [(xhat, rstd)] + ([near.lend(None, xhat, rstd)] if near else [])
    rows = [  # not "*own": it would hold the product while the norm's backward pass works on a copy in fp32
        normalise_backward((g @ w).view_as(own[0]), own[0], own[1]).flatten(1)
        for g, own in zip(incoming, lent, strict=True)
    ]
    if groups:
        rows = [part.flatten(0, 1) for part in groups.share_(rows[0].unflatten(0, (len(grad), -1)), shares)]
    shape = (len(grad), tokens_of(grad).shape[1], w.shape[1])
    tokens = map_of(rows[0], saved.positions.keep, shape, *([rows[1], saved.positions.drop] if rows[1:] else []))
    return (
        tokens
        if len(saved.shape) == 3
        else from_patches(tokens.unflatten(2, xhat.shape[1:]), saved.shape, saved.layout)
    )


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


def _tokens(x):
    """(N, L, C), or the patches of a map, (N, L, 4, C)."""
    return x if x.dim() == 3 else to_patches(x)


def _in_shape_of(x, out):
    """The output for ``x``: tokens, or a map."""
    return out if x.dim() == 3 else in_shape(out, (*out.shape[:2], x.shape[2] // 2, x.shape[3] // 2))


def _matrix(weight):
    """The convolution as a linear layer on patches, in the order of :func:`.rows.to_patches`."""
    return weight if weight.dim() == 2 else weight.permute(0, 2, 3, 1).flatten(1)


def _layer(t):
    """As :func:`.rows.fold` takes it; the norm's affine part is repeated for each pixel of a patch."""
    pixels = t.weight[0, 0].numel()
    bias = t.weight.new_zeros(len(t.weight)) if t.bias is None else t.bias
    return _matrix(t.weight), bias, *(None if p is None else p.repeat(pixels) for p in (t.norm_weight, t.norm_bias))


_norm_linear = Operation('NormLinear', forward, backward, NormLinearGradients)
