"""The head of a region proposal network on one feature map, whose backward pass runs in strips of rows.

    y = relu(conv(x, W) + b),   out = conv1x1(y, W_out) + b_out

Backward, with the gradient g of the output: dW_out = g^T y, dy = g W_out where y > 0, and then dW and dx are those of
the convolution. Every product needs some rows of the maps only, so they are computed strip by strip.

The loss of a region proposal network reads a few sampled anchors, so g is zero nearly everywhere. Then y is recomputed
at the positions with a gradient, and the products have no other rows: see :mod:`.common.sparse_gradient`.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import Operation, gradients_of, with_dtype
from .common.kept_maps import KeptMap, keep, keep_input
from .common.layouts import memory_format
from .common.precision import Sums, accumulator
from .common.row_strips import Convolution, Strip, StripSettings, cut_into_strips, zeros_in
from .common.sign_bits import SignBits
from .common.sparse_gradient import GradientPositions, scatter_gradient

__all__ = ['DenseHeadSettings', 'DenseHeadTensors', 'dense_head']

aten = torch.ops.aten
_POINTWISE = Convolution()
# Largest share of positions with a gradient. Each of them costs more by itself than in a map: what it reads is copied,
# its hidden values are recomputed, and up to nine positions of the input get a gradient from it.
_LARGEST_SHARE = 1 / 4


@dataclasses.dataclass(frozen=True)
class DenseHeadSettings(StripSettings):
    """Settings of :func:`dense_head`.

    Attributes:
        sampled (int | None): Number of positions of an image that are expected to have a gradient at most. It decides
            what is saved, and not what the gradients are. If ``None``, all may have one. Default: None.
    """

    sampled: int | None = None

    def expects_few(self, height: int, width: int) -> bool:
        """Return whether few positions of a map are expected to have a gradient.

        Args:
            height (int): Number of rows of the map.
            width (int): Number of its columns.
        """
        few = self.sampled is not None and self.sampled <= _LARGEST_SHARE * height * width
        return few and self.conv.groups == 1


class DenseHeadTensors(NamedTuple):
    """Inputs of :func:`dense_head`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
        weight, bias (Tensor): First convolution, shapes (D, C, K, K) and (D,).
        out_weight, out_bias (Tensor): Second convolution, shapes (E, D, 1, 1) and (E,).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    out_weight: Tensor
    out_bias: Tensor


_Gradients = gradients_of(DenseHeadTensors)


