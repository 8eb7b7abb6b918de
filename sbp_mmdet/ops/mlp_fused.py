"""Forward and backward pass of the fused channel MLP, as plain functions; see :mod:`.mlp`."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import take
from .chunks import Chunk, chunks
from .compiled import body
from .mlp_tensors import MLPGradients, MLPSaved, MLPSettings, MLPTensors
from .neighbours import SavedPositions
from .precision import accumulate, column_sums, in_range, zeros_for
from .rows import (
    empty_tokens,
    fold,
    in_shape,
    laid_out,
    layout_of,
    map_of,
    normalise,
    normalise_backward,
    put_,
    tokens_of,
    unfold,
)
from .storage import Stored, store

__all__ = ['add_branch', 'backward', 'forward', 'per_image']


def forward(settings: MLPSettings, tensors: MLPTensors, needs: MLPGradients) -> tuple[Tensor, MLPSaved | None]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t, asks = tensors, _Asked.of(needs)
    conv = t.conv if settings.recompute else None
    x, positions = tokens_of(t.x), SavedPositions.of(t.positions, settings.dropped)
    xhat = rstd = hidden = None
    if positions.groups:
        x = x.contiguous()  # rows are gathered from it, which takes longer where a row's numbers lie apart
    if asks.hidden and not settings.recompute:
        branch, xhat, rstd, hidden = _keeping_hidden(settings, t, x, positions.groups)
        out = add_branch(t, [(Chunk.all(x), branch.flatten(0, 1))], settings.dtype)
    else:
        stores = asks.hidden and conv is None
        if stores and not positions.groups:
            xhat, rstd = normalise(x, settings.eps, settings.dtype)
        out = add_branch(t, _branch(settings, _Weights.of(settings, t), x, xhat), settings.dtype)
        if stores and positions.groups:
            xhat, rstd = normalise(positions.groups.centres(x), settings.eps, settings.dtype)
        elif stores:
            xhat, rstd = take(xhat, positions.keep), take(rstd, positions.keep)
    if not asks.anything:
        return out, None
    stored = Stored(None)
    if xhat is not None and (asks.inner or settings.recompute):
        stored = store(xhat, settings.storage, 1)
    given = t._replace(x=None, shortcut=None, positions=None, conv=conv)
    rstd = rstd.flatten(0, 1) if conv is None and needs.x else None
    return out, MLPSaved(stored, rstd, hidden, positions, given, layout_of(t.x))


def _keeping_hidden(settings, t, x, groups):
    """The branch of all rows; x-hat (N, K, C), reciprocal deviation (N, K, 1) and hidden layer of the kept ones, or of
    what stands for their groups."""
    weights = _Weights.of(settings, t)
    branch = x.new_empty(x.shape, dtype=settings.dtype)
    kept = None
    for index in (None,) if t.positions is None else t.positions[:2]:
        rows = take(x, index)
        xhat, rstd = normalise(rows, settings.eps, settings.dtype)
        hidden = None if kept or groups else xhat.new_empty(len(xhat) * xhat.shape[1], len(weights.w1))
        for chunk, part in _branch(settings, weights, rows, xhat, hidden):
            if index is None:
                chunk.put_(branch, part)
            else:
                put_(branch[chunk.images], chunk.of_index(index), part)
        kept = kept or (xhat, rstd, hidden)
    if groups:
        xhat, rstd = normalise(groups.centres(x), settings.eps, settings.dtype)
        kept = xhat, rstd, torch.addmm(weights.b1, xhat.flatten(0, 1), weights.w1.t())
    return branch, *kept


def _branch(settings, weights, x, xhat=None, hidden=None) -> Iterator[tuple[Chunk, Tensor]]:
    """Chunks of the rows x (N, K, C), and of their branch without layer scale.

    x-hat is computed chunk by chunk where it is not given; the hidden layer is written to ``hidden``, if that is there.
    """
    w1, b1, w2, b2 = weights
    for chunk in chunks(*x.shape[:2], len(w1), x.device, settings.chunk):
        rows = normalise(chunk.of(x), settings.eps, settings.dtype)[0] if xhat is None else chunk.of(xhat)
        if hidden is None:
            h = torch.ops.aten.gelu_(torch.addmm(b1, rows, w1.t()), approximate=settings.approximate)
        else:
            h = F.gelu(torch.addmm(b1, rows, w1.t(), out=hidden[chunk.flat]), approximate=settings.approximate)
        yield chunk, torch.addmm(b2, h, w2.t())


def add_branch(t, branch, dtype):
    """The shortcut and, of each of the branch's chunks, the rows times layer scale and stochastic depth's factor."""
    factor = t.gamma
    if t.factor is not None:
        factor = t.factor[:, None, None] if t.gamma is None else t.gamma * t.factor[:, None, None]
    kinds = [dtype] + ([] if t.gamma is None else [t.gamma.dtype])  # the factor is in full precision, and a scalar
    shortcut = tokens_of(t.shortcut)
    dtype = functools.reduce(torch.promote_types, kinds, shortcut.dtype)
    out = empty_tokens(shortcut.shape, layout_of(t.shortcut), dtype, shortcut.device)
    for chunk, rows in branch:
        own, place = shortcut[chunk.images, chunk.rows], out[chunk.images, chunk.rows]
        rows = rows.view(own.shape)
        if factor is None:
            torch.add(own, rows, out=place)
        else:
            torch.addcmul(own, rows, factor if factor.dim() == 1 else factor[chunk.images], out=place)
    return in_shape(out, t.shortcut.shape)


def backward(settings: MLPSettings, saved: MLPSaved | None, grad: Tensor, needs: MLPGradients) -> MLPGradients:
    """See :mod:`sbp_mmdet.ops.operation`."""
    if saved is None:
        return MLPGradients(shortcut=grad)
    t, keep = saved.given, saved.positions.keep
    weights = _Weights.of(settings, t)
    near, groups = saved.positions.neighbours(len(grad)), saved.positions.groups
    x = None if t.conv is None else tokens_of(t.conv.run())
    if x is not None:
        x = groups.centres(x) if groups else take(x, keep)  # what x-hat is computed from
    incoming = _Incoming.of(saved, grad, groups, needs.x)
    sums = _Sums.of(t, needs)
    dx = _InputGradient.of(settings, saved, incoming, x) if needs.x else _InputGradient(None, None)
    images, rows, _ = incoming.shape(incoming.keep)
    each = 1 + incoming.drop.shape[-1] // max(rows, 1) if near else 1
    for chunk in chunks(images, rows, each * len(weights.w1), grad.device, settings.chunk):
        _add_chunk(settings, weights, saved, x, incoming, near, chunk, sums, dx)
    shares = incoming.shares
    del incoming, x
    found = _parameter_gradients(t, sums, sums.total, needs)
    if needs.x:
        found = found._replace(x=dx.whole(saved, groups, shares, grad.shape))
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


class _Incoming(NamedTuple):
    """Where the gradient of the output comes in, and which of its rows are used."""

    tokens: Tensor  # (N, L, C); for 'pool' (N, K, C), the sums of groups
    keep: Tensor | None
    drop: Tensor | None
    shares: Tensor | None = None  # for 'pool', what each dropped row gets of what comes back

    @classmethod
    def of(cls, saved, grad, groups, wanted):
        tokens, keep, drop = tokens_of(grad), saved.positions.keep, saved.positions.drop
        if groups:
            tokens = tokens.contiguous()  # as in the forward pass
            dropped = take(tokens, drop)
            total = groups.sum_(take(tokens, keep), dropped)
            return cls(total, None, None, groups.shares(total, dropped) if wanted else None)
        return cls(tokens, keep, drop)

    def shape(self, index):
        """Of the rows at some places."""
        rows = self.tokens.shape[1] if index is None else index.shape[-1]
        return len(self.tokens), rows, self.tokens.shape[2]


class _Sums(NamedTuple):
    """Sums over the rows that parameters get their gradients from, in full precision; None: nobody asks."""

    total: Tensor  # of the gradient that comes in
    outer: Tensor | None  # A of the package's docstring
    w1: Tensor | None
    b1: Tensor | None

    @classmethod
    def of(cls, t, needs):
        outer = zeros_for(t.weight2) if needs.weight2 or needs.gamma else None
        w1 = zeros_for(t.weight1) if needs.weight1 or needs.norm_weight else None
        return cls(zeros_for(t.bias2), outer, w1, zeros_for(t.bias1) if _Asked.of(needs).inner else None)


class _InputGradient(NamedTuple):
    """Rows that the chunks are written to, (N, K, C) and (N, D, C)."""

    kept: Tensor | None
    dropped: Tensor | None

    @classmethod
    def of(cls, settings, saved, incoming, x):
        if x is not None and x.dtype == settings.dtype:
            kept = x  # each chunk of it is read before its gradient is written to its place
        else:
            layout = saved.layout if saved.positions.keep is None else None
            kept = empty_tokens(incoming.shape(incoming.keep), layout, settings.dtype, incoming.tokens.device)
        return cls(kept, kept.new_empty(incoming.shape(incoming.drop)) if incoming.drop is not None else None)

    def whole(self, saved, groups, shares, shape):
        """The gradient of the input, laid out as that is."""
        kept, dropped = groups.share_(self.kept, shares) if groups else self
        if saved.positions.keep is None:
            return in_shape(kept, shape)
        rows = [None if part is None else part.flatten(0, 1) for part in (kept, dropped)]
        return laid_out(map_of(rows[0], saved.positions.keep, shape, rows[1], saved.positions.drop), saved.layout)


class _Rows(NamedTuple):
    """The activations of some kept rows, as far as they are there."""

    xhat: Tensor | None
    rstd: Tensor | None
    hidden: Tensor | None

    @classmethod
    def of(cls, settings, weights, saved, x, chunk):
        xhat = rstd = None
        if x is not None:
            xhat, rstd = normalise(chunk.of(x), settings.eps, settings.dtype)
        elif saved.xhat.values is not None:
            xhat = saved.xhat.part(chunk.images, chunk.rows).load(settings.dtype).flatten(0, 1)
            rstd = None if saved.rstd is None else saved.rstd[chunk.flat]
        if settings.recompute:
            return cls(xhat, rstd, torch.addmm(weights.b1, xhat, weights.w1.t()))
        return cls(xhat, rstd, saved.hidden[chunk.flat])


def _add_chunk(settings, weights, saved, x, incoming, near, chunk, sums, dx):
    """Adds some kept rows, and the dropped ones that go with them, to ``sums``; writes their rows of ``dx``."""
    t = saved.given
    g, inner = _through_scale(settings, t, incoming.tokens, incoming.keep, chunk, sums)
    if near:
        part = near.dropped(chunk)
        g_dropped, inner_dropped = _through_scale(settings, t, incoming.tokens, incoming.drop, part, sums)
    if sums.outer is None and sums.b1 is None:
        return
    rows = _Rows.of(settings, weights, saved, x, chunk)
    if sums.outer is not None:
        g = near.pool_(g.clone(), g_dropped, chunk) if near else g
        outer, unit = in_range(g, t.gamma, settings.dtype)
        accumulate(sums.outer, outer.t(), F.gelu(rows.hidden, approximate=settings.approximate), unit)
        del outer
    g = g_dropped = None
    if sums.b1 is None:
        return
    dh = _hidden_gradient(settings, weights, inner, rows, sums, dx.kept, chunk)
    if near:
        lent = _Rows(*near.lend(chunk, *rows))
        dh = near.pool_(dh, _hidden_gradient(settings, weights, inner_dropped, lent, sums, dx.dropped, part), chunk)
    if sums.w1 is not None:
        accumulate(sums.w1, dh.t(), rows.xhat)


def _through_scale(settings, t, grad, index, chunk, sums):
    """Rows of the branch's gradient, and what goes back through W2; adds to the sum over all rows."""
    g, factor = chunk.of(grad, index), None
    if t.factor is not None:
        factor = t.factor[chunk.images, None].expand(-1, len(g) // chunk.number).reshape(-1, 1)
    g, inner, total = _scaled(g, factor, t.gamma, settings.dtype)
    sums.total.add_(total)
    return g, inner


@body
def _scaled(g, factor, gamma, dtype):
    g = g if factor is None else g * factor
    return g, (g if gamma is None else g * gamma).to(dtype), column_sums(g)


def _hidden_gradient(settings, weights, grad, rows, sums, dx, chunk):
    """Gradient of the hidden layer of some rows; that of the input goes to their place in ``dx``, if there is one."""
    dh, db, dxhat = _through_gelu(grad, rows.hidden, weights.w1, weights.w2, settings.approximate, dx is not None)
    sums.b1.add_(db)
    if dx is not None:
        chunk.put_(dx, normalise_backward(dxhat, rows.xhat, rows.rstd))
    return dh


@body
def _through_gelu(grad, hidden, w1, w2, approximate, inner):
    dh = grad @ w2
    dh = torch.ops.aten.gelu_backward.grad_input(dh, hidden, approximate=approximate, grad_input=dh)
    return dh, column_sums(dh), dh @ w1 if inner else None


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


def per_image(factor, like):
    """(N,) -> what broadcasts to the shape of ``like``."""
    return factor.view(-1, *[1] * (like.dim() - 1))
