"""The feed-forward network of transformers, ``activation(x W1^T + b1) W2^T + b2`` with dropout after either layer.

x is saved for the backward pass. The hidden layer, four to eight times as wide, is recomputed in chunks of rows, and
the random numbers of dropout are drawn again: from the saved state of the generator, in the same order of chunks. x is
never rounded to eight bits, because hidden values close to zero would end up on the other side of the ReLU.
"""

import contextlib
import dataclasses
import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import Form, OnHost, Operation, gradients_of, with_dtype
from .common.layouts import cut_into_chunks
from .common.precision import Sums, cast_all, column_sums
from .common.row_sampling import sample_rows

__all__ = [
    'FFNSettings',
    'FFNTensors',
    'FeedForward',
    'dropout_factor',
    'feed_forward',
    'random_state',
    'replay_dropout',
]

_WEIGHTS = 'weight1', 'bias1', 'weight2', 'bias2'
_get_weights = operator.attrgetter(*_WEIGHTS)


@dataclasses.dataclass(frozen=True)
class FFNSettings:
    """Settings of :func:`feed_forward`.

    Attributes:
        activation (Activation): Activation after the first layer. Default: ReLU.
        dropout (tuple[float, float]): Dropout rates after the activation and after the second layer. Default: (0, 0).
        chunk (int | None): Number of elements of the hidden layer that exist at a time. If ``None``, it depends on the
            device. Default: None.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.
        form (Form): Which rows gradients of weights are estimated from, and whether chunks are small. Default: all
            rows, in large chunks.
    """

    activation: Activation = Activation('relu')
    dropout: tuple[float, float] = (0.0, 0.0)
    chunk: int | None = None
    dtype: torch.dtype | None = None
    form: Form = Form()


class FFNTensors(NamedTuple):
    """Inputs of :func:`feed_forward`.

    Attributes:
        x (Tensor): Tokens, shape (N, L, C).
        weight1, bias1 (Tensor): First layer, shapes (D, C) and (D,).
        weight2, bias2 (Tensor): Second layer, shapes (C', D) and (C',).
    """

    x: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor


FFNGradients = gradients_of(FFNTensors)


class FFNSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        x (Tensor): Tokens in the precision of matrix products.
        weights (FFNTensors): Parameters.
        state (OnHost | None): State of the generator before dropout. If ``None``, there is no dropout.
    """

    x: Tensor
    weights: FFNTensors
    state: OnHost | None


def random_state(device: torch.device, *rates: float) -> OnHost | None:
    """Return the state of the generator that dropout draws from, or ``None`` if all rates are 0.

    Args:
        device (torch.device): Device of the tokens.
        *rates (float): Dropout rates.
    """
    if not any(rates):
        return None
    return OnHost(torch.cuda.get_rng_state(device) if device.type == 'cuda' else torch.get_rng_state())


@contextlib.contextmanager
def replay_dropout(device: torch.device, state: OnHost | None):
    """Let dropout draw the same random numbers again, and restore the generator afterwards.

    Args:
        device (torch.device): Device of the tokens.
        state (OnHost | None): Result of :func:`random_state`. If ``None``, nothing is drawn.
    """
    if state is None:
        yield
        return
    cuda = device.type == 'cuda'
    get, put = (torch.cuda.get_rng_state, torch.cuda.set_rng_state) if cuda else (torch.get_rng_state, None)
    before = get(device) if cuda else get()
    put(state.tensor, device) if cuda else torch.set_rng_state(state.tensor)
    try:
        yield
    finally:
        put(before, device) if cuda else torch.set_rng_state(before)


def dropout_factor(rows: Tensor, rate: float) -> Tensor:
    """Return what dropout multiplies rows by, drawn as torch's own dropout draws it.

    The ones are contiguous whatever the strides of the rows are: random numbers are drawn in the order of memory, so a
    gradient that is laid out in columns would get the numbers of other entries than the forward pass had.

    Args:
        rows (Tensor): Rows that are multiplied, shape (K, C).
        rate (float): Share of the numbers that dropout sets to zero, more than 0: torch draws numbers for 0, too.
    """
    return F.dropout(torch.ones(rows.shape, dtype=rows.dtype, device=rows.device), rate)


class FeedForward:
    """The network on chunks of rows, with sums of its parameters' gradients over the chunks.

    Args:
        settings (FFNSettings): Settings with a dtype.
        tensors (NamedTuple): Inputs with the four parameters of :class:`FFNTensors`.
        sums (Sums | None): Sums of the gradients of those parameters that need one, and possibly of others. If
            ``None``, there is no backward pass. Default: None.
    """

    def __init__(self, settings: FFNSettings, tensors: NamedTuple, sums: Sums | None = None):
        self.settings, self.sums, dtype = settings, sums, settings.dtype
        self.w1, self.b1, self.w2, self.b2 = cast_all(_get_weights(tensors), dtype)

    @property
    def width(self) -> int:
        """Width of the hidden layer."""
        return len(self.w1)

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the output of rows (K, C), shape (K, C'), in the dtype of the settings."""
        first, second = self.settings.dropout
        hidden = torch.addmm(self.b1, rows.to(self.settings.dtype), self.w1.t())
        hidden = self.settings.activation(hidden, inplace=True)
        if first:
            hidden.mul_(dropout_factor(hidden, first))
        out = torch.addmm(self.b2, hidden, self.w2.t())
        return out.mul_(dropout_factor(out, second)) if second else out

    def skip(self, rows: Tensor) -> None:
        """Draw the random numbers of rows whose gradients are not needed, so that later rows get their own."""
        for rate, width in zip(self.settings.dropout, (len(self.w1), len(self.w2)), strict=True):
            if rate:
                dropout_factor(rows.new_empty(len(rows), width, dtype=self.settings.dtype), rate)

    def backward(self, rows: Tensor, grad: Tensor, needs_rows: bool = True) -> Tensor | None:
        """Add the gradients of some rows to the sums.

        Args:
            rows (Tensor): Input of the forward pass, shape (K, C).
            grad (Tensor): Gradient of the output, shape (K, C').
            needs_rows (bool): Whether the gradient of the rows is needed. Default: True.

        Returns:
            Tensor | None: Gradient of the rows, shape (K, C).
        """
        # With a = act(h) * drop1 and g = dy * drop2: dW2 += g^T a, dh = act'(h) * (g W2 * drop1), dW1 += dh^T x,
        # dx = dh W1.
        act, dtype, sums = self.settings.activation, self.settings.dtype, self.sums
        wanted, (dropout, second) = sums.parameters, self.settings.dropout
        rows = rows.to(dtype)
        hidden = torch.addmm(self.b1, rows, self.w1.t())
        factor = dropout_factor(hidden, dropout) if dropout else None
        grad = grad.to(dtype)
        if second:
            grad = grad * dropout_factor(grad, second)
        sampled = sample_rows(self.settings.form.sample, grad)
        terms = dict(bias2=column_sums(grad) if 'bias2' in wanted else None)
        if 'weight2' in wanted:
            active = act(sampled.take(hidden))
            active = active if factor is None else active.mul_(sampled.take(factor))
            sums.add_product('weight2', sampled.take_weighted(grad), active)
            del active
        if not (needs_rows or 'weight1' in wanted or 'bias1' in wanted):
            sums.add(terms)
            return None
        grad = grad @ self.w2
        grad = act.backward(grad if factor is None else grad.mul_(factor), hidden, inplace=True)
        del hidden, factor
        terms['bias1'] = column_sums(grad) if 'bias1' in wanted else None
        sums.add(terms)
        if 'weight1' in wanted:
            sums.add_product('weight1', sampled.take_weighted(grad), sampled.take(rows))
        return grad @ self.w1 if needs_rows else None


def feed_forward(settings: FFNSettings, tensors: FFNTensors) -> Tensor:
    """Compute ``drop(drop(activation(x W1^T + b1)) W2^T + b2)`` with exact gradients.

    Args:
        settings (FFNSettings): Settings.
        tensors (FFNTensors): Inputs.

    Returns:
        Tensor: Shape (N, L, C'), in the precision of matrix products.

    Example:
        >>> y = feed_forward(FFNSettings(dropout=(0.1, 0.1)), FFNTensors(x, w1, b1, w2, b2))
    """
    return _feed_forward(with_dtype(settings, tensors.x), tensors)


def _chunks(settings, x, run):
    return cut_into_chunks(*x.shape[:2], run.width, x.device, settings.chunk, settings.form)


def _forward(settings, tensors, needs):
    x, run = tensors.x, FeedForward(settings, tensors)
    state = random_state(x.device, *settings.dropout)
    out = x.new_empty(*x.shape[:2], len(run.w2), dtype=settings.dtype)
    for chunk in _chunks(settings, x, run):
        chunk.put_(out, run.forward(chunk.take_rows(x)))
    return out, FFNSaved(x.to(settings.dtype), tensors._replace(x=None), state)


def _backward(settings, saved, grad, needs):
    x, given = saved.x, saved.weights
    sums = Sums({name: getattr(given, name) for name in _WEIGHTS if getattr(needs, name)})
    run = FeedForward(settings, given, sums)
    dx = torch.empty_like(x, dtype=settings.dtype) if needs.x else None
    with replay_dropout(grad.device, saved.state):
        for chunk in _chunks(settings, x, run):
            rows = run.backward(chunk.take_rows(x), chunk.take_rows(grad), needs.x)
            if needs.x:
                chunk.put_(dx, rows)
    return FFNGradients(x=dx, **sums.gradients())


_feed_forward = Operation('FeedForward', _forward, _backward, FFNGradients)
