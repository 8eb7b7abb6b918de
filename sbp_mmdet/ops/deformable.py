"""Deformable attention of several scales, and the encoder's layer that is made of it.

Attention A reads values at places that are computed from the queries: sum over heads, levels and points of
``weight * value[place]``, then a linear layer. What is stored is the queries, the values' input and what the kernel puts
out; values, places and weights are computed again, and given to the kernel's own backward pass. The layer

    y = LN1(x + drop(A(x))),  z = LN2(y + drop(FFN(y)))

stores what the kernel puts out and the sum in front of LN2, and x where it is not such a sum behind its norm: the next
layer reads its x from what this one stored. All between is computed again, in chunks of rows.
"""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .ffn import FeedForward, FFNSettings, dropout_factor, in_sixteen_bits, random_state, replayed, scaled_
from .maps import hand_on, handed_on
from .operation import Form, OnHost, Operation, gradients_of, in_precision
from .precision import accumulate, column_sums, zeros_for
from .rows import chunks

__all__ = [
    'DeformableSettings',
    'DeformableTensors',
    'EncoderSettings',
    'EncoderTensors',
    'deformable_attention',
    'deformable_encoder_layer',
]

_REDUCED = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class DeformableSettings:
    """Of :func:`deformable_attention`.

    Attributes:
        num_heads, num_levels, num_points (int): Of the attention.
        form (Form): How it is stored. Default: fused, native, zero.
        im2col_step (int): Images at a time, of CUDA's kernel. Default: 64.
        dtype (torch.dtype | None): What matrix products run in; None: what autocast says, or as x is. Default: None.
    """

    num_heads: int
    num_levels: int
    num_points: int
    form: Form = Form()
    im2col_step: int = 64
    dtype: torch.dtype | None = None


class DeformableTensors(NamedTuple):
    """What deformable attention works on.

    Attributes:
        x (Tensor): Queries without their positions, shape (N, Q, C).
        query_pos (Tensor | None): Added to them, broadcastable.
        value (Tensor): What is read from, shape (N, S, C).
        reference_points (Tensor): Shape (N, Q, levels, 2) or (N, Q, levels, 4).
        key_padding_mask (Tensor | None): True where nothing is to be read, shape (N, S).
        spatial_shapes, level_start_index (Tensor): Heights and widths (levels, 2), and where each level starts.
        offset_weight, offset_bias (Tensor): Layer that puts out (heads, levels, points, 2) numbers.
        attention_weight, attention_bias (Tensor): Layer that puts out (heads, levels, points) numbers.
        value_weight, value_bias, output_weight, output_bias (Tensor): Layers in front of and behind the kernel.
    """

    x: Tensor
    query_pos: Tensor | None
    value: Tensor
    reference_points: Tensor
    key_padding_mask: Tensor | None
    spatial_shapes: Tensor
    level_start_index: Tensor
    offset_weight: Tensor
    offset_bias: Tensor
    attention_weight: Tensor
    attention_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor


_FIXED = ('key_padding_mask', 'spatial_shapes', 'level_start_index')
DeformableGradients = gradients_of(DeformableTensors, *_FIXED)


class DeformableSaved(NamedTuple):
    """What the backward pass needs: what was given, and what the kernel put out, shape (N, Q, C)."""

    given: DeformableTensors
    sampled: Tensor


def deformable_attention(settings: DeformableSettings, tensors: DeformableTensors) -> Tensor:
    """Deformable attention without dropout and shortcut, exact.

    Args:
        settings (DeformableSettings): See there.
        tensors (DeformableTensors): See there.

    Returns:
        Tensor: Shape (N, Q, C), in the precision of the matrix products.
    """
    return _attention(in_precision(settings, tensors.x), tensors)


def _kernel_inputs(s, t):
    """Values (N, S, heads, d), places (N, Q, heads, levels, points, 2) and weights (N, Q, heads, levels, points)."""

    def linear(x, name):
        return F.linear(x.to(s.dtype), *(getattr(t, f'{name}_{kind}').to(s.dtype) for kind in ('weight', 'bias')))

    value = linear(t.value, 'value')
    if t.key_padding_mask is not None:
        value = value.masked_fill(t.key_padding_mask[..., None], 0.0)
    value = value.unflatten(2, (s.num_heads, -1))
    query = t.x if t.query_pos is None else t.x + t.query_pos
    shape = (s.num_heads, s.num_levels, s.num_points)
    offsets = linear(query, 'offset').unflatten(2, (*shape, 2))
    weights = linear(query, 'attention').unflatten(2, (s.num_heads, -1))
    weights = weights.float() if s.dtype in _REDUCED else weights
    points = t.reference_points[:, :, None, :, None]
    if points.shape[-1] == 2:
        places = points + offsets / t.spatial_shapes.flip(1)[None, None, None, :, None]
    else:
        places = points[..., :2] + offsets / s.num_points * points[..., 2:] * 0.5
    return value, places, weights.softmax(-1).unflatten(3, shape[1:])


