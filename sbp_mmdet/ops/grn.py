"""The channel MLP of ConvNeXt V2, exact and lean: global response normalisation (GRN) behind the GELU.

    a = GELU(h),  G = norm of a over the positions of an image,  n = G / (mean of G over the channels + eps),
    y = ((1 + w n) a + b) W2^T + b2

with h as in the package's docstring. GRN looks at all positions, so none can be dropped. Stored are x-hat, its
reciprocal deviation, and G: one number for each image and channel. The hidden layer is computed once more for the sum
over the positions that G's gradient needs, and once more for what follows from it, in chunks.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import Chunk, chunks
from .convs import Conv
from .mlp_fused import _Weights, add_branch
from .operation import Operation, gradients_of
from .precision import accumulate, accumulator, autocast_dtype, column_sums, in_range, zeros_for
from .rows import in_shape, normalise, normalise_backward, tokens_of, unfold
from .storage import Stored, store

__all__ = ['GRNSettings', 'GRNTensors', 'grn_mlp']


@dataclasses.dataclass(frozen=True)
class GRNSettings:
    """Of :func:`grn_mlp`.

    Attributes:
        eps (float): Of the layer norm. Default: 1e-6.
        grn_eps (float): Of GRN. Default: 1e-6.
        approximate (str): Of the GELU, 'none' or 'tanh'. Default: 'none'.
        storage (str): How x-hat is stored, 'native' or 'int8'. Default: 'native'.
        chunk (int | None): Elements of the hidden layer that exist at a time; None: by the device. Default: None.
        compile (bool): Compile the bodies, see :mod:`.compiled`. Default: False.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.
    """

    eps: float = 1e-6
    grn_eps: float = 1e-6
    approximate: str = 'none'
    storage: str = 'native'
    chunk: int | None = None
    compile: bool = False
    dtype: torch.dtype | None = None


class GRNTensors(NamedTuple):
    """What it works on: see :class:`.mlp.MLPTensors`, and ``grn_weight`` and ``grn_bias`` of GRN, shape (D,)."""

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
    factor: Tensor | None = None
    conv: Conv | None = None


GRNGradients = gradients_of(GRNTensors, 'factor', 'conv')


class GRNSaved(NamedTuple):
    """x-hat (N, L, C) and its reciprocal deviation (N, L, 1), or the convolution before; G (N, D)."""

    xhat: Stored
    rstd: Tensor | None
    response: Tensor
    given: GRNTensors


def grn_mlp(settings: GRNSettings, tensors: GRNTensors) -> Tensor:
    """``shortcut + factor * gamma * (GRN(GELU(LN(x) W1^T + b1)) W2^T + b2)``.

    Args:
        settings (GRNSettings): See there.
        tensors (GRNTensors): See there.

    Returns:
        Tensor: Of the shape of ``shortcut``, and laid out like it.
    """
    dtype = settings.dtype or autocast_dtype(tensors.x) or tensors.x.dtype
    return _grn_mlp(dataclasses.replace(settings, dtype=dtype), tensors)


def forward(settings: GRNSettings, tensors: GRNTensors, needs: GRNGradients) -> tuple[Tensor, GRNSaved]:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t, weights = tensors, _Weights.of(settings, tensors)
    xhat, rstd = normalise(tokens_of(t.x), settings.eps, settings.dtype)
    response = torch.zeros(len(xhat), len(weights.w1), dtype=accumulator(xhat), device=xhat.device)
    for image, chunk in _chunks(settings, xhat, weights):
        a = F.gelu(_hidden(weights, xhat[image, chunk]), approximate=settings.approximate)
        response[image] += a.to(response.dtype).square_().sum(0)
    response.sqrt_()
    scale = _Response.of(settings, t, response).scale.to(settings.dtype)
    branch, bias = torch.empty_like(xhat), t.grn_bias.to(settings.dtype)
    for image, chunk in _chunks(settings, xhat, weights):
        a = F.gelu(_hidden(weights, xhat[image, chunk]), approximate=settings.approximate)
        branch[image, chunk] = torch.addmm(weights.b2, torch.addcmul(bias, a, scale[image]), weights.w2.t())
    out = add_branch(t, [(Chunk.all(branch), branch)], settings.dtype)
    given = t._replace(x=None, shortcut=None)
    if t.conv is not None:
        return out, GRNSaved(Stored(None), None, response, given)
    return out, GRNSaved(store(xhat, settings.storage, 1), rstd, response, given)


def backward(settings: GRNSettings, saved: GRNSaved, grad: Tensor, needs: GRNGradients) -> GRNGradients:
    """See :mod:`sbp_mmdet.ops.operation`."""
    t, weights = saved.given, _Weights.of(settings, saved.given)
    if t.conv is not None:
        xhat, rstd = normalise(tokens_of(t.conv.run()), settings.eps, settings.dtype)
    else:
        xhat, rstd = saved.xhat.load(settings.dtype), saved.rstd
    g = tokens_of(grad)
    g = g if t.factor is None else g * t.factor[:, None, None]
    total = column_sums(g.flatten(0, 1))
    inner = (g if t.gamma is None else g * t.gamma).to(settings.dtype)
    outer, unit = in_range(g.flatten(0, 1), t.gamma, settings.dtype)
    outer = outer.view(g.shape)
    del g
    response = _Response.of(settings, t, saved.response)
    sums = _Sums.of(t, response)
    for image, chunk in _chunks(settings, xhat, weights):
        _add_first(settings, t, weights, response, sums, xhat, inner, outer, image, chunk)
    through = response.backward(t, sums.responses)
    dx = torch.empty_like(xhat)
    for image, chunk in _chunks(settings, xhat, weights):
        h = _hidden(weights, xhat[image, chunk])
        a = F.gelu(h, approximate=settings.approximate)
        da = (inner[image, chunk] @ weights.w2).mul_(response.scale[image].to(settings.dtype))
        da = da.add_((a * through[image]).to(settings.dtype))  # 1 / G alone may leave the range of half precision
        dh = torch.ops.aten.gelu_backward(da, h, approximate=settings.approximate)
        sums.b1.add_(column_sums(dh))
        accumulate(sums.w1, dh.t(), xhat[image, chunk])
        dx[image, chunk] = dh @ weights.w1
    found = _parameter_gradients(t, needs, sums, response, total, unit)
    if needs.x:
        found = found._replace(x=in_shape(normalise_backward(dx, xhat, rstd), grad.shape))
    return found._replace(shortcut=grad if needs.shortcut else None)


def _chunks(settings, xhat, weights):
    """Images one by one, and slices of their positions."""
    parts = chunks(1, xhat.shape[1], len(weights.w1), xhat.device, settings.chunk)
    return [(image, part.rows) for image in range(len(xhat)) for part in parts]


def _hidden(weights, xhat):
    return torch.addmm(weights.b1, xhat, weights.w1.t())


class _Response(NamedTuple):
    """G, mean of G + eps, n, and 1 + w n, for each image; all in full precision."""

    norm: Tensor
    mean: Tensor
    relative: Tensor
    scale: Tensor

    @classmethod
    def of(cls, settings, t, norm):
        mean = norm.mean(1, keepdim=True) + settings.grn_eps
        relative = norm / mean
        return cls(norm, mean, relative, torch.addcmul(torch.ones_like(norm), relative, t.grn_weight.to(norm.dtype)))

    def backward(self, t, sums):
        """What a is multiplied by to give its gradient through G, from the sums of du * a over the positions."""
        dn = sums * t.grn_weight
        dnorm = dn / self.mean - (dn * self.norm).mean(1, keepdim=True) / self.mean.square()
        return torch.where(self.norm > 0, dnorm / self.norm, 0)  # torch.norm's own subgradient where all is zero


class _Sums(NamedTuple):
    """Sums over the positions, in full precision; ``responses`` of each image."""

    outer: Tensor
    w1: Tensor
    b1: Tensor
    grn_bias: Tensor
    responses: Tensor

    @classmethod
    def of(cls, t, response):
        parameters = (t.weight2, t.weight1, t.bias1, t.grn_bias)
        return cls(*map(zeros_for, parameters), torch.zeros_like(response.norm))


def _add_first(settings, t, weights, response, sums, xhat, inner, outer, image, chunk):
    """What does not need G's gradient."""
    a = F.gelu(_hidden(weights, xhat[image, chunk]), approximate=settings.approximate)
    du = inner[image, chunk] @ weights.w2
    sums.responses[image] += (du.to(sums.responses.dtype) * a).sum(0)
    sums.grn_bias.add_(column_sums(du))
    u = torch.addcmul(t.grn_bias.to(a.dtype), a, response.scale[image].to(a.dtype))
    accumulate(sums.outer, outer[image, chunk].t(), u)


def _parameter_gradients(t, needs, sums, response, total, unit):
    outer = sums.outer if unit is None else sums.outer * unit[:, None]
    asked = (needs.norm_weight, needs.norm_bias, needs.weight1, needs.bias1)
    dnw, dnb, dw1, db1 = unfold(sums.w1, sums.b1, t.weight1, t.norm_weight, t.norm_bias, asked)
    scale = 1 if t.gamma is None else t.gamma
    return GRNGradients(
        norm_weight=dnw,
        norm_bias=dnb,
        weight1=dw1,
        bias1=db1,
        grn_weight=(sums.responses * response.relative).sum(0) if needs.grn_weight else None,
        grn_bias=sums.grn_bias if needs.grn_bias else None,
        weight2=(outer if t.gamma is None else outer * scale[:, None]) if needs.weight2 else None,
        bias2=total * scale if needs.bias2 else None,
        gamma=(outer * t.weight2).sum(1) + total * t.bias2 if needs.gamma else None,
    )


_grn_mlp = Operation('GRNChannelMLP', forward, backward, GRNGradients)
