"""The reference form of :mod:`.attention`: Algorithm 1 in plain autograd.

It saves what section 4 counts for MHSA: Q, K and V, and the map before and after the softmax, each for the kept tokens
or heads. The softmax is over all keys nevertheless: what the dropped keys add to the sum of a row and to its output is
computed without a graph.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from .common.flash import attend
from .common.stochastic_depth import factor_for

__all__ = ['reference_attention']


def reference_attention(settings, tensors) -> Tensor:
    """Compute :func:`.attention` in plain autograd.

    Args:
        settings (AttentionSettings): Settings.
        tensors (AttentionTensors): Inputs.

    Returns:
        Tensor: Shape (N, L, C).
    """
    t = tensors
    if settings.mode == 'head' and t.heads is not None:
        branch = _by_heads(settings, t)
    elif t.positions is None:
        branch = _project(t, _attend(*_qkv(settings, t, t.x, 0, 3)))
    else:
        branch = _by_tokens(settings, t)
    if t.factor is None:
        return t.x + branch
    return (t.x + branch * factor_for(t.factor, 3)).to(torch.promote_types(t.x.dtype, branch.dtype))


def _qkv(settings, t, x, first, last, heads=None):
    """Return Q, K, V, or those from ``first`` up to ``last``, by heads (N, h, L, d)."""
    c = x.shape[-1]
    rows = slice(first * c, last * c)
    bias = None if t.qkv_bias is None else t.qkv_bias[rows]
    y = F.linear(F.layer_norm(x, (c,), t.norm_weight, t.norm_bias, settings.eps), t.qkv_weight[rows], bias)
    y = y.unflatten(2, (last - first, settings.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (y if heads is None else y.index_select(2, heads)).unbind(0)


def _project(t, out):
    out = F.linear(out.transpose(1, 2).flatten(2), t.proj_weight, t.proj_bias)
    return out if t.gamma is None else out * t.gamma


def _attend(q, k, v, others=None):
    """Compute attention from a map M of queries and keys that get gradients.

    Args:
        q (Tensor): Queries, shape (N, h, M, d).
        k (Tensor): Keys, shape (N, h, L, d).
        v (Tensor): Values, shape (N, h, L, d).
        others (tuple[Tensor, Tensor] | None): Output and log-sum-exp of the same queries with the dropped keys alone.
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    if others is None:
        return (scores - lse[..., None]).exp().to(v.dtype) @ v
    out, statistics = others
    # O = exp(lse_kept - lse) O_kept + exp(lse_dropped - lse) O_dropped, with lse over all keys.
    lse = torch.logaddexp(lse, statistics)
    kept = (scores - lse[..., None]).exp().to(v.dtype) @ v
    return torch.addcmul(kept, out, (statistics - lse).exp()[..., None].to(v.dtype))


def _by_tokens(settings, t):
    """Compute the branch with gradients of kept queries and, for 'qkv', of kept keys and values."""
    keep, drop = t.positions.keep, t.positions.drop
    kept, dropped = take(t.x, keep), take(t.x, drop)
    others = None
    if settings.mode == 'query':
        (q,), (k, v) = _qkv(settings, t, kept, 0, 1), _qkv(settings, t, t.x, 1, 3)
        keys, values = k, v
    else:
        q, k, v = _qkv(settings, t, kept, 0, 3)
    with torch.no_grad():
        q_drop, k_drop, v_drop = _qkv(settings, t, dropped, 0, 3)
        if settings.mode == 'qkv':
            keys, values = torch.cat([k, k_drop], 2), torch.cat([v, v_drop], 2)
            if k_drop.shape[2]:
                others = attend(q.detach(), k_drop, v_drop)
    branch = _project(t, _attend(q, k, v, others))
    with torch.no_grad():
        rest = _project(t, attend(q_drop, keys.detach(), values.detach())[0])
        whole = branch.new_empty(t.x.shape[:2] + branch.shape[2:])
        whole[:, drop] = rest
    whole[:, keep] = branch  # unlike index_copy_, this stores no rows for the backward pass
    return whole


def _by_heads(settings, t):
    """Compute the branch with gradients of the contribution of the kept heads."""
    out = _attend(*_qkv(settings, t, t.x, 0, 3, t.heads)).transpose(1, 2).flatten(2)
    others = torch.ones(settings.num_heads, dtype=torch.bool, device=t.x.device)
    others[t.heads] = False
    weight = t.proj_weight.unflatten(1, (settings.num_heads, -1))
    branch = F.linear(out, weight[:, t.heads].flatten(1), t.proj_bias)
    branch = branch if t.gamma is None else branch * t.gamma
    with torch.no_grad():
        rest = attend(*_qkv(settings, t, t.x, 0, 3, others.nonzero()[:, 0]))[0].transpose(1, 2).flatten(2)
        rest = F.linear(rest, weight[:, others].flatten(1))
        rest = rest if t.gamma is None else rest * t.gamma
    return branch + rest
