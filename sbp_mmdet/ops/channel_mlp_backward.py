"""The backward pass of the channel MLP (:mod:`.channel_mlp`), and what the forward pass saves for it.

With y = LN(x), h = y W1^T + b1, g = dout and the factor c = factor * gamma of each channel, it recomputes y and h of
the kept tokens, in chunks of rows, and sums over them:

    A = g^T GELU(h),   dW2 = diag(c) A,   db2 = c * sum of g,
    dgamma = factor * (row sums of A * W2 + b2 * sum of g),
    dh = (g diag(c) W2) * GELU'(h),   dW1 = dh^T y,   db1 = sum of dh,   dx = LN'(dh W1; x).

This is what full precision needs: torch's own norm, forwards and backwards. In half precision, and where x-hat is
saved in eight bits, the norm is folded into the first layer (:func:`.folding.fold`), so that x-hat itself is the factor
of matrix products:

    h = x-hat W1'^T + b1',   dW1' = dh^T x-hat,   dx = rstd * LN'(dh W1'; x-hat).

Folding takes a dozen calls on weights, but no pass over maps, where torch's norm would cast each map to full precision
and back.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from .common.activations import overwrite
from .common.folding import (
    fold_bias,
    fold_weight,
    incoming_rows,
    normalise,
    normalise_backward,
    unfold,
    unit_of_channels,
)
from .common.layer_norms import TokenNorm
from .common.layouts import (
    Chunk,
    as_rows,
    cut_into_chunks,
    empty_tokens,
    from_rows,
    in_shape,
    scatter_rows,
    to_layout,
    tokens_of,
)
from .common.precision import FULL, Stored, Sums, cast, cast_all, zeros_for
from .common.row_sampling import add_mean_term_, centre_, choose_rows_of_means, sample_rows

__all__ = ['BackwardPass', 'MLPSaved', 'MLPWeights', 'cut_map_into_chunks', 'folds_norm']

aten = torch.ops.aten
_PARAMETERS = 'norm_weight', 'norm_bias', 'weight1', 'bias1', 'weight2', 'bias2'


class MLPSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        source (Stored | None): Input of the norm for the kept tokens, or x-hat, shape (N, K, C). If ``None``, the
            convolution is rerun, or the input is not needed.
        is_normalised (bool): Whether ``source`` is x-hat.
        rstd (Tensor | None): Reciprocal deviation of the input, shape (N, K, 1), if x-hat is saved and the input needs
            a gradient.
        b1 (Tensor | None): Folded bias b1', which is cheaper to save than to compute again. If ``None``, it is not
            folded or not needed.
        keep (Tensor | None): Indices of the kept tokens. If ``None``, all are kept.
        given (MLPTensors): Parameters, factor and convolution.
        layout (torch.memory_format | None): Layout of the input, if it is a feature map.
        dtype (torch.dtype): Precision of the input.
    """

    source: Stored | None
    is_normalised: bool
    rstd: Tensor | None
    b1: Tensor | None
    keep: Tensor | None
    given: NamedTuple
    layout: torch.memory_format | None
    dtype: torch.dtype


