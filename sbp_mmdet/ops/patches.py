"""The downsampling layer: layer norm and 2x2/2 convolution."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..masks import Positions
from .neighbours import Neighbours
from .precision import accumulate, autocast_dtype, column_sums, no_autocast, zeros_for
from .rows import (
    fold,
    from_patches,
    memory_format,
    normalise,
    normalise_backward,
    patch_weights,
    rows_of,
    to_patches,
    unfold,
)
from .storage import Stored, store

__all__ = ['downsample']


@torch.compiler.disable
def downsample(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    keep: Positions | None = None,
    storage: str = 'native',
) -> Tensor:
    """Layer norm and 2x2/2 convolution with gradients from the kept output positions.

    Args:
        x (Tensor): Shape (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight, bias (Tensor): Convolution, shapes (C', C, 2, 2) and (C',).
        eps (float): Of the layer norm. Default: 1e-6.
        keep (Positions | None): Which output positions send gradients, see :func:`channel_mlp`; None: all.
            Default: None.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.

    Returns:
        Tensor: Shape (N, C', H // 2, W // 2).
    """
    dtype = autocast_dtype(x) or x.dtype
    return _Downsample.apply(x, norm_weight, norm_bias, weight, bias, (eps, keep, storage, dtype))


class _Downsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, options):
        eps, keep, storage, dtype = options
        height, width = x.shape[2] // 2, x.shape[3] // 2
        with no_autocast(x):
            w, b = fold(*patch_weights(weight, bias, norm_weight, norm_bias), dtype)
            xhat, rstd = normalise(to_patches(x), eps, dtype)  # (N, L, 4, C), (N, L, 4, 1)
            out = F.linear(xhat.flatten(2), w, b).transpose(1, 2).unflatten(2, (height, width))
            if any(ctx.needs_input_grad):
                ctx.shape, ctx.dtype = x.shape, dtype
                ctx.starts = keep and keep.nearest and keep.nearest.starts
                needs_x, needs_nw, _, needs_w, _ = ctx.needs_input_grad[:5]
                stored = (xhat if needs_x or needs_nw or needs_w else None, rstd if needs_x else None)
                if keep is not None:
                    stored = (None if s is None else s.index_select(1, keep.keep) for s in stored)
                xhat, rstd = stored
                xhat = Stored(None) if xhat is None else store(xhat, storage, 1)
                ctx.save_for_backward(*xhat, rstd, *Neighbours.tensors(keep), norm_weight, norm_bias, weight, bias)
        return out.contiguous(memory_format=memory_format(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        xhat, xhat_scale, rstd, keep, drop, pairs, norm_weight, norm_bias, weight, bias = ctx.saved_tensors
        needs_x, needs_nw, needs_nb, needs_w, needs_b = ctx.needs_input_grad[:5]
        n, c, height, width = ctx.shape
        with no_autocast(grad):
            folded = patch_weights(weight, bias, norm_weight, norm_bias)
            w, _ = fold(*folded, ctx.dtype)
            if xhat is not None:
                xhat = Stored(xhat, xhat_scale).load(ctx.dtype).flatten(0, 1)  # (N * K, 4, C)
            near = None if drop is None else Neighbours(pairs, ctx.starts, n)
            incoming = [rows_of(grad, index) for index in ((keep, drop) if near else (keep,))]
            db = sum(column_sums(g) for g in incoming)
            g, *g_drop = incoming = [g.to(ctx.dtype) for g in incoming]
            grads = [None] * 6
            dw = zeros_for(folded[0])
            if needs_w or needs_nw:
                pooled = near.pool_(g.clone(), *g_drop) if near else g
                accumulate(dw, pooled.t(), xhat.flatten(1))
            if needs_x:
                rstd = rstd.flatten(0, 1)
                lent = [(xhat, rstd)] + ([near.lend(slice(0, len(g)), xhat, rstd)] if near else [])
                dx = [
                    normalise_backward((g @ w).view_as(xhat), xhat, rstd).view(n, -1, 4, c)
                    for g, (xhat, rstd) in zip(incoming, lent, strict=True)
                ]
                if keep is not None:
                    whole = dx[0].new_zeros(n, (height // 2) * (width // 2), 4, c)
                    for rows, index in zip(dx, (keep, drop), strict=False):
                        whole.index_copy_(1, index, rows)
                    dx = [whole]
                grads[0] = from_patches(dx[0], ctx.shape)
            if needs_nw or needs_nb or needs_w or needs_b:
                dnw, dnb, dw, db = unfold(dw, db, *folded[:1], *folded[2:], (needs_nw, needs_nb, needs_w, needs_b))
                if needs_w:
                    grads[3] = dw.view(len(dw), 2, 2, c).permute(0, 3, 1, 2)
                # Every pixel of a patch is normalised with the same affine part.
                grads[1] = dnw.view(4, c).sum(0) if needs_nw else None
                grads[2] = dnb.view(4, c).sum(0) if needs_nb else None
                grads[4] = db if needs_b else None
        return tuple(grads)
