"""One residual block of a chain: its forward pass, its recomputation and its backward pass.

The chain itself, and what it stores, is :mod:`.residual_chain`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .common.activations import Activation
from .common.average_pool import AveragePool, average_pool, average_pool_backward
from .common.batch_and_group_norms import affine_of_norm, zero_of
from .common.fixed_norms import FixedGradients
from .common.kept_maps import KeptMap, keep
from .common.layouts import memory_format
from .common.sign_bits import SignPacker, SignReader
from .residual_layer import KeptLayer, Layer, layer_backward, rerun_layer, run_layer
from .split_layer import SplitLayer, SplitSettings

__all__ = [
    'RELU',
    'BlockLayers',
    'BlockSettings',
    'Inside',
    'KeptBlock',
    'block_backward',
    'layers_of_blocks',
    'rerun_inside',
    'rerun_output',
    'run_block',
    'split_by_block',
]

aten = torch.ops.aten
_relu_backward = aten.threshold_backward.default
_NO_STRIDE = 1, 1  # of a gradient that has all positions of a map
RELU = Activation('relu')


class BlockSettings(NamedTuple):
    """Shape of the block ``relu(layers(x) + shortcut(x))``.

    Attributes:
        number (int): Number of its convolutions with norm, two or more, with a ReLU between them.
        projects (bool): Whether the shortcut is a convolution with norm. If ``False``, it is ``x``. Default: False.
        pool (AveragePool | None): Pooling in front of the shortcut's convolution. If ``None``, there is none. Default:
            None.
        split (SplitSettings | None): How all convolutions but the first and the last are one split layer. If ``None``,
            they are layers by themselves. Default: None.
    """

    number: int
    projects: bool = False
    pool: AveragePool | None = None
    split: SplitSettings | None = None


class KeptBlock(NamedTuple):
    """Tensors that a block saves for the backward pass.

    Attributes:
        last (KeptMap | None): Input r of its last layer. If ``None``, it is recomputed too.
        signs (list[int]): For each ReLU inside of the block whose output is recomputed, its number for
            :meth:`.SignReader.relu_`.
        output (int | None): The same number for the last ReLU. ``None`` for the last block, whose output is saved.
        layers (tuple[KeptLayer | tuple[KeptLayer | None, ...] | None, ...]): Statistics of each layer, those of the
            shortcut last; of a split layer a tuple.
    """

    last: KeptMap | None
    signs: list[int]
    output: int | None
    layers: tuple[KeptLayer | None, ...]


class BlockLayers(NamedTuple):
    """The layers of a block in one pass.

    Attributes:
        layers (Sequence[Layer | SplitLayer]): The convolutions with norm.
        shortcut (Layer | None): Convolution with norm of the shortcut. If ``None``, the shortcut is the block's input.
        pool (AveragePool | None): Pooling in front of the shortcut's convolution.
        signs (SignPacker | SignReader | None): Signs of the recomputed ReLUs of all blocks: a packer in the forward
            pass, a reader in the backward pass. If ``None``, no backward pass will follow.
    """

    layers: Sequence[Layer | SplitLayer]
    shortcut: Layer | None
    pool: AveragePool | None
    signs: SignPacker | SignReader | None


class Inside(NamedTuple):
    """Recomputed maps inside of a block, layer by layer.

    Attributes:
        inputs (list[Tensor | None]): Inputs of the layers after the first; ``None`` if they still have to be
            recomputed.
        outputs (list[Tensor | None]): Outputs of the convolutions of all layers but the last, where the norm has
            statistics of the map.
    """

    inputs: list[Tensor]
    outputs: list[Tensor | None]

    def only_last(self) -> 'Inside':
        """Drop all maps but the input of the last layer and the output that it was computed from."""
        others = [None] * (len(self.inputs) - 1)
        return Inside([*others, self.inputs[-1]], [*others, self.outputs[-1]])


def split_by_block(blocks: Sequence[BlockSettings], values: Sequence) -> list[Sequence]:
    """Cut a list with a value for each layer into those of each block.

    Args:
        blocks (Sequence[BlockSettings]): Settings of each block.
        values (Sequence): The values, block after block, with that of the shortcut's layer at the end of its block.
    """
    parts, stop = [], 0
    for block in blocks:
        start, stop = stop, stop + block.number + block.projects
        parts.append(values[start:stop])
    return parts


def layers_of_blocks(
    blocks: Sequence[BlockSettings], layers: Sequence[Layer], signs: SignPacker | SignReader | None = None
) -> list[BlockLayers]:
    """Return the layers of each block.

    Args:
        blocks (Sequence[BlockSettings]): Settings of each block.
        layers (Sequence[Layer]): The layers of all blocks, in the order of :func:`split_by_block`.
        signs (SignPacker | SignReader | None): See :class:`BlockLayers`. Default: None.
    """
    grouped = []
    for block, own in zip(blocks, split_by_block(blocks, layers), strict=True):
        layers_of_block = own[: block.number]
        if block.split is not None:
            first, middle, last = block.split.gather(layers_of_block)
            layers_of_block = first, SplitLayer(middle, block.split), last
        grouped.append(BlockLayers(layers_of_block, own[-1] if block.projects else None, block.pool, signs))
    return grouped


def run_block(
    block: BlockLayers, x: Tensor, saves_last: bool
) -> tuple[Tensor, KeptMap | None, list[int], tuple[KeptLayer | None, ...]]:
    """Run a block.

    The shortcut is added in the precision of the norm, as by the block's own code: in full on a GPU under autocast, if
    the norm is a group norm.

    Args:
        block (BlockLayers): Layers of the block.
        x (Tensor): Input of the block, shape (N, C, H, W).
        saves_last (bool): Whether the input of the last layer is saved for a backward pass.

    Returns:
        tuple: The output, and the attributes ``last``, ``signs`` and ``layers`` of :class:`KeptBlock`.
    """
    out, last, signs, saved_layers = x, None, [], []
    *first, final = block.layers
    for i, layer in enumerate(first):
        z, out, saved = layer.run(out) if type(layer) is SplitLayer else run_layer(layer, out)
        out = torch.relu_(out if out.dtype is z.dtype else out.to(z.dtype))
        saved_layers.append(saved)
        if block.signs is not None and saves_last and i + 1 == len(first):
            last = _keep_input(layer, z, out, saved)
        elif block.signs is not None:
            signs.append(block.signs.add(out, 'inside'))
        del z
    _, out, saved = run_layer(final, out)
    saved_layers.append(saved)
    if block.shortcut is None:
        out = out.add_(x)
    else:
        _, shortcut, saved = run_layer(block.shortcut, average_pool(block.pool, x))
        saved_layers.append(saved)
        out = out.add_(shortcut)
    return torch.relu_(out), last, signs, tuple(saved_layers)


def rerun_inside(block: BlockLayers, saved: KeptBlock, x: Tensor, known: Inside | None = None) -> Inside:
    """Recompute the maps inside of a block whose ReLUs have their signs saved.

    Args:
        block (BlockLayers): Layers of the block.
        saved (KeptBlock): What the block saved.
        x (Tensor): Input of the block.
        known (Inside | None): Maps that were recomputed before and are used as they are. If ``None``, there are none.
            Default: None.
    """
    inside = Inside([], [])
    # `signs` is the shortest: it ends in front of a last layer whose input is saved.
    for i, (layer, number, kept) in enumerate(zip(block.layers, saved.signs, saved.layers, strict=False)):
        if known is not None and known.inputs[i] is not None:
            x, z = known.inputs[i], known.outputs[i]
        else:
            z, out = rerun_layer(layer, x, kept)
            x, z = block.signs.relu_(number, out), None if kept is None else z
        inside.inputs.append(x)
        inside.outputs.append(z)
    return inside


def rerun_output(block: BlockLayers, saved: KeptBlock, x: Tensor, last: Tensor | None) -> Tensor:
    """Recompute the output of a block.

    Args:
        block (BlockLayers): Layers of the block.
        saved (KeptBlock): What the block saved.
        x (Tensor): Input of the block.
        last (Tensor | None): The input of its last layer. If ``None``, the saved one.
    """
    number = len(block.layers)
    last = saved.last.load(x.dtype) if last is None else last
    _, out = rerun_layer(block.layers[-1], last, saved.layers[number - 1])
    if block.shortcut is None:
        out.add_(x)
    else:
        out.add_(rerun_layer(block.shortcut, average_pool(block.pool, x), saved.layers[-1])[1])
    return block.signs.relu_(saved.output, out)


def block_backward(
    block: BlockLayers,
    saved: KeptBlock,
    x: Tensor,
    inside: Inside | None,
    grad: Tensor,
    needs: Sequence[Sequence[bool]],
    needs_x: bool,
) -> tuple[Tensor | None, list[FixedGradients | dict]]:
    """Compute the gradients of a block, given that of the sum that its last ReLU is applied to.

    Args:
        block (BlockLayers): Layers of the block.
        saved (KeptBlock): What the block saved.
        x (Tensor): Input of the block.
        inside (Inside | None): Maps inside of the block that are known; the rest are recomputed. If ``None``, none
            are.
        grad (Tensor): Gradient of the sum.
        needs (Sequence[Sequence[bool]]): For each layer, which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, list]: Gradient of the input, and what :func:`layer_backward` finds for each layer.
    """
    layers, of_layers, of_shortcut = block.layers, [], None
    if block.shortcut is not None and block.shortcut.s.process_group is not None:
        # Processes communicate in the order in which autograd would: another one may run the block's own code.
        of_shortcut = _shortcut_backward(block, saved, x, grad, needs[-1], needs_x)
    if type(layers[1]) is SplitLayer:
        needs = layers[1].settings.gather(needs)
    inputs, outputs = rerun_inside(block, saved, x, inside)
    del inside
    inputs.insert(0, x)
    if saved.last is not None:
        inputs.append(saved.last.load(x.dtype))
        outputs.append(saved.last)
    outputs.append(None if saved.layers[len(layers) - 1] is None else layers[-1].convolve(inputs[-1]))
    inner, split_output = grad, None
    for i in reversed(range(len(layers))):
        source, z = inputs.pop(), outputs.pop()
        if type(z) is KeptMap:
            z = None if saved.layers[i] is None else z.before_norm(inner.dtype)
        layer, stride = layers[i], _NO_STRIDE
        if type(layer) is SplitLayer:
            inner, gradients = layer.backward(source, z, split_output, saved.layers[i], inner, needs[i])
            of_layers, split_output = [*gradients, *of_layers], None
            inner = _relu_backward(inner, source, 0)
            continue
        if i == 0 and block.shortcut is not None:
            layer, source, stride = _subsample_input(layer, source)
        inner, gradients = layer_backward(layer, source, z, saved.layers[i], inner, needs[i], needs_x or i > 0)
        of_layers = [gradients, *of_layers]
        if i > 0:
            inner = _relu_backward(inner, source, 0)
            split_output = source if type(layers[i - 1]) is SplitLayer else None
        del source, z
    if block.shortcut is None:
        return inner.add_(grad) if needs_x else None, of_layers
    through, gradients = of_shortcut or _shortcut_backward(block, saved, x, grad, needs[-1], needs_x)
    return _add_subsampled(x, (inner, stride), through) if needs_x else None, [*of_layers, gradients]


def _shortcut_backward(block, saved, x, grad, needs, needs_x):
    """Compute the gradients of a shortcut with a convolution and, if the block has one, pooling in front of it.

    Returns:
        tuple: Gradient of the input with the stride of its positions, and the gradients of the parameters.
    """
    layer, kept, stride = block.shortcut, saved.layers[-1], _NO_STRIDE
    if block.pool is None:
        layer, pooled, stride = _subsample_input(layer, x)
    else:
        pooled = average_pool(block.pool, x)
    z = None if kept is None else layer.convolve(pooled)
    grad, gradients = layer_backward(layer, pooled, z, kept, grad, needs, needs_x)
    return (average_pool_backward(block.pool, x, grad) if needs_x else None, stride), gradients


def _subsample_input(layer, x):
    """Replace a strided 1x1 convolution by one without stride, whose input is the positions that the strided one reads.

    The gradient of this input is a small map. That of the whole input would be zero at all other positions.

    Returns:
        tuple[Layer, Tensor, tuple[int, int]]: Layer and input, which are unchanged for any other layer, and the stride
        of the positions.
    """
    s = layer.s
    if s.stride == _NO_STRIDE or s.padding != (0, 0) or layer.t.weight.shape[2:].numel() > 1:
        return layer, x, _NO_STRIDE
    x_read = _subsample(x, s.stride).contiguous(memory_format=memory_format(x))
    return layer._replace(s=s.without_stride), x_read, s.stride


def _subsample(x, stride):
    """Return every n-th row and column of a map, as a view."""
    return x[:, :, :: stride[0], :: stride[1]]


def _add_subsampled(x, first, second):
    """Add two gradients of the map x in place. Each comes with the stride of the positions that it is given at.

    Returns:
        Tensor: The sum at all positions.
    """
    (total, stride), (other, other_stride) = first, second
    if stride == other_stride:
        total = total.add_(other)
        return total if stride == _NO_STRIDE else _undo_subsampling(total, stride, x)
    if other_stride == _NO_STRIDE:
        (other, other_stride), (total, stride) = first, second
    total = total if stride == _NO_STRIDE else _undo_subsampling(total, stride, x)
    _subsample(total, other_stride).add_(other)
    return total


def _undo_subsampling(values, stride, x):
    """Return a map of the shape of x that has these values at every n-th row and column, and zeros elsewhere."""
    whole = torch.zeros_like(x, dtype=values.dtype)
    _subsample(whole, stride).copy_(values)
    return whole


def _keep_input(layer, z, r, saved):
    """Save ``r = relu(norm(z))``, the input of a block's last layer. If the norm needs z, r is computed from z."""
    storage = layer.s.form.storage
    if saved is None:
        last = keep(r, storage, positive=True)
        return last if last.values is r else last._replace(activation=RELU)  # eight bits are read as below zero, too
    if type(layer) is SplitLayer:
        scale, shift = layer.affine(saved)
    else:
        scale, shift = affine_of_norm(layer.s, layer.t, saved.statistics, z.shape[1])
    last = keep(z, storage, None if storage == 'native' else zero_of(scale, shift))
    return last._replace(scale=scale, shift=shift, activation=RELU)
