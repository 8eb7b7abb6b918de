"""Algorithm 1 of "An In-depth Study of Stochastic Backpropagation" (NeurIPS 2022) for any position-wise operation."""

from collections.abc import Callable

import torch
from torch import Tensor

from .masks import Positions

__all__ = ['centres', 'pooled', 'sbp', 'shares', 'take']


def sbp(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions) -> Tensor:
    """Runs ``f`` on every position and keeps the graph for the kept positions only (Algorithm 1, section 3.4).

    The value is that of ``f(x)``; the gradient is that of ``torch.where(kept, f(x), f(x).detach())``.

    Args:
        f (Callable): Maps (N, K, ...) to (N, K, ...'), each position independently of the others.
        x (Tensor): Shape (N, L, ...).
        positions (Positions): Kept and dropped indices into the L positions, for all images alike, shapes (K,) and
            (D,), or for each image, shapes (N, K) and (N, D).

    Returns:
        Tensor: Shape (N, L, ...').
    """
    keep, drop = positions.keep, positions.drop
    # Kept positions first: under autocast the first call fills the cache of cast weights, and a cache that was filled
    # inside no_grad would cut the weights off from their gradients.
    kept = f(take(x, keep))
    with torch.no_grad():
        outputs = kept.new_empty(x.shape[:2] + kept.shape[2:])
        outputs[_places(drop)] = f(take(x, drop))
    outputs[_places(keep)] = kept
    return outputs


def pooled(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions) -> Tensor:
    """As :func:`sbp`, but dropped positions send gradients too: those of a kept position and of the dropped ones that
    go with it, a group, are summed and go back once, through one input that stands for all of them (:func:`centres`).

    Each position of a group gets its share of what comes back, see :func:`shares`. This is exact where the positions of
    a group are alike and their gradients have one direction. It stores what :func:`sbp` stores.

    Args:
        f (Callable): Maps (N, K, ...) to (N, K, ...'), each position independently of the others.
        x (Tensor): Shape (N, L, ...).
        positions (Positions): As for :func:`sbp`, with ``nearest``.

    Returns:
        Tensor: Shape (N, L, ...').

    Raises:
        ValueError: Without ``nearest``.
    """
    keep, drop, nearest = positions
    if nearest is None:
        raise ValueError('pooled needs positions with `nearest`: make them by positions(mask, nearest=True)')
    pairs = torch.arange(drop.shape[-1], device=drop.device).expand_as(drop) if nearest.index is None else nearest.index
    found = []  # the shares: from the backward pass of the outputs to that of the inputs
    centre = f(_Inputs.apply(x, keep, drop, pairs, found))
    with torch.no_grad():
        outputs = f(x)
    return _Outputs.apply(centre, outputs, keep, drop, pairs, found)


def centres(x: Tensor, keep: Tensor, drop: Tensor, pairs: Tensor | None) -> Tensor:
    """The inputs that stand for groups: between a kept position and the mean of its group, in the middle.

    Args:
        x (Tensor): Shape (N, L, ...).
        keep, drop (Tensor): Positions of the kept and dropped ones, shapes (K,) and (D,), or (N, K) and (N, D).
        pairs (Tensor | None): Which group each dropped one belongs to, shape (D,) or (N, D); None: to the i-th.

    Returns:
        Tensor: Shape (N, K, ...).
    """
    kept, dropped = take(x, keep), take(x, drop)
    if pairs is None:
        return torch.lerp(kept, dropped, 0.25)
    size = torch.ones(keep.shape, dtype=x.dtype, device=x.device).scatter_add(-1, pairs, x.new_ones(pairs.shape))
    part = (0.5 / size).view(-1, keep.shape[-1], *[1] * (x.dim() - 2))
    return _add(kept * (0.5 + part), pairs, dropped * take(part, pairs))


def shares(total: Tensor, dropped: Tensor, pairs: Tensor | None) -> Tensor:
    """Which part of its group's sum each dropped gradient is: <g, s> / <s, s> for the sum s.

    Of all multiples of s, this one is nearest to g. The shares of a group's members add up to 1, so the kept one's is
    what its dropped ones leave.

    Args:
        total (Tensor): Sums of the groups, shape (N, K, C).
        dropped (Tensor): Gradients of the dropped ones, shape (N, D, C).
        pairs (Tensor | None): Which group each of them belongs to, shape (D,) or (N, D); None: to the i-th.

    Returns:
        Tensor: Shape (N, D, 1), at least fp32; 0 where the sum is.
    """
    dtype = torch.promote_types(total.dtype, torch.float32)
    total = take(total, pairs)
    length = torch.linalg.vector_norm(total, dim=-1, keepdim=True, dtype=dtype).clamp_min(torch.finfo(dtype).tiny)
    # The length before the product: in fp16 the squares would leave its range.
    return (total / length).to(dropped.dtype).mul_(dropped).sum(-1, keepdim=True, dtype=dtype) / length


class _Inputs(torch.autograd.Function):
    """Of x (N, L, ...) what stands for groups; all positions of a group get their share of its gradient."""

    @staticmethod
    def forward(ctx, x, keep, drop, pairs, found):
        ctx.save_for_backward(keep, drop, pairs)
        ctx.shape, ctx.found = x.shape, found
        return centres(x, keep, drop, pairs)

    @staticmethod
    def backward(ctx, grad):
        keep, drop, pairs = ctx.saved_tensors
        part = ctx.found.pop()
        rows = grad.flatten(2)
        out = grad.new_empty(ctx.shape).flatten(2)
        out[_places(drop)] = (take(rows, pairs) * part).to(rows.dtype)
        out[_places(keep)] = (rows * (1 - _add(part.new_zeros(*rows.shape[:2], 1), pairs, part))).to(rows.dtype)
        return out.view(ctx.shape), None, None, None, None


class _Outputs(torch.autograd.Function):
    """The outputs (N, L, ...'); what stands for a group gets the sum of its gradients."""

    @staticmethod
    def forward(ctx, centre, outputs, keep, drop, pairs, found):
        ctx.save_for_backward(keep, drop, pairs)
        ctx.found = found
        return outputs.clone()

    @staticmethod
    def backward(ctx, grad):
        keep, drop, pairs = ctx.saved_tensors
        dropped = take(grad, drop)
        total = _add(take(grad, keep), pairs, dropped)
        ctx.found.append(shares(total.flatten(2), dropped.flatten(2), pairs))
        return total, None, None, None, None, None


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows at some places.

    Args:
        x (Tensor): Shape (N, L, ...), of any strides.
        index (Tensor | None): Shape (K,) for all images alike or (N, K); None: all, not copied.

    Returns:
        Tensor: Shape (N, K, ...).
    """
    if index is None:
        return x
    if index.dim() == 1:
        return x.index_select(1, index)
    if torch.is_grad_enabled():  # autograd cannot follow rows into a tensor that is there already
        return torch.stack([image.index_select(0, own) for image, own in zip(x, index, strict=True)])
    out = x.new_empty(*index.shape, *x.shape[2:])
    for image, own, rows in zip(x, index, out, strict=True):
        torch.index_select(image, 0, own, out=rows)
    return out


def _add(x, index, rows):
    if index.dim() == 1:
        return x.index_add(1, index, rows)
    return x.scatter_add(1, index[(..., *[None] * (x.dim() - 2))].expand_as(rows), rows)


def _places(index):
    images = slice(None) if index.dim() == 1 else torch.arange(len(index), device=index.device)[:, None]
    return images, index
