"""Forward and backward pass of the fused channel MLP, as plain functions; see :mod:`.mlp`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import take
from .mlp_tensors import MLPGradients, MLPSaved, MLPSettings, MLPTensors
from .neighbours import SavedPositions
from .precision import accumulate, column_sums, in_range, zeros_for
from .rows import fold, in_shape, map_of, normalise, normalise_backward, put_, rows_of, tokens_of, unfold
from .storage import Stored, store

__all__ = ['backward', 'forward', 'per_image']

# Elements of the hidden layer that exist at a time: on a CPU what stays in its caches, on a GPU enough to keep it busy.
_CHUNK = {'cpu': 2**20, 'cuda': 2**24}


def forward(settings: MLPSettings, tensors: MLPTensors, needs: MLPGradients) -> tuple[Tensor, MLPSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t = tensors
    asks = _Asked.of(needs)
    weights = _Weights.of(settings, t)
    conv = t.conv if settings.recompute else None
    keep_hidden = asks.hidden and not settings.recompute
    saved = SavedPositions.of(t.positions, settings.dropped)
    if t.positions is None:
        rows, kept = _branch(settings, weights, rows_of(t.x, None), keep_hidden)
        branch = rows.view(len(t.x), -1, rows.shape[1])
    else:
        branch = t.x.new_empty(tokens_of(t.x).shape, dtype=settings.dtype)
        rows, kept = _branch(settings, weights, rows_of(t.x, t.positions.keep), keep_hidden and not saved.groups)
        put_(branch, t.positions.keep, rows)
        rows, _ = _branch(settings, weights, rows_of(t.x, t.positions.drop), False)
        put_(branch, t.positions.drop, rows)
    branch, factor = in_shape(branch, t.shortcut.shape), _factor(t.gamma, t.factor, t.shortcut)
    out = t.shortcut + branch if factor is None else torch.addcmul(t.shortcut, branch, factor)
    if not asks.anything:
        return out, None
    if saved.groups and conv is None:
        kept = _centres(settings, weights, t.x, saved.groups, keep_hidden)
    xhat, rstd, hidden = kept
    if conv is not None or not (asks.inner or (asks.hidden and settings.recompute)):
        stored = Stored(None)
    else:
        stored = store(xhat.view(len(t.x), -1, xhat.shape[1]), settings.storage, 1)
    given = t._replace(x=None, shortcut=None, positions=None, conv=conv)
    rstd = rstd if conv is None and needs.x else None
    return out, MLPSaved(stored, rstd, hidden, saved, given)


def backward(settings: MLPSettings, saved: MLPSaved | None, grad: Tensor, needs: MLPGradients) -> MLPGradients:
    """See :mod:`sbp_mmdet.ops.operation`."""
    if saved is None:
        return MLPGradients(shortcut=grad)
    t, keep = saved.given, saved.positions.keep
    asks = _Asked.of(needs)
    weights = _Weights.of(settings, t)
    xhat, rstd = saved.xhat.values, saved.rstd
    near, groups = saved.positions.neighbours(len(grad)), saved.positions.groups
    if t.conv is not None and groups:
        xhat, rstd, _ = _centres(settings, weights, t.conv.run(), groups, False)
    elif t.conv is not None:
        xhat, rstd = normalise(rows_of(t.conv.run(), keep), settings.eps, settings.dtype)
    elif xhat is not None:
        xhat = saved.xhat.load(settings.dtype).flatten(0, 1)  # (N * K, C)
    incoming = _incoming(settings, saved, grad, near, groups, needs.x)
    sums = _Sums.of(t, needs)
    dx = _InputGradient.like(incoming) if needs.x else _InputGradient(None, None)
    rows = _Rows(xhat, rstd if needs.x else None, saved.hidden)
    for chunk in _chunks(settings, incoming, weights, near) if asks.hidden else []:
        _add_chunk(settings, weights, rows, incoming, near, chunk, sums, dx)
    if incoming.unit is not None and sums.outer is not None:
        sums.outer.mul_(incoming.unit[:, None])
    found = _parameter_gradients(t, sums, incoming.total, needs)
    if needs.x:
        if groups:
            shared = groups.share_(dx.kept.unflatten(0, (len(grad), -1)), incoming.shares)
            dx = _InputGradient(*(g.flatten(0, 1) for g in shared))
        found = found._replace(x=map_of(dx.kept, keep, grad.shape, dx.dropped, saved.positions.drop))
    return found._replace(shortcut=grad if needs.shortcut else None)


class _Asked(NamedTuple):
    """For which parts of the backward pass there is somebody who needs a gradient."""

    inner: bool  # the gradient of the hidden layer
    hidden: bool  # the hidden layer
    anything: bool  # any of the branch

    @classmethod
    def of(cls, needs):
        inner = needs.x or needs.norm_weight or needs.norm_bias or needs.weight1 or needs.bias1
        hidden = inner or needs.weight2 or needs.gamma
        return cls(inner, hidden, hidden or needs.bias2)


class _Weights(NamedTuple):
    """W1', b1', W2 and b2 of the package's docstring, in the precision of the matrix products."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def of(cls, settings, t):
        folded = fold(t.weight1, t.bias1, t.norm_weight, t.norm_bias, settings.dtype)
        return cls(*folded, t.weight2.to(settings.dtype), t.bias2.to(settings.dtype))


