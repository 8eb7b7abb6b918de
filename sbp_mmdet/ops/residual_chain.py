"""A chain of residual blocks as one autograd node, which saves one feature map for each block.

A block is y = relu(F(x) + shortcut(x)), with F a sequence of convolutions with norms and ReLUs in between. Let r be the
input of its last convolution. The chain saves its own input, r of each block, and its own output. The backward pass
first runs forwards through the blocks and recomputes their inputs,

    x_{n+1} = relu(norm(conv_last(r_n)) + shortcut(x_n)),

and then backwards through them. There the inputs of a block's convolutions in front of r_n are recomputed from x_n. The
convolution that makes r_n is not recomputed: in a bottleneck, this is the 3x3.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .common.activations import Activation
from .common.autograd_function import in_precision, put_tensors_back, take_tensors_out
from .common.handed_maps import hand_on
from .common.kept_maps import KeptMap, keep, kept
from .common.map_norms import (
    Factors,
    FixedGradients,
    Statistics,
    affine_of_norm,
    factors_of_fixed,
    gradients_of_fixed,
    normalise,
    normalise_backward,
    parts_in_half,
)
from .common.precision import no_autocast
from .common.sign_bits import SignBits
from .conv_norm_act import ConvNormGradients, ConvNormSettings, ConvNormTensors, convolve, convolve_backward

__all__ = ['AveragePool', 'BlockSettings', 'BlockTensors', 'residual_chain']

aten = torch.ops.aten
_RELU = Activation('relu')
_DIFFERENTIABLE = ConvNormGradients._fields[1:-1]  # parameters of a layer: weight, bias, norm_weight, norm_bias


class AveragePool(NamedTuple):
    """Settings of ``nn.AvgPool2d`` without padding, in front of the convolution of a shortcut."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    ceil_mode: bool
    count_include_pad: bool


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """Settings of the block ``relu(layers(x) + shortcut(x))``.

    Attributes:
        layers (tuple[ConvNormSettings, ...]): Convolutions with norm, two or more, with a ReLU between them. Their
            own activation is ``None``.
        shortcut (ConvNormSettings | None): Convolution with norm. If ``None``, the shortcut is ``x``. Default: None.
        pool (AveragePool | None): Pooling in front of the shortcut's convolution. If ``None``, there is none. Default:
            None.
    """

    layers: tuple[ConvNormSettings, ...]
    shortcut: ConvNormSettings | None = None
    pool: AveragePool | None = None


class BlockTensors(NamedTuple):
    """Parameters and buffers of a block, whose fields ``x`` and ``residual`` are ``None``.

    Attributes:
        layers (tuple[ConvNormTensors, ...]): Parameters and buffers of the layers.
        shortcut (ConvNormTensors | None): Parameters and buffers of the shortcut's layer. Default: None.
    """

    layers: tuple[ConvNormTensors, ...]
    shortcut: ConvNormTensors | None = None


class KeptLayer(NamedTuple):
    """Statistics that a layer is recomputed with.

    Attributes:
        statistics (Statistics | None): Mean and reciprocal deviation of a batch norm in training mode or a group norm.
        count (Tensor | None): Number of positions that the statistics of a SyncBN are computed over.
    """

    statistics: Statistics | None
    count: Tensor | None


class KeptBlock(NamedTuple):
    """Tensors that a block saves for the backward pass.

    Attributes:
        last (KeptMap): Input r of its last layer.
        signs (tuple[SignBits, ...]): Signs of the ReLUs in front of r, whose outputs are recomputed from the block's
            input.
        output (SignBits | None): Signs of the block's output. ``None`` for the last block, whose output is saved.
        layers (tuple[KeptLayer, ...]): Statistics of each layer, those of the shortcut last.
    """

    last: KeptMap
    signs: tuple[SignBits, ...]
    output: SignBits | None
    layers: tuple[KeptLayer, ...]


