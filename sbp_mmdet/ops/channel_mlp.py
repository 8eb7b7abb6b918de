"""The channel MLP: layer norm, pointwise layer, GELU, pointwise layer, layer scale, residual connection.

This is the MLP of a ConvNeXt block, which works on feature maps and has its depthwise convolution between shortcut and
norm, and the MLP of a transformer block, which works on tokens and whose ``x`` and ``shortcut`` are the same.

**Stochastic Backpropagation.** Each output token depends on its own input token alone, and the two pointwise layers are
the paper's PW-Convs. With ``positions``, the operation is Algorithm 1 (section 3.4) with the branch as f:

    y[keep] = shortcut[keep] + f(x[keep])   with gradients,   y[drop] = shortcut[drop] + f(x[drop])   without.

So with g = dy and all sums over the kept tokens only (Eq. 5, and Eq. 9 for two layers that drop the same tokens),

    dW2 = g[keep]^T GELU(h[keep]),  dW1 = dh[keep]^T LN(x)[keep],  dx[keep] = LN'(dh[keep] W1),  dx[drop] = 0,

which are exact for these tokens, and dshortcut = g everywhere. The reference form runs Algorithm 1 in plain autograd,
which saves every activation of f for the kept tokens.

**Memory.** The fused form saves the input of the norm for the kept tokens, or nothing where the convolution that made
it is rerun. If the input is in full precision and the products are not, as in a transformer under autocast, or if it is
to be rounded to eight bits, x-hat is saved instead, the normalised input before the affine part of the norm. The hidden
layer, four times as wide, is recomputed in the backward pass (:mod:`.channel_mlp_backward`), in chunks of tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import sbp, take
from ..stochastic_backprop.masks import Positions
from .channel_mlp_backward import BackwardPass, MLPSaved, MLPWeights, cut_map_into_chunks, folds_norm
from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.folding import add_branch, fold_bias, normalise
from .common.layouts import as_rows, from_rows, in_shape, layout_of, tokens_of
from .common.precision import cast, promote, store
from .common.rerun_conv import Conv
from .common.stochastic_depth import factor_for

__all__ = ['MLPSettings', 'MLPTensors', 'channel_mlp']

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """Settings of :func:`channel_mlp`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        eps (float): Added to the variance of the layer norm. Default: 1e-6.
        approximate (str): Approximation of the GELU, 'none' or 'tanh'. Default: 'none'.
        activation (Callable | None): Activation of the reference form. If ``None``, GELU. Default: None.
        chunk (int | None): Number of elements of the hidden layer that exist at a time. If ``None``, it depends on the
            device. Default: None.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.

    Raises:
        ValueError: If the fused form is given an activation.
    """

    form: Form = Form()
    eps: float = 1e-6
    approximate: str = 'none'
    activation: Callable[[Tensor], Tensor] | None = None
    chunk: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.activation is not None and self.form.implementation == 'fused':
            raise ValueError(
                f"activation={self.activation!r} needs implementation='reference'; the fused MLP has GELU alone"
            )


class MLPTensors(NamedTuple):
    """Inputs of :func:`channel_mlp`.

    Attributes:
        x (Tensor): Input of the norm, tokens (N, L, C) or a feature map (N, C, H, W).
        shortcut (Tensor): Tensor that the branch is added to, of the same shape as ``x``.
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight1, bias1 (Tensor): First pointwise layer, shapes (D, C) and (D,).
        weight2, bias2 (Tensor): Second pointwise layer, shapes (C, D) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        factor (Tensor | float | None): Factor of the branch from stochastic depth: of each image, shape (N,), or a
            number for all of them. If ``None``, 1. Default: None.
        positions (Positions | None): Kept and dropped tokens. If ``None``, all are kept. Default: None.
        conv (Conv | None): Convolution that made ``x``. If given, it is rerun instead of saving ``x``. Default: None.
    """

    x: Tensor
    shortcut: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    gamma: Tensor | None = None
    factor: Tensor | float | None = None
    positions: Positions | None = None
    conv: Conv | None = None


MLPGradients = gradients_of(MLPTensors, 'factor', 'positions', 'conv')


def channel_mlp(settings: MLPSettings, tensors: MLPTensors) -> Tensor:
    """Compute ``shortcut + factor * gamma * (GELU(LN(x) W1^T + b1) W2^T + b2)``, with gradients of the kept tokens.

    The output and the gradient of the shortcut are exact everywhere (section 3.4, Algorithm 1).

    Args:
        settings (MLPSettings): Settings.
        tensors (MLPTensors): Inputs.

    Returns:
        Tensor: Output, of the shape and layout of ``shortcut``.

    Example:
        >>> kept = positions(mask)  # see stochastic_backprop.masks
        >>> y = channel_mlp(MLPSettings(), MLPTensors(x, x, *norm, *first, *second, positions=kept))
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _channel_mlp(with_dtype(settings, tensors.x), tensors)


