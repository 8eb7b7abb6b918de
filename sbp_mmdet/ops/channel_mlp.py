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

**Memory.** The fused form saves x-hat and its reciprocal deviation for the kept tokens (in full precision ``x``, see
:mod:`.channel_mlp_full`), or nothing where the convolution that made ``x`` is rerun. The hidden layer, four times as
wide, is recomputed in the backward pass, in chunks of tokens.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import sbp, take
from ..stochastic_backprop.masks import Positions
from . import channel_mlp_full as full
from .common.autograd_function import Form, Operation, gradients_of, in_precision
from .common.folding import (
    Incoming,
    add_branch,
    fold_bias,
    fold_weight,
    normalise,
    normalise_backward,
    unfold,
)
from .common.layouts import chunks, empty_tokens, in_shape, laid_out, layout_of, put_together, tokens_of
from .common.precision import Stored, Sum, cast, cast_all, column_sums, store
from .common.rerun_conv import Conv
from .common.row_sampling import add_mean_term_, centre_, draw, some_rows

__all__ = ['MLPSettings', 'MLPTensors', 'MLPWeights', 'channel_mlp']


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
        shortcut (Tensor): What the branch is added to, of the same shape.
        norm_weight, norm_bias (Tensor | None): Affine part of the layer norm, shape (C,).
        weight1, bias1 (Tensor): First pointwise layer, shapes (D, C) and (D,).
        weight2, bias2 (Tensor): Second pointwise layer, shapes (C, D) and (C,).
        gamma (Tensor | None): Layer scale, shape (C,). Default: None.
        factor (Tensor | None): Factor of the branch of each image, from stochastic depth, shape (N,). Default: None.
        positions (Positions | None): Kept and dropped tokens. If ``None``, all are kept. Default: None.
        conv (Conv | None): Convolution that made ``x``. If given, it is rerun instead of saving x-hat. Default: None.
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
    factor: Tensor | None = None
    positions: Positions | None = None
    conv: Conv | None = None


MLPGradients = gradients_of(MLPTensors, 'factor', 'positions', 'conv')


class MLPSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        xhat (Stored | None): Normalised input of the kept tokens, shape (N, K, C). If ``None``, the convolution is
            rerun.
        rstd (Tensor | None): Its reciprocal deviation, shape (N, K, 1).
        keep (Tensor | None): Indices of the kept tokens.
        b1 (Tensor | None): Folded bias b1', which is cheaper to keep than to recompute.
        given (MLPTensors): Parameters and factor.
        layout (torch.memory_format | None): Layout of ``x``, if it is a feature map.
    """

    xhat: Stored | None
    rstd: Tensor | None
    keep: Tensor | None
    b1: Tensor | None
    given: MLPTensors
    layout: torch.memory_format | None


class MLPWeights(NamedTuple):
    """The folded weights W1', b1', and W2, b2 of the package's docstring, in the precision of matrix products."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def folded(cls, t: NamedTuple, dtype: torch.dtype) -> 'MLPWeights':
        """Return the weights of an MLP, given its inputs."""
        others = cast_all((fold_bias(t.weight1, t.bias1, t.norm_bias), t.weight2, t.bias2), dtype)
        return cls(fold_weight(t.weight1, t.norm_weight, dtype), *others)

    def hidden(self, xhat: Tensor) -> Tensor:
        """Return the hidden layer of some rows, before the GELU."""
        return torch.addmm(self.b1, xhat, self.w1.t())


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
    return _channel_mlp(in_precision(settings, tensors.x), tensors)


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
    out = out if t.factor is None else out * t.factor[:, None, None].to(out.dtype)
    return t.shortcut + in_shape(out, t.x.shape)


def _forward(settings, tensors, needs):
    # The branch of all tokens is computed, so the output is exact; x-hat is saved for the kept ones (Algorithm 1).
    t = tensors
    if full.saves_input(settings, t):
        return full.forward(settings, t), _save_input(settings, t, needs)
    normalised, weights = _normalised(settings, t, needs), MLPWeights.folded(t, settings.dtype)
    branch = _branch(settings, weights, tokens_of(t.x), normalised[0])
    out = add_branch(t.shortcut, branch, t.gamma, t.factor, settings.dtype)
    return out, _save(settings, t, needs, normalised, weights.b1)


def _normalised(settings, t, needs):
    """Return x-hat and its reciprocal deviation, if they are saved."""
    saves = _needed_gradients(needs)[1] and t.conv is None
    return normalise(tokens_of(t.x), settings.eps, settings.dtype) if saves else (None, None)


