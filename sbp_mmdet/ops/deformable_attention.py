"""Multi-scale deformable attention.

Values are sampled at locations that are computed from the queries (mmcv's ``sampling_locations``). For a query q with
its reference point p,

    offsets = q W_o^T + b_o,   locations = p + offsets / (width, height) of each level,
    weights = softmax(q W_a^T + b_a),
    out = sum over levels and points of weights * V[locations] for each head,   y = out W_p^T + b_p.

The queries, the input of the values V and the output of the sampling kernel are saved. Values, locations and weights
are recomputed for the backward pass of the kernel. The input of the values is not saved if it is the output of an
encoder whose last layer saves what it can be recomputed from.
"""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of, with_dtype
from .common.layer_norms import RecomputedNorm
from .common.layouts import CHUNK
from .common.precision import Stored, accumulate, column_sums, promote, store
from .common.shared_maps import find_shared_map

__all__ = [
    'FIXED',
    'DeformableSettings',
    'DeformableTensors',
    'deformable_attention',
    'inputs_backward',
    'kernel_inputs',
    'run_kernel',
]

_REDUCED = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class DeformableSettings:
    """Settings of :func:`deformable_attention`.

    Attributes:
        num_heads, num_levels, num_points (int): Number of heads, levels, and points in each level.
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
        im2col_step (int): Number of images that the CUDA kernel processes at a time. Default: 64.
        dtype (torch.dtype | None): Precision of matrix products. If ``None``, that of autocast, or of ``x``. Default:
            None.
    """

    num_heads: int
    num_levels: int
    num_points: int
    form: Form = Form()
    im2col_step: int = 64
    dtype: torch.dtype | None = None


class DeformableTensors(NamedTuple):
    """Inputs of :func:`deformable_attention`.

    Attributes:
        x (Tensor): Queries without their position embedding, shape (N, Q, C).
        query_pos (Tensor | None): Position embedding of the queries, broadcastable.
        value (Tensor): Input of the values, shape (N, S, C).
        reference_points (Tensor): Shape (N, Q, levels, 2) or (N, Q, levels, 4).
        key_padding_mask (Tensor | None): True where values are zero, shape (N, S).
        spatial_shapes (Tensor): Height and width of each level, shape (levels, 2).
        level_start_index (Tensor): Index of the first value of each level, shape (levels,).
        offset_weight, offset_bias (Tensor): Layer with (heads, levels, points, 2) outputs.
        attention_weight, attention_bias (Tensor): Layer with (heads, levels, points) outputs.
        value_weight, value_bias (Tensor): Layer in front of the kernel.
        output_weight, output_bias (Tensor): Layer after the kernel.
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


FIXED = ('key_padding_mask', 'spatial_shapes', 'level_start_index')
DeformableGradients = gradients_of(DeformableTensors, *FIXED)


class DeformableSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        given (DeformableTensors): The inputs.
        attended (Stored): Output of the sampling kernel, shape (N, Q, C).
        value (RecomputedNorm | None): What computes the input of the values. If ``None``, that is among the inputs.
    """

    given: DeformableTensors
    attended: Stored
    value: RecomputedNorm | None


def deformable_attention(settings: DeformableSettings, tensors: DeformableTensors) -> Tensor:
    """Compute deformable attention without dropout and shortcut, with exact gradients.

    Args:
        settings (DeformableSettings): Settings.
        tensors (DeformableTensors): Inputs.

    Returns:
        Tensor: Shape (N, Q, C), in the precision of matrix products.
    """
    return _attention(with_dtype(settings, tensors.x), tensors)


