"""The attention layer of ViTDet and SAM: on a whole map or in windows, with a decomposed bias of relative positions.

    [Q K V] = LN(x) W^T + b,   M = s Q K^T + B,   y = x + factor * proj(softmax(M) V)

The bias between positions (i, j) and (k, l) is a product of the query with an embedding of i - k and one of j - l:

    B = Q R_h[i - k] + Q R_w[j - l].

So M is a product of longer vectors, [s Q, Q R_h, Q R_w] and [K, e_k, e_l], where e is a unit vector. A kernel without
an attention map computes the softmax of that, and neither M nor B ever exists. x-hat and its reciprocal deviation are
saved. The backward pass recomputes some windows or images at a time.

A map that the windows do not divide is padded after the norm, with tokens that are zero, and other tokens attend to
them.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.folding import normalise, normalise_backward
from .common.layouts import elements_at_a_time
from .common.precision import Stored, accumulator, store
from .common.stochastic_depth import factor_for

__all__ = ['DecomposedSettings', 'DecomposedTensors', 'decomposed_attention', 'into_windows', 'out_of_windows']

_ALIGNED = 8  # numbers that CUDA's kernels want vectors to be a multiple of


@dataclasses.dataclass(frozen=True)
class DecomposedSettings:
    """Settings of :func:`decomposed_attention`.

    Attributes:
        form (Form): What the operation saves. It has no reference form.
        num_heads (int): Number of heads h; C = h d.
        window (int): Side of a window, in tokens. If 0, attention is on the whole map. Default: 0.
        eps (float): Added to the variance of the layer norm. Default: 1e-6.
        chunk (int | None): Number of elements of the largest tensor that exist at a time, of at least one row of
            windows or one image. If ``None``, it depends on the device. Default: None.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.
    """

    form: Form
    num_heads: int
    window: int = 0
    eps: float = 1e-6
    chunk: int | None = None
    dtype: torch.dtype | None = None


class DecomposedTensors(NamedTuple):
    """Inputs of :func:`decomposed_attention`.

    Attributes:
        x (Tensor): Tokens of a map, shape (N, H, W, C).
        norm_weight, norm_bias (Tensor): Affine part of the layer norm, shape (C,).
        qkv_weight, qkv_bias (Tensor): Linear layer to Q, K and V, shapes (3 C, C) and (3 C,); the bias may be ``None``.
        proj_weight, proj_bias (Tensor): Projection, shapes (C, C) and (C,).
        rows, columns (Tensor | None): Embeddings of the distances of rows and of columns, R_h and R_w, shape (., d).
            They are resized to the side of the attended map. If ``None``, there is no bias. Default: None.
        factor (Tensor | float | None): Factor of the branch from stochastic depth: of each image, shape (N,), or a
            number for all of them. If ``None``, 1. Default: None.
    """

    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None
    factor: Tensor | float | None = None


DecomposedGradients = gradients_of(DecomposedTensors, 'factor')


class DecomposedSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        xhat (Stored): Normalised tokens, shape (N, H, W, C).
        rstd (Tensor): Their reciprocal deviation, shape (N, H, W, 1).
        given (DecomposedTensors): Parameters and factor.
    """

    xhat: Stored
    rstd: Tensor
    given: DecomposedTensors


def decomposed_attention(settings: DecomposedSettings, tensors: DecomposedTensors) -> Tensor:
    """Compute ``x + factor * proj(softmax(s Q K^T + B) V)`` with Q, K, V from ``LN(x)``, with exact gradients.

    Args:
        settings (DecomposedSettings): Settings.
        tensors (DecomposedTensors): Inputs.

    Returns:
        Tensor: Shape (N, H, W, C).
    """
    return _operation(with_dtype(settings, tensors.x), tensors)


