"""A chain of residual blocks as one autograd node, which saves one feature map for each block, or none inside.

A block is y = relu(F(x) + shortcut(x)), with F a sequence of convolutions with norms and ReLUs in between. Let r be the
input of its last convolution. The chain saves its own input, r of each block, and its own output. The backward pass
first runs forwards through the blocks and recomputes their inputs,

    x_{n+1} = relu(norm(conv_last(r_n)) + shortcut(x_n)),

and then backwards through them. There the inputs of a block's convolutions in front of r_n are recomputed from x_n. The
convolution that makes r_n is not recomputed: in a bottleneck, this is the 3x3.

If r is not saved either (:func:`residual_chain` says when), it is recomputed with x_{n+1}.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .common.autograd_function import (
    apply_function,
    differentiable_once,
    put_tensors_back,
    saved_tensors_of,
    take_tensors_out,
)
from .common.batch_and_group_norms import keeps_full_precision
from .common.kept_maps import keep, keep_input
from .common.precision import cast, no_autocast
from .common.shared_maps import share_map
from .common.sign_bits import SignPacker, SignReader
from .conv_norm_act import ConvNormSettings, ConvNormTensors
from .residual_block import (
    RELU,
    BlockSettings,
    KeptBlock,
    block_backward,
    layers_of_blocks,
    rerun_inside,
    rerun_output,
    run_block,
    split_by_block,
)
from .residual_layer import PARAMETERS, flatten_tensors, layers_of_pass, parameter_gradients, unflatten_tensors
from .split_layer import SplitLayer

__all__ = ['ChainSettings', 'residual_chain']

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ChainSettings:
    """Settings of :func:`residual_chain`.

    Attributes:
        blocks (tuple[BlockSettings, ...]): Settings of the blocks in their order.
        layers (tuple[ConvNormSettings, ...]): Settings of all layers, each with a precision and without an activation:
            block after block, with the shortcut's layer at the end of its block.
    """

    blocks: tuple[BlockSettings, ...]
    layers: tuple[ConvNormSettings, ...]


def residual_chain(settings: ChainSettings, x: Tensor, tensors: Sequence[ConvNormTensors]) -> Tensor:
    """Run residual blocks one after the other and save one feature map for each block, or none inside of the chain.

    The chain's input and output are saved, which the layers around it usually save too, and the input of the last
    convolution of each block. The inputs of the blocks are recomputed by the last convolutions, and the inputs of the
    other layers by all convolutions but the last two. In a bottleneck the 3x3 convolution, which is most of the work,
    is not recomputed.

    The input of the last convolution is recomputed too with ``form.minimal``, unless it is that of a split layer, and
    in a block of two convolutions that is a chain by itself, whose input is no larger. Then all convolutions but the
    last one of the chain are recomputed. So it is with eight bits where the inputs of the last convolutions would take
    more memory than eight bits save of the chain's output, which is the case in long chains in half precision.

    Signs of recomputed ReLUs are saved, one bit for each element, see :mod:`.sign_bits`. No copy of a weight is saved:
    batch norms in evaluation mode are folded again, by three saved numbers for each channel. Blocks in front of the
    first one that needs a gradient save nothing.

    Args:
        settings (ChainSettings): Settings.
        x (Tensor): Input of the first block, shape (N, C, H, W).
        tensors (Sequence[ConvNormTensors]): Parameters and buffers of each layer, in the order of the settings, whose
            fields ``x`` and ``residual`` are ``None``.

    Returns:
        Tensor: Output of the last block.

    Example:
        >>> y = residual_chain(ChainSettings((BlockSettings(3),), (s1, s2, s3)), x, [t1, t2, t3])
    """
    leaves = [x]
    for t in tensors:
        leaves += t[1:5]  # as in PARAMETERS
    if torch.is_grad_enabled() and any([leaf is not None and leaf.requires_grad for leaf in leaves]):
        return apply_function(_Chain, settings, tensors, *leaves)
    with torch.no_grad(), no_autocast(x):
        layers = layers_of_pass([*zip(settings.layers, tensors, strict=True)])
        return _run(layers_of_blocks(settings.blocks, layers), x)[0]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, tensors, *leaves):
        x, needs, number = leaves[0], ctx.needs_input_grad[3:], len(PARAMETERS)
        needs = split_by_block(settings.blocks, [needs[i : i + number] for i in range(0, len(needs), number)])
        ctx.set_materialize_grads(False)
        first = 0 if ctx.needs_input_grad[2] else [any(map(any, block)) for block in needs].index(True)
        ctx.skipped, ctx.dtype = sum(map(len, needs[:first])), x.dtype
        ctx.blocks, ctx.layers, ctx.needs = settings.blocks[first:], settings.layers[ctx.skipped :], needs[first:]
        with no_autocast(x):
            if first:
                before = [*zip(settings.layers, tensors[: ctx.skipped], strict=False)]
                x = _run(layers_of_blocks(settings.blocks[:first], layers_of_pass(before)), x)[0]
            pairs = [*zip(ctx.layers, tensors[ctx.skipped :], strict=True)]
            layers, signs = layers_of_pass(pairs), SignPacker()
            y, source, saved = _run(layers_of_blocks(ctx.blocks, layers, signs), x)
            s = layers[0].s
            output = keep(cast(y, s.dtype), s.form.storage, positive=True)._replace(activation=RELU)
        if output.values is not y:
            share_map(y, output)
        norms, tensors_saved = layers[0].norms, []
        factors = norms.factors if norms.numbers else None
        ctx.structure = take_tensors_out((source, saved, output, factors, signs.finish()), tensors_saved)
        ctx.save_for_backward(*tensors_saved, *flatten_tensors(pairs))
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        tensors = iter(saved_tensors_of(ctx))
        source, saved, output, factors, signs = put_tensors_back(ctx.structure, tensors)
        saved, pairs = [*saved], [*zip(ctx.layers, unflatten_tensors([*tensors]), strict=True)]
        with no_autocast(grad):
            layers = layers_of_pass(pairs, True, factors)
            grads = [output.activation_backward(cast(grad, layers[0].s.dtype))]
            del output
            blocks = layers_of_blocks(ctx.blocks, layers, SignReader(signs))
            dx, gradients = _backward(blocks, source, saved, grads, ctx.needs, ctx.needs_input_grad[2])
            gradients = parameter_gradients(layers, gradients)
        skipped = [None] * ctx.skipped * len(PARAMETERS)
        return None, None, None if dx is None else cast(dx, ctx.dtype), *skipped, *gradients


def _run(blocks, x):
    """Run the blocks.

    Returns:
        tuple[Tensor, KeptMap | None, tuple[KeptBlock, ...]]: Output of the last block and, if a backward pass will
        follow, the saved input and what each block saves.
    """
    s, signs, given, saved = blocks[0].layers[0].s, blocks[0].signs, x, []
    x = cast(x, s.dtype)
    source = None if signs is None else keep_input(given, x, s.form.storage)
    if keeps_full_precision(s, x):
        x = given
    saves_last = signs is not None and _saves_last(blocks)
    for n, block in enumerate(blocks):
        # A split layer is not recomputed in any form: its output is smaller than the block's input.
        x, last, numbers, layers = run_block(block, x, saves_last or type(block.layers[1]) is SplitLayer)
        output = None if signs is None or n + 1 == len(blocks) else signs.add(x, 'output')
        saved.append(KeptBlock(last, numbers, output, layers))
    return x, source, tuple(saved)


def _saves_last(blocks):
    """Return whether the inputs of the last convolutions of all blocks are saved."""
    s = blocks[0].layers[0].s
    if s.form.minimal or (len(blocks) == 1 and len(blocks[0].layers) == 2):
        return False
    lasts = [block.layers[-1] for block in blocks]
    if s.form.storage == 'native' or type(blocks[0].layers[1]) is SplitLayer:
        return True
    # Bytes for each position: in eight bits a map takes one for each channel, and signs of a ReLU take an eighth of it.
    needed = sum([last.t.weight.shape[1] for last in lasts]) * 7 / 8
    return needed <= lasts[-1].t.weight.shape[0] * (s.dtype.itemsize - 1)


def _backward(blocks, source, saved, grads, needs, needs_x):
    """Run the backward pass of the blocks. What is in a list is freed as soon as it was used.

    Args:
        blocks (list[BlockLayers]): Layers of the blocks.
        source (KeptMap): Input of the first block.
        saved (list[KeptBlock]): What the blocks saved. It is emptied.
        grads (list[Tensor]): Gradient of the last ReLU's input. It is emptied.
        needs (list[list[list[bool]]]): For each layer of each block, which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, list]: Gradient of the first block's input, and the result of :func:`.block_backward` for
        each layer.
    """
    # Forwards: the inputs of all blocks. Backwards: each block is done, and its input freed.
    grad = grads.pop()
    dtype, inputs, insides, x = grad.dtype, [], [], source.load(grad.dtype)
    for block, kept_block in zip(blocks[:-1], saved[:-1], strict=True):
        # The first input is often the largest. Of one in eight bits the copy is made once more when it is used again.
        inputs.append(x if inputs or source.is_exact else None)
        inside = last = None
        if kept_block.last is None:
            inside = rerun_inside(block, kept_block, x)
            last = inside.inputs[-1]
            if block.shortcut is not None:  # its first maps may be larger than its output, and wait until the end
                inside = inside.only_last()
        x = rerun_output(block, kept_block, x, last)
        insides.append(inside)
    inputs.append(x)
    insides.append(None)
    del x
    # From here on, what a block recomputes is followed by its gradients, which need the same folded weights.
    blocks[0].layers[0].norms.keeps_folded = True
    of_layers = []
    for n in reversed(range(len(blocks))):
        x, inside = inputs.pop(), insides.pop()
        x = source.load(dtype) if x is None else x
        needed = needs[n], needs_x or n > 0
        grad, own = block_backward(blocks[n], saved.pop(), x, inside, grad, *needed)
        # x is the output of the previous block's last ReLU, so it is positive where that passes the gradient.
        grad = aten.threshold_backward.default(grad, x, 0) if n > 0 else grad
        of_layers = [*own, *of_layers]
    return grad, of_layers
