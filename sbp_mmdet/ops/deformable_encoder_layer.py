"""The layer of a deformable encoder: ``y = LN1(x + drop(A(x)))``, ``z = LN2(y + drop(FFN(y)))``.

The output of the sampling kernel of the attention A and the sum in front of LN2 are saved, and x unless it is the
output of such a layer: then x is LN2 of the sum that the layer before has saved. Everything in between is recomputed in
chunks of rows, at the cost of one product of the FFN and three and a half small ones. With ``form.minimal`` the kernel
runs again as well, so that a layer saves one map.

With ``positions`` the operation is Algorithm 1 (section 3.4) with A and FFN as its f: dropped tokens get gradients
through shortcuts and norms, but neither as queries of A nor as rows of the FFN. They are saved for the norms.
"""

import dataclasses
import operator
from collections import namedtuple
from typing import NamedTuple

import torch
from torch import Tensor

from ..stochastic_backprop.algorithm1 import take
from .common.autograd_function import OnHost, Operation, gradients_of, with_dtype
from .common.layer_norms import RecomputedNorm, norm_backward, run_norm
from .common.layouts import add_rows_, cut_into_chunks
from .common.precision import Sums, cast, cast_all, column_sums
from .common.row_sampling import sample_rows
from .common.shared_maps import find_shared_map, share_map
from .deformable_attention import (
    FIXED,
    DeformableSettings,
    DeformableTensors,
    inputs_backward,
    kernel_inputs,
    run_kernel,
)
from .ffn import FeedForward, FFNSettings, dropout_factor, random_state, replay_dropout

__all__ = ['EncoderSettings', 'EncoderTensors', 'deformable_encoder_layer']


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """Settings of :func:`deformable_encoder_layer`.

    Attributes:
        attention (DeformableSettings): Settings of the attention, with the form and the dtype of the whole layer.
        ffn (FFNSettings): Settings of the feed-forward network, with the chunk of the whole layer and the dtype of
            ``attention``. Default: ReLU without dropout.
        dropout (float): Dropout rate after the attention. Default: 0.
        eps (tuple[float, float]): Added to the variances of the two norms. Default: 1e-5.
    """

    attention: DeformableSettings
    ffn: FFNSettings = FFNSettings()
    dropout: float = 0.0
    eps: tuple[float, float] = (1e-5, 1e-5)


EncoderTensors = namedtuple(
    'EncoderTensors',
    [name for name in DeformableTensors._fields if name != 'value']
    + ['norm1_weight', 'norm1_bias', 'weight1', 'bias1', 'weight2', 'bias2', 'norm2_weight', 'norm2_bias', 'positions'],
    defaults=[None],
)
EncoderTensors.__doc__ = """Inputs of :func:`deformable_encoder_layer`.

These are the inputs of :class:`.DeformableTensors`, with ``x`` as the input of the values; the affine parts of both
layer norms, shape (C,); ``weight1``, ``bias1``, ``weight2``, ``bias2`` as in :class:`.ffn.FFNTensors`; and
``positions``, the kept and dropped tokens. If ``positions`` is ``None``, all are kept.
"""
EncoderGradients = gradients_of(EncoderTensors, *FIXED, 'positions')


class EncoderSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        x (Tensor | RecomputedNorm): Input, or the norm that computes it.
        attended (Tensor | None): Output of the sampling kernel, shape (N, L, C). If ``None``, it is recomputed.
        sum (Tensor): Sum in front of the second norm, shape (N, L, C).
        given (EncoderTensors): The other inputs.
        state (OnHost | None): State of the generator before dropout. If ``None``, there is no dropout.
    """

    x: Tensor | RecomputedNorm
    attended: Tensor | None
    sum: Tensor
    given: EncoderTensors
    state: OnHost | None


def deformable_encoder_layer(settings: EncoderSettings, tensors: EncoderTensors) -> Tensor:
    """Compute a layer of a deformable encoder, with gradients of the kept tokens.

    Args:
        settings (EncoderSettings): Settings.
        tensors (EncoderTensors): Inputs.

    Returns:
        Tensor: Shape (N, L, C).
    """
    if settings.attention.dtype is None:
        attention = with_dtype(settings.attention, tensors.x)
        ffn = dataclasses.replace(settings.ffn, dtype=attention.dtype)
        settings = dataclasses.replace(settings, attention=attention, ffn=ffn)
    return _encoder_layer(settings, tensors)


# All inputs of the attention after x, query_pos and value.
_get_other_attention_inputs = operator.attrgetter(*DeformableTensors._fields[3:])


def _attention_tensors(t, x):
    """Return the inputs of the attention, whose queries and values are both computed from ``x``."""
    return DeformableTensors(x, t.query_pos, x, *_get_other_attention_inputs(t))


_OF_FFN = 'weight1', 'bias1', 'weight2', 'bias2'
_PRODUCT_PARAMETERS = (
    *[f'{name}_{kind}' for name in ('offset', 'attention', 'value', 'output') for kind in ('weight', 'bias')],
    *_OF_FFN,
)
_get_product_parameters = operator.attrgetter(*_PRODUCT_PARAMETERS)
# Parameters whose gradients are summed over chunks of rows.
_SUMMED = (*[f'{name}_{kind}' for name in ('output', 'norm1', 'norm2') for kind in ('weight', 'bias')], *_OF_FFN)


def _in_precision_of_products(t, dtype):
    """Return the inputs with all parameters of matrix products in ``dtype``."""
    given = _get_product_parameters(t)
    if given[0].dtype is dtype and len({x.dtype for x in given}) == 1:
        return t
    return t._replace(**dict(zip(_PRODUCT_PARAMETERS, cast_all(given, dtype), strict=True)))


class _RowwiseLayers:
    """The part of the layer after the sampling kernel, which computes each token independently of the others.

    It runs on rows of x and of the kernel's output. Given ``sums``, it adds the gradients of its parameters to them.
    """

    def __init__(self, settings, t, sums=None):
        self.s, self.t, self.sums = settings, t, sums
        self.dtype = settings.attention.dtype
        self.ffn = FeedForward(settings.ffn, t, sums)

    def chunks(self, x):
        """Yield chunks of kept tokens, then of dropped ones.

        Yields:
            tuple[Tensor | None, bool, Chunk]: Indices of the tokens (``None`` for all in order), whether they are kept,
            and the chunk of these.
        """
        keep, drop = self.t.positions[:2] if self.t.positions else (None, None)
        elements, form = self.s.ffn.chunk, self.s.attention.form
        for index, kept in ((keep, True),) if drop is None else ((keep, True), (drop, False)):
            each = x.shape[1] if index is None else len(index)
            for chunk in cut_into_chunks(len(x), each, self.ffn.width, x.device, elements, form):
                yield index, kept, chunk

    def add_attention(self, x, attended):
        """Compute the sum in front of the first norm, and what dropout multiplies the attention's output by."""
        out = torch.addmm(self.t.output_bias, cast(attended, self.dtype), self.t.output_weight.t())
        if not self.s.dropout:
            return x + out, None
        factor = dropout_factor(out, self.s.dropout)
        return x + out.mul_(factor), factor

    def forward(self, x, attended):
        """Compute the sum in front of the second norm, and the output."""
        t, eps = self.t, self.s.eps
        y = run_norm(self.add_attention(x, attended)[0], t.norm1_weight, t.norm1_bias, eps[0])[0]
        total = y + self.ffn.forward(y)
        return total, run_norm(total, t.norm2_weight, t.norm2_bias, eps[1])[0]

    def backward(self, x, attended, total, grad, kept):
        """Compute the gradients of rows of x, without the path through the attention, and of the kernel's output.

        Args:
            x (Tensor): Rows of the input.
            attended (Tensor): Rows of the sampling kernel's output.
            total (Tensor): Rows of the sum in front of the second norm.
            grad (Tensor): Gradient of the output.
            kept (bool): Whether the rows are kept. If not, the second gradient is ``None``.
        """
        t, eps, sums = self.t, self.s.eps, self.sums
        before, factor = self.add_attention(x, attended)
        y, *statistics = run_norm(before, t.norm1_weight, t.norm1_bias, eps[0])
        second = run_norm(total, t.norm2_weight, t.norm2_bias, eps[1])[1:]
        grad = self._norm_backward('norm2', grad, total, second)
        if kept:
            grad = grad.add_(self.ffn.backward(y, grad))
        else:
            self.ffn.skip(y)
        grad = self._norm_backward('norm1', grad, before, statistics)
        if not kept:
            return grad, None
        out = cast(grad, self.dtype)  # gradient of the attention's output, through the shortcut's sum and dropout
        out = out if factor is None else out * factor
        sums.add(dict(output_bias=column_sums(out)))
        sampled = sample_rows(self.s.attention.form.sample, out)
        sums.add_product('output_weight', sampled.take_weighted(out), cast(sampled.take(attended), self.dtype))
        return grad, out @ t.output_weight

    def _norm_backward(self, name, grad, x, statistics):
        names = f'{name}_weight', f'{name}_bias'
        grad, *gradients = norm_backward(grad, x, statistics, *[getattr(self.t, name) for name in names])
        self.sums.add(dict(zip(names, gradients, strict=True)))
        return grad