def kernel_inputs(s: DeformableSettings, t: DeformableTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs of the sampling kernel.

    Args:
        s (DeformableSettings): Settings with a dtype.
        t (DeformableTensors): Inputs.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Values (N, S, heads, d), locations (N, Q, heads, levels, points, 2) from 0 to 1
        inside of the feature maps, and weights (N, Q, heads, levels, points).
    """
    value = _linear(s, t, t.value, 'value')
    if t.key_padding_mask is not None:
        value = value.masked_fill_(t.key_padding_mask[..., None], 0.0)
    query = t.x if t.query_pos is None else t.x + t.query_pos
    query = query.to(s.dtype)
    offsets = _linear(s, t, query, 'offset').unflatten(2, (s.num_heads, s.num_levels, s.num_points, 2))
    locations = t.reference_points[:, :, None, :, None, :2] + _scale_offsets(s, t, offsets)
    return value.unflatten(2, (s.num_heads, -1)), locations, _softmax(s, t, query)


def _linear(s, t, x, name):
    """Apply the layer 'offset', 'attention', 'value' or 'output' in the precision of matrix products."""
    weight, bias = getattr(t, f'{name}_weight'), getattr(t, f'{name}_bias')
    return F.linear(x.to(s.dtype), weight.to(s.dtype), bias.to(s.dtype))


def _softmax(s, t, query):
    """Return the attention weights (N, Q, heads, levels, points): a softmax over the points of all levels."""
    weights = _linear(s, t, query, 'attention').unflatten(2, (s.num_heads, -1))
    weights = weights.float() if s.dtype in _REDUCED else weights
    return weights.softmax(-1).unflatten(3, (s.num_levels, s.num_points))


def _scale_offsets(s, t, offsets):
    """Return offsets (..., levels, points, 2) as shares of the width and height of the maps.

    Offsets are in pixels of their level for reference points, and in half widths and heights of the box, divided by the
    number of points, for reference boxes.
    """
    if t.reference_points.shape[-1] == 2:
        return offsets / t.spatial_shapes.flip(1)[:, None]
    return offsets / s.num_points * t.reference_points[:, :, None, :, None, 2:] * 0.5


def has_kernel(value: Tensor) -> bool:
    """Check whether mmcv's CUDA kernel runs; it divides by the number of images.

    Args:
        value (Tensor): Values, see :func:`kernel_inputs`.
    """
    return value.is_cuda and len(value) > 0


def _cast_for_kernel(value, locations, weights):
    """Cast to one precision: the CUDA kernel does not support bfloat16, and CPUs sample in full precision."""
    dtype = value.dtype
    if dtype == torch.bfloat16 or (dtype == torch.float16 and not has_kernel(value)):
        dtype = torch.float32
    return value.to(dtype).contiguous(), locations.to(dtype).contiguous(), weights.to(dtype).contiguous()


def _split_heads(value, locations, weights):
    """Yield some heads of some images, their columns of the output, and their inputs.

    There are at least as many heads as threads, because torch samples a head in one thread, and more where what is
    sampled for them stays in a CPU's caches.
    """
    images, _, heads, width = value.shape
    each = locations.shape[1] * locations.shape[3:5].numel() * width  # elements that are sampled for a head
    number = max(CHUNK['cpu'] // max(each, 1), torch.get_num_threads())
    together, number = max(number // heads, 1), min(number, heads)  # images and heads
    for n in range(0, images, together):
        for first in range(0, heads, number):
            where = slice(n, n + together), slice(None), slice(first, first + number)
            part = slice(n, n + together), slice(None), slice(first * width, (first + number) * width)
            yield where, part, [x[where] for x in (value, locations, weights)]


def run_kernel(
    s: DeformableSettings, t: DeformableTensors, value: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Run the sampling kernel.

    Args:
        s (DeformableSettings): Settings.
        t (DeformableTensors): Inputs.
        value (Tensor): Values, see :func:`kernel_inputs`.
        locations (Tensor): Locations, see :func:`kernel_inputs`.
        weights (Tensor): Weights, see :func:`kernel_inputs`.

    Returns:
        Tensor: Shape (N, Q, C).
    """
    from mmcv.ops import multi_scale_deform_attn as mmcv

    dtype = value.dtype
    value, locations, weights = _cast_for_kernel(value, locations, weights)
    if has_kernel(value):
        run = mmcv.MultiScaleDeformableAttnFunction.apply
        return run(value, t.spatial_shapes, t.level_start_index, locations, weights, s.im2col_step).to(dtype)
    out = value.new_empty(*locations.shape[:2], value.shape[2] * value.shape[3], dtype=dtype)
    sizes = t.spatial_shapes.tolist()
    for _, columns, (v, p, w) in _split_heads(value, locations, weights):
        out[columns] = mmcv.multi_scale_deformable_attn_pytorch(v, sizes, p, w)
    return out


def _kernel_backward(s, t, grad, value, locations, weights):
    """Return the gradients of values, locations and weights from that of the kernel's output."""
    from mmcv.ops import multi_scale_deform_attn as mmcv

    dtypes = [x.dtype for x in (value, locations, weights)]
    value, locations, weights = _cast_for_kernel(value, locations, weights)
    if has_kernel(value):
        saved = (value, t.spatial_shapes, t.level_start_index, locations, weights)
        context = SimpleNamespace(saved_tensors=saved, im2col_step=s.im2col_step)
        gradients = mmcv.MultiScaleDeformableAttnFunction.backward(context, grad.to(value.dtype).contiguous())
        gradients = gradients[0], gradients[3], gradients[4]
    else:
        gradients, sizes = tuple(map(torch.empty_like, (value, locations, weights))), t.spatial_shapes.tolist()
        for where, columns, part in _split_heads(value, locations, weights):
            with torch.enable_grad():
                part = [x.detach().requires_grad_() for x in part]
                out = mmcv.multi_scale_deformable_attn_pytorch(part[0], sizes, *part[1:])
            of_part = torch.autograd.grad(out, part, grad[columns].to(out.dtype))
            for whole, gradient in zip(gradients, of_part, strict=True):
                whole[where] = gradient
    return [x.to(dtype) for x, dtype in zip(gradients, dtypes, strict=True)]


# Recomputed inputs of the kernel and their gradients have ten times as many elements as the values. So many elements of
# the values exist at a time.
_AT_A_TIME = 2**22
_PER_IMAGE = ('x', 'query_pos', 'value', 'reference_points', 'key_padding_mask')
_PARAMETERS = tuple(f'{name}_{kind}' for name in ('offset', 'attention', 'value') for kind in ('weight', 'bias'))
_INPUTS = tuple(name for name in DeformableGradients._fields if not name.startswith('output'))


def inputs_backward(
    s: DeformableSettings, t: DeformableTensors, grad: Tensor, needs: dict[str, bool]
) -> dict[str, Tensor]:
    """Compute the gradients of the inputs from that of the kernel's output, some images at a time.

    Args:
        s (DeformableSettings): Settings with a dtype.
        t (DeformableTensors): Inputs.
        grad (Tensor): Gradient of the kernel's output, shape (N, Q, C).
        needs (dict[str, bool]): Whether the gradient of an input is needed, by its name.

    Returns:
        dict[str, Tensor]: The needed gradients by name, without those of the output layer.
    """
    needed = [name for name in _INPUTS if needs[name]]
    if not needed:
        return {}
    t = t._replace(**{name: getattr(t, name).to(s.dtype) for name in _PARAMETERS})  # once for all images
    gradients, number = {}, max(_AT_A_TIME // max(t.value.shape[1:].numel(), 1), 1)
    if number >= len(grad):
        return _images_backward(s, t, grad, needed)
    # mmcv's kernel refuses a number of images above its step that the step does not divide.
    number -= number % s.im2col_step if number > s.im2col_step else 0
    whole = {name: x for name in _PER_IMAGE if (x := getattr(t, name)) is not None and len(x) == len(grad)}
    for start in range(0, len(grad), number):
        images = slice(start, start + number)
        part = t._replace(**{name: x[images] for name, x in whole.items()})
        for name, gradient in _images_backward(s, part, grad[images], needed).items():
            if name in whole:
                if not start:
                    gradients[name] = torch.empty_like(whole[name])
                gradients[name][images] = gradient
            else:
                gradients[name] = gradients[name].add_(gradient) if start else gradient
    return gradients


def _images_backward(s, t, grad, needed):
    """Compute the gradients of :func:`inputs_backward` for some images."""
    inputs = kernel_inputs(s, t)
    weights = inputs[2]
    dvalue, dlocations, dweights = _kernel_backward(s, t, grad, *inputs)
    del inputs
    gradients = _value_backward(s, t, dvalue.flatten(2), needed)
    dlocations = dlocations.to(promote(s.dtype, t.reference_points.dtype))
    if 'reference_points' in needed:
        gradients['reference_points'] = _points_backward(s, t, dlocations)
    if not {'x', 'query_pos', *_QUERY_LAYERS}.intersection(needed):
        return gradients
    query = t.x if t.query_pos is None else t.x + t.query_pos
    rows = query.to(s.dtype).flatten(0, 1)
    # Locations are linear in the offsets, so d offsets is d locations scaled as the offsets are; then the softmax's
    # backward pass, and dq = d offsets W_o + d logits W_a.
    doffsets = _scale_offsets(s, t, dlocations).to(s.dtype).flatten(2).flatten(0, 1)
    dlogits = torch.ops.aten._softmax_backward_data.default(
        dweights.flatten(3).to(weights.dtype), weights.flatten(3), -1, weights.dtype
    )
    dlogits = dlogits.to(s.dtype).flatten(2).flatten(0, 1)
    for name, gradient in (('offset', doffsets), ('attention', dlogits)):
        gradients |= _layer_backward(name, gradient, rows, needed)
    if {'x', 'query_pos'}.intersection(needed):
        dquery = doffsets @ t.offset_weight.to(s.dtype)
        dquery = torch.addmm(dquery, dlogits, t.attention_weight.to(s.dtype)).view(query.shape)
        for name in ('x', 'query_pos'):
            if name in needed:
                own = getattr(t, name)
                gradients[name] = dquery.sum_to_size(own.shape).to(own.dtype)
    return gradients


_QUERY_LAYERS = ('offset_weight', 'offset_bias', 'attention_weight', 'attention_bias')


def _value_backward(s, t, grad, needed):
    """Return the gradients of the value layer and of its input by name, given that of the values, (N, S, C)."""
    if t.key_padding_mask is not None:
        grad = grad.masked_fill(t.key_padding_mask[..., None], 0.0)
    rows = grad.to(s.dtype).flatten(0, 1)
    gradients = _layer_backward('value', rows, t.value.to(s.dtype).flatten(0, 1), needed)
    if 'value' in needed:
        gradients['value'] = (rows @ t.value_weight.to(s.dtype)).view(t.value.shape).to(t.value.dtype)
    return gradients


def _layer_backward(name, grad, x, needed):
    """Return the gradients of a linear layer's parameters from rows of its output's gradient and of its input."""
    gradients = {}
    if f'{name}_bias' in needed:
        gradients[f'{name}_bias'] = column_sums(grad)
    if f'{name}_weight' in needed:
        gradients[f'{name}_weight'] = accumulate(None, grad, x)
    return gradients


def _points_backward(s, t, grad):
    """Return the gradient of the reference points, from that of the locations.

    A location is the centre, plus for boxes offset * size / (2 points): the gradient of the size is the sum of the
    locations' gradients times offset / (2 points).
    """
    centres = grad.sum((2, 4))
    if t.reference_points.shape[-1] == 2:
        return centres.sum_to_size(t.reference_points.shape)
    query = t.x if t.query_pos is None else t.x + t.query_pos
    offsets = _linear(s, t, query, 'offset').unflatten(2, grad.shape[2:])
    sizes = (grad * offsets).sum((2, 4)) * (0.5 / s.num_points)
    return torch.cat([centres, sizes], -1).sum_to_size(t.reference_points.shape)


def _attention_forward(settings, tensors, needs):
    s, t = settings, tensors
    attended = run_kernel(s, t, *kernel_inputs(s, t))
    out = F.linear(attended, t.output_weight.to(s.dtype), t.output_bias.to(s.dtype))
    # An encoder's output is saved by its last layer, as the sum in front of its last norm.
    value = find_shared_map(t.value)
    value = value if isinstance(value, RecomputedNorm) else None
    return out, DeformableSaved(t if value is None else t._replace(value=None), store(attended, s.form.storage), value)


def _attention_backward(settings, saved, grad, needs):
    s, (t, attended, value) = settings, saved
    t = t if value is None else t._replace(value=value.load())
    rows, gradients = grad.flatten(0, 1), {}
    if needs.output_bias:
        gradients['output_bias'] = column_sums(rows)
    if needs.output_weight:
        gradients['output_weight'] = accumulate(None, rows, attended.load(s.dtype).flatten(0, 1))
    grad = grad @ t.output_weight.to(grad.dtype)
    return DeformableGradients(**gradients, **inputs_backward(s, t, grad, needs._asdict()))


_attention = Operation('DeformableAttention', _attention_forward, _attention_backward, DeformableGradients)
