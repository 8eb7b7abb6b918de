"""The channel MLP of a ConvNeXt block: layer norm, pointwise, GELU, pointwise, layer scale, residual connection."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..masks import Positions
from .convs import Conv
from .neighbours import Neighbours
from .precision import accumulate, autocast_dtype, column_sums, no_autocast, zeros_for
from .rows import fold, map_of, normalise, normalise_backward, rows_of, unfold
from .storage import Stored, store

__all__ = ['channel_mlp']

# Elements of the hidden layer that exist at a time: on a CPU what stays in its caches, on a GPU enough to keep it busy.
_CHUNK = {'cpu': 2**20, 'cuda': 2**26}


@torch.compiler.disable
def channel_mlp(
    x: Tensor,
    shortcut: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    gamma: Tensor | None,
    *,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    approximate: str = 'none',
    keep: Positions | None = None,
    recompute: bool = False,
    source: Conv | None = None,
    storage: str = 'native',
) -> Tensor:
    """``shortcut + scale * gamma * (GELU(LN(x) W1^T + b1) W2^T + b2)`` with gradients from the kept positions.

    The shortcut's gradient is exact everywhere.

    Args:
        x (Tensor): Output of the depthwise convolution, shape (N, C, H, W).
        shortcut (Tensor): Shape (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight1, bias1 (Tensor): First pointwise layer, shapes (D, C) and (D,).
        weight2, bias2 (Tensor): Second pointwise layer, shapes (C, D) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,).
        scale (Tensor | None): Factor of the branch for each image (stochastic depth), shape (N,). Default: None.
        eps (float): Of the layer norm. Default: 1e-6.
        approximate (str): Of the GELU, 'none' or 'tanh'. Default: 'none'.
        keep (Positions | None): Which positions send gradients; with ``keep.nearest`` the dropped ones do so as well,
            by the activations of the kept ones. None: all. Default: None.
        recompute (bool): Compute the hidden layer again in the backward pass instead of storing it. Default: False.
        source (Conv | None): Where ``x`` comes from, to compute it again too, with ``recompute``. Default: None.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.

    Returns:
        Tensor: Shape (N, C, H, W).
    """
    dtype = autocast_dtype(x) or x.dtype
    options = (eps, approximate, keep, recompute, source if recompute else None, storage, dtype)
    return _ChannelMLP.apply(x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, scale, options)


class _ChannelMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, scale, options):
        eps, approximate, keep, recompute, source, storage, dtype = options
        n, c, height, width = x.shape
        needs_inner = any(ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5))
        needs_hidden = needs_inner or ctx.needs_input_grad[6] or ctx.needs_input_grad[8]
        with no_autocast(x):
            w1, b1 = fold(weight1, bias1, norm_weight, norm_bias, dtype)
            w2, b2 = weight2.to(dtype), bias2.to(dtype)

            def run(index, store_hidden):
                xhat, rstd = normalise(rows_of(x, index), eps, dtype)
                hidden = xhat.new_empty(len(xhat), len(w1)) if store_hidden else None
                rows = xhat.new_empty(len(xhat), c)
                for chunk in _chunks(len(xhat), len(w1), x.device):
                    h = torch.addmm(b1, xhat[chunk], w1.t(), out=None if hidden is None else hidden[chunk])
                    h = F.gelu(h, approximate=approximate) if hidden is not None else _gelu_(h, approximate)
                    torch.addmm(b2, h, w2.t(), out=rows[chunk])
                return rows, (xhat, rstd, hidden)

            if keep is None:
                branch, kept = run(None, needs_hidden and not recompute)
                branch = branch.view(n, height * width, c)
            else:
                branch = x.new_empty(n, height * width, c, dtype=dtype)
                rows, kept = run(keep.keep, needs_hidden and not recompute)
                branch.index_copy_(1, keep.keep, rows.view(n, -1, c))
                rows, _ = run(keep.drop, False)
                branch.index_copy_(1, keep.drop, rows.view(n, -1, c))
            branch = branch.transpose(1, 2).unflatten(2, (height, width))
            factor = _factor(gamma, scale)
            out = shortcut + branch if factor is None else torch.addcmul(shortcut, branch, factor)
            xhat, rstd, hidden = kept
            if source is not None or not (needs_inner or (needs_hidden and recompute)):
                xhat = Stored(None)
            else:
                xhat = store(xhat.view(n, -1, c), storage, 1)
        if source is not None or not ctx.needs_input_grad[0]:
            rstd = None
        if any(ctx.needs_input_grad[i] for i in (0, *range(2, 9))):
            ctx.shape = x.shape
            # The source is kept by its tensors, saved like all others, so that hooks on saved tensors see them.
            ctx.options = (
                eps,
                approximate,
                recompute,
                source and source.options,
                keep and keep.nearest and keep.nearest.starts,
                dtype,
            )
            ctx.save_for_backward(
                *(*xhat, rstd, hidden, scale, *Neighbours.tensors(keep)),
                *(source.tensors if source else [None] * 4),
                *(norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma),
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not any(ctx.needs_input_grad[i] for i in (0, *range(2, 9))):
            return None, grad, *[None] * 9
        xhat, xhat_scale, rstd, hidden, scale, keep, drop, pairs, *saved = ctx.saved_tensors
        source, (norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma) = saved[:4], saved[4:]
        eps, approximate, recompute, conv_options, starts, dtype = ctx.options
        needs_x, _, needs_nw, needs_nb, needs_w1, needs_b1, needs_w2, needs_b2, needs_gamma = ctx.needs_input_grad[:9]
        needs_inner = needs_x or needs_nw or needs_nb or needs_w1 or needs_b1
        with no_autocast(grad):
            w1, b1 = fold(weight1, bias1, norm_weight, norm_bias, dtype)
            w2 = weight2.to(dtype)
            if conv_options is not None:
                xhat, rstd = normalise(rows_of(Conv.of_tensors(source, conv_options).run(), keep), eps, dtype)
            elif xhat is not None:
                xhat = Stored(xhat, xhat_scale).load(dtype).flatten(0, 1)  # (N * K, C)

            def incoming(index):
                """Gradient of the branch, and what of it goes through the second pointwise layer."""
                g = rows_of(grad, index)
                if scale is not None:
                    g = g * scale.repeat_interleave(len(g) // len(scale))[:, None]
                return g, (g if gamma is None else g * gamma).to(dtype)

            g, g_inner = incoming(keep)
            sum_g = column_sums(g)
            near = None
            if drop is not None:
                near = Neighbours(pairs, starts, len(grad))
                g_drop, g_inner_drop = incoming(drop)
                sum_g += column_sums(g_drop)
                g = near.pool_(g.clone(), g_drop)
                del g_drop
            g, unit = _in_range(g, gamma, dtype)
            outer = zeros_for(weight2) if needs_w2 or needs_gamma else None  # A of the package's docstring
            dw1, db1 = (zeros_for(weight1), zeros_for(bias1)) if needs_inner else (None, None)
            dx = g.new_empty(g.shape) if needs_x else None
            dx_drop = g.new_empty(g_inner_drop.shape) if needs_x and near else None

            def inner(g, h, xhat, rstd, dx):
                """Gradient of the hidden layer; that of the input goes to ``dx``."""
                dh = torch.ops.aten.gelu_backward(g @ w2, h, approximate=approximate)
                db1.add_(column_sums(dh))
                if needs_x:
                    dx.copy_(normalise_backward(dh @ w1, xhat, rstd))
                return dh

            rows_each = 1 + len(g_inner_drop) // max(len(g), 1) if near else 1  # dropped rows come with kept ones
            for chunk in _chunks(len(g), rows_each * len(w1), g.device) if needs_inner or outer is not None else []:
                h = torch.addmm(b1, xhat[chunk], w1.t()) if recompute else hidden[chunk]
                if outer is not None:
                    accumulate(outer, g[chunk].t(), F.gelu(h, approximate=approximate))
                if not needs_inner:
                    continue
                # What the norm's backward needs is there only if the input needs a gradient.
                rows = (h, xhat[chunk], rstd[chunk]) if needs_x else (h, None, None)
                dh = inner(g_inner[chunk], *rows, dx[chunk] if needs_x else None)
                if near:
                    part = near.dropped(chunk)
                    dh_drop = inner(g_inner_drop[part], *near.lend(chunk, *rows), dx_drop[part] if needs_x else None)
                    dh = near.pool_(dh, dh_drop, chunk)
                if needs_w1 or needs_nw:
                    accumulate(dw1, dh.t(), xhat[chunk])
            if unit is not None and outer is not None:
                outer *= unit[:, None]
            grads = [None] * 11
            if needs_x:
                grads[0] = map_of(dx, keep, ctx.shape, dx_drop, drop)
            if ctx.needs_input_grad[1]:
                grads[1] = grad
            if needs_inner:
                grads[2:6] = unfold(dw1, db1, weight1, norm_weight, norm_bias, ctx.needs_input_grad[2:6])
            if needs_w2:
                grads[6] = outer if gamma is None else outer * gamma[:, None]
            if needs_b2:
                grads[7] = sum_g if gamma is None else sum_g * gamma
            if needs_gamma:
                grads[8] = (outer * weight2).sum(1) + sum_g * bias2
        return tuple(grads)


def _in_range(g, gamma, dtype):
    """The rows that A is formed from, in ``dtype``, and what A has to be multiplied by for each of its rows.

    In fp16 a small gamma keeps the plain block's gradients in range; A is formed without gamma. Each channel is brought
    below 1/16 instead, which leaves room for the sum over the positions of a chunk.
    """
    if gamma is None or dtype != torch.float16 or not len(g):
        return g.to(dtype), None
    unit = 16 * g.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
    return (g / unit).to(dtype), unit


def _chunks(rows, hidden, device):
    size = max(_CHUNK.get(device.type, _CHUNK['cuda']) // hidden, 1)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _gelu_(x, approximate):
    return torch.ops.aten.gelu_(x, approximate=approximate)


def _factor(gamma, scale):
    """Layer scale and stochastic depth as one factor that broadcasts to (N, C, H, W)."""
    if gamma is None:
        return None if scale is None else scale[:, None, None, None]
    gamma = gamma[:, None, None]
    return gamma if scale is None else gamma * scale[:, None, None, None]
