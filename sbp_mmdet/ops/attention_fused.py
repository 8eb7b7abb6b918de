"""Forward and backward pass of the lean attention layer, as plain functions; :mod:`.attention` says what they compute."""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .flash import attend, attend_backward
from .mlp import _in_range
from .precision import accumulate, accumulator, column_sums, no_autocast
from .rows import fold, normalise, normalise_backward, unfold
from .storage import Stored, store
from .tokens import add_rows_, group_sizes, take

__all__ = ['AttentionSaved', 'AttentionSettings', 'AttentionTensors', 'backward', 'forward']

# Rows that a product in half precision sums over before it is added in full precision.
_ROWS = 2**13


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """How the attention layer runs; see :func:`attention`, which checks the values.

    Attributes:
        num_heads (int): h.
        mode (str): 'qkv', 'query' or 'head'.
        dropped (str): 'zero' or 'pool'.
        recompute (bool | str): False, True or 'attention'.
        storage (str): 'native' or 'int8'.
        eps (float): Of the layer norm.
        dtype (torch.dtype): Of the matrix products.
    """

    num_heads: int
    mode: str
    dropped: str
    recompute: bool | str
    storage: str
    eps: float
    dtype: torch.dtype

    @property
    def pooled(self) -> bool:
        """Whether dropped tokens send gradients by the kept ones."""
        return self.dropped == 'pool'


class AttentionTensors(NamedTuple):
    """What the layer gets, and which of it needs gradients, and the gradients."""

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor
    gamma: Tensor | None
    factor: Tensor | None
    keep: Tensor | None
    drop: Tensor | None
    pairs: Tensor | None
    heads: Tensor | None

    @property
    def inner(self) -> bool:
        """Of needs: anything in front of the projection."""
        return any(self[:5])

    @property
    def outer(self) -> bool:
        """Of needs: what is a product with the attention's output."""
        return self.proj_weight or self.gamma


class AttentionSaved(NamedTuple):
    """What waits for the backward pass; rows of tokens, (N, K, ...)."""

    xhat: Tensor | None
    xhat_scale: Tensor | None
    rstd: Tensor | None
    out: Tensor | None
    out_scale: Tensor | None
    lse: Tensor | None  # (N, K, h)
    q: Tensor | None
    kv: Tensor | None
    tensors: AttentionTensors  # without x


def forward(
    settings: AttentionSettings, tensors: AttentionTensors, needs: AttentionTensors
) -> tuple[Tensor, AttentionSaved]:
    """The layer's output, and what its backward pass needs."""
    t, dtype = tensors, settings.dtype
    with no_autocast(t.x):
        xhat, rstd = normalise(t.x, settings.eps, dtype)
        qkv = F.linear(xhat, *_qkv_layer(settings, t))
        head_dim = qkv.shape[-1] // 3 // settings.num_heads
        out, lse = attend(*(_to_heads(rows, head_dim) for rows in qkv.chunk(3, -1)))
        out = _to_rows(out)
        branch = F.linear(out, t.proj_weight.to(dtype), t.proj_bias.to(dtype))
        multiplier = t.gamma
        if t.factor is not None:
            multiplier = t.factor[:, None, None] * (1 if t.gamma is None else t.gamma)
        y = t.x + branch if multiplier is None else torch.addcmul(t.x, branch, multiplier)
        return y, _save(settings, t, needs, xhat, rstd, qkv, out, lse)


def _save(settings, t, needs, xhat, rstd, qkv, out, lse):
    queries, seen = _indices(settings, t)
    again = settings.recompute == 'attention'
    xhat_stored = out_stored = Stored(None)
    kept_lse = q = kv = None
    if needs.inner or (again and needs.outer):
        xhat_stored = store(take(xhat, seen), settings.storage, 1)
    if not again and (needs.inner or needs.outer):
        out_stored = store(_of_heads(take(out, queries), settings, t), settings.storage, 1)
    if not again and needs.inner:
        kept_lse = take(lse.transpose(1, 2), queries)
        kept_lse = kept_lse if t.heads is None else kept_lse.index_select(2, t.heads)
        if not settings.recompute:
            c = out.shape[2]
            q = _of_heads(take(qkv[..., :c], queries), settings, t)
            kv = _of_heads(take(qkv[..., c:], seen), settings, t, 2)
    rstd = take(rstd, seen) if needs.x else None
    return AttentionSaved(*xhat_stored, rstd, *out_stored, kept_lse, q, kv, t._replace(x=None))


