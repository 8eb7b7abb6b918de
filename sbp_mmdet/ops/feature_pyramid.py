"""A feature pyramid as one autograd node, which saves its inputs alone.

    L_i = conv1x1(x_i) + up(L_{i+1}),   y_i = conv(L_i),   level i + 1 being the next coarser one

Backward, from the finest level on: dL_i = conv^T(dy_i) + up^T(dL_{i-1}), from which dx_i and the gradients of the
lateral convolution follow. The laterals L_i, which dW of the second convolution needs, are recomputed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import (
    apply_function,
    differentiable_once,
    put_tensors_back,
    take_tensors_out,
    with_dtype,
)
from .common.kept_maps import keep_input
from .common.layouts import memory_format
from .common.precision import Sums, no_autocast
from .common.row_strips import Convolution, Strip, StripSettings, cut_into_strips, zeros_in

__all__ = ['LevelTensors', 'feature_pyramid']

aten = torch.ops.aten
_LATERAL = Convolution()


class LevelTensors(NamedTuple):
    """Inputs of a level.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
        weight, bias (Tensor | None): Lateral convolution, shapes (D, C, 1, 1) and (D,).
        out_weight, out_bias (Tensor | None): Second convolution, shapes (D, D, K, K) and (D,).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None


def feature_pyramid(settings: StripSettings, levels: Sequence[LevelTensors]) -> tuple[Tensor, ...]:
    """Compute ``conv(lateral)`` of each level, with ``lateral = conv1x1(x) + up(lateral of the next level)``.

    The inputs are saved, which the layers in front usually save too. The backward pass goes level by level, from the
    finest one on, in strips of rows. Laterals are recomputed, that of the finest level strip by strip.

    Args:
        settings (StripSettings): Settings.
        levels (Sequence[LevelTensors]): Inputs of the levels, from the finest one on. Coarser maps are enlarged by
            nearest-neighbour interpolation.

    Returns:
        tuple[Tensor, ...]: The output of each level, shape (N, D, H, W).
    """
    s = with_dtype(settings, levels[0].x)
    leaves = [tensor for level in levels for tensor in level]
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return apply_function(_Pyramid, s, *leaves)
    with torch.no_grad(), no_autocast(levels[0].x):
        return _run(s, levels)


class _Level(NamedTuple):
    """Tensors that a level saves: its input and its parameters, with shape, precision and layout of the input."""

    input: tuple | None
    parameters: LevelTensors
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format


class _Pyramid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, *leaves):
        levels, needs = _in_levels(leaves), _in_levels(ctx.needs_input_grad[1:])
        ctx.s, ctx.needs, saved = s, needs, []
        with no_autocast(levels[0].x):
            outs = _run(s, levels)
            trains = any(any(need[1:]) for need in needs)
            for t in levels:
                source = keep_input(t.x, t.x.to(s.dtype), s.form.storage) if trains else None
                saved.append(_Level(source, t._replace(x=None), t.x.shape, t.x.dtype, memory_format(t.x)))
        tensors = []
        ctx.structure = take_tensors_out(tuple(saved), tensors)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        levels = put_tensors_back(ctx.structure, iter(ctx.saved_tensors))
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return (None,) * (1 + sum(map(len, ctx.needs)))
        with no_autocast(given):
            gradients = _backward(ctx.s, levels, grads, [*ctx.needs])
        return None, *gradients


def _in_levels(leaves):
    size = len(LevelTensors._fields)
    return [LevelTensors(*leaves[i : i + size]) for i in range(0, len(leaves), size)]


def _cast(s, t):
    """Return the parameters in the precision of the convolutions."""
    return LevelTensors(None, *(None if p is None else p.to(s.dtype) for p in t[1:]))


def _run(s, levels):
    outs, lateral = [], None
    for t in reversed(levels):
        cast, height = _cast(s, t), t.x.shape[2]
        lateral = _lateral(cast, t.x.to(s.dtype), lateral)
        strips = _forward_strips(s, lateral)
        outs.append(torch.empty_like(lateral) if len(strips) > 1 else None)
        for strip in strips:
            part = s.conv.run(s.conv.reads(strip, height).of(lateral), cast.out_weight, cast.out_bias, strip, height)
            if len(strips) > 1:
                strip.of(outs[-1]).copy_(part)
            else:
                outs[-1] = part
    return tuple(reversed(outs))


def _forward_strips(s, lateral):
    """Return the strips of rows that the second convolution of a level is computed in: one, unless memory comes first.

    On a GPU, cuDNN's workspace for a whole map of the finest level may be as large as the map.
    """
    if s.form.small_chunks and lateral.is_cuda:
        return cut_into_strips(lateral.shape, lateral.device)
    return [Strip(0, lateral.shape[2])]


