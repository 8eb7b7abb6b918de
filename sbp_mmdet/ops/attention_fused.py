"""Forward and backward pass of the lean attention layer, as plain functions; see :mod:`.attention`."""

import dataclasses
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import take
from ..masks import Positions
from .flash import attend, attend_backward
from .neighbours import SavedPositions
from .operation import gradients_of
from .precision import accumulate, accumulator, column_sums, in_range
from .rows import add_rows_, fold, map_of, normalise, normalise_backward, unfold
from .storage import STORAGES, Stored, store

__all__ = ['AttentionGradients', 'AttentionSaved', 'AttentionSettings', 'AttentionTensors', 'backward', 'forward']

_CHOICES = dict(
    mode=('qkv', 'query', 'head'),
    dropped=('zero', 'pool'),
    recompute=(False, True, 'attention'),
    storage=STORAGES,
    implementation=('fused', 'reference'),
)
# Rows that a product in half precision sums over before it is added in full precision.
_ROWS = 2**13


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Of :func:`.attention.attention`.

    Attributes:
        num_heads (int): h; C = h d.
        mode (str): What is dropped (section 4, "How to apply SBP on MHSA?"): 'qkv' and 'query' go by positions, 'head'
            by ``heads``. Default: 'qkv'.
        dropped (str): What dropped tokens send: 'zero', nothing, or 'pool', a share of their group's gradient.
            Default: 'zero'.
        recompute (bool | str): False: Q, K and V are stored as well. True: they are computed again. 'attention': so are
            its output and statistics, and only x-hat is stored; not for 'qkv' with dropped tokens, where x-hat of all
            tokens would take the place of two rows for each kept one. Default: True.
        storage (str): How x-hat and the attention's output are stored, 'native' or 'int8'. Default: 'native'.
        implementation (str): 'fused', or 'reference': Algorithm 1 with stored maps, as the paper counts them; for
            'zero' and 'native' only. Default: 'fused'.
        eps (float): Of the layer norm. Default: 1e-6.
        compile (bool): Compile the bodies, see :mod:`.compiled`. Default: False.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.

    Raises:
        ValueError: For an unknown value, or one that the form of implementation does not have.
    """

    num_heads: int
    mode: str = 'qkv'
    dropped: str = 'zero'
    recompute: bool | str = True
    storage: str = 'native'
    implementation: str = 'fused'
    eps: float = 1e-6
    compile: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self):
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                hint = "; 'pool' gives weights the same gradients for fewer products" if value == 'nearest' else ''
                raise ValueError(f'{name}={value!r} is not there for attention; choose one of {known}{hint}')
        if self.implementation == 'reference' and (self.dropped, self.storage) != ('zero', 'native'):
            raise ValueError(
                f"implementation='reference' knows dropped='zero' and storage='native' only, not {self.dropped!r} and "
                f"{self.storage!r}: use 'fused'"
            )


class AttentionTensors(NamedTuple):
    """What the layer works on.

    Attributes:
        x (Tensor): Tokens, shape (N, L, C).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        qkv_weight, qkv_bias (Tensor): Linear layer to Q, K and V, shapes (3 C, C) and (3 C,); the bias may be None.
        proj_weight, proj_bias (Tensor): Projection, shapes (C, C) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        factor (Tensor | None): Of the branch of each image (stochastic depth), shape (N,). Default: None.
        positions (Positions | None): Kept and dropped *tokens*, for all images alike or for each, see
            :func:`.tokens.token_positions`; 'pool' needs ``positions.nearest``. None: all are kept. Default: None.
        heads (Tensor | None): int64, kept heads, for mode 'head'. None: all. Default: None.
    """

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor
    gamma: Tensor | None = None
    factor: Tensor | None = None
    positions: Positions | None = None
    heads: Tensor | None = None


AttentionGradients = gradients_of(AttentionTensors, 'factor', 'positions', 'heads')


class AttentionSaved(NamedTuple):
    """What waits for the backward pass, as rows of tokens (N, K, ...)."""

    xhat: Stored
    rstd: Tensor | None
    out: Stored
    lse: Tensor | None  # (N, K, h)
    q: Tensor | None
    kv: Tensor | None
    positions: SavedPositions
    given: AttentionTensors  # without x and positions


def _asks(needs):
    """Whether anything in front of the projection, and whether a product with the attention's output, is needed."""
    inner = needs.x or needs.norm_weight or needs.norm_bias or needs.qkv_weight or needs.qkv_bias
    return inner, needs.proj_weight or needs.gamma


