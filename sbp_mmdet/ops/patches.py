"""The downsampling layer: layer norm and 2x2/2 convolution."""

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
from .rows import (
    fold,
    from_patches,
    in_shape,
    memory_format,
    normalise,
    normalise_backward,
    patch_weights,
    put_,
    rows_of,
    to_patches,
    unfold,
)
from .storage import Stored, store

__all__ = ['DownsampleSettings', 'DownsampleTensors', 'downsample']


@dataclasses.dataclass(frozen=True)
class DownsampleSettings:
    """Of :func:`downsample`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-6.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped positions send, see :class:`.mlp.MLPSettings`. Default: 'zero'.
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


class DownsampleTensors(NamedTuple):
    """What a downsampling layer works on.

    Attributes:
        x (Tensor): Shape (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight, bias (Tensor): Convolution, shapes (C', C, 2, 2) and (C',).
        positions (Positions | None): Which output positions are kept, see :class:`.mlp.MLPTensors`. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor
    positions: Positions | None = None


class DownsampleGradients(NamedTuple):
    """Gradients of the tensors of these names."""

    x: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class Parameters(NamedTuple):
    """As :func:`.rows.patch_weights` takes them."""

    weight: Tensor
    bias: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None


class DownsampleSaved(NamedTuple):
    """What the backward pass needs: x-hat (N, K, 4, C) and its reciprocal deviation (N, K, 4, 1), and parameters."""

    xhat: Stored
    rstd: Tensor | None
    positions: SavedPositions
    parameters: Parameters
    shape: torch.Size


def downsample(settings: DownsampleSettings, tensors: DownsampleTensors) -> Tensor:
    """Layer norm and 2x2/2 convolution with gradients from the kept output positions.

    Patches do not overlap, so each output position is independent (section 3.2.2, the case s >= k).

    Args:
        settings (DownsampleSettings): See there.
        tensors (DownsampleTensors): See there.

    Returns:
        Tensor: Shape (N, C', H // 2, W // 2).
    """
    if settings.implementation == 'reference':
        return reference(settings, tensors)
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _downsample(dataclasses.replace(settings, dtype=dtype), tensors)


def reference(settings: DownsampleSettings, tensors: DownsampleTensors) -> Tensor:
    """:func:`downsample` in plain autograd, by Algorithm 1."""
    x, norm_weight, norm_bias, weight, bias, positions = tensors

    def norm(tokens):
        return F.layer_norm(tokens, tokens.shape[-1:], norm_weight, norm_bias, settings.eps)

    if positions is None:
        normed = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous(memory_format=memory_format(x))
        return F.conv2d(normed, weight, bias, stride=2)
    matrix, bias, *_ = patch_weights(weight, bias, None, None)
    run = pooled if settings.dropped == 'pool' else sbp
    out = run(lambda patches: F.linear(norm(patches).flatten(2), matrix, bias), to_patches(x), positions)
    return in_shape(out, (*out.shape[:2], x.shape[2] // 2, x.shape[3] // 2))


def forward(
    settings: DownsampleSettings, tensors: DownsampleTensors, needs: DownsampleGradients
) -> tuple[Tensor, DownsampleSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    x, norm_weight, norm_bias, weight, bias, positions = tensors
    w, b = fold(*patch_weights(weight, bias, norm_weight, norm_bias), settings.dtype)
    xhat, rstd = normalise(to_patches(x), settings.eps, settings.dtype)  # (N, L, 4, C), (N, L, 4, 1)
    out = in_shape(F.linear(xhat.flatten(2), w, b), (len(x), len(w), x.shape[2] // 2, x.shape[3] // 2))
    out = out.contiguous(memory_format=memory_format(x))
    if not any(needs):
        return out, None
    saved = SavedPositions.of(positions, settings.dropped)
    rstd = take(rstd, saved.keep) if needs.x else None
    if needs.x or needs.norm_weight or needs.weight:
        stored = store(take(xhat, saved.keep), settings.storage, 1)
    else:
        stored = Stored(None)
    return out, DownsampleSaved(stored, rstd, saved, Parameters(weight, bias, norm_weight, norm_bias), x.shape)


def backward(
    settings: DownsampleSettings, saved: DownsampleSaved, grad: Tensor, needs: DownsampleGradients
) -> DownsampleGradients:
    """See :mod:`sbp_mmdet.ops.operation`."""
    folded = patch_weights(*saved.parameters)
    w, _ = fold(*folded, settings.dtype)
    xhat = saved.xhat.values
    if xhat is not None:
        xhat = saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, 4, C)
    near, groups = saved.positions.neighbours(len(grad)), saved.positions.groups
    incoming = [rows_of(grad, index) for index in saved.positions[: 2 if near or groups else 1]]
    db = sum(column_sums(g) for g in incoming)
    if groups:
        incoming = [groups.sum_(*(g.unflatten(0, (len(grad), -1)) for g in incoming)).flatten(0, 1)]
    g, *g_dropped = incoming = [g.to(settings.dtype) for g in incoming]
    dw = zeros_for(folded[0])
    if needs.weight or needs.norm_weight:
        accumulate(dw, (near.pool_(g.clone(), *g_dropped) if near else g).t(), xhat.flatten(1))
    dx = _input_gradient(saved, incoming, w, xhat, near, groups) if needs.x else None
    return _parameter_gradients(folded, dw, db, needs)._replace(x=dx)


def _input_gradient(saved, incoming, w, xhat, near, groups):
    n, c, height, width = saved.shape
    rstd = saved.rstd.flatten(0, 1)
    lent = [(xhat, rstd)] + ([near.lend(slice(0, len(xhat)), xhat, rstd)] if near else [])
    dx = [
        normalise_backward((g @ w).view_as(xhat), xhat, rstd).view(n, -1, 4, c)
        for g, (xhat, rstd) in zip(incoming, lent, strict=True)
    ]
    if saved.positions.keep is None:
        return from_patches(dx[0], saved.shape)
    if groups:
        dx = [rows.unflatten(2, (4, c)) for rows in groups.share_(dx[0].flatten(2))]
    whole = dx[0].new_zeros(n, (height // 2) * (width // 2), 4, c)
    for rows, index in zip(dx, saved.positions, strict=False):
        put_(whole, index, rows.flatten(0, 1))
    return from_patches(whole, saved.shape)


def _parameter_gradients(folded, dw, db, needs):
    weight, _, norm_weight, norm_bias = folded
    asked = (needs.norm_weight, needs.norm_bias, needs.weight, needs.bias)
    dnw, dnb, dw, db = unfold(dw, db, weight, norm_weight, norm_bias, asked)
    channels = weight.shape[1] // 4
    return DownsampleGradients(
        # Every pixel of a patch is normalised with the same affine part.
        norm_weight=None if dnw is None else dnw.view(4, channels).sum(0),
        norm_bias=None if dnb is None else dnb.view(4, channels).sum(0),
        weight=None if dw is None else dw.view(len(dw), 2, 2, channels).permute(0, 3, 1, 2),
        bias=db,
    )


_downsample = Operation('Downsample', forward, backward, DownsampleGradients)