def residual_chain(x: Tensor, blocks: Sequence[BlockSettings], tensors: Sequence[BlockTensors]) -> Tensor:
    """Run residual blocks one after the other and save one feature map for each block.

    The chain's input and output are saved, which the layers around it usually save too, and the input of the last
    convolution of each block. The inputs of the blocks are recomputed by the last convolutions, and the inputs of the
    other layers by all convolutions but the last two. In a bottleneck the 3x3 convolution, which is most of the work,
    is not recomputed. Signs of recomputed ReLUs are saved, one bit for each element, see :class:`.SignBits`. No copy of
    a weight is saved: batch norms in evaluation mode are folded again.

    Blocks in front of the first one that needs a gradient save nothing.

    Args:
        x (Tensor): Input of the first block, shape (N, C, H, W).
        blocks (Sequence[BlockSettings]): Settings of the blocks in their order.
        tensors (Sequence[BlockTensors]): Parameters and buffers of each block.

    Returns:
        Tensor: Output of the last block.

    Example:
        >>> y = residual_chain(x, [settings], [BlockTensors((t1, t2, t3))])
    """
    if blocks[0].layers[0].dtype is None:
        blocks = [_in_precision(block, x) for block in blocks]
    blocks, tensors = tuple(blocks), tuple(tensors)
    leaves = [x, *_leaves(tensors)]
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves):
        return _apply(blocks, tensors, *leaves)
    with torch.no_grad(), no_autocast(x):
        return _run(blocks, tensors, x, first=len(blocks))[0]


@torch.compiler.disable
def _apply(*args):
    return _Chain.apply(*args)


def _in_precision(block, x):
    layers = tuple(in_precision(layer, x) for layer in block.layers)
    return dataclasses.replace(block, layers=layers, shortcut=block.shortcut and in_precision(block.shortcut, x))


def _layers(block, t):
    """Return settings and tensors of a block's layers, the shortcut's last."""
    pairs = [*zip(block.layers, t.layers, strict=True)]
    return pairs if block.shortcut is None else [*pairs, (block.shortcut, t.shortcut)]


class Layer(NamedTuple):
    """A layer in one forward or backward pass.

    Attributes:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters and buffers.
        factors (Factors | None): Those of a fixed norm, see :func:`.factors_of_fixed`.
        parts (tuple[Tensor, Tensor] | None): Those of the factors, see :func:`.parts_in_half`.
    """

    s: ConvNormSettings
    t: ConvNormTensors
    factors: Factors | None
    parts: tuple[Tensor, Tensor] | None


class Members(NamedTuple):
    """The layers of a block in one pass; without a shortcut's layer the block's own input goes past."""

    layers: list[Layer]
    shortcut: Layer | None


def _members(blocks, tensors, backward=False):
    """Return the layers of each block, with the factors of all fixed norms where they are needed.

    Args:
        blocks (Sequence[BlockSettings]): Settings of each block.
        tensors (Sequence[BlockTensors]): Parameters and buffers of each block.
        backward (bool): Whether they are for a backward pass, which needs the factors in every precision. Default:
            False.
    """
    dtype = blocks[0].layers[0].dtype
    pairs = [_layers(*pair) for pair in zip(blocks, tensors, strict=True)]
    flat = [pair for block in pairs for pair in block]
    full = dtype in (torch.float32, torch.float64)  # otherwise nothing is folded in the forward pass
    factors = factors_of_fixed(flat) if full or backward else [None] * len(flat)
    parts = [None] * len(flat)
    if dtype == torch.float16 and (fixed := [i for i, found in enumerate(factors) if found]):
        for i, found in zip(fixed, parts_in_half([factors[i] for i in fixed]), strict=True):
            parts[i] = found
    layers = (Layer(*pair, *found) for pair, *found in zip(flat, factors, parts, strict=True))
    found = []
    for block, own in zip(blocks, pairs, strict=True):
        own = [next(layers) for _ in own]
        found.append(Members(own, None) if block.shortcut is None else Members(own[:-1], own[-1]))
    return found