def forward(
    settings: AttentionSettings, tensors: AttentionTensors, needs: AttentionGradients
) -> tuple[Tensor, AttentionSaved]:
    """The layer's output, and what its backward pass needs; see :mod:`.operation`."""
    t, dtype = tensors, settings.dtype
    xhat, rstd = normalise(t.x, settings.eps, dtype)
    qkv = F.linear(xhat, *_qkv_layer(settings, t))
    head_dim = t.proj_weight.shape[1] // settings.num_heads
    out, lse = attend(*(_to_heads(rows, head_dim) for rows in qkv.chunk(3, -1)))
    out = _to_rows(out)
    branch = F.linear(out, t.proj_weight.to(dtype), t.proj_bias.to(dtype))
    multiplier = t.gamma
    if t.factor is not None:
        multiplier = t.factor[:, None, None] * (1 if t.gamma is None else t.gamma)
    y = t.x + branch if multiplier is None else torch.addcmul(t.x, branch, multiplier)
    kinds = [t.x.dtype, dtype] + ([] if t.gamma is None else [t.gamma.dtype])  # whatever the factor's precision
    y = y.to(functools.reduce(torch.promote_types, kinds))
    return y, _save(settings, t, needs, xhat, rstd, qkv, out, lse)


def _save(settings, t, needs, xhat, rstd, qkv, out, lse):
    positions = SavedPositions.of(t.positions, settings.dropped)
    queries, seen = positions.keep, _seen(settings, positions)
    again = settings.recompute == 'attention'
    inner, outer = _asks(needs)
    xhat_stored = out_stored = Stored(None)
    kept_lse = q = kv = None
    if inner or (again and outer):
        xhat_stored = store(take(xhat, seen), settings.storage, 1)
    if not again and (inner or outer):
        out_stored = store(_of_heads(take(out, queries), settings, t), settings.storage, 1)
    if not again and inner:
        kept_lse = take(lse.transpose(1, 2), queries)
        kept_lse = kept_lse if t.heads is None else kept_lse.index_select(2, t.heads)
        if not settings.recompute:
            c = out.shape[2]
            q = _of_heads(take(qkv[..., :c], queries), settings, t)
            kv = _of_heads(take(qkv[..., c:], seen), settings, t, 2)
            if queries is not None:
                kv = kv.contiguous()  # a view would hold the queries that are not kept
    rstd = take(rstd, seen) if needs.x else None
    given = t._replace(x=None, positions=None)
    return AttentionSaved(xhat_stored, rstd, out_stored, kept_lse, q, kv, positions, given)


