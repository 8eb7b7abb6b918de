"""Softmax attention by its row statistics, without an attention map of n x n numbers.

With the log-sum-exp of each row of M = Q K^T / sqrt(d), every entry of the softmax is S = exp(M - lse), whichever other
rows and keys are present. So the backward pass may be given *some* queries and *some* keys: with the output O and the
log-sum-exp of the whole forward pass, each entry of dM = S * (dO V^T - rowsum(dO * O)) that it computes is exact. That
is what drops entries of the attention map in Stochastic Backpropagation (appendix).

The kernels are torch's own: one for CPUs, two for CUDA. Where none supports the input, or the user has switched it off
(``torch.backends.cuda.enable_flash_sdp``, ``torch.nn.attention.sdpa_kernel``), heads are computed in chunks.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import accumulator

__all__ = ['attend', 'attend_backward', 'to_heads', 'to_rows']

_HALF = (torch.float16, torch.bfloat16)
# CUDA's memory-efficient kernel reads rows of statistics in blocks of this many numbers.
_ALIGN = 32
# Number of entries of the attention map that exist at a time if no kernel supports the input.
_MAP = 2**24


def to_heads(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows (N, L, h d) as heads (N, h, L, d), a view.

    Args:
        rows (Tensor): The rows.
        head_dim (int): Width d of a head.
    """
    return rows.unflatten(2, (-1, head_dim)).transpose(1, 2)


def to_rows(heads: Tensor) -> Tensor:
    """Return heads (N, h, L, d) as rows (N, L, h d)."""
    return heads.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``softmax(q k^T / sqrt(d)) v`` and its row statistics, without gradients.

    Args:
        q (Tensor): Queries, shape (N, h, M, d).
        k (Tensor): Keys, shape (N, h, L, d), L > 0.
        v (Tensor): Values, shape (N, h, L, d).

    Returns:
        tuple[Tensor, Tensor]: Output, shape (N, h, M, d), and log-sum-exp, shape (N, h, M), in full precision.
    """
    kernel = _kernel(q)
    if not q.numel():
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q))
    if kernel == 'cpu':
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return _FORWARD.get(kernel, _plain)(q, k, v)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of some queries, keys and values from the statistics of all.

    Args:
        grad (Tensor): Gradient of the output, shape (N, h, M, d).
        q (Tensor): Queries, shape (N, h, M, d).
        k (Tensor): Keys, shape (N, h, L, d).
        v (Tensor): Values, shape (N, h, L, d).
        out (Tensor): Output of the forward pass for these queries and *all* keys, shape (N, h, M, d).
        lse (Tensor): Log-sum-exp of these queries and *all* keys, shape (N, h, M).

    Returns:
        tuple[Tensor, Tensor, Tensor]: Gradients of q, k and v.
    """
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel = _kernel(q)
    if kernel == 'cpu':
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, False)
    if kernel == 'flash':
        return _flash_backward(grad, q, k, v, out, lse)
    if kernel == 'efficient':
        return _efficient_backward(grad, q, k, v, out, lse)
    return _plain_backward(grad, q, k, v, out, lse)


def _kernel(q):
    """Return the name of the kernel that supports the input. Each computes with the statistics of the others."""
    head_dim, allowed = q.shape[-1], torch.backends.cuda  # whose switches hold for CPUs, too
    flash = allowed.flash_sdp_enabled()
    if q.device.type == 'cpu':
        return 'cpu' if flash and hasattr(torch.ops.aten, '_scaled_dot_product_flash_attention_for_cpu') else 'plain'
    if q.device.type != 'cuda' or head_dim % 8 or q.dtype == torch.float64:
        return 'plain'
    ampere, place = _ampere(q.device.index), (q.dtype, q.device)
    # Before torch 2.2 the flash kernel's backward pass expects lengths in int32, and its statistics are padded.
    fits = q.dtype in _HALF and head_dim <= 128 and torch.__version__ >= (2, 2)
    if flash and ampere and fits and _is_built('flash', *place):
        return 'flash'
    # bf16 came with Ampere.
    fits = allowed.mem_efficient_sdp_enabled() and (ampere or q.dtype != torch.bfloat16)
    return 'efficient' if fits and _is_built('efficient', *place) else 'plain'


