"""The channel MLP of ConvNeXt V2: global response normalisation (GRN) after the GELU, with exact gradients.

    a = GELU(h),  G = norm of a over the positions of an image,  n = G / (mean of G over the channels + eps),
    u = (1 + w n) a + b,  y = u W2^T + b2

with h as in :mod:`sbp_mmdet.ops`. GRN reads all positions, so it is not position-wise and none can be dropped.

x-hat, its reciprocal deviation and G, one number for each image and channel, are saved. With m = mean of G + eps and
s = sum over the positions of du * a, the gradient that reaches a is

    da = (1 + w n) du + a / G * dG,   dG = w s / m - mean over the channels of (w s G) / m^2.

dG needs the sum over all positions first. So the backward pass goes through the chunks twice: for s and the gradients
of the second layer, and for da and the gradients of the first. The second pass goes back, because the hidden layer of
the chunk that the first pass ended with is still there: a single chunk is not computed again.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.folding import (
    add_branch,
    fold_bias,
    fold_weight,
    normalise,
    normalise_backward,
    scale_into_range,
    unfold,
    unscale,
)
from .common.layouts import cut_into_chunks, in_shape, tokens_of
from .common.precision import Stored, accumulate, accumulator, cast_all, column_sums, store, zeros_for
from .common.rerun_conv import Conv
from .common.row_sampling import sample_rows
from .common.stochastic_depth import factor_for

__all__ = ['GRNSettings', 'GRNTensors', 'grn_mlp']


@dataclasses.dataclass(frozen=True)
class GRNSettings:
    """Settings of :func:`grn_mlp`: those of :class:`.channel_mlp.MLPSettings`, without a reference form.

    Attributes:
        grn_eps (float): Added to the mean of the norms in GRN. Default: 1e-6.
    """

    form: Form = Form()
    eps: float = 1e-6
    grn_eps: float = 1e-6
    approximate: str = 'none'
    chunk: int | None = None
    dtype: torch.dtype | None = None


class GRNTensors(NamedTuple):
    """Inputs of :func:`grn_mlp`: those of :class:`.channel_mlp.MLPTensors` without positions, and GRN's parameters.

    Attributes:
        grn_weight, grn_bias (Tensor): Weight and bias of GRN, shape (D,).
    """

    x: Tensor
    shortcut: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight1: Tensor
    bias1: Tensor
    grn_weight: Tensor
    grn_bias: Tensor
    weight2: Tensor
    bias2: Tensor
    gamma: Tensor | None = None
    factor: Tensor | float | None = None
    conv: Conv | None = None


GRNGradients = gradients_of(GRNTensors, 'factor', 'conv')


class GRNSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        xhat (Stored | None): Normalised input, shape (N, L, C). If ``None``, the convolution is rerun.
        rstd (Tensor | None): Its reciprocal deviation, shape (N, L, 1).
        response (Tensor): G, shape (N, D).
        given (GRNTensors): Parameters, factor and convolution.
        dtype (torch.dtype): Precision of the input.
    """

    xhat: Stored | None
    rstd: Tensor | None
    response: Tensor
    given: GRNTensors
    dtype: torch.dtype


