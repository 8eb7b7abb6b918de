"""The channel MLP: layer norm, pointwise, GELU, pointwise, layer scale, residual connection.

It is that of a ConvNeXt block, which works on feature maps and has its depthwise convolution between shortcut and
norm, and that of a transformer's block, which works on tokens: ``x`` and ``shortcut`` are the same there.

The fused form stores x-hat and its reciprocal deviation of the kept rows; where the convolution that made the input can
be run again, nothing. The hidden layer is computed again in the backward pass. It exists for a chunk of the rows.
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
from .common.autograd_function import Form, Operation, gradients_of, in_precision
from .common.folding import Incoming, add_branch, fold, normalise, normalise_backward, unfold, unit_statistics, unscale
from .common.layouts import Chunk, chunks, empty_tokens, in_shape, laid_out, layout_of, put_together, tokens_of
from .common.precision import Stored, Sum, column_sums, store
from .common.rerun_conv import Conv
from .common.row_sampling import draw

__all__ = ['MLPSettings', 'MLPTensors', 'MLPWeights', 'channel_mlp']

# Rows that means of activations are taken over.
_ROWS_OF_MEANS = 256


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """Of :func:`channel_mlp`. Raises ValueError for an activation that the fused form does not have."""

    form: Form = Form()
    eps: float = 1e-6  # of the layer norm
    approximate: str = 'none'  # of the GELU, or 'tanh'
    activation: Callable[[Tensor], Tensor] | None = None  # of the reference alone, in place of the GELU
    chunk: int | None = None  # elements of the hidden layer that exist at a time; None: by the device
    dtype: torch.dtype | None = None  # of matrix products; None: what autocast says, or as x is

    def __post_init__(self):
        if self.activation is not None and self.form.implementation == 'fused':
            raise ValueError(
                f"activation={self.activation!r} needs implementation='reference'; the fused MLP has GELU alone"
            )


class MLPTensors(NamedTuple):
    """What a channel MLP works on."""

    x: Tensor  # input of the norm, tokens (N, L, C) or a map (N, C, H, W)
    shortcut: Tensor  # what the branch is added to, of the same shape
    norm_weight: Tensor | None  # affine part of the layer norm, (C,)
    norm_bias: Tensor | None
    weight1: Tensor  # first pointwise layer, (D, C)
    bias1: Tensor
    weight2: Tensor  # second pointwise layer, (C, D)
    bias2: Tensor
    gamma: Tensor | None = None  # layer scale, (C,)
    factor: Tensor | None = None  # of the branch of each image (stochastic depth), (N,)
    positions: Positions | None = None  # which positions are kept; None: all
    conv: Conv | None = None  # where x comes from, so that it is computed again as well


MLPGradients = gradients_of(MLPTensors, 'factor', 'positions', 'conv')


class MLPSaved(NamedTuple):
    """What the backward pass needs: of the kept rows x-hat (N, K, C) and its reciprocal deviation (N * K, 1), unless
    the convolution runs again; and what was given."""

    xhat: Stored | None
    rstd: Tensor | None
    keep: Tensor | None  # the kept rows' positions
    given: MLPTensors  # without maps and positions
    layout: torch.memory_format | None  # of ``x``, if it is a map


class MLPWeights(NamedTuple):
    """W1', b1', W2 and b2 of the package's docstring, in the precision of the matrix products."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    @classmethod
    def folded(cls, t: NamedTuple, dtype: torch.dtype) -> 'MLPWeights':
        """Of the tensors of an MLP."""
        return cls(*cls.first(t, dtype), t.weight2.to(dtype), t.bias2.to(dtype))

    @staticmethod
    def first(t: NamedTuple, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W1' and b1' alone."""
        return fold(t.weight1, t.bias1, t.norm_weight, t.norm_bias, dtype)

    def hidden(self, xhat: Tensor) -> Tensor:
        """Rows of the hidden layer, before the GELU."""
        return torch.addmm(self.b1, xhat, self.w1.t())


def channel_mlp(settings: MLPSettings, tensors: MLPTensors) -> Tensor:
    """``shortcut + factor * gamma * (GELU(LN(x) W1^T + b1) W2^T + b2)`` with gradients from the kept positions.

    The shortcut's gradient is exact everywhere.

    Args:
        settings (MLPSettings): See there.
        tensors (MLPTensors): See there.

    Returns:
        Tensor: Of the shape of ``shortcut``, and laid out like it.
    """
    if settings.form.implementation == 'reference':
        return _reference(settings, tensors)
    return _channel_mlp(in_precision(settings, tensors.x), tensors)


def _reference(settings, tensors):
    """Plain autograd, by Algorithm 1."""
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
    t, keep = tensors, settings.form.kept(tensors.positions)
    _, hidden, anything = _asked(needs)
    x, xhat, rstd = tokens_of(t.x), None, None
    if hidden and t.conv is None:
        xhat, rstd = normalise(x, settings.eps, settings.dtype)
    out = add_branch(t.shortcut, _branch(settings, t, x, xhat), t.gamma, t.factor, settings.dtype)
    if not anything:
        return out, None
    stored = None
    if xhat is not None:
        if keep is not None:
            xhat, rstd = take(xhat, keep), take(rstd, keep)
        stored, rstd = store(xhat, settings.form.storage), rstd.flatten(0, 1) if needs.x else None
    given = t._replace(x=None, shortcut=None, positions=None, conv=t.conv if hidden else None)
    return out, MLPSaved(stored, rstd, keep, given, layout_of(t.x))


def _asked(needs):
    """Whether anybody asks for gradients through the GELU; with the hidden layer; in the branch at all."""
    through_gelu = needs.x or needs.norm_weight or needs.norm_bias or needs.weight1 or needs.bias1
    hidden = through_gelu or needs.weight2 or needs.gamma
    return through_gelu, hidden, hidden or needs.bias2


def _branch(settings, t, x, xhat):
    """Chunks of the rows x (N, L, C), and of their branch without layer scale; x-hat is computed if it is not given."""
    weights = MLPWeights.folded(t, settings.dtype)
    for chunk in chunks(*x.shape[:2], len(weights.w1), x.device, settings.chunk):
        rows = chunk.rows_of(x if xhat is None else xhat)
        rows = normalise(rows, settings.eps, settings.dtype)[0] if xhat is None else rows
        hidden = torch.ops.aten.gelu_(weights.hidden(rows), approximate=settings.approximate)
        rows = torch.addmm(weights.b2, hidden, weights.w2.t())
        del hidden  # or it would be there beside the next chunk's
        yield chunk, rows


def _backward(settings, saved, grad, needs):
    if saved is None:
        return MLPGradients(shortcut=grad)
    run = _BackwardPass(settings, saved, grad, needs)
    for chunk in run.chunks():
        run.add(chunk)
    return run.parameter_gradients()._replace(x=run.whole_input_gradient(grad.shape), shortcut=grad)


class _BackwardPass:
    """What the chunks of a backward pass share. ``dx`` has the rows that they write, (N, K, C)."""

    def __init__(self, settings, saved, grad, needs):
        self.settings, self.saved, self.t = settings, saved, saved.given
        self.keep = saved.keep
        self.grad = tokens_of(grad)
        self.incoming = Incoming(self.grad, self.t.bias2, self.t.gamma, self.t.factor, settings.dtype)
        self.w2 = self.incoming.second(self.t.weight2)
        self.kept = self.grad.shape[1] if self.keep is None else len(self.keep)
        self.w1, self.b1 = MLPWeights.first(self.t, settings.dtype)
        self.x = None  # (N, K, C), what x-hat is computed from
        if self.t.conv is not None:
            x = tokens_of(self.t.conv.run())
            self.x = x if self.keep is None else take(x, self.keep)
        outer, w1 = needs.weight2 or needs.gamma, needs.weight1 or needs.norm_weight
        self.sums = types.SimpleNamespace(  # over the rows; None: nobody asks
            outer=Sum(self.t.weight2) if outer else None,  # A of the package's docstring
            w1=Sum(self.t.weight1) if w1 else None,
            b1=Sum(self.t.bias1) if _asked(needs)[0] else None,
        )
        self.means = [None, None]
        if settings.form.sample and self.grad.numel() and (outer or w1):
            self.means = self._means()
        self.dx = self.statistics = None
        if needs.x:
            self._allocate_input_gradient()

    def _means(self):
        """Of x-hat and of the hidden layer behind the GELU, over some rows of all images.

        A sample estimates the sum of outer products with what activations have beyond these. The rest, a mean times the
        sum of all gradients, is exact. Behind a GELU activations are far from zero on average, so this leaves less to
        estimate. Nothing here may depend on the draw.
        """
        number, rows = len(self.grad), self.kept
        # Odd, or the rows would stand in one column of most maps; at most a quarter, or this would cost a product.
        step = max(number * rows // _ROWS_OF_MEANS, 4) | 1
        some = Chunk(slice(0, number), slice(min(step // 2, rows - 1), rows, step), rows)
        xhat, _, hidden = self._activations(some)
        return [rows.mean(0) for rows in (xhat, F.gelu(hidden, approximate=self.settings.approximate))]

    def _allocate_input_gradient(self):
        if self.x is not None and self.x.dtype == self.settings.dtype:
            self.dx = self.x  # each chunk of it is read before its gradient is written to its place
        else:
            layout, shape = self.saved.layout if self.keep is None else None, (len(self.grad), self.kept)
            self.dx = empty_tokens((*shape, self.grad.shape[2]), layout, self.settings.dtype, self.grad.device)

    def chunks(self):
        """Of the kept rows."""
        return chunks(len(self.grad), self.kept, len(self.w1), self.grad.device, self.settings.chunk)

    def add(self, chunk):
        """Adds some kept rows to sums and input gradient."""
        settings, sums = self.settings, self.sums
        g = self.incoming.rows(chunk, self.keep)
        if sums.outer is None and sums.b1 is None:
            return
        rows, drawn = self._activations(chunk), draw(settings.form.sample, g)
        if sums.outer is not None:
            hidden = F.gelu(drawn.of(rows[-1]), approximate=settings.approximate)
            sums.outer.add_product(drawn.divided(g), _less(hidden, self.means[1]), self.incoming.unit)
            del hidden
        if sums.b1 is None:
            return
        dh = self._through_gelu(chunk, g, *rows)
        if sums.w1 is not None:
            sums.w1.add_product(drawn.divided(dh), _less(drawn.of(rows[0]), self.means[0]))

    def _activations(self, chunk):
        """x-hat, its reciprocal deviation, if anybody asks, and the hidden layer of some kept rows."""
        dtype, saved = self.settings.dtype, self.saved
        if self.x is not None:
            xhat, rstd = normalise(chunk.rows_of(self.x), self.settings.eps, dtype)
        else:
            xhat = saved.xhat.part(chunk.images, chunk.rows).load(dtype).flatten(0, 1)
            rstd = None if saved.rstd is None else saved.rstd[chunk.flat]
        return xhat, rstd, torch.addmm(self.b1, xhat, self.w1.t())

    def _through_gelu(self, chunk, rows, xhat, rstd, hidden):
        """Gradient of the hidden layer of some rows; that of the input goes to their place in ``dx``."""
        dh, approximate = self.incoming.behind(rows) @ self.w2, self.settings.approximate
        dh = torch.ops.aten.gelu_backward.grad_input(dh, hidden, approximate=approximate, grad_input=dh)
        self.sums.b1.add(column_sums(dh))
        if self.dx is not None:
            if self.statistics is None or len(self.statistics[0]) < len(rstd):
                self.statistics = unit_statistics(rstd)
            normalise_backward(dh @ self.w1, xhat, rstd, self.dx[chunk.images, chunk.rows], self.statistics)
        return dh

    def parameter_gradients(self):
        """From the sums over the rows."""
        t, first = self.t, [None] * 4
        outer, w1, b1 = (s and s.value for s in (self.sums.outer, self.sums.w1, self.sums.b1))
        outer = _with_mean_(outer, self.incoming.total, self.means[1])
        if b1 is not None:
            first = unfold(_with_mean_(w1, b1, self.means[0]), b1, t.weight1, t.norm_weight, t.norm_bias)
        return MLPGradients(None, None, *first, *unscale(outer, self.incoming.total, t.weight2, t.bias2, t.gamma))

    def whole_input_gradient(self, shape):
        """That of the input, laid out as it is; None: nobody asks."""
        self.x = None  # it is no longer needed, and may be as large as the input
        if self.dx is None or self.keep is None:
            return None if self.dx is None else in_shape(self.dx, shape)
        tokens = put_together(self.dx, self.keep, self.grad.shape[1])
        return laid_out(in_shape(tokens, shape), self.saved.layout)


def _less(rows, mean):
    """Rows that were drawn, less their mean, in place; None: as they are."""
    return rows if mean is None else rows.sub_(mean)


def _with_mean_(estimate, total, mean):
    """The whole gradient, from what was drawn and the sum of all rows' gradients, in place."""
    return estimate if estimate is None or mean is None else estimate.addr_(total, mean.to(total.dtype))


_channel_mlp = Operation('ChannelMLP', _forward, _backward, MLPGradients)