@functools.cache
def _ampere(index):
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def _is_built(kernel, dtype, device):
    """Check whether this build of torch has a kernel. Many for Windows have no flash attention, and some have neither.

    torch itself chooses among the kernels that it has. A call by name is an error where the kernel is missing.
    """
    q = torch.zeros(1, 1, 8, 8, dtype=dtype, device=device)
    try:
        _FORWARD[kernel](q, q, q)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:  # 'USE_FLASH_ATTENTION was not enabled for build.'
        return False
    return True


def _flash_forward(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]


def _efficient_forward(q, k, v):
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    return out, lse.narrow(2, 0, q.shape[2])


_FORWARD = dict(flash=_flash_forward, efficient=_efficient_forward)


def _flash_backward(grad, q, k, v, out, lse):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # the state of dropout's random numbers
    lengths = (None, None, q.shape[2], k.shape[2])
    return backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, False, unused, unused)


def _efficient_backward(grad, q, k, v, out, lse):
    if out.stride()[1:] != (out.shape[3], out.shape[1] * out.shape[3], 1):  # the kernel assumes this layout
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # The kernel reads whole blocks of statistics; infinity makes the softmax beyond the last row zero.
    missing = -lse.shape[-1] % _ALIGN
    lse = (F.pad(lse, (0, missing), value=math.inf) if missing else lse).contiguous()  # nothing to pad would be a copy
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    needs = [True, True, True, False]
    return backward(grad, q, k, v, None, out, lse, unused, unused, 0.0, needs)[:3]


def _chunks(q, k):
    """Return slices of the (N * h) heads whose attention maps have at most ``_MAP`` entries together."""
    heads = q.shape[0] * q.shape[1]
    size = max(_MAP // (q.shape[2] * k.shape[2]), 1)
    return [slice(start, start + size) for start in range(0, heads, size)]


def _like(x, heads):
    """Return heads in the shape of ``x``, (N, h, M, d), with the memory layout (N, M, h, d)."""
    n, h, m, d = x.shape
    return heads.view(n, h, m, d).transpose(1, 2).contiguous().to(x.dtype).transpose(1, 2)


def _plain(q, k, v):
    full = accumulator(q)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = q.new_empty(rows[0].shape, dtype=full), q.new_empty(rows[0].shape[:2], dtype=full)
    for chunk in _chunks(q, k):
        queries, keys, values = (x[chunk].to(full) for x in rows)
        scores = queries @ keys.mT * q.shape[-1] ** -0.5
        lse[chunk] = scores.logsumexp(-1)
        out[chunk] = (scores - lse[chunk, :, None]).exp_() @ values
    return _like(q, out), lse.view(q.shape[:3])


def _plain_backward(grad, q, k, v, out, lse):
    full, factor = accumulator(q), q.shape[-1] ** -0.5
    rows = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse)]
    dq, dk, dv = (torch.empty(x.flatten(0, 1).shape, dtype=full, device=x.device) for x in (q, k, v))
    for chunk in _chunks(q, k):
        g, queries, keys, values, o, statistics = (x[chunk].to(full) for x in rows)
        # S = exp(M - lse), dV = S^T dO, dM = S * (dO V^T - rowsum(dO * O)), dQ = dM K / sqrt(d), dK = dM^T Q / sqrt(d)
        scores = queries @ keys.mT * factor - statistics[..., None]
        softmax = scores.exp_()
        dv[chunk] = softmax.mT @ g
        dscores = softmax * (g @ values.mT - (g * o).sum(-1, keepdim=True)) * factor
        dq[chunk] = dscores @ keys
        dk[chunk] = dscores.mT @ queries
    return _like(q, dq), _like(k, dk), _like(v, dv)