def _save(settings, tensors, needs, normalised=None, b1=None):
    t = tensors
    if full.saves_input(settings, t):
        return _save_input(settings, t, needs)
    keep = settings.form.kept(t.positions)
    _, hidden, anything = _needed_gradients(needs)
    if not anything:
        return None
    xhat, rstd = normalised or _normalised(settings, t, needs)
    stored = None
    if xhat is not None:
        if keep is not None:
            xhat, rstd = take(xhat, keep), take(rstd, keep)
        stored, rstd = store(xhat, settings.form.storage), rstd if needs.x else None
    if not hidden:
        b1 = None
    elif b1 is None:
        b1 = cast(fold_bias(t.weight1, t.bias1, t.norm_bias), settings.dtype)
    given = t._replace(x=None, shortcut=None, positions=None, conv=t.conv if hidden else None)
    return MLPSaved(stored, rstd, keep, b1, given, layout_of(t.x))


def _save_input(settings, t, needs):
    _, hidden, anything = _needed_gradients(needs)
    return full.save(t, settings.form.kept(t.positions), hidden) if anything else None


def _needed_gradients(needs):
    """Return which gradients are needed: through the GELU, of the hidden layer, any of the branch."""
    through_gelu = needs.x or needs.norm_weight or needs.norm_bias or needs.weight1 or needs.bias1
    hidden = through_gelu or needs.weight2 or needs.gamma
    return through_gelu, hidden, hidden or needs.bias2


def _branch(settings, weights, x, xhat):
    """Yield chunks of the rows x (N, L, C) and their branch without layer scale, from x-hat if that is given."""
    for chunk in chunks(*x.shape[:2], len(weights.w1), x.device, settings.chunk):
        rows = chunk.take_rows(x if xhat is None else xhat)
        rows = normalise(rows, settings.eps, settings.dtype)[0] if xhat is None else rows
        hidden = torch.ops.aten.gelu_.default(weights.hidden(rows), approximate=settings.approximate)
        rows = torch.addmm(weights.b2, hidden, weights.w2.t())
        del hidden  # otherwise it exists beside that of the next chunk
        yield chunk, rows


def _backward(settings, saved, grad, needs):
    if saved is None:
        return MLPGradients(shortcut=grad)
    if type(saved) is full.SavedInput:
        dx, gradients = full.backward(settings, saved, grad, needs)
        return MLPGradients(dx, grad, *gradients)
    run = _BackwardPass(settings, saved, grad, needs)
    for chunk in run.chunks():
        run.add(chunk)
    return run.parameter_gradients()._replace(x=run.whole_input_gradient(grad.shape), shortcut=grad)


