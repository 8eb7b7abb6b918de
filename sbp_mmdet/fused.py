"""The gradients of Algorithm 1 in less memory: what each operation stores for the backward pass is chosen by hand.

Stored are, for the kept positions only, the normalised input x-hat (without the affine part), its reciprocal standard
deviation and, unless it is recomputed, the hidden layer of the channel MLP; where the convolution that made the input
can be run again (:class:`Conv`), not even those. With the affine part of the norm folded into the weights that follow,

    W1' = W1 diag(w_ln),  b1' = b1 + W1 b_ln,  h = x-hat W1'^T + b1',  y = GELU(h) W2^T + b2,

the gradients of the original parameters follow from those of the folded ones:

    dW1 = dW1' diag(w_ln) + db1' b_ln^T,  dw_ln = column sums of dW1' * W1,  db_ln = W1^T db1',  db1 = db1'.

The layer scale gamma is not folded: trained from 1e-6 it would push W2 out of fp16's range. Its gradient still needs no
stored output: with A = g^T GELU(h) for the gradient g of the block's output, dW2 = diag(gamma) A and
dgamma = row sums of A * W2 + (column sums of g) * b2.

Precision: parameters are folded in their own precision and then cast, weight gradients of chunks are added in fp32, and
parameters are saved uncast, so that no cast copy of a weight outlives the forward pass.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masks import Positions
from .rows import (
    accumulate,
    accumulator,
    column_sums,
    fold,
    from_patches,
    map_of,
    memory_format,
    normalise,
    normalise_backward,
    patch_weights,
    rows_of,
    to_patches,
    unfold,
    zeros_for,
)

__all__ = ['Conv', 'autocast_dtype', 'channel_mlp', 'downsample', 'layer_norm']

# Elements of the hidden layer that exist at a time: on a CPU what stays in its caches, on a GPU enough to keep it busy.
_CHUNK = {'cpu': 2**20, 'cuda': 2**26}


class Conv(NamedTuple):
    """A convolution that can be run again in the backward pass.

    Its input is in the graph anyway, saved by the convolution itself, if it was cast before and not by autocast.

    Attributes:
        input (Tensor): Shape (N, C, H, W).
        weight (Tensor): Uncast.
        bias (Tensor): Uncast.
        options (dict): ``stride``, ``padding``, ``groups``.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor
    options: dict

    @classmethod
    def of(cls, conv: torch.nn.Conv2d, x: Tensor) -> 'Conv':
        """The module's convolution of ``x``."""
        return cls(x, conv.weight, conv.bias, dict(stride=conv.stride, padding=conv.padding, groups=conv.groups))

    def run(self) -> Tensor:
        """The convolution's output."""
        dtype = self.input.dtype
        return F.conv2d(self.input, self.weight.to(dtype), self.bias.to(dtype), **self.options)


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
        keep (Positions | None): Which positions send gradients; None: all. Default: None.
        recompute (bool): Compute the hidden layer again in the backward pass instead of storing it. Default: False.
        source (Conv | None): Where ``x`` comes from, to compute it again too, with ``recompute``. Default: None.

    Returns:
        Tensor: Shape (N, C, H, W).
    """
    dtype = autocast_dtype(x) or x.dtype
    options = (eps, approximate, keep, recompute, source if recompute else None, dtype)
    return _ChannelMLP.apply(x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, scale, options)


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
) -> Tensor:
    """Layer norm and 2x2/2 convolution with gradients from the kept output positions.

    Args:
        x (Tensor): Shape (N, C, H, W).
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight, bias (Tensor): Convolution, shapes (C', C, 2, 2) and (C',).
        eps (float): Of the layer norm. Default: 1e-6.
        keep (Positions | None): Which output positions send gradients; None: all. Default: None.

    Returns:
        Tensor: Shape (N, C', H // 2, W // 2).
    """
    return _Downsample.apply(x, norm_weight, norm_bias, weight, bias, (eps, keep, autocast_dtype(x) or x.dtype))


@torch.compiler.disable
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float = 1e-6, source: Conv | None = None
) -> Tensor:
    """Layer norm over the channels; under autocast it stores the normalised input in reduced precision.

    Args:
        x (Tensor): Shape (N, C, H, W).
        weight, bias (Tensor | None): Affine part, shape (C,).
        eps (float): Added to the variance. Default: 1e-6.
        source (Conv | None): Where ``x`` comes from, to compute it again instead of storing it. Default: None.

    Returns:
        Tensor: Shape (N, C, H, W); under autocast in full precision, as CUDA's autocast has it.
    """
    dtype = autocast_dtype(x)
    if weight is None or bias is None or (dtype is None and source is None):
        out = F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)
    else:
        out = _LayerNorm.apply(x, weight, bias, eps, source, dtype)
    return out.contiguous(memory_format=memory_format(x))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast runs a matrix product of ``x`` in; None where autocast is off or leaves ``x`` alone."""
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    if hasattr(torch, 'get_autocast_dtype'):  # torch 2.4 and newer
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == 'cpu':
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


class _ChannelMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma, scale, options):
        eps, approximate, keep, recompute, source, dtype = options
        n, c, height, width = x.shape
        needs_inner = any(ctx.needs_input_grad[i] for i in (0, 2, 3, 4, 5))
        needs_hidden = needs_inner or ctx.needs_input_grad[6] or ctx.needs_input_grad[8]
        with _no_autocast(x):
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
                branch, stored = run(None, needs_hidden and not recompute)
                branch = branch.view(n, height * width, c)
            else:
                branch = x.new_empty(n, height * width, c, dtype=dtype)
                rows, stored = run(keep.keep, needs_hidden and not recompute)
                branch.index_copy_(1, keep.keep, rows.view(n, -1, c))
                rows, _ = run(keep.drop, False)
                branch.index_copy_(1, keep.drop, rows.view(n, -1, c))
            branch = branch.transpose(1, 2).unflatten(2, (height, width))
            factor = _factor(gamma, scale)
            out = shortcut + branch if factor is None else torch.addcmul(shortcut, branch, factor)
        xhat, rstd, hidden = stored
        if source is not None or not (needs_inner or (needs_hidden and recompute)):
            xhat = None
        if source is not None or not ctx.needs_input_grad[0]:
            rstd = None
        if any(ctx.needs_input_grad[i] for i in (0, *range(2, 9))):
            ctx.shape = x.shape
            # The source is kept by its tensors, saved like all others, so that hooks on saved tensors see them.
            ctx.options = (eps, approximate, recompute, source and source.options, dtype)
            ctx.save_for_backward(
                *(xhat, rstd, hidden, None if keep is None else keep.keep, scale, *(source or [None] * 4)[:3]),
                *(norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma),
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if not any(ctx.needs_input_grad[i] for i in (0, *range(2, 9))):
            return None, grad, *[None] * 9
        saved = ctx.saved_tensors
        xhat, rstd, hidden, keep, scale, *source = saved[:8]
        norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma = saved[8:]
        eps, approximate, recompute, conv_options, dtype = ctx.options
        needs_x, _, needs_nw, needs_nb, needs_w1, needs_b1, needs_w2, needs_b2, needs_gamma = ctx.needs_input_grad[:9]
        needs_inner = needs_x or needs_nw or needs_nb or needs_w1 or needs_b1
        with _no_autocast(grad):
            w1, b1 = fold(weight1, bias1, norm_weight, norm_bias, dtype)
            w2 = weight2.to(dtype)
            if conv_options is not None:
                xhat, rstd = normalise(rows_of(Conv(*source, conv_options).run(), keep), eps, dtype)
            g = rows_of(grad, keep)
            if scale is not None:
                g = g * scale.repeat_interleave(len(g) // len(scale))[:, None]
            sum_g = column_sums(g)
            g_scaled = (g if gamma is None else g * gamma).to(dtype)
            unit = None
            if gamma is None:
                g = g_scaled
            elif dtype == torch.float16 and len(g):
                # A small gamma keeps the plain block's gradients in fp16's range; A is formed without gamma. Each
                # channel is brought below 1/16 instead, which leaves room for the sum over the positions of a chunk.
                unit = 16 * g.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
                g = (g / unit).to(dtype)
            else:
                g = g.to(dtype)
            outer = zeros_for(weight2) if needs_w2 or needs_gamma else None  # A of the module's docstring
            dw1, db1 = (zeros_for(weight1), zeros_for(bias1)) if needs_inner else (None, None)
            dx = g.new_empty(g.shape) if needs_x else None
            chunks = _chunks(len(g), len(w1), g.device) if needs_inner or outer is not None else []
            for chunk in chunks:
                h = torch.addmm(b1, xhat[chunk], w1.t()) if recompute else hidden[chunk]
                if outer is not None:
                    accumulate(outer, g[chunk].t(), F.gelu(h, approximate=approximate))
                if needs_inner:
                    dh = torch.ops.aten.gelu_backward(g_scaled[chunk] @ w2, h, approximate=approximate)
                    if needs_w1 or needs_nw:
                        accumulate(dw1, dh.t(), xhat[chunk])
                    db1 += column_sums(dh)
                    if needs_x:
                        dx[chunk] = normalise_backward(dh @ w1, xhat[chunk], rstd[chunk])
            if unit is not None and outer is not None:
                outer *= unit[:, None]
            grads = [None] * 11
            if needs_x:
                grads[0] = map_of(dx, keep, ctx.shape)
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


class _Downsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, options):
        eps, keep, dtype = options
        height, width = x.shape[2] // 2, x.shape[3] // 2
        with _no_autocast(x):
            w, b = fold(*patch_weights(weight, bias, norm_weight, norm_bias), dtype)
            xhat, rstd = normalise(to_patches(x), eps, dtype)  # (N, L, 4, C), (N, L, 4, 1)
            out = F.linear(xhat.flatten(2), w, b).transpose(1, 2).unflatten(2, (height, width))
        if any(ctx.needs_input_grad):
            ctx.shape, ctx.dtype = x.shape, dtype
            indices = None if keep is None else keep.keep
            needs_x, needs_nw, _, needs_w, _ = ctx.needs_input_grad[:5]
            stored = (xhat if needs_x or needs_nw or needs_w else None, rstd if needs_x else None)
            if keep is not None:
                stored = (None if s is None else s.index_select(1, indices) for s in stored)
            ctx.save_for_backward(*stored, indices, norm_weight, norm_bias, weight, bias)
        return out.contiguous(memory_format=memory_format(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        xhat, rstd, keep, norm_weight, norm_bias, weight, bias = ctx.saved_tensors
        needs_x, needs_nw, needs_nb, needs_w, needs_b = ctx.needs_input_grad[:5]
        n, c, height, width = ctx.shape
        with _no_autocast(grad):
            folded = patch_weights(weight, bias, norm_weight, norm_bias)
            w, _ = fold(*folded, ctx.dtype)
            g = rows_of(grad, keep)
            db = column_sums(g)
            g = g.to(ctx.dtype)
            grads = [None] * 6
            dw = zeros_for(folded[0])
            if needs_w or needs_nw:
                accumulate(dw, g.t(), xhat.reshape(len(g), 4 * c))
            if needs_x:
                dx = normalise_backward((g @ w).view_as(xhat), xhat, rstd)  # (N, K, 4, C)
                if keep is not None:
                    dx = dx.new_zeros(n, (height // 2) * (width // 2), 4, c).index_copy_(1, keep, dx)
                grads[0] = from_patches(dx, ctx.shape)
            if needs_nw or needs_nb or needs_w or needs_b:
                dnw, dnb, dw, db = unfold(dw, db, *folded[:1], *folded[2:], (needs_nw, needs_nb, needs_w, needs_b))
                if needs_w:
                    grads[3] = dw.view(len(dw), 2, 2, c).permute(0, 3, 1, 2)
                # Every pixel of a patch is normalised with the same affine part.
                grads[1] = dnw.view(4, c).sum(0) if needs_nw else None
                grads[2] = dnb.view(4, c).sum(0) if needs_nb else None
                grads[4] = db if needs_b else None
        return tuple(grads)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, source, dtype):
        with _no_autocast(x):
            xhat, rstd = normalise(x.permute(0, 2, 3, 1), eps, accumulator(x))
            ctx.options = (eps, source and source.options, x.dtype)
            stored = (xhat.to(dtype), rstd) if source is None else (None, None)
            ctx.save_for_backward(*stored, weight, *(source or [None] * 4)[:3])
            out = torch.addcmul(bias, xhat, weight).permute(0, 3, 1, 2)
            return out if dtype is not None else out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        xhat, rstd, weight, *source = ctx.saved_tensors
        eps, conv_options, dtype = ctx.options
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with _no_autocast(grad):
            grad = grad.permute(0, 2, 3, 1).to(accumulator(grad))  # (N, H, W, C)
            if conv_options is not None:
                xhat, rstd = normalise(Conv(*source, conv_options).run().permute(0, 2, 3, 1), eps, grad.dtype)
            xhat = xhat.to(grad.dtype)
            dx = dweight = dbias = None
            if needs_x:
                dx = normalise_backward(grad * weight, xhat, rstd).to(dtype).permute(0, 3, 1, 2)
            if needs_weight:
                dweight = (grad * xhat).sum((0, 1, 2))
            if needs_bias:
                dbias = grad.sum((0, 1, 2))
        return dx, dweight, dbias, None, None, None


def _no_autocast(x):
    return torch.autocast(x.device.type, enabled=False)


def _chunks(rows, hidden, device):
    size = max(_CHUNK.get(device.type, _CHUNK['cuda']) // hidden, 1)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _gelu_(x, approximate):
    return torch.ops.aten.gelu_(x, approximate=approximate)


def _factor(gamma, scale):
    """Layer scale and stochastic depth as one factor that broadcasts to (N, C, H, W)."""
    if gamma is None:
        return None if scale is None else scale[:, None, None, None]
    gamma = gamma[:, None, None]
    return gamma if scale is None else gamma * scale[:, None, None, None]
