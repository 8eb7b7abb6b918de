"""The attention layer of a transformer block on tokens, with gradients from some tokens or heads (appendix, "Gradient
Calculation of Attention Layers").

    x-hat = LN(x) without its affine part,  [Q K V] = x-hat W'^T + b',  S = softmax(Q K^T / sqrt(d)),  O = S V,
    y = x + factor * gamma * (O W_p^T + b_p)

The forward pass is always the whole one. What sends gradients (section 4, "How to apply SBP on MHSA?"):

- ``'qkv'``: the branch's output at kept tokens, and of the map M = Q K^T / sqrt(d) the entries of kept queries and kept
  keys. Each of these entries of dM is exact, for the softmax is that over all keys (:mod:`.flash`).
- ``'query'``: the branch's output at kept tokens, and of M the rows of kept queries. K and V send gradients everywhere.
  dV comes from the kept queries, as Algorithm 1 on queries has it. The appendix leaves dV exact, which would need the
  outputs of all tokens.
- ``'head'``: what the kept heads add to the branch's output, for all tokens. The other heads send nothing: neither
  their columns of W_p nor gamma get a gradient from them.

Stored are x-hat (of kept tokens; of all for 'query' and 'head'), O and the log-sum-exp of the rows of M (of kept tokens
or heads). One product gives Q, K and V again. Arithmetic of the backward attention: r^2, r and r of the exact one.

With ``dropped='pool'`` a dropped token is taken for the kept one that it goes with. The backward pass is linear in the
gradient of O, so the gradients of a group are summed and sent back once. A kept key stands for its whole group, which
is a bias of log(size) in the softmax. The gradient of the input is shared by the group.
"""

import dataclasses

from torch import Tensor

from .attention_fused import AttentionGradients, AttentionSettings, AttentionTensors, backward, forward
from .attention_reference import attention_reference
from .operation import Operation
from .precision import autocast_dtype

__all__ = ['AttentionSettings', 'AttentionTensors', 'attention']

_attention = Operation('Attention', forward, backward, AttentionGradients)


def attention(settings: AttentionSettings, tensors: AttentionTensors) -> Tensor:
    """``x + factor * gamma * proj(softmax(Q K^T / sqrt(d)) V)`` with Q, K, V from ``LN(x)``; see this module.

    The shortcut's gradient is exact everywhere, and so are all others where nothing is dropped. There is no dropout.

    Args:
        settings (AttentionSettings): See there.
        tensors (AttentionTensors): See there.

    Returns:
        Tensor: Shape (N, L, C).

    Raises:
        ValueError: If settings and tensors do not go together.
    """
    _check(settings, tensors)
    if settings.implementation == 'reference':
        return attention_reference(settings, tensors)
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _attention(dataclasses.replace(settings, dtype=dtype), tensors)


def _check(settings, t):
    if t.x.shape[-1] % settings.num_heads:
        raise ValueError(f'num_heads={settings.num_heads} must divide the {t.x.shape[-1]} channels of the tokens')
    if settings.mode == 'head' and t.positions is not None:
        raise ValueError("mode='head' drops heads, not tokens: give `heads` and no `positions`")
    if settings.mode != 'head' and t.heads is not None:
        raise ValueError(f"mode={settings.mode!r} drops tokens, not heads: give `positions`, or use mode='head'")
    if t.positions is None:
        return
    if settings.dropped == 'pool' and t.positions.nearest is None:
        raise ValueError("dropped='pool' needs a kept token for each dropped one, but positions.nearest is None")
    if settings.recompute == 'attention' and settings.mode == 'qkv':
        raise ValueError(
            "recompute='attention' needs x-hat of all tokens, mode='qkv' stores that of kept ones: use recompute=True"
        )