def _leaves(tensors):
    """Return the tensors that may need gradients, layer by layer."""
    found = [layer for t in tensors for layer in (*t.layers, t.shortcut) if layer is not None]
    return [tensor for layer in found for tensor in layer[1:5]]  # as in _DIFFERENTIABLE


def _without_running_statistics(block, t):
    """Return the tensors of a block without running statistics that the backward pass does not read.

    The next forward pass updates them in place, which autograd would report for a saved tensor.
    """

    def strip(s, layer):
        return layer if s.norm == 'fixed' else layer._replace(running_mean=None, running_var=None)

    layers = tuple(strip(*pair) for pair in zip(block.layers, t.layers, strict=True))
    return BlockTensors(layers, t.shortcut and strip(block.shortcut, t.shortcut))


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, blocks, tensors, *leaves):
        x, needs = leaves[0], iter(ctx.needs_input_grad[3:])
        ctx.blocks, ctx.dtype, ctx.needs = blocks, x.dtype, []
        for pair in zip(blocks, tensors, strict=True):
            ctx.needs.append([[next(needs) for _ in _DIFFERENTIABLE] for _ in _layers(*pair)])
        ctx.first = 0 if ctx.needs_input_grad[2] else [any(map(any, block)) for block in ctx.needs].index(True)
        with no_autocast(x):
            y, source, saved = _run(blocks, tensors, x, ctx.first)
            output = keep(y, blocks[0].layers[0].form.storage, positive=True)._replace(activation=_RELU)
        if output.values is not y:
            hand_on(y, output)
        trained = tuple(_without_running_statistics(*pair) for pair in zip(blocks, tensors, strict=True))[ctx.first :]
        found = []
        ctx.structure = take_tensors_out((source, saved, output, trained), found)
        ctx.save_for_backward(*found)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        source, saved, output, tensors = put_tensors_back(ctx.structure, iter(ctx.saved_tensors))
        skipped = sum(len(_DIFFERENTIABLE) * len(needs) for needs in ctx.needs[: ctx.first])
        blocks, needs = ctx.blocks[ctx.first :], ctx.needs[ctx.first :]
        with no_autocast(grad):
            grad = output.activation_backward(grad.to(blocks[0].layers[0].dtype))
            members = _members(blocks, tensors, backward=True)
            dx, found = _backward(blocks, members, source, saved, grad, needs, ctx.needs_input_grad[2])
            found = _parameter_gradients(found)
        return None, None, None if dx is None else dx.to(ctx.dtype), *[None] * skipped, *found


def _parameter_gradients(layers):
    """Return the gradients of all parameters, layer by layer, from what :func:`_layer_backward` has found."""
    fixed = [i for i, layer in enumerate(layers) if isinstance(layer, FixedGradients)]
    for i, found in zip(fixed, gradients_of_fixed([layers[i] for i in fixed]), strict=True):
        layers[i] = found
    return [layer.get(name) for layer in layers for name in _DIFFERENTIABLE]


def _run(blocks, tensors, x, first):
    """Run the blocks, of which those from the index ``first`` on save tensors.

    Returns:
        tuple[Tensor, KeptMap | None, tuple[KeptBlock, ...]]: Output of the last block, input of block ``first``, and
        what the blocks from ``first`` on save.
    """
    source, saved = None, []
    storage = blocks[0].layers[0].form.storage
    for n, (block, members) in enumerate(zip(blocks, _members(blocks, tensors), strict=True)):
        given, x = x, x.to(block.layers[0].dtype)
        if n == first:
            source = kept(given, x, storage)
        if n < first:
            x = _run_block(block, members, x)[0]
        else:
            x, last, signs, layers = _run_block(block, members, x, saves=True)
            output = SignBits.pack(x) if n + 1 < len(blocks) else None
            saved.append(KeptBlock(last, signs, output, layers))
    return x, source, tuple(saved)