def _branch(settings, weights, x, keep_hidden):
    """The branch without layer scale, row by row, and x-hat, reciprocal deviation and hidden layer."""
    w1, b1, w2, b2 = weights
    xhat, rstd = normalise(x, settings.eps, settings.dtype)
    hidden = xhat.new_empty(len(xhat), len(w1)) if keep_hidden else None
    rows = xhat.new_empty(xhat.shape)
    for chunk in _slices(settings, len(xhat), len(w1), x.device):
        h = torch.addmm(b1, xhat[chunk], w1.t(), out=hidden[chunk] if keep_hidden else None)
        h = F.gelu(h, approximate=settings.approximate) if keep_hidden else _gelu_(h, settings.approximate)
        torch.addmm(b2, h, w2.t(), out=rows[chunk])
    return rows, (xhat, rstd, hidden)


def _centres(settings, weights, x, groups, keep_hidden):
    """As the second result of :func:`_branch`, of what stands for groups."""
    xhat, rstd = normalise(groups.centres(tokens_of(x)).flatten(0, 1), settings.eps, settings.dtype)
    return xhat, rstd, torch.addmm(weights.b1, xhat, weights.w1.t()) if keep_hidden else None


class _Incoming(NamedTuple):
    """The gradient of the branch, as rows.

    ``outer`` and ``inner`` are of the kept rows. ``outer`` is what W2's gradient is formed from, without gamma and with
    the share of the dropped rows; ``unit`` is what the sum has to be multiplied by (see :func:`in_range`). ``inner``,
    and for 'nearest' ``dropped`` of the dropped rows, is what goes back through W2; for 'pool' it holds the sums of
    groups, and ``shares`` what each dropped row gets of what comes back. ``total`` is the sum over all rows that send
    gradients.
    """

    outer: Tensor
    unit: Tensor | None
    inner: Tensor
    dropped: Tensor | None
    shares: Tensor | None
    total: Tensor


def _incoming(settings, saved, grad, near, groups, wanted):
    gamma, factor = saved.given.gamma, saved.given.factor

    def rows(index):
        g = take(tokens_of(grad), index)
        return (g if factor is None else g * factor[:, None, None]).reshape(-1, g.shape[2])

    def through_scale(g):
        return (g if gamma is None else g * gamma).to(settings.dtype)

    g = rows(saved.positions.keep)
    dropped = shares = None
    total = column_sums(g)
    if groups:
        g_dropped = rows(saved.positions.drop)
        total += column_sums(g_dropped)
        parts = [part.unflatten(0, (len(grad), -1)) for part in (g, g_dropped)]
        groups.sum_(*parts)
        shares = groups.shares(*parts) if wanted else None
        del g_dropped, parts
    inner = through_scale(g)
    if near:
        g_dropped = rows(saved.positions.drop)
        total += column_sums(g_dropped)
        dropped = through_scale(g_dropped)
        g = near.pool_(g.clone(), g_dropped)
        del g_dropped
    return _Incoming(*in_range(g, gamma, settings.dtype), inner, dropped, shares, total)


class _Sums(NamedTuple):
    """Sums over the rows that parameters get their gradients from, in full precision; None: nobody asks."""

    outer: Tensor | None  # A of the package's docstring
    w1: Tensor | None
    b1: Tensor | None

    @classmethod
    def of(cls, t, needs):
        outer = zeros_for(t.weight2) if needs.weight2 or needs.gamma else None
        w1 = zeros_for(t.weight1) if needs.weight1 or needs.norm_weight else None
        return cls(outer, w1, zeros_for(t.bias1) if _Asked.of(needs).inner else None)