def has_kernel(value):
    return value.is_cuda


def _for_kernel(value, places, weights):
    """In one precision: CUDA's kernel has no bfloat16, and CPUs are exact in full precision."""
    dtype = value.dtype
    if dtype == torch.bfloat16 or (dtype == torch.float16 and not has_kernel(value)):
        dtype = torch.float32
    return tuple(x.to(dtype).contiguous() for x in (value, places, weights))


def _parts(value, places, weights):
    """One head of one image at a time, and its columns of the output."""
    width = value.shape[3]
    for n in range(len(value)):
        for head in range(value.shape[2]):
            where = slice(n, n + 1), slice(None), slice(head, head + 1)
            part = slice(n, n + 1), slice(None), slice(head * width, (head + 1) * width)
            yield where, part, [x[where] for x in (value, places, weights)]


def _sample(s, t, value, places, weights):
    """What the kernel puts out, shape (N, Q, C)."""
    from mmcv.ops import multi_scale_deform_attn as mmcv

    dtype = value.dtype
    value, places, weights = _for_kernel(value, places, weights)
    if has_kernel(value):
        run = mmcv.MultiScaleDeformableAttnFunction.apply
        return run(value, t.spatial_shapes, t.level_start_index, places, weights, s.im2col_step).to(dtype)
    out = value.new_empty(*places.shape[:2], value.shape[2] * value.shape[3], dtype=dtype)
    sizes = t.spatial_shapes.tolist()
    for _, columns, (v, p, w) in _parts(value, places, weights):
        out[columns] = mmcv.multi_scale_deformable_attn_pytorch(v, sizes, p, w)
    return out


def _sample_backward(s, t, grad, value, places, weights):
    """Gradients of values, places and weights."""
    from mmcv.ops import multi_scale_deform_attn as mmcv

    dtypes = [x.dtype for x in (value, places, weights)]
    value, places, weights = _for_kernel(value, places, weights)
    if has_kernel(value):
        saved = (value, t.spatial_shapes, t.level_start_index, places, weights)
        context = SimpleNamespace(saved_tensors=saved, im2col_step=s.im2col_step)
        found = mmcv.MultiScaleDeformableAttnFunction.backward(context, grad.to(value.dtype).contiguous())
        found = found[0], found[3], found[4]
    else:
        found, sizes = tuple(map(torch.empty_like, (value, places, weights))), t.spatial_shapes.tolist()
        for where, columns, part in _parts(value, places, weights):
            with torch.enable_grad():
                part = [x.detach().requires_grad_() for x in part]
                out = mmcv.multi_scale_deformable_attn_pytorch(part[0], sizes, *part[1:])
            for whole, gradient in zip(found, torch.autograd.grad(out, part, grad[columns].to(out.dtype)), strict=True):
                whole[where] = gradient
    return [x.to(dtype) for x, dtype in zip(found, dtypes, strict=True)]


_INPUTS = tuple(name for name in DeformableGradients._fields if not name.startswith('output'))


def _inputs_backward(s, t, grad, needs):
    """Gradients of what values, places and weights are computed from, by name, as far as somebody asks.

    Args:
        s (DeformableSettings): With a dtype.
        t (DeformableTensors): What was given.
        grad (Tensor): Of what the kernel puts out, shape (N, Q, C).
        needs (dict[str, bool]): By the names of the tensors.
    """
    asked = [name for name in _INPUTS if needs[name]]
    if not asked:
        return {}
    with torch.enable_grad():
        leaves = {name: getattr(t, name).detach().requires_grad_() for name in asked}
        made = _kernel_inputs(s, t._replace(**leaves))
    found = _sample_backward(s, t, grad, *(x.detach() for x in made))
    outs, grads = zip(*((x, g) for x, g in zip(made, found, strict=True) if x.requires_grad), strict=True)
    gradients = torch.autograd.grad(outs, [*leaves.values()], grads, allow_unused=True)
    return dict(zip(asked, gradients, strict=True))


