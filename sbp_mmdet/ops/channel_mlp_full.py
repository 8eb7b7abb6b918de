"""The channel MLP (:mod:`.channel_mlp`) in full precision, which saves its input, not the normalised one.

Input and x-hat have the same size there, and torch's own norm does in one call each what folding the norm into the
first layer takes a dozen calls for: so a step costs less where calls, not arithmetic, take its time. In half precision
x-hat is half as large as the residual stream.

With h = LN(x) W1^T + b1 and g = factor * dy, the backward pass recomputes LN(x) and h of the kept tokens and sums over
them, in chunks:

    A = g^T GELU(h),  dW2 = diag(gamma) A,  db2 = gamma * sum of g,  dgamma = row sums of A * W2 + b2 * sum of g
    dh = g diag(gamma) W2 * GELU'(h),  dW1 = dh^T LN(x),  db1 = sum of dh,  dx = LN'(dh W1)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from .common.folding import add_branch
from .common.layouts import (
    as_rows,
    chunks,
    empty_tokens,
    from_rows,
    in_shape,
    laid_out,
    layout_of,
    put_together,
    tokens_of,
)
from .common.precision import accumulate, in_full_precision, zeros_for
from .common.row_sampling import add_mean_term_, centre_, draw, some_rows

__all__ = ['SavedInput', 'backward', 'forward', 'save', 'saves_input']

aten = torch.ops.aten
_LAYERS = 'norm_weight', 'norm_bias', 'weight1', 'bias1', 'weight2', 'bias2'
_norm_backward = aten.native_layer_norm_backward.default


class SavedInput(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        x (Tensor | None): Input of the kept tokens, shape (N, K, C). If ``None``, the convolution is rerun.
        keep (Tensor | None): Indices of the kept tokens.
        given (MLPTensors): Parameters and factor.
        layout (torch.memory_format | None): Layout of the input, if it is a feature map.
    """

    x: Tensor | None
    keep: Tensor | None
    given: NamedTuple
    layout: torch.memory_format | None


def saves_input(settings, t) -> bool:
    """Return whether an MLP saves its input: in full precision, where it is not to be rounded to eight bits.

    Args:
        settings (MLPSettings): Settings with a dtype.
        t (MLPTensors): Inputs.
    """
    if t.conv is None and settings.form.storage != 'native':
        return False
    return in_full_precision(settings.dtype, t.x, t[:9])


def forward(settings, t) -> Tensor:
    """Compute the MLP.

    Args:
        settings (MLPSettings): Settings.
        t (MLPTensors): Inputs.

    Returns:
        Tensor: Output, of the shape and layout of the shortcut.
    """
    parts = _chunks(settings, t, t.x)
    if len(parts) == 1 and t.factor is None:
        return _add_whole(t, _run_rows(settings, t, as_rows(t.x)))
    x = tokens_of(t.x)
    branch = ((chunk, _run_rows(settings, t, chunk.take_rows(x))) for chunk in parts)
    return add_branch(t.shortcut, branch, t.gamma, t.factor, settings.dtype)


def save(t, keep: Tensor | None, hidden: bool) -> SavedInput:
    """Return what is saved for the backward pass.

    Args:
        t (MLPTensors): Inputs.
        keep (Tensor | None): Indices of the kept tokens. If ``None``, all.
        hidden (bool): Whether the backward pass needs the hidden layer.
    """
    source = None
    if t.conv is None and hidden:
        x = tokens_of(t.x)
        source = x if keep is None else take(x, keep)
    given = type(t)(None, None, *t[2:10], None, t.conv if hidden else None)
    return SavedInput(source, keep, given, layout_of(t.x))


def _chunks(settings, t, x, keep=None):
    """Return the chunks of the positions of a map or of tokens, or of those that are kept."""
    length = x.shape[1] if x.dim() == 3 else x.shape[2] * x.shape[3]
    return chunks(x.shape[0], length if keep is None else len(keep), t.weight1.shape[0], x.device, settings.chunk)