class MLPWeights:
    """The norm, and the pointwise layers in the precision of matrix products.

    Args:
        settings (MLPSettings): Settings with a dtype.
        t (MLPTensors): Inputs.
        folds (bool): Whether the norm is folded into the first layer.
        second (Sequence[Tensor]): Weight and bias of the second layer, if they are needed. Default: none.
        b1 (Tensor | None): The folded bias. If ``None``, it is computed. Default: None.

    Attributes:
        norm (TokenNorm | None): The norm. If ``None``, it is folded into the first layer.
        w1, b1 (Tensor): First layer.
        second (list[Tensor]): Second layer: w2 and b2, or empty.
    """

    def __init__(self, settings, t, folds, second=(), b1=None):
        dtype = settings.dtype
        if folds:
            self.norm = None
            b1 = fold_bias(t.weight1, t.bias1, t.norm_bias) if b1 is None else b1
            self.b1, *self.second = cast_all((b1, *second), dtype)  # in one launch
            self.w1 = fold_weight(t.weight1, t.norm_weight, dtype)
        else:
            self.norm = TokenNorm(t.norm_weight, t.norm_bias, settings.eps, dtype)
            self.w1, self.b1, *self.second = cast_all((t.weight1, t.bias1, *second), dtype)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the hidden layer of rows after the norm, or of x-hat, before the GELU."""
        return F.linear(rows, self.w1, self.b1)


def folds_norm(settings, saves_normalised: bool) -> bool:
    """Return whether the norm is folded into the first layer.

    Args:
        settings (MLPSettings): Settings with a dtype.
        saves_normalised (bool): Whether x-hat is saved.
    """
    return settings.dtype not in FULL or saves_normalised


def cut_map_into_chunks(settings, t, x: Tensor, keep: Tensor | None = None) -> list[Chunk]:
    """Return the chunks that the rows of a map or of tokens are computed in.

    Args:
        settings (MLPSettings): Settings.
        t (MLPTensors): Parameters.
        x (Tensor): Feature map (N, C, H, W) or tokens (N, L, C).
        keep (Tensor | None): Indices of the kept tokens. If ``None``, all are kept. Default: None.
    """
    length = x.shape[1] if x.dim() == 3 else x.shape[2] * x.shape[3]
    return cut_into_chunks(
        x.shape[0], length if keep is None else len(keep), t.weight1.shape[0], x.device, settings.chunk
    )


class BackwardPass:
    """A backward pass, whose chunks of rows add to common sums.

    Args:
        settings (MLPSettings): Settings.
        saved (MLPSaved): What the forward pass saved.
        grad (Tensor): Gradient of the output.
        needs (MLPGradients): Which gradients are needed.

    Attributes:
        needs_of_norm (tuple[bool, bool, bool]): Whether the gradients of the norm's input, weight and bias are needed.
        needs_first (bool): Whether a gradient is needed that comes through the GELU.
        needs_outer (bool): Whether A = g^T GELU(h) is needed.
        needs_product (bool): Whether dW1, or dW1' of the folded layer, is needed.
        scale (Tensor | float | None): Layer scale times the number of stochastic depth. If ``None``, 1.
        unit (Tensor | None): What each channel of g is divided by, shape (C,): in fp16, rows are not multiplied by a
            small layer scale for A, but brought into range. If ``None``, 1. ``by`` is its reciprocal.
        scale_of_rows (Tensor | float | None): Product of both, by which A is multiplied for dW2, and g for dh in fp16.
            ``column`` is the same, shape (C, 1).
        w2 (Tensor): What rows of g are multiplied by for dh: W2, with ``scale`` where there is no ``unit``.
    """

    def __init__(self, settings, saved: MLPSaved, grad: Tensor, needs):
        t = saved.given
        self.settings, self.saved, self.t, self.grad, self.needs = settings, saved, t, grad, needs
        self.dtype, self.full = settings.dtype, torch.float64 if settings.dtype is torch.float64 else torch.float32
        self.needs_of_norm = needs.x, needs.norm_weight, needs.norm_bias
        self.needs_first = any(self.needs_of_norm) or needs.weight1 or needs.bias1
        self.needs_outer = needs.weight2 or needs.gamma
        self.folds = folds_norm(settings, saved.is_normalised)
        self.weights = MLPWeights(settings, t, self.folds, b1=saved.b1)
        # Stochastic depth is a factor of each image, or a number that layer scale is multiplied by.
        self.factor = t.factor if isinstance(t.factor, Tensor) else None
        self.number = 1 if t.factor is None or self.factor is not None else t.factor
        self.scale = t.gamma
        if self.number != 1:
            self.scale = self.number if t.gamma is None else t.gamma * self.number
        self.unit = self.by = None
        if t.gamma is not None and self.dtype is torch.float16:
            self.unit = unit_of_channels(grad)
            self.by = self.unit.reciprocal()
        self.scale_of_rows = self.scale if self.unit is None else self.scale * self.unit
        self.column = self.scale_of_rows.unsqueeze(1) if isinstance(self.scale, Tensor) else self.scale
        if self.scale is None or self.unit is not None:
            self.w2 = cast(t.weight2, self.dtype)
        elif t.weight2.dtype is self.dtype and (t.gamma is None or t.gamma.dtype is self.dtype):
            self.w2 = t.weight2 * self.column
        else:
            self.w2 = torch.mul(t.weight2, self.column, out=torch.empty_like(t.weight2, dtype=self.dtype))
        self.means = None, None
        self.needs_product = needs.weight1 or (self.folds and needs.norm_weight)
        self._samples = settings.form.sample and (self.needs_outer or self.needs_product)
        # By the name of the parameter whose gradient follows from it.
        self.sums = Sums({})

    def run(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of ``x`` and, in the order of the tensors, of the parameters."""
        grad, keep, source, conv = self.grad, self.saved.keep, self.saved.source, self.t.conv
        chunks = cut_map_into_chunks(self.settings, self.t, grad, keep)
        x = None if conv is None else conv.run()
        if len(chunks) == 1 and keep is None and self.factor is None:
            return self._run_whole(x), self._gradients()
        tokens = tokens_of(grad)
        if x is not None:
            x = tokens_of(x)
            source = Stored(x if keep is None else take(x, keep))
        if self._samples and tokens.numel():
            some = choose_rows_of_means(len(tokens), source.values.shape[1])
            self._find_means(*self._activations(source, some)[:2])
        dx = self._allocate_gradient(source) if self.needs.x else None
        for chunk in chunks:
            part = tokens[chunk.images, chunk.rows]
            if keep is not None:
                part = chunk.take_rows(tokens, keep).view(chunk.num_images, -1, tokens.shape[2])
            self._add(part, source, chunk, None if dx is None else dx[chunk.images, chunk.rows])
        if dx is not None:
            dx = to_layout(in_shape(scatter_rows(dx, keep, tokens.shape[1]), grad.shape), self.saved.layout)
        return dx, self._gradients()

    def _run_whole(self, x):
        """Run the backward pass of all rows at once, and return the gradient of the input."""
        source, shape = self.saved.source if x is None else Stored(x), self.grad.shape
        if not self.folds:
            dx = self._add(self.grad, source)
            return None if dx is None else from_rows(dx, shape)
        dx = None
        if self.needs.x:
            source = source if x is None else Stored(tokens_of(x))
            dx = self._allocate_gradient(source)
        self._add(self.grad, source, None, dx)
        return None if dx is None else in_shape(dx, shape)

    def _allocate_gradient(self, source):
        """Return the tensor (N, K, C) that gradients of the input are written to."""
        values, dtype = source.values, self.saved.dtype
        if self.t.conv is not None and values.dtype is dtype:
            return values  # recomputed here; each chunk is read before its gradient takes its place
        layout = self.saved.layout if self.saved.keep is None else None
        return empty_tokens(values.shape, layout, dtype, values.device)

    def _activations(self, source, chunk=None):
        """Recompute some rows.

        Args:
            source (Stored): Input of the norm or x-hat.
            chunk (Chunk | None): The rows. If ``None``, all.

        Returns:
            tuple: The hidden layer, the rows in front of it, and what the norm's backward pass reads: the input with
            mean and reciprocal deviation, or x-hat with the reciprocal deviation of the input.
        """
        saved, weights, dtype = self.saved, self.weights, self.dtype
        part = source if chunk is None else source.part(chunk.images, chunk.rows)
        if not self.folds:
            x = as_rows(part.values, self.full)
            rows, *statistics = weights.norm.run(x)
            return weights.hidden(rows), rows, (x, *statistics)
        if saved.is_normalised:
            rows, rstd = as_rows(part.load(dtype)), saved.rstd
            rstd = rstd if rstd is None or chunk is None else rstd[chunk.images, chunk.rows]
        else:
            rows, rstd = normalise(as_rows(part.values), self.settings.eps, dtype)
        return weights.hidden(rows), rows, (rows, rstd)

    def _find_means(self, hidden, rows):
        """Compute means of the first layer's input and of GELU(h) over some rows, see :func:`.choose_rows_of_means`."""
        self.means = rows.mean(0), F.gelu(hidden, approximate=self.settings.approximate).mean(0)

    def _add(self, part, source, chunk=None, out=None):
        """Add rows to the sums, and compute the gradient of their input, if it is needed.

        Args:
            part (Tensor): Gradient of the branch: tokens of a chunk, or the feature map or tokens of all.
            source (Stored | None): Input or x-hat of all rows.
            chunk (Chunk | None): The chunk. If ``None``, these are all rows.
            out (Tensor | None): Where the gradient of the input is written, shape (n, k, C). If ``None``, it is
                returned, shape (K, C), or not needed.
        """
        factor = None if self.factor is None else self.factor[chunk.images]
        (rows, total), dx = incoming_rows(part, self.dtype, factor, self.by), None
        terms = dict(bias2=total)
        if self.needs_outer or self.needs_first:
            dx = self._add_through_layers(rows, source, chunk, terms, out)
        self.sums.add(terms)
        return dx

    def _add_through_layers(self, g, source, chunk, terms, out):
        """Return the gradient of the input, and compute the gradients of the parameters that come from some rows.

        Those of ``weight1`` and ``weight2`` are added to the sums, the others are put into ``terms``.
        """
        sums, approximate, weights = self.sums, self.settings.approximate, self.weights
        hidden, rows, normed = self._activations(source, chunk)
        if self._samples and chunk is None:
            images = self.grad.shape[0]
            some = choose_rows_of_means(images, len(g) // images)
            self._find_means(*[some.take_rows(part.view(images, -1, part.shape[1])) for part in (hidden, rows)])
        sampled = sample_rows(self.settings.form.sample, g)
        if self.needs_outer:
            active = F.gelu(sampled.take(hidden), approximate=approximate)
            sums.add_product('weight2', sampled.take_weighted(g), centre_(active, self.means[1]))
            del active
        if not self.needs_first:
            return None
        g = g if self.unit is None else g.mul_(self.scale_of_rows)
        dh = torch.mm(g, self.w2)
        dh = overwrite(aten.gelu_backward, dh, hidden, approximate=approximate)
        del g, hidden
        terms['bias1'] = dh.sum(0, dtype=self.full)
        if self.needs_product:
            sums.add_product('weight1', sampled.take_weighted(dh), centre_(sampled.take(rows), self.means[0]))
        if not (self.needs.x if self.folds else any(self.needs_of_norm)):
            return None
        dy = torch.mm(dh, weights.w1)
        del dh
        if self.folds:
            return normalise_backward(dy, *normed, self.saved.dtype, out)
        dx, terms['norm_weight'], terms['norm_bias'] = weights.norm.backward(
            dy, normed[0], normed[1:], self.needs_of_norm
        )
        return dx if out is None else out.copy_(dx.view(out.shape))

    def _gradients(self):
        """Return the gradients of norm_weight, norm_bias, weight1, bias1, weight2, bias2 and gamma."""
        t, needs, scale, unit = self.t, self.needs, self.scale, self.unit
        sums = self.sums.found
        if not sums:  # there were no rows
            given = {name: getattr(t, name) for name in _PARAMETERS}
            sums = {name: None if p is None else zeros_for(p) for name, p in given.items()}
        total, b1 = sums['bias2'], sums['bias1'] if self.needs_first else None
        w1 = add_mean_term_(sums['weight1'], b1, self.means[0]) if self.needs_product else None
        outer = None
        if self.needs_outer:
            mean = self.means[1]
            outer = add_mean_term_(sums['weight2'], total if mean is None or unit is None else total / unit, mean)
        if not self.folds:
            first = [sums.get('norm_weight'), sums.get('norm_bias'), w1, b1]
        elif b1 is None:
            first = [None] * 4
        else:
            first = unfold(w1, b1, t.weight1, t.norm_weight, t.norm_bias)
        if scale is None:
            return [*first, outer, total, None]
        gamma = None
        if needs.gamma:
            gamma = (outer * t.weight2).sum(1)
            gamma = gamma if unit is None else gamma.mul_(unit)
            gamma = torch.addcmul(gamma, total, cast(t.bias2, total.dtype))
            gamma = gamma if self.number == 1 else gamma.mul_(self.number)
        if needs.weight2:
            outer = outer.mul_(self.column)
        return [*first, outer if needs.weight2 else None, total * scale, gamma]
