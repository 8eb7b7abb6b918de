"""The attention layer of a transformer block, with gradients of some tokens or heads.

Equations and names are those of the appendix, "Gradient Calculation of Attention Layers":

    x-hat = LN(x) without its affine part,  [Q K V] = x-hat W'^T + b',  S = softmax(Q K^T / sqrt(d)),  O = S V,
    y = x + factor * gamma * (O W_p^T + b_p)

The output is always exact. Gradients flow through (section 4, "How to apply SBP on MHSA?"):

- ``'qkv'``: the output of the branch at kept tokens, and the entries of kept queries and kept keys of the attention map
  M = Q K^T / sqrt(d). Each of these entries of dM is exact, because the softmax is over all keys (:mod:`.flash`).
- ``'query'``: the output of the branch at kept tokens, and the rows of kept queries of M; keys and values of all
  tokens. dV is computed from the kept queries, as Algorithm 1 on queries does. The appendix leaves dV exact, which
  would need the outputs of all tokens.
- ``'head'``: the contribution of the kept heads to the output of the branch, for all tokens. Neither the columns of W_p
  of the other heads nor gamma get a gradient from them.

If nothing is dropped, x-hat is saved and the attention is recomputed in the backward pass. Otherwise x-hat (of kept
tokens; of all for 'query' and 'head'), O and the log-sum-exp of the rows of M (of kept tokens or heads) are saved, and
one product recomputes Q, K and V. With keep ratio r, the backward attention takes r^2, r and r of the exact arithmetic.
In a layer that is recomputed as a whole, all of these are saved for a moment.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from ..stochastic_backprop.masks import Positions
from .attention_reference import reference_attention
from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.flash import attend, attend_backward, to_heads, to_rows
from .common.folding import (
    add_branch,
    bias_or_zeros,
    fold,
    normalise,
    normalise_backward,
    scale_into_range,
    unfold,
    unscale,
)
from .common.layouts import Chunk, add_rows_
from .common.precision import Stored, accumulate, column_sums, store
from .common.row_sampling import sample_rows
from .common.stochastic_depth import factor_for

__all__ = ['AttentionSettings', 'AttentionTensors', 'attention']

_MODES = ('qkv', 'query', 'head')


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings of :func:`attention`.

    Attributes:
        form (Form): How the operation is computed and what it saves.
        num_heads (int): Number of heads h; C = h d.
        mode (str): What is dropped: 'qkv' and 'query' drop tokens, 'head' drops heads. Default: 'qkv'.
        eps (float): Added to the variance of the layer norm. Default: 1e-6.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.

    Raises:
        ValueError: If ``mode`` is unknown.
    """

    form: Form
    num_heads: int
    mode: str = 'qkv'
    eps: float = 1e-6
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.mode not in _MODES:
            raise ValueError(f'mode={self.mode!r} is unknown; choose one of {_MODES}')