class _Weights(NamedTuple):
    """The folded weights W1', b1', and W2, b2 of :mod:`sbp_mmdet.ops`, in the precision of matrix products."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def folded(cls, t, dtype):
        """Return the weights of an MLP, given its inputs."""
        others = cast_all((fold_bias(t.weight1, t.bias1, t.norm_bias), t.weight2, t.bias2), dtype)
        return cls(fold_weight(t.weight1, t.norm_weight, dtype), *others)

    def hidden(self, xhat):
        """Return the hidden layer of some rows, before the GELU."""
        return torch.addmm(self.b1, xhat, self.w1.t())


def grn_mlp(settings: GRNSettings, tensors: GRNTensors) -> Tensor:
    """Compute ``shortcut + factor * gamma * (GRN(GELU(LN(x) W1^T + b1)) W2^T + b2)`` with exact gradients.

    Args:
        settings (GRNSettings): Settings.
        tensors (GRNTensors): Inputs.

    Returns:
        Tensor: Output, of the shape and layout of ``shortcut``.
    """
    return _grn_mlp(with_dtype(settings, tensors.x), tensors)


def _forward(settings, tensors, needs):
    t, weights = tensors, _Weights.folded(tensors, settings.dtype)
    xhat, rstd = normalise(tokens_of(t.x), settings.eps, settings.dtype)
    chunks = cut_into_chunks(*xhat.shape[:2], len(weights.w1), xhat.device, settings.chunk)
    activations = _LastChunk(lambda chunk: _activate(settings, weights.hidden(chunk.take_rows(xhat))))
    # First pass over the positions: G. Second pass: u and y.
    response = torch.zeros(len(xhat), len(weights.w1), dtype=accumulator(xhat), device=xhat.device)
    for chunk in chunks:
        squares = activations.of(chunk).to(response.dtype, copy=True).square_()
        response[chunk.images] += _by_image(chunk, squares).sum(1)
        del squares
    response.sqrt_()
    scale = _Response.of_norm(settings, t, response).scale.to(settings.dtype)
    bias = t.grn_bias.to(settings.dtype)

    def run_second_layer(chunk):
        u = torch.addcmul(bias, _by_image(chunk, activations.take(chunk)), scale[chunk.images].unsqueeze(1))
        return torch.addmm(weights.b2, u.flatten(0, 1), weights.w2.t())

    branch = ((chunk, run_second_layer(chunk)) for chunk in reversed(chunks))
    out = add_branch(t.shortcut, branch, t.gamma, t.factor, settings.dtype)
    given = t._replace(x=None, shortcut=None)
    if t.conv is not None:
        return out, GRNSaved(None, None, response, given, t.x.dtype)
    return out, GRNSaved(store(xhat, settings.form.storage), rstd, response, given, t.x.dtype)


def _backward(settings, saved, grad, needs):
    t, weights = saved.given, _Weights.folded(saved.given, settings.dtype)
    if t.conv is not None:
        xhat, rstd = normalise(tokens_of(t.conv.run()), settings.eps, settings.dtype)
    else:
        xhat, rstd = saved.xhat.load(settings.dtype), saved.rstd
    g = tokens_of(grad)
    g = g if t.factor is None else g * factor_for(t.factor, 3)
    g = g.reshape(-1, g.shape[2])
    total = column_sums(g)
    scaled = (g if t.gamma is None else g * t.gamma).to(settings.dtype).view(xhat.shape)
    outer, unit = scale_into_range(g, t.gamma, settings.dtype)
    outer = outer.view(xhat.shape)
    del g
    response = _Response.of_norm(settings, t, saved.response)
    # First pass over the positions: s, and the gradients of the second layer. Second pass: da, and those of the first.
    sums = types.SimpleNamespace(  # over the positions, in full precision; `responses` holds s of each image
        outer=zeros_for(t.weight2),
        w1=zeros_for(t.weight1),
        b1=zeros_for(t.bias1),
        grn_bias=zeros_for(t.grn_bias),
        responses=torch.zeros_like(response.norm),
    )
    chunks = cut_into_chunks(*xhat.shape[:2], len(weights.w1), xhat.device, settings.chunk)

    def compute_hidden(chunk):
        h = weights.hidden(chunk.take_rows(xhat))
        return h, _activate(settings, h), chunk.take_rows(scaled) @ weights.w2  # the last one is du = (gamma * g) W2

    hidden = _LastChunk(compute_hidden)
    for chunk in chunks:
        _add_second_layer(settings, t, response, sums, chunk, hidden.of(chunk), chunk.take_rows(outer))
    through, dx = response.backward(t, sums.responses), torch.empty_like(xhat)
    for chunk in reversed(chunks):
        dh = _hidden_gradient(settings, response, through, chunk, *hidden.take(chunk))
        _add_first_layer(settings, sums, dh, chunk.take_rows(xhat))
        chunk.put_(dx, dh @ weights.w1)
        del dh
    dx = in_shape(normalise_backward(dx, xhat, rstd, saved.dtype), grad.shape) if needs.x else None
    first = unfold(sums.w1, sums.b1, t.weight1, t.norm_weight, t.norm_bias)
    of_grn = (sums.responses * response.relative).sum(0), sums.grn_bias
    second = unscale(sums.outer, total, t.weight2, t.bias2, t.gamma, unit)
    return GRNGradients(dx, grad, *first, *of_grn, *second)


def _activate(settings, h):
    return F.gelu(h, approximate=settings.approximate)


def _by_image(chunk, rows):
    """Return a chunk's rows (K, D) as (images, rows of each, D), a view."""
    return rows.view(chunk.num_images, -1, rows.shape[1])