def _split_map(s, x):
    """Yield the images and rows of the map that are computed at a time: whole images, or rows of windows of one."""
    n, height, width, channels = x.shape
    side = s.window or max(height, width)
    tokens = (s.chunk or elements_at_a_time(x.device, s.form)) // (3 * (channels + 2 * side * s.num_heads))
    each, bands = (s.window, -(-height // s.window)) if s.window else (height, 1)
    together = max(tokens // (each * -(-width // side) * side), 1)
    if together >= bands:
        images = together // bands
        yield from ((slice(i, i + images), slice(0, height)) for i in range(0, n, images))
        return
    for i in range(n):
        for band in range(0, bands, together):
            yield slice(i, i + 1), slice(band * each, min((band + together) * each, height))


def into_windows(x: Tensor, side: int) -> Tensor:
    """Pad a map with zeros and cut it into windows.

    Args:
        x (Tensor): The map, shape (N, H, W, C).
        side (int): Side of a window.

    Returns:
        Tensor: Shape (B, side, side, C).
    """
    n, height, width, channels = x.shape
    x = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
    x = x.view(n, x.shape[1] // side, side, x.shape[2] // side, side, channels)
    return x.transpose(2, 3).reshape(-1, side, side, channels)


def out_of_windows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reverse :func:`into_windows`.

    Args:
        x (Tensor): The windows, shape (B, side, side, C).
        shape (tuple[int, ...]): Shape of the map, (N, H, W, ...).

    Returns:
        Tensor: Shape (N, H, W, C).
    """
    n, height, width = shape[:3]
    side = x.shape[1]
    x = x.view(n, -(-height // side), -(-width // side), side, side, x.shape[3]).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)[:, :height, :width]


def _distance_embeddings(table, length):
    """Return the embedding of each distance between positions of a line, shape (length, length, d)."""
    if len(table) != 2 * length - 1:
        table = F.interpolate(table.t()[None], size=2 * length - 1, mode='linear')[0].t()
    place = torch.arange(length, device=table.device)
    return table[place[:, None] - place + length - 1]


def _append_embeddings(s, t, q, k, v, size):
    """Return longer queries, keys and values (B, h, L, D), so that the product of queries and keys is s Q K^T + B.

    Values are padded with zeros to the same length, as the kernel wants; the output's first d numbers are the result.
    """
    scale, zeros = q.shape[-1] ** -0.5, (0, -(q.shape[-1] + sum(size)) % _ALIGNED)
    on_map = q.unflatten(2, size)
    # Resized before they are rounded, as by autocast on a GPU, which runs interpolations in full precision.
    rows, columns = (
        _distance_embeddings(t[name], n).to(s.dtype) for name, n in zip(('rows', 'columns'), size, strict=True)
    )
    down = torch.einsum('bnhwc,hkc->bnhwk', on_map, rows).flatten(2, 3)
    across = torch.einsum('bnhwc,wkc->bnhwk', on_map, columns).flatten(2, 3)
    units = [torch.eye(n, device=q.device).to(q.dtype) for n in size]  # torch 2.1 makes none in bf16
    units = torch.cat([units[0].repeat_interleave(size[1], 0), units[1].repeat(size[0], 1)], 1)
    q = F.pad(torch.cat([q * scale, down, across], -1), zeros)
    k = F.pad(torch.cat([k, units.expand(*k.shape[:2], -1, -1)], -1), zeros)
    return q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))


def _branch(s, t, xhat):
    """Compute the branch for some rows of a map from x-hat, shape (N, H, W, C)."""
    y = xhat * t['norm_weight'].to(s.dtype) + t['norm_bias'].to(s.dtype)
    y = into_windows(y, s.window) if s.window else y
    bias = None if t['qkv_bias'] is None else t['qkv_bias'].to(s.dtype)
    qkv = F.linear(y, t['qkv_weight'].to(s.dtype), bias).flatten(1, 2)
    q, k, v = qkv.unflatten(2, (3, s.num_heads, -1)).permute(2, 0, 3, 1, 4)
    width, scale = q.shape[-1], q.shape[-1] ** -0.5
    if t['rows'] is not None:
        (q, k, v), scale = _append_embeddings(s, t, q, k, v, y.shape[1:3]), 1.0
    out = F.scaled_dot_product_attention(q, k, v, scale=scale)[..., :width]
    out = out.transpose(1, 2).flatten(2).view(y.shape)
    out = F.linear(out, t['proj_weight'].to(s.dtype), t['proj_bias'].to(s.dtype))
    return out_of_windows(out, xhat.shape) if s.window else out


def _forward(s, tensors, needs):
    t = tensors
    xhat, rstd = normalise(t.x, s.eps, s.dtype)
    out = torch.empty_like(t.x, dtype=torch.promote_types(t.x.dtype, s.dtype))
    for where in _split_map(s, t.x):
        branch = _branch(s, t._asdict(), xhat[where])
        branch = branch if t.factor is None else branch * factor_for(t.factor, 4, where[0])
        torch.add(t.x[where], branch, out=out[where])
    return out, DecomposedSaved(store(xhat, s.form.storage, (1, 2)), rstd, t._replace(x=None))


def _backward(s, saved, grad, needs):
    # Autograd computes the gradients of the branch of some windows or images at a time.
    t = saved.given
    names = [name for name, needed in needs._asdict().items() if needed and name != 'x']
    sums = {name: torch.zeros_like(getattr(t, name), dtype=accumulator(getattr(t, name))) for name in names}
    xhat = saved.xhat.load(s.dtype)
    dx = torch.empty_like(grad) if needs.x else None
    for where in _split_map(s, xhat):
        g = grad[where] if t.factor is None else grad[where] * factor_for(t.factor, 4, where[0])
        with torch.enable_grad():
            own = t._asdict() | {name: getattr(t, name).detach().requires_grad_() for name in names}
            rows = xhat[where].detach().requires_grad_(needs.x)
            branch = _branch(s, own, rows)
        wanted = [own[name] for name in names] + ([rows] if needs.x else [])
        gradients = torch.autograd.grad(branch, wanted, g.to(branch.dtype))
        for name, gradient in zip(names, gradients, strict=False):
            sums[name] += gradient
        if needs.x:
            branch = normalise_backward(gradients[-1], xhat[where], saved.rstd[where], grad.dtype)
            torch.add(grad[where], branch, out=dx[where])
    return DecomposedGradients(x=dx, **sums)


_operation = Operation('DecomposedAttention', _forward, _backward, DecomposedGradients)