def _seen(settings, positions):
    """Tokens whose x-hat, keys and values send gradients; None: all."""
    return positions.keep if settings.mode == 'qkv' else None


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
    settings: AttentionSettings, saved: AttentionSaved, grad: Tensor, needs: AttentionGradients
) -> AttentionGradients:
    """Gradients of the layer's tensors, as far as they are needed; see :mod:`.operation`."""
    t, positions = saved.given, saved.positions
    groups = positions.groups
    incoming, sums = _incoming(t, positions, groups, grad)
    xhat = None if saved.xhat.values is None else saved.xhat.load(settings.dtype)
    weight, bias = (None, None) if xhat is None else _qkv_layer(settings, t, _channels(settings, t, 3))
    q, k, v, out, lse = _activations(settings, saved, xhat, weight, bias)
    found = _projection_gradients(settings, t, needs, incoming, sums, out)
    if not _asks(needs)[0]:
        return AttentionGradients(**found)
    g = incoming if t.gamma is None else incoming * t.gamma
    g = _to_heads(g.to(settings.dtype) @ _of_heads(t.proj_weight, settings, t).to(settings.dtype), q.shape[-1])
    del incoming
    parts = attend_backward(g, q, k, v, _to_heads(out, q.shape[-1]), lse, _key_bias(settings, groups))
    dq, dk, dv = (_to_rows(part) for part in parts)
    del q, k, v, out, parts, g
    queries = positions.keep if settings.mode == 'query' else None
    if queries is not None and groups:
        dq, queries = _shared(positions, groups, dq, grad.shape), None
    found |= _layer_gradients(settings, t, needs, xhat, (dq, dk, dv), queries)
    if needs.x:
        branch = normalise_backward(_input_gradient(weight, dq, dk, dv, queries), xhat, saved.rstd)
        found['x'] = _scattered(settings, positions, groups, grad, branch.to(grad.dtype))
    return AttentionGradients(**found)


def _incoming(t, positions, groups, grad):
    """Gradients of the branch at kept tokens, summed over groups, and their sum over all tokens that send any."""

    def rows(index):
        g = take(grad, index)
        return g if t.factor is None else g * t.factor[:, None, None]

    g = rows(positions.keep)
    sums = column_sums(g.flatten(0, 1))
    if groups:
        dropped = rows(positions.drop)
        sums += column_sums(dropped.flatten(0, 1))
        groups.sum_(g, dropped)
    return g, sums


def _activations(settings, saved, xhat, weight, bias):
    """Queries, keys and values by heads, the attention's output (N, K, C) and the statistics by heads."""
    head_dim = saved.given.proj_weight.shape[1] // settings.num_heads
    q = k = v = None
    if saved.q is not None:
        q, kv = saved.q, saved.kv
    elif xhat is not None:
        c = len(weight) // 3
        q = F.linear(take(xhat, saved.positions.keep if settings.mode == 'query' else None), weight[:c], bias[:c])
        kv = F.linear(xhat, weight[c:], bias[c:])
    if q is not None:
        q, k, v = (_to_heads(rows, head_dim) for rows in (q, *kv.chunk(2, -1)))
    if settings.recompute == 'attention' and q is not None:
        out, lse = attend(q, k, v)
        return q, k, v, _to_rows(out), lse
    out = None if saved.out.values is None else saved.out.load(settings.dtype)
    return q, k, v, out, None if saved.lse is None else saved.lse.transpose(1, 2)


def _key_bias(settings, groups):
    """What a kept key's share of the softmax is multiplied by, as a logarithm."""
    if not groups or settings.mode != 'qkv':
        return None
    sizes = groups.sizes(torch.float64 if settings.dtype == torch.float64 else torch.float32)
    return sizes.squeeze(-1).log().to(settings.dtype)


def _shared(positions, groups, rows, shape):
    """Gradients of groups (N, K, C), changed, shared by all of their tokens: (N, L, C)."""
    kept, dropped = (part.flatten(0, 1) for part in groups.share_(rows))
    return map_of(kept, positions.keep, shape, dropped, positions.drop)


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
    if not _asks(needs)[1]:
        return grads
    rows, unit = in_range(incoming.flatten(0, 1), t.gamma, settings.dtype)
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


def _scattered(settings, positions, groups, grad, branch):
    """Gradient of the tokens: the shortcut's and, where there is one, the branch's."""
    index = _seen(settings, positions)
    if index is None:
        return grad + branch
    if not groups:
        return add_rows_(grad.clone(), index, branch)
    return grad + _shared(positions, groups, branch, grad.shape)
