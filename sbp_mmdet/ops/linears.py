"""Layer norm and linear layer on tokens: Swin's patch merging, where a token is a patch of 2x2 positions."""

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
from .rows import fold, map_of, normalise, normalise_backward, rows_of, unfold
from .storage import Stored, store

__all__ = ['NormLinearSettings', 'NormLinearTensors', 'norm_linear']


@dataclasses.dataclass(frozen=True)
class NormLinearSettings:
    """Of :func:`norm_linear`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-5.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped tokens send, see :class:`.mlp.MLPSettings`. Default: 'zero'.
        implementation (str): 'fused', or 'reference': Algorithm 1 as the paper writes it. Default: 'fused'.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.

    Raises:
        ValueError: For options that the reference does not have.
    """

    eps: float = 1e-5
    storage: str = 'native'
    dropped: str = 'zero'
    implementation: str = 'fused'
    dtype: torch.dtype | None = None

    def __post_init__(self):
        check_form(self.implementation, storage=self.storage, dropped=self.dropped)


class NormLinearTensors(NamedTuple):
    """What it works on.

    Attributes:
        x (Tensor): Tokens, shape (N, L, C).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight (Tensor): Linear layer, shape (C', C).
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
    """x-hat (N, K, C) of the kept tokens, its reciprocal deviation (N, K, 1), and what was given, without tokens."""

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


def reference(settings: NormLinearSettings, tensors: NormLinearTensors) -> Tensor:
    """:func:`norm_linear` in plain autograd, by Algorithm 1."""
    t = tensors

    def f(x):
        return F.linear(F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps), t.weight, t.bias)

    run = pooled if settings.dropped == 'pool' else sbp
    return f(t.x) if t.positions is None else run(f, t.x, t.positions)


def forward(
    settings: NormLinearSettings, tensors: NormLinearTensors, needs: NormLinearGradients
) -> tuple[Tensor, NormLinearSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t = tensors
    w, b = _layer(settings, t)
    xhat, rstd = normalise(t.x, settings.eps, settings.dtype)
    out = F.linear(xhat, w, b)
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
    t = saved.given
    w, _ = _layer(settings, t)
    xhat = saved.xhat.values
    if xhat is not None:
        xhat = saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, C)
    near, groups = saved.positions.neighbours(len(grad)), saved.positions.groups
    incoming = [rows_of(grad, index) for index in saved.positions[: 2 if near or groups else 1]]
    db = sum(column_sums(g) for g in incoming)
    if groups:
        incoming = [groups.sum_(*(g.unflatten(0, (len(grad), -1)) for g in incoming)).flatten(0, 1)]
    incoming = [g.to(settings.dtype) for g in incoming]
    dw = zeros_for(t.weight)
    if needs.weight or needs.norm_weight:
        accumulate(dw, (near.pool_(incoming[0].clone(), incoming[1]) if near else incoming[0]).t(), xhat)
    dx = _input_gradient(saved, incoming, w, xhat, near, groups, grad) if needs.x else None
    asked = (needs.norm_weight, needs.norm_bias, needs.weight, needs.bias)
    return NormLinearGradients(dx, *unfold(dw, db, t.weight, t.norm_weight, t.norm_bias, asked))


def _input_gradient(saved, incoming, w, xhat, near, groups, grad):
    rstd = saved.rstd.flatten(0, 1)
    lent = [(xhat, rstd)] + ([near.lend(slice(0, len(xhat)), xhat, rstd)] if near else [])
    rows = [normalise_backward(g @ w, *own) for g, own in zip(incoming, lent, strict=True)]
    if groups:
        rows = [part.flatten(0, 1) for part in groups.share_(rows[0].unflatten(0, (len(grad), -1)))]
    shape = (len(grad), grad.shape[1], w.shape[1])
    return map_of(rows[0], saved.positions.keep, shape, *([rows[1], saved.positions.drop] if len(rows) > 1 else []))


def _layer(settings, t):
    """Weight and bias behind x-hat."""
    bias = t.weight.new_zeros(len(t.weight)) if t.bias is None else t.bias
    return fold(t.weight, bias, t.norm_weight, t.norm_bias, settings.dtype)


_norm_linear = Operation('NormLinear', forward, backward, NormLinearGradients)