class _InputGradient(NamedTuple):
    """Rows that the chunks are written to."""

    kept: Tensor | None
    dropped: Tensor | None

    @classmethod
    def like(cls, incoming):
        return cls(*(None if g is None else g.new_empty(g.shape) for g in (incoming.outer, incoming.dropped)))


class _Rows(NamedTuple):
    """The activations of the kept rows, as far as they are there."""

    xhat: Tensor | None
    rstd: Tensor | None
    hidden: Tensor | None


def _add_chunk(settings, weights, rows, incoming, near, chunk, sums, dx):
    """Adds a slice of the kept rows, and the dropped rows that go with it, to ``sums``; writes their rows of ``dx``."""
    xhat, rstd, hidden = (None if r is None else r[chunk] for r in rows)
    h = torch.addmm(weights.b1, xhat, weights.w1.t()) if settings.recompute else hidden
    if sums.outer is not None:
        accumulate(sums.outer, incoming.outer[chunk].t(), F.gelu(h, approximate=settings.approximate))
    if sums.b1 is None:
        return
    # What the norm's backward needs is there only if the input needs a gradient.
    own = _Rows(xhat if rstd is not None else None, rstd, h)
    dh = _hidden_gradient(settings, weights, incoming.inner[chunk], own, sums, dx.kept, chunk)
    if near:
        part = near.dropped(chunk)
        lent = _Rows(*near.lend(chunk, *own))
        dh_dropped = _hidden_gradient(settings, weights, incoming.dropped[part], lent, sums, dx.dropped, part)
        dh = near.pool_(dh, dh_dropped, chunk)
    if sums.w1 is not None:
        accumulate(sums.w1, dh.t(), xhat)


def _hidden_gradient(settings, weights, grad, rows, sums, dx, part):
    """Gradient of the hidden layer of some rows; that of the input goes to this part of ``dx``, if there is one."""
    dh = torch.ops.aten.gelu_backward(grad @ weights.w2, rows.hidden, approximate=settings.approximate)
    sums.b1.add_(column_sums(dh))
    if dx is not None:
        dx[part].copy_(normalise_backward(dh @ weights.w1, rows.xhat, rows.rstd))
    return dh


def _parameter_gradients(t, sums, total, needs):
    """From the sums over the rows."""
    found = MLPGradients()
    if sums.b1 is not None:
        asked = (needs.norm_weight, needs.norm_bias, needs.weight1, needs.bias1)
        dnw, dnb, dw1, db1 = unfold(sums.w1, sums.b1, t.weight1, t.norm_weight, t.norm_bias, asked)
        found = found._replace(norm_weight=dnw, norm_bias=dnb, weight1=dw1, bias1=db1)
    if needs.weight2:
        found = found._replace(weight2=sums.outer if t.gamma is None else sums.outer * t.gamma[:, None])
    if needs.bias2:
        found = found._replace(bias2=total if t.gamma is None else total * t.gamma)
    if needs.gamma:
        found = found._replace(gamma=(sums.outer * t.weight2).sum(1) + total * t.bias2)
    return found


def _chunks(settings, incoming, weights, near):
    """Slices of the kept rows; where dropped rows come with them, these count in a slice."""
    kept = len(incoming.outer)
    each = 1 + len(incoming.dropped) // max(kept, 1) if near else 1
    return _slices(settings, kept, each * len(weights.w1), incoming.outer.device)


def _slices(settings, rows, hidden, device):
    most = max((settings.chunk or _CHUNK.get(device.type, _CHUNK['cuda'])) // hidden, 1)
    pieces = -(-rows // most)
    size = -(-rows // max(pieces, 1))  # of equal size: a short last piece costs a GPU as many launches as a whole one
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def _gelu_(x, approximate):
    return torch.ops.aten.gelu_(x, approximate=approximate)


def _factor(gamma, factor, like):
    """Layer scale and stochastic depth as one factor that broadcasts to the shape of ``like``."""
    if gamma is not None:
        gamma = gamma if like.dim() == 3 else gamma[:, None, None]
    if factor is None:
        return gamma
    factor = per_image(factor, like)
    return factor if gamma is None else gamma * factor


def per_image(factor, like):
    """(N,) -> what broadcasts to the shape of ``like``."""
    return factor.view(-1, *[1] * (like.dim() - 1))
