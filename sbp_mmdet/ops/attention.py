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

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..masks import Positions
from . import attention_fused as fused
from .attention_fused import AttentionSaved, AttentionSettings, AttentionTensors
from .attention_reference import attention_reference
from .precision import autocast_dtype
from .storage import STORAGES

__all__ = ['MODES', 'RECOMPUTE', 'attention']

MODES = ('qkv', 'query', 'head')
RECOMPUTE = (False, True, 'attention')


def attention(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gamma: Tensor | None = None,
    *,
    num_heads: int,
    factor: Tensor | None = None,
    mode: str = 'qkv',
    keep: Positions | None = None,
    heads: Tensor | None = None,
    dropped: str = 'zero',
    recompute: bool | str = True,
    storage: str = 'native',
    eps: float = 1e-6,
    implementation: str = 'fused',
) -> Tensor:
    """``x + factor * gamma * proj(softmax(Q K^T / sqrt(d)) V)``, Q, K, V from ``LN(x)``; exact gradients unless told.

    The shortcut's gradient is exact everywhere. Attention and projection have no dropout.

    Args:
        x (Tensor): Tokens, shape (N, L, C).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        qkv_weight, qkv_bias (Tensor): Linear layer to Q, K and V, shapes (3 C, C) and (3 C,); the bias may be None.
        proj_weight, proj_bias (Tensor): Projection, shapes (C, C) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        num_heads (int): h; C = h d.
        factor (Tensor | None): Factor of the branch for each image (stochastic depth), shape (N,). Default: None.
        mode (str): What is dropped (section 4, "How to apply SBP on MHSA?"): 'qkv' and 'query' go by ``keep``, 'head'
            by ``heads``. Default: 'qkv'.
        keep (Positions | None): Kept and dropped *tokens*, see :func:`~.tokens.token_positions`. None: all are kept.
            Default: None.
        heads (Tensor | None): int64, kept heads, ascending; for mode 'head'. Default: None.
        dropped (str): What dropped tokens send: 'zero', or 'pool', a share of their group's gradient; this needs
            ``keep.nearest``. Default: 'zero'.
        recompute (bool | str): False: Q, K and V are stored as well. True: they are computed again. 'attention': so are
            its output and statistics, and only x-hat is stored; not for 'qkv' with dropped tokens, where x-hat of all
            tokens would take the place of two rows for each kept one. Default: True.
        storage (str): How x-hat and the attention's output are stored, 'native' or 'int8'. Default: 'native'.
        eps (float): Of the layer norm. Default: 1e-6.
        implementation (str): 'fused', or 'reference': Algorithm 1 with stored maps, as the paper counts them;
            for 'zero' and 'native' only. Default: 'fused'.

    Returns:
        Tensor: Shape (N, L, C).

    Raises:
        ValueError: Naming the value and the remedy.
    """
    dtype = autocast_dtype(x) or x.dtype
    settings = AttentionSettings(num_heads, mode, dropped, recompute, storage, eps, dtype)
    _check(settings, x, keep, heads, implementation)
    indices = (None, None, None)
    if keep is not None:
        drop = keep.drop if dropped == 'pool' or implementation == 'reference' else None
        indices = (keep.keep, drop, keep.nearest.index if dropped == 'pool' else None)
    parameters = (norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, gamma)
    tensors = AttentionTensors(x, *parameters, factor, *indices, heads)
    if implementation == 'reference':
        return attention_reference(settings, tensors)
    return _run(settings, tensors)


def _check(settings, x, keep, heads, implementation):
    mode, dropped, recompute = settings.mode, settings.dropped, settings.recompute
    if x.shape[-1] % settings.num_heads:
        raise ValueError(f'num_heads={settings.num_heads} must divide the {x.shape[-1]} channels of the tokens')
    for name, value, known in (
        ('attention mode', mode, MODES),
        ('recompute', recompute, RECOMPUTE),
        ('storage', settings.storage, STORAGES),
        ('implementation', implementation, ('fused', 'reference')),
    ):
        if value not in known:
            raise ValueError(f'{name}={value!r} is unknown; choose one of {known}')
    if mode == 'head' and keep is not None:
        raise ValueError("mode='head' drops heads, not tokens: give `heads` and no `keep`")
    if mode != 'head' and heads is not None:
        raise ValueError(f"mode={mode!r} drops tokens, not heads: give `keep`, or mode='head'")
    if dropped not in ('zero', 'pool'):
        raise ValueError(f"dropped={dropped!r}: attention knows 'zero' and 'pool'; 'pool' is the nearer to 'nearest'")
    if dropped == 'pool' and keep is not None and keep.nearest is None:
        raise ValueError("dropped='pool' needs a kept token for each dropped one, but keep.nearest is None")
    if recompute == 'attention' and mode == 'qkv' and keep is not None:
        raise ValueError(
            "recompute='attention' needs x-hat of all tokens, mode='qkv' stores that of kept ones: use recompute=True"
        )
    if implementation == 'reference' and (dropped, settings.storage) != ('zero', 'native'):
        raise ValueError(
            f"implementation='reference' knows dropped='zero' and storage='native' only, not {dropped!r} and "
            f"{settings.storage!r}: use 'fused'"
        )


@torch.compiler.disable
def _run(settings, tensors):
    return _Attention.apply(settings, *tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, *tensors):
        tensors = AttentionTensors(*tensors)
        out, saved = fused.forward(settings, tensors, AttentionTensors(*ctx.needs_input_grad[1:]))
        ctx.settings = settings
        ctx.save_for_backward(*saved[:-1], *saved.tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        stored = ctx.saved_tensors
        own = len(AttentionSaved._fields) - 1
        saved = AttentionSaved(*stored[:own], AttentionTensors(*stored[own:]))
        return None, *fused.backward(ctx.settings, saved, grad, AttentionTensors(*ctx.needs_input_grad[1:]))