class _Saved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        tensors (DenseHeadTensors): Parameters; ``x`` is None.
        shape (tuple[int, ...]): Shape of ``x``.
        dtype (torch.dtype): Precision of ``x``.
        layout (torch.memory_format): Memory layout of ``x``.
        input (KeptMap | None): ``x``, if the gradient of the weight or the recomputation of the hidden map needs it.
        hidden (KeptMap | None): The hidden map. If ``None``, it is recomputed.
        signs (tuple[SignBits, ...]): Signs of the hidden map, strip by strip, where it is recomputed.
    """

    tensors: DenseHeadTensors
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.memory_format
    input: KeptMap | None
    hidden: KeptMap | None
    signs: tuple[SignBits, ...]


def dense_head(settings: DenseHeadSettings, tensors: DenseHeadTensors) -> Tensor:
    """Compute ``conv1x1(relu(conv(x)))``.

    The backward pass runs in strips of rows, so apart from the gradient of ``x`` no map exists as a whole. The hidden
    map is saved, as it is or in eight bits. With ``form.minimal``, or where few positions are expected to have a
    gradient, only the input and the signs of the ReLU are saved, one bit for each element, and the hidden map is
    recomputed: at these positions if they are as few as expected, else strip by strip.

    Args:
        settings (DenseHeadSettings): Settings.
        tensors (DenseHeadTensors): Inputs.

    Returns:
        Tensor: Shape (N, E, H, W).
    """
    return _dense_head(with_dtype(settings, tensors.x), tensors)


def _forward(s, t, needs):
    x, height = t.x.to(s.dtype), t.x.shape[2]
    weight, bias, out_weight, out_bias = (p.to(s.dtype) for p in t[1:])
    recomputes = any(needs) and (s.form.minimal or s.expects_few(*x.shape[2:]))
    hidden, signs = None, []
    if not recomputes:
        y = F.relu_(s.conv.run(x, weight, bias, Strip(0, height), height))
        out = F.conv2d(y, out_weight, out_bias)
        if any(needs):
            hidden = keep(y, s.form.storage, positive=True)
            hidden = hidden if hidden.values is y else hidden._replace(activation=Activation('relu'))
    else:
        shape = x.shape[0], len(out_weight), *x.shape[2:]
        out = torch.empty(shape, dtype=s.dtype, device=x.device, memory_format=memory_format(x))
        for strip in _strips(t, x.shape, x.device):
            y = F.relu_(s.conv.run(s.conv.reads(strip, height).of(x), weight, bias, strip, height))
            signs.append(SignBits.pack(y))
            strip.of(out).copy_(F.conv2d(y, out_weight, out_bias))
    source = keep_input(t.x, x, s.form.storage) if needs.weight or (recomputes and any(needs)) else None
    saved = _Saved(t._replace(x=None), x.shape, t.x.dtype, memory_format(x), source, hidden, tuple(signs))
    return out, saved


def _strips(t, shape, device):
    return cut_into_strips((shape[0], max(shape[1], len(t.weight)), *shape[2:]), device)


def _backward(s, saved, grad, needs):
    t, height = saved.tensors, saved.shape[2]
    grad = grad.to(s.dtype)
    weight, bias, out_weight = (p.to(s.dtype) for p in (t.weight, t.bias, t.out_weight))
    if s.expects_few(*saved.shape[2:]) and saved.hidden is None:
        positions = GradientPositions.with_gradient(grad)
        if len(positions.rows) <= s.sampled * saved.shape[0]:
            return _backward_of_few(s, saved, grad, positions, needs)
    sums = Sums({name: getattr(t, name) for name in _Gradients._fields[1:] if getattr(needs, name)})
    inner = needs.x or needs.weight or needs.bias
    strips = _strips(t, saved.shape, grad.device)
    dx = zeros_in(saved.shape, grad, saved.layout) if needs.x and len(strips) > 1 else None
    for i, strip in enumerate(strips):
        halo = s.conv.reads(strip, height)
        if saved.input is None:  # only the shape is read
            x = grad.new_empty(1).expand(*saved.shape[:2], halo.stop - halo.start, saved.shape[3])
        else:
            x = saved.input.rows(*halo).load(s.dtype)
        if saved.hidden is None:
            y = saved.signs[i].relu_(s.conv.run(x, weight, bias, strip, height))
        else:
            y = saved.hidden.rows(*strip).load(s.dtype)
        which = inner, needs.out_weight, needs.out_bias
        dy, dout_weight, dout_bias = _POINTWISE.run_backward(strip.of(grad), y, out_weight, strip, height, which)
        gradients, part = dict(out_weight=dout_weight, out_bias=dout_bias), None
        if inner:
            dy = aten.threshold_backward(dy, y, 0)
            which = needs.x, needs.weight, needs.bias
            part, gradients['weight'], gradients['bias'] = s.conv.run_backward(dy, x, weight, strip, height, which)
        sums.add(gradients)
        if needs.x:  # rows of the halo get gradients from two strips
            dx = part if dx is None else dx
            if part is not dx:
                halo.of(dx).add_(part)
        del x, y, dy, part
    gradients = {name: total.to(getattr(t, name).dtype) for name, total in sums.gradients().items()}
    return _Gradients(**gradients, x=dx.to(saved.dtype) if needs.x else None)


def _backward_of_few(s, saved, grad, positions, needs):
    """Compute the gradients where the output has one at few positions only."""
    t, (_, _, height, width), size = saved.tensors, saved.shape, saved.tensors.weight.shape[2:]
    weight, bias, out_weight = (p.to(s.dtype) for p in (t.weight, t.bias, t.out_weight.flatten(1)))
    strips = _strips(t, saved.shape, grad.device)
    patches = _patches(s, saved, positions, strips, size)
    shape = saved.shape[0], len(weight), height, width
    dropped = ~SignBits.at_in_strips(
        saved.signs, strips[0].stop, shape, positions.images, positions.rows, positions.columns
    )
    grad = positions.gather(grad)
    y = torch.addmm(bias, patches, weight.permute(0, 2, 3, 1).flatten(1).t())
    y = y.clamp_min_(torch.finfo(y.dtype).tiny).masked_fill_(dropped, 0)  # as in `SignBits.relu_`
    full, gradients = accumulator(y), {}
    if needs.out_weight:
        gradients['out_weight'] = (grad.t() @ y).view_as(t.out_weight)
    if needs.out_bias:
        gradients['out_bias'] = grad.sum(0, dtype=full)
    if needs.x or needs.weight or needs.bias:
        dy = (grad @ out_weight).masked_fill_(dropped, 0)
        if needs.weight:
            gradients['weight'] = (dy.t() @ patches).view(len(weight), *size, -1).permute(0, 3, 1, 2)
        if needs.bias:
            gradients['bias'] = dy.sum(0, dtype=full)
    gradients = {name: value.to(getattr(t, name).dtype) for name, value in gradients.items()}
    if needs.x:
        del patches
        gradients['x'] = scatter_gradient(dy, positions, weight, s.conv, saved.shape, saved.layout).to(saved.dtype)
    return _Gradients(**gradients)


def _patches(s, saved, positions, strips, size):
    """Return the input patch of each output position, shape (K, h * w * C)."""
    height = saved.shape[2]
    if _is_whole(saved.input, s.dtype):
        return positions.gather_patches(saved.input.values, 0, height, s.conv, size).flatten(1)
    patches = []
    for strip, own in zip(strips, positions.in_strips(strips), strict=True):
        halo = s.conv.reads(strip, height)
        patches.append(own.gather_patches(saved.input.rows(*halo).load(s.dtype), halo.start, height, s.conv, size))
    return torch.cat(patches).flatten(1)


def _is_whole(saved, dtype):
    """Return whether a saved map is a plain tensor in this precision."""
    return isinstance(saved, KeptMap) and saved.values.dtype is dtype and all(x is None for x in saved[1:])


_dense_head = Operation('DenseHead', _forward, _backward, _Gradients)