def _run_rows(settings, t, rows):
    rows = torch.layer_norm(rows, rows.shape[1:], t.norm_weight, t.norm_bias, settings.eps)
    hidden = aten.gelu_.default(F.linear(rows, t.weight1, t.bias1), approximate=settings.approximate)
    return F.linear(hidden, t.weight2, t.bias2)


def _add_whole(t, rows):
    """Return the sum of the shortcut and the scaled rows of all tokens, in the layout of the shortcut."""
    rows = from_rows(rows, t.shortcut.shape)
    if t.gamma is None:
        return torch.add(t.shortcut, rows)
    gamma = t.gamma if rows.dim() == 3 else t.gamma.view(-1, 1, 1)
    return torch.addcmul(t.shortcut, rows, gamma)


def backward(settings, saved: SavedInput, grad: Tensor, needs) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of the input and, in the order of the tensors, of the parameters.

    Args:
        settings (MLPSettings): Settings.
        saved (SavedInput): What was saved.
        grad (Tensor): Gradient of the output.
        needs (MLPGradients): Which gradients are needed.

    Returns:
        tuple[Tensor | None, list[Tensor | None]]: Gradient of ``x``, and those of :meth:`_Sums.gradients`.
    """
    t, keep = saved.given, saved.keep
    run = _Sums(settings, t, needs)
    parts = _chunks(settings, t, grad, keep)
    x = saved.x if t.conv is None else t.conv.run()
    if len(parts) == 1 and keep is None and t.factor is None:
        rows = None if x is None else as_rows(x)
        dx = run.add(as_rows(grad), rows, grad.shape[0])
        return None if dx is None else from_rows(dx, grad.shape), run.gradients()
    tokens, x = tokens_of(grad), x if t.conv is None else take(tokens_of(x), keep)
    kept = tokens.shape[1] if keep is None else len(keep)
    if settings.form.sample and run.weights and tokens.numel():
        run.find_means(*run.activations(some_rows(len(x), kept).take_rows(x)))
    layout = saved.layout if keep is None else None
    dx = empty_tokens((len(tokens), kept, tokens.shape[2]), layout, grad.dtype, grad.device) if needs.x else None
    for chunk in parts:
        part = tokens[chunk.images, chunk.rows]
        if keep is not None:
            part = chunk.take_rows(tokens, keep).view(chunk.num_images, -1, tokens.shape[2])
        rows = run.add(
            _times_factor(t, part, chunk.images).reshape(-1, tokens.shape[2]), None if x is None else chunk.take_rows(x)
        )
        if needs.x:
            chunk.put_(dx, rows)
    if dx is None:
        return None, run.gradients()
    dx = put_together(dx, keep, tokens.shape[1])
    return laid_out(in_shape(dx, grad.shape), saved.layout), run.gradients()


def _times_factor(t, part, images):
    return part if t.factor is None else part * t.factor[images, None, None].to(part.dtype)


class _Sums:
    """Sums over rows for the gradients of parameters.

    Args:
        settings (MLPSettings): Settings.
        t (MLPTensors): Parameters.
        needs (MLPGradients): Which gradients are needed.
    """

    def __init__(self, settings, t, needs):
        self.settings, self.t, self.needs = settings, t, needs
        self.norm = needs.x, needs.norm_weight, needs.norm_bias  # gradients of the norm
        self.first = any(self.norm) or needs.weight1 or needs.bias1
        self.outer = needs.weight2 or needs.gamma
        self.weights = self.outer or needs.weight1
        self.means = None, None
        self.gamma = None if t.gamma is None else t.gamma.unsqueeze(1)
        self.w2 = t.weight2 if t.gamma is None else t.weight2 * self.gamma
        # By the name of the parameter whose gradient follows from it: sums of outer products, and of vectors.
        self.products, self.sums = dict(weight1=None, weight2=None), {}

    def activations(self, rows):
        """Compute the first layer's input and output for some rows, and the statistics of the norm."""
        t = self.t
        rows, *statistics = torch.native_layer_norm(rows, rows.shape[1:], t.norm_weight, t.norm_bias, self.settings.eps)
        return rows, F.linear(rows, t.weight1, t.bias1), *statistics

    def find_means(self, rows, hidden, *_):
        """Compute means of the first layer's input and of the hidden layer after the GELU, over :func:`some_rows`."""
        self.means = rows.mean(0), F.gelu(hidden, approximate=self.settings.approximate).mean(0)

    def add(self, grad: Tensor, x: Tensor | None, images: int | None = None) -> Tensor | None:
        """Add some rows to the sums.

        Args:
            grad (Tensor): Gradient of the output, before layer scale, shape (K, C).
            x (Tensor | None): Input of the norm, shape (K, C). If ``None``, it is not needed.
            images (int | None): Number of images, if these are all of their rows, which means are then computed over.
                If ``None``, they are some, and :meth:`find_means` was called. Default: None.

        Returns:
            Tensor | None: Gradient of the norm's input, if it is needed.
        """
        sums, dx = dict(bias2=grad.sum(0)), None
        if self.outer or self.first:
            dx = self._add_through_layers(grad, x, images, sums)
        if self.sums:
            torch._foreach_add_([self.sums[name] for name in sums], [*sums.values()])
        else:
            self.sums = sums
        return dx

    def _add_through_layers(self, grad, x, images, sums):
        """Add rows to the sums of products, vectors into ``sums``, and return the gradient of the input."""
        t, products, approximate = self.t, self.products, self.settings.approximate
        rows, hidden, mean, rstd = self.activations(x)
        if self.settings.form.sample and images and self.weights:
            chunk = some_rows(images, x.shape[0] // images)
            self.find_means(*[chunk.take_rows(part.view(images, -1, part.shape[1])) for part in (rows, hidden)])
        drawn = draw(self.settings.form.sample, grad)
        if self.outer:
            active = F.gelu(drawn.of(hidden), approximate=approximate)
            products['weight2'] = accumulate(products['weight2'], drawn.divided(grad), centre_(active, self.means[1]))
            del active
        if not self.first:
            return None
        dh = torch.mm(grad, self.w2)
        dh = aten.gelu_backward.grad_input(dh, hidden, approximate=approximate, grad_input=dh)
        sums['bias1'] = dh.sum(0)
        if self.needs.weight1:
            products['weight1'] = accumulate(
                products['weight1'], drawn.divided(dh), centre_(drawn.of(rows), self.means[0])
            )
        if not any(self.norm):
            return None
        dy = torch.mm(dh, t.weight1)
        dx, *norm = _norm_backward(dy, x, x.shape[1:], mean, rstd, t.norm_weight, t.norm_bias, self.norm)
        for name, part in zip(('norm_weight', 'norm_bias'), norm, strict=True):
            if part is not None:
                sums[name] = part
        return dx

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of norm_weight, norm_bias, weight1, bias1, weight2, bias2 and gamma."""
        t, needs, sums = self.t, self.needs, self.sums | self.products
        if not self.sums:  # there were no rows
            given = {name: getattr(t, name) for name in _LAYERS}
            sums = {name: None if p is None else zeros_for(p) for name, p in given.items()}
        total, b1 = sums['bias2'], sums['bias1'] if self.first else None
        w1 = add_mean_term_(sums['weight1'], b1, self.means[0]) if needs.weight1 else None
        outer = add_mean_term_(sums['weight2'], total, self.means[1]) if self.outer else None
        norm = [sums[name] if getattr(needs, name) else None for name in ('norm_weight', 'norm_bias')]
        if t.gamma is None:
            return [*norm, w1, b1, outer, total, None]
        bias2, gamma = total * t.gamma, None
        if needs.gamma:
            gamma = torch.addcmul((outer * t.weight2).sum(1), total, t.bias2)
        return [*norm, w1, b1, outer.mul_(self.gamma) if needs.weight2 else None, bias2, gamma]