def _run_block(block, members, x, saves=False):
    """Return a block's output, the input of its last layer, signs of the ReLUs before, and what its layers keep."""
    out, last, signs, layers = x, None, [], []
    *first, final = members.layers
    for i, member in enumerate(first):
        z, out, layer = _run_layer(member, out)
        out = F.relu_(out)
        layers.append(layer)
        if saves and i + 1 == len(first):
            last = _keep_input(member, z, out, layer)
        elif saves:
            signs.append(SignBits.pack(out))
        del z
    _, out, layer = _run_layer(final, out)
    layers.append(layer)
    if members.shortcut is None:
        out = out.add_(x)
    else:
        _, shortcut, layer = _run_layer(members.shortcut, _pooled(block, x))
        layers.append(layer)
        out = out.add_(shortcut)
    return F.relu_(out), last, tuple(signs), tuple(layers)


def _keep_input(member, z, r, layer):
    """Save ``r = relu(norm(z))``, the input of a block's last layer. If the norm needs z, r is computed from z."""
    storage = member.s.form.storage
    if layer.statistics is None:
        return keep(r, storage, positive=True)._replace(activation=_RELU)
    scale, shift = affine_of_norm(member.s, member.t, layer.statistics, z.shape[1])
    last = keep(z, storage, (-shift / scale).nan_to_num(0))
    return last._replace(scale=scale, shift=shift, activation=_RELU)


def _pooled(block, x):
    if block.pool is None:
        return x
    pool = block.pool
    return F.avg_pool2d(x, pool.kernel_size, pool.stride, 0, pool.ceil_mode, pool.count_include_pad)


_NOTHING = KeptLayer(None, None)


def _run_layer(member, x):
    """Run convolution and norm.

    Returns:
        tuple[Tensor, Tensor, KeptLayer]: The convolution's output, that of the norm, and what the layer needs to run
        again.
    """
    s, t, factors, _ = member
    z = convolve(s, t, x, factors)
    if s.norm in ('none', 'fixed'):
        return z, z, _NOTHING
    u, statistics, count = normalise(s, t, z)
    return z, u.to(z.dtype), KeptLayer(statistics, count)


def _rerun_layer(member, x, layer):
    """Recompute convolution and norm with the saved statistics, and return the outputs of both."""
    s, t, factors, _ = member
    z = convolve(s, t, x, factors)
    if layer.statistics is None:
        return z, z
    scale, shift = affine_of_norm(s, t, layer.statistics, z.shape[1])
    return z, torch.addcmul(shift, z, scale).to(z.dtype)


def _layer_backward(member, x, z, layer, grad, needs, needs_x):
    """Compute the gradients of a layer.

    Args:
        member (Layer): The layer.
        x (Tensor): The layer's input.
        z (Tensor | None): Output of the convolution, which batch statistics and group norm need.
        layer (KeptLayer): What the layer saved.
        grad (Tensor): Gradient of the norm's output.
        needs (list[bool]): Which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, FixedGradients | dict]: See :func:`.convolve_backward`.
    """
    s, t, factors, parts = member
    needs = ConvNormGradients(needs_x, *needs, residual=False)
    if layer.statistics is None:
        return convolve_backward(s, t, factors, parts, x, grad, needs)
    grad, weight, bias = normalise_backward(s, t, layer.statistics, layer.count, z, grad, needs)
    dx, found = convolve_backward(s, t, None, None, x, grad, needs)
    return dx, dict(found, norm_weight=weight, norm_bias=bias)