def _lateral(t, x, coarse):
    """Return the lateral map of a level, given that of the next one."""
    lateral = F.conv2d(x, t.weight, t.bias)
    return lateral if coarse is None else lateral.add_(F.interpolate(coarse, size=x.shape[2:], mode='nearest'))


def _nearest_rows(coarse, height):
    """Return, for each row, the row of the coarser level that nearest-neighbour interpolation copies into it."""
    numbers = torch.arange(coarse.shape[2], dtype=torch.float32, device=coarse.device).view(1, 1, -1, 1)
    return F.interpolate(numbers, size=(height, 1), mode='nearest').flatten().long()


def _backward(s, levels, grads, needs):
    """Return the gradients of the inputs and parameters of all levels, in the order of :class:`LevelTensors`."""
    casts = [_cast(s, level.parameters) for level in levels]
    trains = levels[0].input is not None
    coarse = [None] * len(levels)  # the lateral of the next level
    if trains:
        for i in reversed(range(len(levels) - 1)):
            coarse[i] = _lateral(casts[i + 1], levels[i + 1].input.load(s.dtype), coarse[i + 1])
    gradients, incoming = [], None
    for i, (level, t, grad) in enumerate(zip(levels, casts, grads, strict=True)):
        if grad is None and incoming is None:
            gradients += [None] * len(LevelTensors._fields)
            continue
        parameters = {name: p for name, p in level.parameters._asdict().items() if p is not None}
        sums = Sums(parameters)
        shape = level.shape[0], len(t.weight), *level.shape[2:]
        if incoming is None:
            incoming = zeros_in(shape, grad.new_empty(0, dtype=s.dtype), memory_format(grad))
        if grad is not None:
            _output_backward(s, level, t, coarse[i], grad.to(s.dtype), incoming, needs[i], sums)
        dx = _lateral_backward(s, level, t, incoming, needs[i], sums)
        if grad is None:  # as in plain autograd: with a gradient of zero, an optimizer would decay these weights
            needs[i] = needs[i]._replace(out_weight=False, out_bias=False)
        found = {name: total.to(parameters[name].dtype) for name, total in sums.gradients().items()}
        wanted = zip(LevelTensors._fields[1:], needs[i][1:], strict=True)
        gradients += [dx, *(found[name] if need else None for name, need in wanted)]
        coarse[i] = None
        if i + 1 < len(levels):
            size = *shape[:2], *levels[i + 1].shape[2:]  # up^T(dL) sums the fine positions that read a coarse one
            incoming = aten.upsample_nearest2d_backward(incoming, [*shape[2:]], [*size], None, None)
    return gradients


def _output_backward(s, level, t, coarse, grad, lateral_grad, needs, sums):
    """Add the gradient of the lateral map to ``lateral_grad`` and those of the second convolution to the sums."""
    height, strips = level.shape[2], _strips(level, t, grad.device)
    nearest = None if coarse is None or len(strips) == 1 else _nearest_rows(coarse, height)
    for strip in strips:
        halo = s.conv.reads(strip, height)
        if level.input is None:
            x = grad.new_empty(1).expand(*lateral_grad.shape[:2], halo.stop - halo.start, grad.shape[3])
        else:
            x, rows = level.input.rows(*halo).load(s.dtype), coarse
            if nearest is not None:
                rows = coarse.index_select(2, nearest[halo.start : halo.stop])
            x = _lateral(t, x, rows)
        which = True, needs.out_weight, bool(needs.out_bias)
        part, dweight, dbias = s.conv.run_backward(strip.of(grad), x, t.out_weight, strip, height, which)
        halo.of(lateral_grad).add_(part)
        sums.add(dict(out_weight=dweight, out_bias=dbias))


def _lateral_backward(s, level, t, grad, needs, sums):
    """Return the gradient of a level's input and add those of the lateral convolution to the sums."""
    height = level.shape[2]
    dx = zeros_in(level.shape, grad, level.layout) if needs.x else None
    if not any(needs[:3]):
        return None
    for strip in _strips(level, t, grad.device):
        if level.input is None:
            x = grad.new_empty(1).expand(*level.shape[:2], strip.stop - strip.start, level.shape[3])
        else:
            x = level.input.rows(*strip).load(s.dtype)
        which = needs.x, needs.weight, bool(needs.bias)
        part, dweight, dbias = _LATERAL.run_backward(strip.of(grad), x, t.weight, strip, height, which)
        if needs.x:
            strip.of(dx).copy_(part)
        sums.add(dict(weight=dweight, bias=dbias))
    return dx.to(level.dtype) if needs.x else None


def _strips(level, t, device):
    return cut_into_strips((level.shape[0], max(level.shape[1], len(t.weight)), *level.shape[2:]), device)