def _attention_forward(settings, tensors, needs):
    s, t = settings, tensors
    sampled = _sample(s, t, *_kernel_inputs(s, t))
    out = F.linear(sampled, t.output_weight.to(s.dtype), t.output_bias.to(s.dtype))
    return out, DeformableSaved(t, in_sixteen_bits(s.form, sampled))


def _attention_backward(settings, saved, grad, needs):
    s, (t, sampled) = settings, saved
    rows, found = grad.flatten(0, 1), {}
    if needs.output_bias:
        found['output_bias'] = column_sums(rows)
    if needs.output_weight:
        found['output_weight'] = zeros_for(t.output_weight)
        accumulate(found['output_weight'], rows, sampled.to(s.dtype).flatten(0, 1))
    grad = grad @ t.output_weight.to(grad.dtype)
    return DeformableGradients(**found, **_inputs_backward(s, t, grad, needs._asdict()))


_attention = Operation('DeformableAttention', _attention_forward, _attention_backward, DeformableGradients)


# The encoder's layer.


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """Of :func:`deformable_encoder_layer`.

    Attributes:
        attention (DeformableSettings): Of the attention; its form and dtype are the layer's.
        ffn (FFNSettings): Of the feed-forward network; its chunk is the layer's, its form and dtype mean nothing.
            Default: ReLU without dropout.
        dropout (float): Behind the attention. Default: 0.
        eps (tuple[float, float]): Of the norms. Default: 1e-5.
    """

    attention: DeformableSettings
    ffn: FFNSettings = FFNSettings()
    dropout: float = 0.0
    eps: tuple[float, float] = (1e-5, 1e-5)


EncoderTensors = NamedTuple(
    'EncoderTensors',
    [
        *((name, Tensor) for name in DeformableTensors._fields if name != 'value'),
        *((name, Tensor) for name in ('norm1_weight', 'norm1_bias', 'weight1', 'bias1', 'weight2', 'bias2')),
        *((name, Tensor) for name in ('norm2_weight', 'norm2_bias')),
    ],
)
EncoderTensors.__doc__ = """What a layer works on.

As :class:`DeformableTensors`, but values are made of ``x``; the affine parts of both layer norms, shape (C,); and
``weight1``, ``bias1``, ``weight2``, ``bias2`` as in :class:`.ffn.FFNTensors`.
"""
EncoderGradients = gradients_of(EncoderTensors, *_FIXED)


class Normed(NamedTuple):
    """The output of a layer norm, as it is read from the norm's input."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    dtype: torch.dtype

    def load(self) -> Tensor:
        """The output."""
        return _norm(self.x, self.weight, self.bias, self.eps)[0].to(self.dtype)


class EncoderSaved(NamedTuple):
    """What the backward pass needs: the input, what the kernel put out (N, L, C), the sum in front of the second norm
    (N, L, C), and what was given."""

    x: Tensor | Normed
    sampled: Tensor
    sum: Tensor
    given: EncoderTensors  # without x
    state: OnHost | None


def deformable_encoder_layer(settings: EncoderSettings, tensors: EncoderTensors) -> Tensor:
    """A layer of a deformable encoder, see this module; exact.

    Args:
        settings (EncoderSettings): See there.
        tensors (EncoderTensors): See there.

    Returns:
        Tensor: Shape (N, L, C).
    """
    attention = in_precision(settings.attention, tensors.x)
    ffn = dataclasses.replace(settings.ffn, dtype=attention.dtype)
    return _encoder_layer(dataclasses.replace(settings, attention=attention, ffn=ffn), tensors)


def _norm(x, weight, bias, eps):
    """Layer norm in the precision of its weights, if that is higher: output, mean, reciprocal deviation."""
    x = x.to(torch.promote_types(x.dtype, weight.dtype))
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def _norm_backward(grad, x, statistics, weight, bias):
    """Gradients of input, weight and bias."""
    x = x.to(torch.promote_types(x.dtype, weight.dtype))
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(grad.to(x.dtype), x, x.shape[-1:], *statistics, weight, bias, [True, True, True])


def _attention_tensors(t, x):
    """Of an encoder's tensors those of its attention."""
    shared = {name: getattr(t, name) for name in DeformableTensors._fields if name not in ('x', 'value')}
    return DeformableTensors(x=x, value=x, **shared)