class _BackwardPass:
    """State that the chunks of a backward pass share: sums over the kept rows, and the input's gradient.

    For each chunk of kept rows, with g = factor * dy and the hidden layer h recomputed from x-hat,

        A += g^T GELU(h),   dh = (gamma * g) W2 * GELU'(h),   db1' += sum of dh,   dW1' += dh^T x-hat,
        dx-hat = dh W1',   dx = LN'(dx-hat; x-hat) * rstd.

    A is ``sums.outer``. ``dx`` holds the gradients of the kept rows, shape (N, K, C). The parameters' gradients follow
    from the sums, see :mod:`sbp_mmdet.ops`.
    """

    def __init__(self, settings, saved, grad, needs):
        self.settings, self.saved, self.t = settings, saved, saved.given
        self.keep = saved.keep
        self.grad = tokens_of(grad)
        self.incoming = Incoming(self.grad, self.t.bias2, self.t.gamma, self.t.factor, settings.dtype)
        self.w2 = self.incoming.second(self.t.weight2)
        self.kept = self.grad.shape[1] if self.keep is None else len(self.keep)
        self.w1, self.b1 = fold_weight(self.t.weight1, self.t.norm_weight, settings.dtype), saved.b1
        self.x = None  # input of the norm, (N, K, C), where the convolution is rerun
        if self.t.conv is not None:
            x = tokens_of(self.t.conv.run())
            self.x = x if self.keep is None else take(x, self.keep)
        outer, w1 = needs.weight2 or needs.gamma, needs.weight1 or needs.norm_weight
        self.sums = types.SimpleNamespace(  # None where no gradient needs it
            outer=Sum(self.t.weight2) if outer else None,
            w1=Sum(self.t.weight1) if w1 else None,
            b1=Sum(self.t.bias1) if _needed_gradients(needs)[0] else None,
        )
        self.means = [None, None]
        if settings.form.sample and self.grad.numel() and (outer or w1):
            self.means = self._means()
        self.dx = None
        if needs.x:
            self._allocate_input_gradient()

    def _means(self):
        """Return means of x-hat and of the hidden layer after the GELU, see :func:`.some_rows`."""
        xhat, _, hidden = self._activations(some_rows(len(self.grad), self.kept))
        return [rows.mean(0) for rows in (xhat, F.gelu(hidden, approximate=self.settings.approximate))]

    def _allocate_input_gradient(self):
        if self.x is not None and self.x.dtype == self.settings.dtype:
            self.dx = self.x  # each chunk of it is read before its gradient is written to its place
        else:
            layout, shape = self.saved.layout if self.keep is None else None, (len(self.grad), self.kept)
            self.dx = empty_tokens((*shape, self.grad.shape[2]), layout, self.settings.dtype, self.grad.device)

    def chunks(self):
        """Return the chunks of the kept rows."""
        return chunks(len(self.grad), self.kept, len(self.w1), self.grad.device, self.settings.chunk)

    def add(self, chunk):
        """Add the kept rows of a chunk to the sums, and compute their input gradient."""
        settings, sums = self.settings, self.sums
        g = self.incoming.rows(chunk, self.keep)  # also adds them to the sum of g, which db2 follows from
        if sums.outer is None and sums.b1 is None:
            return
        rows, drawn = self._activations(chunk), draw(settings.form.sample, g)
        if sums.outer is not None:
            hidden = F.gelu(drawn.of(rows[-1]), approximate=settings.approximate)
            sums.outer.add_product(drawn.divided(g), centre_(hidden, self.means[1]))
            del hidden
        if sums.b1 is None:
            return
        dh = self._through_gelu(chunk, g, *rows)
        if sums.w1 is not None:
            sums.w1.add_product(drawn.divided(dh), centre_(drawn.of(rows[0]), self.means[0]))

    def _activations(self, chunk):
        """Recompute x-hat, its reciprocal deviation if it is needed, and the hidden layer of a chunk."""
        dtype, saved = self.settings.dtype, self.saved
        if self.x is not None:
            xhat, rstd = normalise(chunk.take_rows(self.x), self.settings.eps, dtype)
        else:
            xhat = saved.xhat.part(chunk.images, chunk.rows).load(dtype).flatten(0, 1)
            rstd = None if saved.rstd is None else saved.rstd[chunk.images, chunk.rows]
        return xhat, rstd, torch.addmm(self.b1, xhat, self.w1.t())

    def _through_gelu(self, chunk, rows, xhat, rstd, hidden):
        """Return the gradient of the hidden layer of a chunk, and write that of the input to ``dx``."""
        dh, approximate = self.incoming.behind(rows) @ self.w2, self.settings.approximate  # (gamma * g) W2
        dh = torch.ops.aten.gelu_backward.grad_input(dh, hidden, approximate=approximate, grad_input=dh)
        self.sums.b1.add(column_sums(dh))
        if self.dx is not None:
            normalise_backward(dh @ self.w1, xhat, rstd, self.dx[chunk.images, chunk.rows])
        return dh

    def parameter_gradients(self):
        """Return the gradients of the parameters, from the sums over the rows."""
        t, first = self.t, [None] * 4
        outer, w1, b1 = (s and s.value for s in (self.sums.outer, self.sums.w1, self.sums.b1))
        outer = self.incoming.add_mean_term_(outer, self.means[1])
        if b1 is not None:
            first = unfold(add_mean_term_(w1, b1, self.means[0]), b1, t.weight1, t.norm_weight, t.norm_bias)
        return MLPGradients(None, None, *first, *self.incoming.unscale(outer, t.weight2, t.bias2))

    def whole_input_gradient(self, shape):
        """Return the gradient of the input in its layout, zero for dropped tokens, or ``None`` if it is not needed."""
        self.x = None  # may be as large as the input
        if self.dx is None or self.keep is None:
            return None if self.dx is None else in_shape(self.dx, shape)
        tokens = put_together(self.dx, self.keep, self.grad.shape[1])
        return laid_out(in_shape(tokens, shape), self.saved.layout)


_channel_mlp = Operation('ChannelMLP', _forward, _backward, MLPGradients, _save)