class _LastChunk:
    """Intermediate tensors of one chunk at a time, which are computed when another chunk is asked for.

    Args:
        compute (Callable): Computes the tensors of a chunk.
    """

    def __init__(self, compute: Callable):
        self._compute = compute
        self._chunk = self._tensors = None

    def of(self, chunk):
        """Return the tensors of this chunk."""
        if chunk is not self._chunk:
            self._chunk = self._tensors = None  # freed before those of the next chunk exist
            self._chunk, self._tensors = chunk, self._compute(chunk)
        return self._tensors

    def take(self, chunk):
        """Return the tensors of this chunk, and keep them no longer."""
        tensors = self.of(chunk)
        self._chunk = self._tensors = None
        return tensors


def _add_second_layer(settings, t, response, sums, chunk, hidden, outer):
    """Add the gradients that do not need dG: those of the second layer and of GRN."""
    _, a, du = hidden
    products = du.to(sums.responses.dtype, copy=True).mul_(a)
    sums.responses[chunk.images] += _by_image(chunk, products).sum(1)
    del products
    sums.grn_bias.add_(column_sums(du))
    sampled = sample_rows(settings.form.sample, outer)
    scale = response.scale[chunk.images].to(a.dtype).unsqueeze(1)
    u = torch.addcmul(t.grn_bias.to(a.dtype), _by_image(chunk, a), scale).flatten(0, 1)
    accumulate(sums.outer, sampled.take_weighted(outer), sampled.take(u))  # A = g^T u, its rows divided by unit


def _hidden_gradient(settings, response, through, chunk, h, a, du):
    """Return the gradient of the hidden layer before the GELU, from dG / G (``through``)."""
    images = chunk.images
    # da = (1 + w n) du + a * dG / G
    da = _by_image(chunk, du).mul_(response.scale[images].to(settings.dtype).unsqueeze(1))
    da = da.add_(_by_image(chunk, a) * through[images].unsqueeze(1))  # dG / G alone may leave the range of fp16
    return torch.ops.aten.gelu_backward(da.flatten(0, 1), h, approximate=settings.approximate)


def _add_first_layer(settings, sums, dh, xhat):
    """Add the gradients of the first layer."""
    sums.b1.add_(column_sums(dh))
    sampled = sample_rows(settings.form.sample, dh)
    accumulate(sums.w1, sampled.take_weighted(dh), sampled.take(xhat))


class _Response(NamedTuple):
    """Quantities of GRN for each image, in full precision.

    Attributes:
        norm (Tensor): G, shape (N, D).
        mean (Tensor): Mean of G over the channels, plus eps, shape (N, 1).
        relative (Tensor): n, shape (N, D).
        scale (Tensor): 1 + w n, shape (N, D).
    """

    norm: Tensor
    mean: Tensor
    relative: Tensor
    scale: Tensor

    @classmethod
    def of_norm(cls, settings, t, norm):
        mean = norm.mean(1, keepdim=True) + settings.grn_eps
        relative = norm / mean
        return cls(norm, mean, relative, torch.addcmul(torch.ones_like(norm), relative, t.grn_weight.to(norm.dtype)))

    def backward(self, t, sums):
        """Return dG / G, which a is multiplied by to give its gradient through G, from s."""
        dn = sums * t.grn_weight
        dnorm = dn / self.mean - (dn * self.norm).mean(1, keepdim=True) / self.mean.square()
        return torch.where(self.norm > 0, dnorm / self.norm, 0)  # torch.norm's own subgradient where all is zero


_grn_mlp = Operation('GRNChannelMLP', _forward, _backward, GRNGradients)