def _indices(settings, t):
    """Tokens whose queries, and tokens whose x-hat, keys and values send gradients; None: all."""
    return t.keep, t.keep if settings.mode == 'qkv' else None


def _channels(settings, t, parts=1):
    """Indices of kept heads' channels in ``parts`` times C; None: all."""
    if t.heads is None:
        return None
    c = t.proj_weight.shape[1]
    inside = torch.arange(c // settings.num_heads, device=t.heads.device)
    own = (t.heads[:, None] * len(inside) + inside).flatten()
    return torch.cat([own + part * c for part in range(parts)])


def _of_heads(rows, settings, t, parts=1):
    """The kept heads' part of rows (..., parts * C)."""
    channels = _channels(settings, t, parts)
    return rows if channels is None else rows.index_select(-1, channels)


def _qkv_layer(settings, t, channels=None):
    """Weight and bias from x-hat to Q, K and V, of some of their channels."""
    bias = t.qkv_weight.new_zeros(len(t.qkv_weight)) if t.qkv_bias is None else t.qkv_bias
    weight, bias = fold(t.qkv_weight, bias, t.norm_weight, t.norm_bias, settings.dtype)
    return (weight, bias) if channels is None else (weight[channels], bias[channels])


def _to_heads(rows, head_dim):
    """(N, L, h d) -> (N, h, L, d), a view."""
    return rows.unflatten(2, (-1, head_dim)).transpose(1, 2)


def _to_rows(heads):
    """(N, h, L, d) -> (N, L, h d)."""
    return heads.transpose(1, 2).flatten(2)


def backward(
    settings: AttentionSettings, saved: AttentionSaved, grad: Tensor, needs: AttentionTensors
) -> AttentionTensors:
    """Gradients of the layer's tensors, as far as they are needed."""
    t = saved.tensors
    grads = AttentionTensors(*[None] * len(AttentionTensors._fields))
    with no_autocast(grad):
        incoming, sums = _incoming(settings, t, grad)
        xhat = None if saved.xhat is None else Stored(saved.xhat, saved.xhat_scale).load(settings.dtype)
        weight, bias = _qkv_layer(settings, t, _channels(settings, t, 3)) if xhat is not None else (None, None)
        q, k, v, out, lse = _activations(settings, saved, xhat, weight, bias)
        grads = grads._replace(**_projection_gradients(settings, t, needs, incoming, sums, out))
        if needs.inner:
            g = incoming if t.gamma is None else incoming * t.gamma
            g = _to_heads(g.to(settings.dtype) @ _of_heads(t.proj_weight, settings, t).to(settings.dtype), q.shape[-1])
            del incoming
            parts = attend_backward(g, q, k, v, _to_heads(out, q.shape[-1]), lse, _key_bias(settings, t))
            dq, dk, dv = (_to_rows(part) for part in parts)
            del q, k, v, out, parts, g
            queries = t.keep if settings.mode == 'query' else None
            if queries is not None and settings.pooled:
                dq, queries = _shared(t, dq, grad.shape[1]), None
            grads = grads._replace(**_layer_gradients(settings, t, needs, xhat, (dq, dk, dv), queries))
            if needs.x:
                branch = _input_gradient(weight, dq, dk, dv, queries)
                branch = normalise_backward(branch, xhat, saved.rstd).to(grad.dtype)
                grads = grads._replace(x=_scattered(settings, t, grad, branch))
    return grads


def _incoming(settings, t, grad):
    """Gradients of the branch at kept tokens, summed over groups, and their sum over what sends any."""
    g = take(grad, t.keep)
    g = g if t.factor is None else g * t.factor[:, None, None]
    sums = column_sums(g.flatten(0, 1))
    if t.keep is not None and settings.pooled:
        rest = take(grad, t.drop)
        rest = rest if t.factor is None else rest * t.factor[:, None, None]
        sums += column_sums(rest.flatten(0, 1))
        g = add_rows_(g.clone(), t.pairs, rest)
    return g, sums


def _activations(settings, saved, xhat, weight, bias):
    """Queries, keys and values by heads, the attention's output (N, K, C) and the statistics by heads."""
    t = saved.tensors
    head_dim = t.proj_weight.shape[1] // settings.num_heads
    q = k = v = out = None
    if saved.q is not None:
        q, kv = saved.q, saved.kv
    elif xhat is not None:
        c = len(weight) // 3
        q = F.linear(take(xhat, t.keep if settings.mode == 'query' else None), weight[:c], bias[:c])
        kv = F.linear(xhat, weight[c:], bias[c:])
    if q is not None:
        q, k, v = (_to_heads(rows, head_dim) for rows in (q, *kv.chunk(2, -1)))
    if settings.recompute == 'attention' and q is not None:
        out, lse = attend(q, k, v)
        return q, k, v, _to_rows(out), lse
    if saved.out is not None:
        out = Stored(saved.out, saved.out_scale).load(settings.dtype)
    return q, k, v, out, None if saved.lse is None else saved.lse.transpose(1, 2)


def _key_bias(settings, t):
    """What a kept key's share of the softmax is multiplied by, as a logarithm."""
    if t.keep is None or not settings.pooled or settings.mode != 'qkv':
        return None
    return group_sizes(t.pairs, t.keep, accumulator(t.qkv_weight)).squeeze(-1).log().to(settings.dtype)


def _shared(t, rows, tokens):
    """Gradients of groups (N, K, C), shared by all of their tokens: (N, L, C)."""
    rows = rows / group_sizes(t.pairs, t.keep, rows.dtype)
    everyone = rows.new_zeros(rows.shape[0], tokens, rows.shape[2])
    add_rows_(everyone, t.keep, rows)
    return add_rows_(everyone, t.drop, rows if t.pairs is None else take(rows, t.pairs))


def _product(a, b):
    """a^T b of rows (N, K, ...), in full precision."""
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    total = torch.zeros(a.shape[1], b.shape[1], dtype=accumulator(a), device=a.device)
    for start in range(0, len(a), _ROWS):
        accumulate(total, a[start : start + _ROWS].t(), b[start : start + _ROWS])
    return total


def _projection_gradients(settings, t, needs, incoming, sums, out):
    """Those of the projection and of layer scale, by A = g^T O as the package's docstring has it."""
    grads = {}
    gamma = 1 if t.gamma is None else t.gamma
    if needs.proj_bias:
        grads['proj_bias'] = sums * gamma
    if not needs.outer:
        return grads
    rows, unit = _in_range(incoming.flatten(0, 1), t.gamma, settings.dtype)
    outer = _product(rows[None], out)
    outer = outer if unit is None else outer * unit[:, None]
    if needs.gamma:
        weight = _of_heads(t.proj_weight, settings, t)
        grads['gamma'] = (outer * weight).sum(1) + sums * t.proj_bias
    if needs.proj_weight:
        outer = outer if t.gamma is None else outer * gamma[:, None]
        grads['proj_weight'] = _among_all(outer, _channels(settings, t), 1, t.proj_weight)
    return grads


def _among_all(part, channels, dim, like):
    """A gradient of kept heads' channels, zero for the others."""
    return part if channels is None else part.new_zeros(like.shape).index_copy_(dim, channels, part)


def _layer_gradients(settings, t, needs, xhat, parts, queries):
    """Those of the norm's affine part and of the layer to Q, K and V."""
    names = ('norm_weight', 'norm_bias', 'qkv_weight', 'qkv_bias')
    wanted = [getattr(needs, name) for name in names]
    if not any(wanted):
        return {}
    channels = _channels(settings, t, 3)
    db = torch.cat([column_sums(part.flatten(0, 1)) for part in parts])
    db = _among_all(db, channels, 0, t.qkv_weight[:, 0])
    dw = None
    if needs.norm_weight or needs.qkv_weight:
        rows = (take(xhat, queries), xhat, xhat)
        dw = torch.cat([_product(part, seen) for part, seen in zip(parts, rows, strict=True)])
        dw = _among_all(dw, channels, 0, t.qkv_weight)
    return dict(zip(names, unfold(dw, db, t.qkv_weight, t.norm_weight, t.norm_bias, wanted), strict=True))


def _input_gradient(weight, dq, dk, dv, queries):
    """Gradient of x-hat."""
    wq, wk, wv = weight.chunk(3)
    total = (dk @ wk).add_(dv @ wv)
    return add_rows_(total, queries, dq @ wq)


def _scattered(settings, t, grad, branch):
    """Gradient of the tokens: the shortcut's and, where there is one, the branch's."""
    index = _indices(settings, t)[1]
    if index is None:
        return grad + branch
    if not settings.pooled:
        return add_rows_(grad.clone(), index, branch)
    return grad + _shared(t, branch, grad.shape[1])