class AttentionTensors(NamedTuple):
    """Inputs of :func:`attention`.

    Attributes:
        x (Tensor): Tokens, shape (N, L, C).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        qkv_weight, qkv_bias (Tensor): Linear layer to Q, K and V, shapes (3 C, C) and (3 C,); the bias may be ``None``.
        proj_weight, proj_bias (Tensor): Projection W_p and b_p, shapes (C, C) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        factor (Tensor | float | None): Factor of the branch from stochastic depth: of each image, shape (N,), or a
            number for all of them. If ``None``, 1. Default: None.
        positions (Positions | None): Kept and dropped tokens, see :func:`.masks.token_positions`. If ``None``, all are
            kept. Default: None.
        heads (Tensor | None): Indices of the kept heads for mode 'head', int64. If ``None``, all. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor
    gamma: Tensor | None = None
    factor: Tensor | float | None = None
    positions: Positions | None = None
    heads: Tensor | None = None


AttentionGradients = gradients_of(AttentionTensors, 'factor', 'positions', 'heads')


class AttentionSaved(NamedTuple):
    """Tensors saved for the backward pass, as rows of tokens.

    Attributes:
        xhat (Stored | None): Normalised tokens, shape (N, K, C).
        rstd (Tensor | None): Their reciprocal deviation, shape (N, K, 1).
        out (Stored | None): O, shape (N, K, C), where tokens or heads are dropped or the layer is recomputed.
        lse (Tensor | None): Log-sum-exp of the rows of M, shape (N, K, h), where O is saved.
        keep (Tensor | None): Indices of the kept tokens.
        given (AttentionTensors): Parameters, factor and heads.
        qkv (Tensor | None): Q, K and V, shape (N, L, 3 C). If ``None``, they are recomputed.
    """

    xhat: Stored | None
    rstd: Tensor | None
    out: Stored | None
    lse: Tensor | None
    keep: Tensor | None
    given: AttentionTensors
    qkv: Tensor | None


def attention(settings: AttentionSettings, tensors: AttentionTensors) -> Tensor:
    """Compute ``x + factor * gamma * proj(softmax(Q K^T / sqrt(d)) V)`` with Q, K, V from ``LN(x)``.

    The gradient of the shortcut is exact everywhere; if nothing is dropped, so are all others. There is no dropout.

    Args:
        settings (AttentionSettings): Settings.
        tensors (AttentionTensors): Inputs.

    Returns:
        Tensor: Shape (N, L, C).

    Raises:
        ValueError: If the heads do not divide the channels, or what is dropped does not match the mode.

    Example:
        >>> y = attention(AttentionSettings(Form(), num_heads=12), AttentionTensors(x, *norm, *qkv, *proj))
    """
    t = tensors
    if t.x.shape[-1] % settings.num_heads:
        raise ValueError(f'num_heads={settings.num_heads} must divide the {t.x.shape[-1]} channels of the tokens')
    if settings.mode == 'head' and t.positions is not None:
        raise ValueError("mode='head' drops heads, not tokens: give `heads` and no `positions`")
    if settings.mode != 'head' and t.heads is not None:
        raise ValueError(f"mode={settings.mode!r} drops tokens, not heads: give `positions`, or use mode='head'")
    if settings.form.implementation == 'reference':
        return reference_attention(settings, tensors)
    return _attention(with_dtype(settings, t.x), tensors)


def _forward(settings, tensors, needs):
    t, dtype, kept = tensors, settings.dtype, settings.form.kept(tensors.positions)
    xhat, rstd = normalise(t.x, settings.eps, dtype)
    qkv = F.linear(xhat, *_qkv_layer(settings, t))
    head_dim = t.proj_weight.shape[1] // settings.num_heads
    out, lse = attend(*(to_heads(rows, head_dim) for rows in qkv.chunk(3, -1)))
    out = to_rows(out)
    branch = F.linear(out, t.proj_weight.to(dtype), t.proj_bias.to(dtype))
    y = add_branch(t.x, [(Chunk.whole(branch), branch)], t.gamma, t.factor, dtype)

    storage, seen = settings.form.storage, _tokens_with_gradients(settings, kept)
    runs_again = kept is None and t.heads is None and not settings.form.recomputed
    through_softmax, with_output = _needed_gradients(needs)
    stored_xhat = stored_out = stored_lse = None
    if through_softmax or (runs_again and with_output):
        stored_xhat = store(take(xhat, seen), storage)
    if not runs_again and (through_softmax or with_output):
        stored_out = store(_select_heads(take(out, kept), settings, t), storage)
    if not runs_again and through_softmax:
        stored_lse = take(lse.transpose(1, 2), kept)
        stored_lse = stored_lse if t.heads is None else stored_lse.index_select(2, t.heads)
    rstd = take(rstd, seen) if needs.x else None
    given, qkv = t._replace(x=None, positions=None), qkv if settings.form.recomputed else None
    return y, AttentionSaved(stored_xhat, rstd, stored_out, stored_lse, kept, given, qkv)


def _needed_gradients(needs):
    """Return which gradients are needed: through the softmax, and of a product with the output O."""
    through_softmax = needs.x or needs.norm_weight or needs.norm_bias or needs.qkv_weight or needs.qkv_bias
    return through_softmax, needs.proj_weight or needs.gamma


def _tokens_with_gradients(settings, kept):
    """Return the indices of tokens whose x-hat, keys and values get gradients, or ``None`` if all do."""
    return kept if settings.mode == 'qkv' else None


def _head_channels(settings, t, parts=1):
    """Return the indices of the channels of kept heads, or ``None`` if all are kept.

    There are ``parts`` times C channels, for example three times if queries, keys and values lie side by side.
    """
    if t.heads is None:
        return None
    c = t.proj_weight.shape[1]
    inside = torch.arange(c // settings.num_heads, device=t.heads.device)
    own = (t.heads[:, None] * len(inside) + inside).flatten()
    return torch.cat([own + part * c for part in range(parts)])


def _select_heads(rows, settings, t):
    """Return the kept heads' part of rows (..., C)."""
    channels = _head_channels(settings, t)
    return rows if channels is None else rows.index_select(-1, channels)


def _scatter_heads(part, channels, dim, like):
    """Return the gradient of all heads' channels from that of the kept heads', zero for the others."""
    return part if channels is None else part.new_zeros(like.shape).index_copy_(dim, channels, part)


def _qkv_layer(settings, t, channels=None):
    """Return W' and b' of Q, K and V, or of some of their channels."""
    bias = bias_or_zeros(t.qkv_weight, t.qkv_bias)
    weight, bias = fold(t.qkv_weight, bias, t.norm_weight, t.norm_bias, settings.dtype)
    return (weight, bias) if channels is None else (weight[channels], bias[channels])