def _layer_forward(settings, tensors, needs):
    s, t, x = settings.attention, _in_precision_of_products(tensors, settings.attention.dtype), tensors.x
    state = random_state(x.device, settings.dropout, *settings.ffn.dropout)
    attention = _attention_tensors(t, x)
    attended = run_kernel(s, attention, *kernel_inputs(s, attention))
    run, total, out = _RowwiseLayers(settings, t), None, None
    for index, _, chunk in run.chunks(x):
        rows = run.forward(chunk.take_rows(x, index), chunk.take_rows(attended, index))
        if out is None:
            total, out = x.new_empty(x.shape, dtype=rows[0].dtype), x.new_empty(x.shape, dtype=rows[1].dtype)
        chunk.put_(total, rows[0], index)
        chunk.put_(out, rows[1], index)
    if out is None:  # a batch without images has no chunks
        total, out = (rows.view(x.shape) for rows in run.forward(x.flatten(0, 1), attended.flatten(0, 1)))
    if not any(needs):
        return out, None
    source = find_shared_map(x)
    source = source if isinstance(source, RecomputedNorm) else x
    share_map(out, RecomputedNorm(total, t.norm2_weight, t.norm2_bias, settings.eps[1], out.dtype))
    # With `int8` it is recomputed too: rounded, it would move hidden values close to zero across the ReLU's kink.
    attended = None if s.form.minimal or s.form.storage == 'int8' else attended
    return out, EncoderSaved(source, attended, total, tensors._replace(x=None), state)


def _layer_backward(settings, saved, grad, needs):
    s, t = settings.attention, _in_precision_of_products(saved.given, settings.attention.dtype)
    x = saved.x.load() if isinstance(saved.x, RecomputedNorm) else saved.x
    attention, attended = _attention_tensors(t, x), saved.attended
    if attended is None:
        attended = run_kernel(s, attention, *kernel_inputs(s, attention))
    sums = Sums({name: getattr(saved.given, name) for name in _SUMMED if name not in _OF_FFN or getattr(needs, name)})
    run, keep = _RowwiseLayers(settings, t, sums), t.positions and t.positions.keep
    queries = grad.shape[1] if keep is None else len(keep)
    dx, dattended = torch.empty_like(grad), attended
    if saved.attended is not None or keep is not None:  # otherwise each row's gradient takes the place of the row
        dattended = grad.new_empty(len(grad), queries, grad.shape[2], dtype=s.dtype)
    with replay_dropout(x.device, saved.state):
        for index, kept, chunk in run.chunks(x):
            rows = run.backward(*[chunk.take_rows(part, index) for part in (x, attended, saved.sum, grad)], kept)
            chunk.put_(dx, rows[0], index)
            if kept:
                chunk.put_(dattended, rows[1])
    del attended
    inputs = _attention_backward(s, attention, keep, dattended, dict(needs._asdict(), value=needs.x))
    if needs.x:
        dx.add_(inputs.pop('value'))
        inputs['x'] = add_rows_(dx, keep, inputs['x'])
    return EncoderGradients(**inputs, **sums.gradients())


_PER_QUERY = ('x', 'query_pos', 'reference_points')


def _attention_backward(s, t, keep, grad, needed):
    """Run :func:`inputs_backward` for the kept queries. The gradient of ``x`` has the rows of these queries only."""
    if keep is None:
        return inputs_backward(s, t, grad, needed)
    whole = {name: getattr(t, name) for name in _PER_QUERY if getattr(t, name) is not None}
    gradients = inputs_backward(s, t._replace(**{name: take(v, keep) for name, v in whole.items()}), grad, needed)
    for name in _PER_QUERY[1:]:
        if gradients.get(name) is not None:
            gradients[name] = torch.zeros_like(whole[name]).index_copy_(1, keep, gradients[name])
    return gradients


_encoder_layer = Operation('DeformableEncoderLayer', _layer_forward, _layer_backward, EncoderGradients)