def _backward(blocks, members, source, saved, grad, needs, needs_x):
    """Run the backward pass of the blocks.

    Args:
        blocks (Sequence[BlockSettings]): Settings of the blocks.
        members (list[Members]): Layers of the blocks.
        source (KeptMap): Input of the first block.
        saved (tuple[KeptBlock, ...]): What the blocks saved.
        grad (Tensor): Gradient of the last ReLU's input.
        needs (list[list[list[bool]]]): For each layer of each block, which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, list]: Gradient of the first block's input, and the result of :func:`_layer_backward` for
        each layer.
    """
    # Forwards: the inputs of all blocks. Backwards: each block is done, and its input freed.
    inputs = [source.load(grad.dtype)]
    for each in zip(blocks[:-1], members[:-1], saved[:-1], strict=True):
        inputs.append(_rerun_output(*each, inputs[-1]))
    found = []
    for n in reversed(range(len(blocks))):
        x = inputs.pop()
        grad, own = _block_backward(blocks[n], members[n], saved[n], x, grad, needs[n], needs_x or n > 0)
        # x is the output of the previous block's last ReLU, so it is positive where that passes the gradient.
        grad = aten.threshold_backward.default(grad, x, 0) if n > 0 else grad
        found = [*own, *found]
    return grad, found


def _rerun_output(block, members, saved, x):
    """Recompute the output of a block from its input x and the saved input of its last layer."""
    number = len(members.layers)
    _, out = _rerun_layer(members.layers[-1], saved.last.load(x.dtype), saved.layers[number - 1])
    if members.shortcut is None:
        out.add_(x)
    else:
        out.add_(_rerun_layer(members.shortcut, _pooled(block, x), saved.layers[-1])[1])
    return saved.output.relu_(out)


def _block_backward(block, members, saved, x, grad, needs, needs_x):
    """Compute the gradients of a block, given that of the sum that its last ReLU is applied to.

    Args:
        block (BlockSettings): Settings of the block.
        members (Members): Layers of the block.
        saved (KeptBlock): What the block saved.
        x (Tensor): Input of the block.
        grad (Tensor): Gradient of the sum.
        needs (list[list[bool]]): For each layer, which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, list]: Gradient of the input, and what :func:`_layer_backward` finds for each layer.
    """
    own, found = members.layers, []
    # Inputs of the layers, and the convolutions' outputs where a norm has statistics of the batch.
    inputs, outputs = [x], []
    for member, signs, layer in zip(own[:-2], saved.signs, saved.layers, strict=False):
        z, out = _rerun_layer(member, inputs[-1], layer)
        outputs.append(None if layer.statistics is None else z)
        inputs.append(signs.relu_(out))
        del z, out
    inputs.append(saved.last.load(x.dtype))
    outputs.append(saved.last)
    s, t, _, _ = own[-1]
    outputs.append(None if saved.layers[len(own) - 1].statistics is None else convolve(s, t, inputs[-1], None))
    inner = grad
    for i in reversed(range(len(own))):
        source, z = inputs.pop(), outputs.pop()
        if isinstance(z, KeptMap):
            z = None if saved.layers[i].statistics is None else z.before_norm(inner.dtype)
        inner, gradients = _layer_backward(own[i], source, z, saved.layers[i], inner, needs[i], needs_x or i > 0)
        found = [gradients, *found]
        if i > 0:
            inner = aten.threshold_backward.default(inner, source, 0)
        del source, z
    if members.shortcut is None:
        return inner.add_(grad) if needs_x else None, found
    through, gradients = _shortcut_backward(block, members.shortcut, saved, x, grad, needs[-1], needs_x)
    return inner.add_(through) if needs_x else None, [*found, gradients]


def _shortcut_backward(block, member, saved, x, grad, needs, needs_x):
    """Compute the gradients of a shortcut with a convolution and, if the block has one, pooling in front of it."""
    pooled, layer, z = _pooled(block, x), saved.layers[-1], None
    if layer.statistics is not None:
        z = convolve(member.s, member.t, pooled, None)
    grad, found = _layer_backward(member, pooled, z, layer, grad, needs, needs_x)
    if block.pool is not None and needs_x:
        pool = block.pool
        options = [*pool.kernel_size], [*pool.stride], [0, 0], pool.ceil_mode, pool.count_include_pad, None
        grad = aten.avg_pool2d_backward.default(grad, x, *options)
    return grad, found