class _Rows:
    """From rows of x and of what the kernel put out to the layer's output, and back."""

    def __init__(self, settings, t, needs=None):
        self.s, self.t, self.needs = settings, t, needs
        self.dtype = settings.attention.dtype
        self.output = [t.output_weight.to(self.dtype), t.output_bias.to(self.dtype)]
        self.ffn = FeedForward(settings.ffn, t, needs)
        names = ('output_weight', 'output_bias', 'norm1_weight', 'norm1_bias', 'norm2_weight', 'norm2_bias')
        self.sums = {name: zeros_for(getattr(t, name)) for name in names} if needs else {}

    def chunks(self, x):
        return chunks(*x.shape[:2], self.ffn.width, x.device, self.s.ffn.chunk)

    def first(self, x, sampled):
        """The sum in front of the first norm, and what dropout did to the attention."""
        out = torch.addmm(self.output[1], sampled.to(self.dtype), self.output[0].t())
        factor = dropout_factor(out, self.s.dropout)
        return x + scaled_(out, factor), factor

    def forward(self, x, sampled):
        """The sum in front of the second norm, and the output."""
        t, eps = self.t, self.s.eps
        y = _norm(self.first(x, sampled)[0], t.norm1_weight, t.norm1_bias, eps[0])[0]
        total = y + self.ffn.forward(y)
        return total, _norm(total, t.norm2_weight, t.norm2_bias, eps[1])[0]

    def backward(self, x, sampled, total, grad):
        """Gradients of the rows of x, past the attention, and of what the kernel put out."""
        t, eps, sums = self.t, self.s.eps, self.sums
        before, factor = self.first(x, sampled)
        y, *statistics = _norm(before, t.norm1_weight, t.norm1_bias, eps[0])
        second = _norm(total, t.norm2_weight, t.norm2_bias, eps[1])[1:]
        grad = self._norm_backward('norm2', grad, total, second)
        grad = grad.add_(self.ffn.backward(y, grad))
        grad = self._norm_backward('norm1', grad, before, statistics)
        out = grad.to(self.dtype)
        out = out if factor is None else out * factor
        sums['output_bias'].add_(column_sums(out))
        accumulate(sums['output_weight'], out, sampled.to(self.dtype))
        return grad, out @ self.output[0]

    def _norm_backward(self, name, grad, x, statistics):
        weight, bias = f'{name}_weight', f'{name}_bias'
        grad, dw, db = _norm_backward(grad, x, statistics, getattr(self.t, weight), getattr(self.t, bias))
        self.sums[weight].add_(dw)
        self.sums[bias].add_(db)
        return grad


def _layer_forward(settings, tensors, needs):
    s, t, x = settings.attention, tensors, tensors.x
    state = random_state(x.device, settings.dropout, *settings.ffn.dropout)
    attention = _attention_tensors(t, x)
    sampled = _sample(s, attention, *_kernel_inputs(s, attention))
    run, total, out = _Rows(settings, t), None, None
    for chunk in run.chunks(x):
        rows = run.forward(chunk.rows_of(x), chunk.rows_of(sampled))
        if out is None:
            total, out = (x.new_empty(x.shape, dtype=r.dtype) for r in rows)
        chunk.put_(total, rows[0])
        chunk.put_(out, rows[1])
    if not any(needs):
        return out, None
    source = handed_on(x)
    source = source if isinstance(source, Normed) else x
    hand_on(out, Normed(total, t.norm2_weight, t.norm2_bias, settings.eps[1], out.dtype))
    sampled = in_sixteen_bits(s.form, sampled)
    return out, EncoderSaved(source, sampled, total, t._replace(x=None), state)


def _layer_backward(settings, saved, grad, needs):
    s, t = settings.attention, saved.given
    x = saved.x.load() if isinstance(saved.x, Normed) else saved.x
    run = _Rows(settings, t, needs)
    dx, dsampled = torch.empty_like(grad), torch.empty_like(saved.sampled, dtype=s.dtype)
    with replayed(x.device, saved.state):
        for chunk in run.chunks(x):
            rows = run.backward(*(chunk.rows_of(i) for i in (x, saved.sampled, saved.sum, grad)))
            chunk.put_(dx, rows[0])
            chunk.put_(dsampled, rows[1])
    asked = dict(needs._asdict(), value=needs.x)
    inputs = _inputs_backward(s, _attention_tensors(t, x), dsampled, asked)
    if needs.x:
        inputs['x'] = dx.add_(inputs['x']).add_(inputs.pop('value'))
    return EncoderGradients(**inputs, **run.sums, **run.ffn.sums)


_encoder_layer = Operation('DeformableEncoderLayer', _layer_forward, _layer_backward, EncoderGradients)