def _reference(settings, tensors):
    """Run the MLP in plain autograd, by Algorithm 1."""
    t = tensors

    def branch(x):
        x = F.linear(F.layer_norm(x, x.shape[-1:], t.norm_weight, t.norm_bias, settings.eps), t.weight1, t.bias1)
        x = F.gelu(x, approximate=settings.approximate) if settings.activation is None else settings.activation(x)
        x = F.linear(x, t.weight2, t.bias2)
        return x if t.gamma is None else x * t.gamma

    x = tokens_of(t.x)
    out = branch(x) if t.positions is None else sbp(branch, x, t.positions)
    if t.factor is not None:
        out = (out * factor_for(t.factor, out.dim())).to(out.dtype)
    return t.shortcut + in_shape(out, t.x.shape)


def _forward(settings, tensors, needs):
    # The branch of all tokens is computed, so the output is exact; the input is saved for the kept ones (Algorithm 1).
    s, t, normalised, saves_normalised = settings, tensors, None, _saves_normalised(settings, tensors)
    weights = MLPWeights(s, t, folds_norm(s, saves_normalised), (t.weight2, t.bias2))
    chunks = cut_map_into_chunks(s, t, t.x)
    if len(chunks) == 1 and not isinstance(t.factor, Tensor) and not saves_normalised:
        branch = _run_rows(s, weights, _normed(s, weights, as_rows(t.x)))
        return _add_whole(t, from_rows(branch, t.shortcut.shape)), _save(s, t, needs, None, weights)
    x = tokens_of(t.x)
    if saves_normalised:
        normalised = normalise(x, s.eps, s.dtype)
        branch = ((chunk, _run_rows(s, weights, chunk.take_rows(normalised[0]))) for chunk in chunks)
    else:
        branch = ((chunk, _run_rows(s, weights, _normed(s, weights, chunk.take_rows(x)))) for chunk in chunks)
    return add_branch(t.shortcut, branch, t.gamma, t.factor, s.dtype), _save(s, t, needs, normalised, weights)


def _normed(settings, weights, rows):
    """Return rows of the input after the norm, or x-hat if the norm is folded into the first layer."""
    if weights.norm is None:
        return normalise(rows, settings.eps, settings.dtype)[0]
    return weights.norm.run(rows)[0]


def _run_rows(settings, weights, rows):
    """Return the branch of rows after the norm, without layer scale."""
    weight2, bias2 = weights.second
    hidden = aten.gelu_.default(weights.hidden(rows), approximate=settings.approximate)
    return F.linear(hidden, weight2, bias2)


def _add_whole(t, branch):
    """Return the sum of the shortcut and the scaled branch of all tokens, in the layout of the shortcut."""
    shortcut, gamma, number = t.shortcut, t.gamma, 1 if t.factor is None else t.factor
    if gamma is None:
        return torch.add(shortcut, branch, alpha=number)
    gamma = gamma if branch.dim() == 3 else gamma.view(-1, 1, 1)
    if branch.dtype is not shortcut.dtype and branch.device.type == 'cpu':  # torch 2.1 promotes no types there
        kind = promote(shortcut.dtype, branch.dtype, gamma.dtype)
        shortcut, branch, gamma = cast(shortcut, kind), cast(branch, kind), cast(gamma, kind)
    return torch.addcmul(shortcut, branch, gamma, value=number)


def _saves_normalised(settings, t):
    """Return whether x-hat is saved, because it takes less memory than the input."""
    return t.conv is None and (t.x.dtype is not settings.dtype or settings.form.storage != 'native')


def _save(settings, tensors, needs, normalised=None, weights=None):
    """Return what the backward pass needs, or ``None`` if only the shortcut gets a gradient.

    The forward pass gives ``normalised`` and ``weights`` if it has computed them.
    """
    s, t = settings, tensors
    keep = s.form.kept(t.positions)
    through_gelu = needs.x or needs.norm_weight or needs.norm_bias or needs.weight1 or needs.bias1
    hidden = through_gelu or needs.weight2 or needs.gamma
    if not hidden and not needs.bias2:
        return None
    source, rstd, is_normalised = None, None, _saves_normalised(s, t)
    if hidden and t.conv is None:
        source = tokens_of(t.x)
        if is_normalised:
            source, rstd = normalised or normalise(source, s.eps, s.dtype)
            rstd = rstd if needs.x else None
        if keep is not None:
            source, rstd = take(source, keep), None if rstd is None else take(rstd, keep)
        source = store(source, s.form.storage)
    b1 = None
    if hidden and folds_norm(s, is_normalised):
        b1 = cast(fold_bias(t.weight1, t.bias1, t.norm_bias), s.dtype) if weights is None else weights.b1
    given = MLPTensors(None, None, *t[2:10], None, t.conv if hidden else None)  # 2 to 9: norm_weight to factor
    return MLPSaved(source, is_normalised, rstd, b1, keep, given, layout_of(t.x), t.x.dtype)


def _backward(settings, saved, grad, needs):
    if saved is None:
        return MLPGradients(shortcut=grad)
    dx, gradients = BackwardPass(settings, saved, grad, needs).run()
    return MLPGradients(dx, grad, *gradients)


_channel_mlp = Operation('ChannelMLP', _forward, _backward, MLPGradients, _save)
