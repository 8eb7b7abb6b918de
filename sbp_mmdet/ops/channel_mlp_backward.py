"""The backward pass of the channel MLP (:mod:`.channel_mlp`), and what the forward pass saves for it.

With y = LN(x), h = y W1^T + b1, g = dout and the factor c = factor * gamma of each channel, it recomputes y and h of
the kept tokens, in chunks of rows, and sums over them:

    A = g^T GELU(h),   dW2 = diag(c) A,   db2 = c * sum of g,
    dgamma = factor * (row sums of A * W2 + b2 * sum of g),
    dh = (g diag(c) W2) * GELU'(h),   dW1 = dh^T y,   db1 = sum of dh,   dx = LN'(dh W1; x).

The norm is computed in full precision, as autocast does it on a GPU, and its backward pass is torch's own. Where x-hat
is saved, it stands for x with mean 0 and deviation 1, and the gradient is multiplied by the reciprocal deviation of x.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from .common.folding import unit_of_channels, unit_statistics
from .common.layouts import (
    Chunk,
    as_rows,
    chunks,
    empty_tokens,
    from_rows,
    in_shape,
    laid_out,
    put_together,
    tokens_of,
)
from .common.precision import Stored, accumulate, accumulator, cast, cast_all, column_sums, multiplied, zeros_for
from .common.row_sampling import add_mean_term_, centre_, draw, some_rows

__all__ = ['BackwardPass', 'MLPSaved', 'MLPWeights', 'chunks_of_map']

aten = torch.ops.aten
_norm_backward = aten.native_layer_norm_backward.default
_PARAMETERS = 'norm_weight', 'norm_bias', 'weight1', 'bias1', 'weight2', 'bias2'


class MLPSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        source (Stored | None): Input of the norm for the kept tokens, or x-hat, shape (N, K, C). If ``None``, the
            convolution is rerun, or the input is not needed.
        is_normalised (bool): Whether ``source`` is x-hat.
        rstd (Tensor | None): Reciprocal deviation of the input, shape (N, K, 1), if x-hat is saved and the input needs
            a gradient.
        keep (Tensor | None): Indices of the kept tokens. If ``None``, all are kept.
        given (MLPTensors): Parameters, factor and convolution.
        layout (torch.memory_format | None): Layout of the input, if it is a feature map.
        dtype (torch.dtype): Precision of the input.
    """

    source: Stored | None
    is_normalised: bool
    rstd: Tensor | None
    keep: Tensor | None
    given: NamedTuple
    layout: torch.memory_format | None
    dtype: torch.dtype