def _backward(settings, saved, grad, needs):
    t = saved.given
    # g = factor * dy, of the tokens whose branch sends gradients.
    incoming = take(grad, saved.keep)
    incoming = incoming if t.factor is None else incoming * factor_for(t.factor, 3)
    xhat = None if saved.xhat is None else saved.xhat.load(settings.dtype)
    weight, bias = (None, None) if xhat is None else _qkv_layer(settings, t, _head_channels(settings, t, 3))
    q, k, v, out, lse = _activations(settings, saved, xhat, weight, bias)
    projection = _projection_gradients(settings, t, needs, incoming, out)
    if not _needed_gradients(needs)[0]:
        return AttentionGradients(*[None] * 5, *projection)
    # dO = (gamma * g) W_p. The kernel computes dM = S * (dO V^T - rowsum(dO * O)) entry by entry, and from it
    # dQ = dM K / sqrt(d), dK = dM^T Q / sqrt(d) and dV = S^T dO, for the queries, keys and heads that it is given.
    g = incoming if t.gamma is None else incoming * t.gamma
    g = to_heads(g.to(settings.dtype) @ _select_heads(t.proj_weight, settings, t).to(settings.dtype), q.shape[-1])
    del incoming
    parts = attend_backward(g, q, k, v, to_heads(out, q.shape[-1]), lse)
    dq, dk, dv = (to_rows(part) for part in parts)
    del q, k, v, out, parts, g
    queries = saved.keep if settings.mode == 'query' else None
    layer = _layer_gradients(settings, t, needs, xhat, (dq, dk, dv), queries)
    dx = None
    if needs.x:
        branch = normalise_backward(_normed_gradient(weight, dq, dk, dv, queries), xhat, saved.rstd, grad.dtype)
        seen = _tokens_with_gradients(settings, saved.keep)
        dx = grad + branch if seen is None else add_rows_(grad.clone(), seen, branch)
    return AttentionGradients(dx, *layer, *projection)


def _activations(settings, saved, xhat, weight, bias):
    """Recompute Q, K and V by heads, O as rows (N, K, C), and the statistics by heads."""
    out = None if saved.out is None else saved.out.load(settings.dtype)
    if xhat is None:
        return None, None, None, out, None
    c, head_dim = len(weight) // 3, saved.given.proj_weight.shape[1] // settings.num_heads
    if saved.qkv is None:
        q = F.linear(take(xhat, saved.keep if settings.mode == 'query' else None), weight[:c], bias[:c])
        rows = q, *F.linear(xhat, weight[c:], bias[c:]).chunk(2, -1)
    else:
        rows = saved.qkv.chunk(3, -1)
    q, k, v = (to_heads(part, head_dim) for part in rows)
    if out is not None:
        return q, k, v, out, saved.lse.transpose(1, 2)
    out, lse = attend(q, k, v)
    return q, k, v, to_rows(out), lse


def _estimate_product(sampled, a, b):
    """Compute a^T b of rows (N, K, ...) in full precision, estimated if rows are sampled."""
    return accumulate(None, sampled.take_weighted(a.flatten(0, 1)), sampled.take(b.flatten(0, 1)))


def _projection_gradients(settings, t, needs, incoming, out):
    """Return the gradients of projection and layer scale from A = g^T O, see :mod:`sbp_mmdet.ops`."""
    outer, unit, total = None, None, column_sums(incoming.flatten(0, 1))
    if needs.proj_weight or needs.gamma:
        rows, unit = scale_into_range(incoming.flatten(0, 1), t.gamma, settings.dtype)
        outer = _estimate_product(sample_rows(settings.form.sample, rows), rows[None], out)
    weight = None if t.gamma is None else _select_heads(t.proj_weight, settings, t)
    dw, db, dgamma = unscale(outer, total, weight, t.proj_bias, t.gamma, unit)
    return None if dw is None else _scatter_heads(dw, _head_channels(settings, t), 1, t.proj_weight), db, dgamma


def _layer_gradients(settings, t, needs, xhat, parts, queries):
    """Return the gradients of the norm's affine part and of the layer to Q, K and V."""
    channels = _head_channels(settings, t, 3)
    db = torch.cat([column_sums(part.flatten(0, 1)) for part in parts])
    db = _scatter_heads(db, channels, 0, t.qkv_weight[:, 0])
    dw = None
    if needs.norm_weight or needs.qkv_weight:
        rows = (take(xhat, queries), xhat, xhat)
        sampled = sample_rows(settings.form.sample, *(part.flatten(0, 1) for part in parts))
        dw = torch.cat([_estimate_product(sampled, part, seen) for part, seen in zip(parts, rows, strict=True)])
        dw = _scatter_heads(dw, channels, 0, t.qkv_weight)
    return unfold(dw, db, t.qkv_weight, t.norm_weight, t.norm_bias)


def _normed_gradient(weight, dq, dk, dv, queries):
    """Return dQ W_Q + dK W_K + dV W_V, the gradient of x-hat; dQ has the rows of the tokens ``queries`` alone."""
    wq, wk, wv = weight.chunk(3)
    return add_rows_((dk @ wk).add_(dv @ wv), queries, dq @ wq)


_attention = Operation('Attention', _forward, _backward, AttentionGradients)