class MLPWeights:
    """Parameters of the norm in full precision, and those of pointwise layers in the precision of matrix products.

    Args:
        settings (MLPSettings): Settings with a dtype.
        t (MLPTensors): Inputs.
        *others (Tensor): Further tensors to cast, in the same launch as the first layer's.
    """

    def __init__(self, settings, t, *others):
        self.dtype, self.eps = settings.dtype, settings.eps
        self.full = full = torch.float64 if settings.dtype is torch.float64 else torch.float32
        weight, bias = t.norm_weight, t.norm_bias
        self.norm_weight = weight if weight is None or weight.dtype is full else weight.to(full)
        self.norm_bias = bias if bias is None or bias.dtype is full else bias.to(full)
        self.w1, self.b1, *self.others = cast_all((t.weight1, t.bias1, *others), settings.dtype)

    def normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Apply the layer norm to rows in full precision.

        Args:
            x (Tensor): Rows of the norm's input, shape (K, C).

        Returns:
            tuple[Tensor, Tensor, Tensor, Tensor]: The rows behind the norm, in the precision of matrix products, and
            what the norm's backward pass reads: ``x``, its mean and its reciprocal deviation, shape (K, 1).
        """
        rows, mean, rstd = torch.native_layer_norm(x, x.shape[1:], self.norm_weight, self.norm_bias, self.eps)
        return rows if self.dtype is self.full else rows.to(self.dtype), x, mean, rstd

    def scale(self, xhat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Apply the affine part of the layer norm to rows of x-hat; otherwise as :meth:`normalise`."""
        xhat, weight, bias = cast(xhat, self.full), self.norm_weight, self.norm_bias
        rows = xhat
        if weight is not None:
            rows = xhat * weight if bias is None else torch.addcmul(bias, xhat, weight)
        return cast(rows, self.dtype), xhat, *unit_statistics(len(xhat), self.full, xhat.device)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the hidden layer of rows behind the norm, before the GELU."""
        return torch.addmm(self.b1, rows, self.w1.t())


def chunks_of_map(settings, t, x: Tensor, keep: Tensor | None = None) -> list[Chunk]:
    """Return the chunks that the rows of a map or of tokens are computed in.

    Args:
        settings (MLPSettings): Settings.
        t (MLPTensors): Parameters.
        x (Tensor): Feature map (N, C, H, W) or tokens (N, L, C).
        keep (Tensor | None): Indices of the kept tokens. If ``None``, all are kept. Default: None.
    """
    length = x.shape[1] if x.dim() == 3 else x.shape[2] * x.shape[3]
    return chunks(x.shape[0], length if keep is None else len(keep), t.weight1.shape[0], x.device, settings.chunk)


class BackwardPass:
    """A backward pass, whose chunks of rows add to common sums.

    Args:
        settings (MLPSettings): Settings.
        saved (MLPSaved): What the forward pass saved.
        grad (Tensor): Gradient of the output.
        needs (MLPGradients): Which gradients are needed.
    """

    def __init__(self, settings, saved: MLPSaved, grad: Tensor, needs):
        t = saved.given
        self.settings, self.saved, self.t, self.grad, self.needs = settings, saved, t, grad, needs
        self.dtype, self.keep = settings.dtype, saved.keep
        self.norm = needs.x, needs.norm_weight, needs.norm_bias  # gradients of the norm
        self.first = any(self.norm) or needs.weight1 or needs.bias1
        self.outer = needs.weight2 or needs.gamma
        self.weights = MLPWeights(settings, t)
        # Stochastic depth is a factor of each image, or a number that layer scale is multiplied by.
        self.factor = t.factor if isinstance(t.factor, Tensor) else None
        self.number = 1 if t.factor is None or self.factor is not None else t.factor
        self.scale = t.gamma
        if self.number != 1:
            self.scale = self.number if t.gamma is None else t.gamma * self.number
        # In fp16 rows are not multiplied by a small layer scale for A. Each channel is brought into range instead.
        self.unit = None
        if t.gamma is not None and self.dtype is torch.float16:
            self.unit = unit_of_channels(grad)
        self.column = self.scale.unsqueeze(1) if isinstance(self.scale, Tensor) else self.scale
        self.w2 = self._second_weight()
        self.means = None, None
        self._samples = settings.form.sample and (self.outer or needs.weight1)
        # By the name of the parameter whose gradient follows from it: sums of outer products, and of vectors.
        self.products, self.sums = dict(weight1=None, weight2=None), {}

    def _second_weight(self):
        """Return what rows of g are multiplied by for the gradient of the hidden layer."""
        weight = self.t.weight2
        if self.scale is None or self.unit is not None:
            return cast(weight, self.dtype)
        if isinstance(self.scale, Tensor):
            return multiplied(weight, self.column, self.dtype)
        return torch.mul(weight, self.scale, out=torch.empty_like(weight, dtype=self.dtype))

    def run(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of ``x`` and, in the order of the tensors, of the parameters."""
        grad, keep, source, conv = self.grad, self.keep, self.saved.source, self.t.conv
        parts = chunks_of_map(self.settings, self.t, grad, keep)
        x = None if conv is None else conv.run()
        if len(parts) == 1 and keep is None and self.factor is None:
            dx = self._add(grad, source if x is None else Stored(x))
            return None if dx is None else self._whole(dx), self._gradients()
        if x is not None:
            x = tokens_of(x)
            source = Stored(x if keep is None else take(x, keep))
        tokens = tokens_of(grad)
        if self._samples and tokens.numel():
            some = some_rows(len(tokens), source.values.shape[1])
            self._find_means(*self._activations(source.part(some.images, some.rows))[:2])
        dx = self._input_gradient(tokens, source) if self.needs.x else None
        for chunk in parts:
            part = tokens[chunk.images, chunk.rows]
            if keep is not None:
                part = chunk.take_rows(tokens, keep).view(chunk.num_images, -1, tokens.shape[2])
            own = None if source is None else source.part(chunk.images, chunk.rows)
            rows = self._add(part, own, chunk)
            if dx is not None:
                chunk.put_(dx, rows)
            del rows  # otherwise it exists beside those of the next chunk
        if dx is None:
            return None, self._gradients()
        dx = put_together(dx, keep, tokens.shape[1])
        return laid_out(in_shape(dx, grad.shape), self.saved.layout), self._gradients()

    def _input_gradient(self, tokens, source):
        """Return the tensor (N, K, C) that gradients of the input are written to."""
        if self.t.conv is not None and source.values.dtype is self.saved.dtype:
            return source.values  # recomputed here; each chunk is read before its gradient takes its place
        kept, layout = (tokens.shape[1], self.saved.layout) if self.keep is None else (len(self.keep), None)
        return empty_tokens((len(tokens), kept, tokens.shape[2]), layout, self.saved.dtype, tokens.device)

    def _whole(self, rows):
        """Return the rows of all tokens as the gradient of the input."""
        dx = from_rows(rows, self.grad.shape)
        if dx.dtype is self.saved.dtype:
            return dx
        return dx.to(self.saved.dtype, memory_format=self.saved.layout or torch.contiguous_format)

    def _incoming(self, part, factor):
        """Return g as rows for matrix products, divided by ``unit``, and its sum over them."""
        if part.dtype is self.dtype and self.unit is None and factor is None:
            rows = as_rows(part)
            return rows, column_sums(rows)
        part = part.permute(0, 2, 3, 1) if part.dim() == 4 else part
        full, by = accumulator(part), None if self.unit is None else self.unit.reciprocal()
        if factor is None:
            total = part.sum(tuple(range(part.dim() - 1)), dtype=full)
        else:
            total = torch.mv(part.sum(1, dtype=full).t(), factor.to(full))
            by = factor[:, None, None] if by is None else factor[:, None, None] * by
        rows = torch.empty(part.shape, dtype=self.dtype, device=part.device)
        if by is None:
            rows.copy_(part)
        else:
            torch.mul(part, by, out=rows)
        return rows.view(-1, part.shape[-1]), total

    def _activations(self, part):
        """Return the hidden layer of some rows and the results of :meth:`MLPWeights.normalise`.

        Args:
            part (Stored): Their input or x-hat.
        """
        weights = self.weights
        if self.saved.is_normalised:
            normed = weights.scale(as_rows(part.load(self.dtype)))
        else:
            normed = weights.normalise(as_rows(part.values, weights.full))
        return weights.hidden(normed[0]), *normed

    def _find_means(self, hidden, rows):
        """Compute means of the first layer's input and of the hidden layer after the GELU, over :func:`.some_rows`."""
        self.means = rows.mean(0), F.gelu(hidden, approximate=self.settings.approximate).mean(0)

    def _add(self, part, source, chunk=None):
        """Add rows to the sums, and return the gradient of their input, if it is needed.

        Args:
            part (Tensor): Gradient of the branch: tokens of a chunk, or the feature map or tokens of all.
            source (Stored | None): Their input or x-hat.
            chunk (Chunk | None): The chunk. If ``None``, these are all rows.
        """
        factor = None if self.factor is None else self.factor[chunk.images]
        (rows, total), dx = self._incoming(part, factor), None
        sums = dict(bias2=total)
        if self.outer or self.first:
            dx = self._add_through_layers(rows, source, chunk, sums)
        if self.sums:
            torch._foreach_add_([self.sums[name] for name in sums], [*sums.values()])
        else:
            self.sums = sums
        return dx

    def _add_through_layers(self, g, source, chunk, sums):
        """Add rows to the sums of products, vectors into ``sums``, and return the gradient of the input."""
        products, approximate, weights = self.products, self.settings.approximate, self.weights
        hidden, rows, x, mean, rstd = self._activations(source)
        if self._samples and chunk is None:
            images = self.grad.shape[0]
            some = some_rows(images, len(g) // images)
            self._find_means(*[some.take_rows(part.view(images, -1, part.shape[1])) for part in (hidden, rows)])
        drawn = draw(self.settings.form.sample, g)
        if self.outer:
            active = F.gelu(drawn.of(hidden), approximate=approximate)
            products['weight2'] = accumulate(products['weight2'], drawn.divided(g), centre_(active, self.means[1]))
            del active
        if not self.first:
            return None
        g = g if self.unit is None else g.mul_(self.unit * self.scale)
        dh = torch.mm(g, self.w2)
        dh = aten.gelu_backward.grad_input(dh, hidden, approximate=approximate, grad_input=dh)
        del g, hidden
        sums['bias1'] = column_sums(dh)
        if self.needs.weight1:
            rows = centre_(drawn.of(rows), self.means[0])
            products['weight1'] = accumulate(products['weight1'], drawn.divided(dh), rows)
        if not any(self.norm):
            return None
        dy = torch.mm(dh, weights.w1)
        del dh, rows
        dy = dy if dy.dtype is weights.full else dy.to(weights.full)
        numbers = mean, rstd, weights.norm_weight, weights.norm_bias
        dx, *norm = _norm_backward(dy, x, x.shape[1:], *numbers, self.norm)
        for name, gradient in zip(('norm_weight', 'norm_bias'), norm, strict=True):
            if gradient is not None:
                sums[name] = gradient
        if dx is not None and self.saved.is_normalised:
            rstd = self.saved.rstd
            dx.mul_((rstd if chunk is None else rstd[chunk.images, chunk.rows]).reshape(-1, 1))
        return dx

    def _gradients(self):
        """Return the gradients of norm_weight, norm_bias, weight1, bias1, weight2, bias2 and gamma."""
        t, needs, sums, scale, unit = self.t, self.needs, self.sums | self.products, self.scale, self.unit
        if not self.sums:  # there were no rows
            given = {name: getattr(t, name) for name in _PARAMETERS}
            sums = {name: None if p is None else zeros_for(p) for name, p in given.items()}
        total, b1 = sums['bias2'], sums['bias1'] if self.first else None
        w1 = add_mean_term_(sums['weight1'], b1, self.means[0]) if needs.weight1 else None
        outer = None
        if self.outer:
            mean = self.means[1]
            outer = add_mean_term_(sums['weight2'], total if mean is None or unit is None else total / unit, mean)
        norm = [sums[name] if getattr(needs, name) else None for name in ('norm_weight', 'norm_bias')]
        if scale is None:
            return [*norm, w1, b1, outer, total, None]
        gamma = None
        if needs.gamma:
            gamma = (outer * t.weight2).sum(1)
            gamma = gamma if unit is None else gamma.mul_(unit)
            gamma = torch.addcmul(gamma, total, cast(t.bias2, total.dtype))
            gamma = gamma if self.number == 1 else gamma.mul_(self.number)
        if needs.weight2:
            outer = outer.mul_(self.column if unit is None else self.column * unit.unsqueeze(1))
        return [*norm, w1, b1, outer if needs.weight2 else None, total * scale, gamma]
