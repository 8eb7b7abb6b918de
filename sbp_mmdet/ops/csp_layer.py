"""A CSP layer, or blocks of it alone, as one autograd node, which saves one feature map for each convolution or fewer.

A layer is act(norm(conv(x))). A block is x + layers(x), or layers(x) alone. A CSP layer is

    y = final(p),   p = a * c or c,   c = cat(blocks(main(x)), short(x)),   a = hardsigmoid(fc(mean(c)))

with the mean over positions. Of each layer the node saves the convolution's output z and the statistics of its norm, or
the activation's input u if the norm has no statistics of the map. From them the backward pass recomputes u and act(u),
once each, and thereby c, p and the inputs of all blocks.

With ``form.minimal``, z is saved of dense convolutions larger than 1x1 alone, and recomputed by pointwise and depthwise
ones, which are a small part of the work. So it is with eight bits where all z in eight bits would take more memory than
these few in the precision of the layer, which is the case in half precision.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.autograd_function import (
    apply_function,
    differentiable_once,
    put_tensors_back,
    saved_tensors_of,
    take_tensors_out,
)
from .common.batch_and_group_norms import affine_of_norm, keeps_full_precision, zero_of
from .common.folded_convolution import weight_needed
from .common.kept_maps import DEEPEST, keep, keep_input
from .common.precision import cast, no_autocast
from .common.shared_maps import mark_as_made_here, share_map
from .conv_norm_act import ConvNormGradients, ConvNormSettings, ConvNormTensors
from .csp_backward import GROUP, CSPBackward, CSPSaved
from .residual_layer import flatten_tensors, layers_of_pass, run_layer

__all__ = ['CSPSettings', 'csp_layer']

_SMOOTH = 'silu', 'swish', 'gelu'


@dataclasses.dataclass(frozen=True)
class CSPSettings:
    """Settings of :func:`csp_layer`.

    Attributes:
        layers (tuple[ConvNormSettings, ...]): Settings of all layers, each with an activation and a precision: with
            ``whole`` those of short, main, the blocks and final, otherwise those of the blocks.
        blocks (tuple[int, ...]): Number of layers of each block.
        adds (tuple[bool, ...]): Whether each block adds its input to its output.
        whole (bool): Whether it is a CSP layer. Default: False.
    """

    layers: tuple[ConvNormSettings, ...]
    blocks: tuple[int, ...]
    adds: tuple[bool, ...]
    whole: bool = False


def csp_layer(
    settings: CSPSettings,
    x: Tensor,
    tensors: Sequence[ConvNormTensors],
    gate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Run a CSP layer, or blocks one after the other.

    Args:
        settings (CSPSettings): Settings.
        x (Tensor): Input, shape (N, C, H, W).
        tensors (Sequence[ConvNormTensors]): Parameters and buffers of each layer, without feature maps.
        gate (tuple[Tensor, Tensor] | None): Weight and bias of the channel attention's layer, shapes (C, C, 1, 1) and
            (C,). If ``None``, there is no attention. Default: None.

    Returns:
        Tensor: Output of the last layer, or of the last block.

    Example:
        >>> y = csp_layer(CSPSettings((short, main, first, second, final), (2,), (True,), whole=True), x, tensors)
    """
    gate = gate or (None, None)
    leaves = [x, *gate, *[tensor for t in tensors for tensor in t[1:5]]]
    if torch.is_grad_enabled():
        for leaf in leaves:
            if leaf is not None and leaf.requires_grad:
                return apply_function(_Node, settings, tensors, *leaves)
    with torch.no_grad(), no_autocast(x):
        y = _Forward(settings, layers_of_pass([*zip(settings.layers, tensors, strict=True)]), None).run(x, gate)
        mark_as_made_here(y)
        return y


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, tensors, *leaves):
        needs = ctx.needs_input_grad[5:]
        ctx.needs = [ConvNormGradients(None, *needs[i : i + 4], False) for i in range(0, len(needs), 4)]
        with no_autocast(leaves[0]):
            pairs = [*zip(settings.layers, tensors, strict=True)]
            run = _Forward(settings, layers_of_pass(pairs), ctx.needs)
            y = run.run(leaves[0], leaves[1:3])
        tensors_saved = []
        ctx.settings, ctx.dtype, ctx.shape = settings, leaves[0].dtype, leaves[0].shape
        ctx.structure = take_tensors_out(run.saved, tensors_saved)
        ctx.save_for_backward(*tensors_saved, *leaves[1:3], *flatten_tensors(pairs), *run.flatten_maps())
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        tensors = iter(saved_tensors_of(ctx))
        saved = put_tensors_back(ctx.structure, tensors)
        gate = next(tensors), next(tensors)
        with no_autocast(grad):
            run = CSPBackward(ctx.settings, saved, [*tensors], gate, ctx.shape, ctx.needs, ctx.needs_input_grad[2:5])
            dx, gradients = run.run(grad)
        return None, None, None if dx is None else cast(dx, ctx.dtype), *gradients


def _saves_output(settings, number, weight):
    """Return whether the output of a layer's convolution is saved, and not recomputed, where layers are recomputed.

    The output of the last layer is saved, because the next layer reads it. So are inputs of activations whose
    derivative jumps: a recomputed value may lie on the other side of the jump.
    """
    s = settings.layers[number]
    if number == len(settings.layers) - 1 or s.activation.name not in _SMOOTH:
        return True
    return weight.shape[2:].numel() > 1 and weight.shape[1] > 1


def _recomputes(settings, layers):
    """Return whether outputs of pointwise and depthwise convolutions are recomputed.

    All maps have one size, so their channels say how many bytes they take. In eight bits, a map takes one byte for each
    number and its steps.
    """
    form = settings.layers[0].form
    if form.minimal or form.storage == 'native':
        return form.minimal
    widths = [layer.t.weight.shape[0] for layer in layers]
    few = sum([n for i, n in enumerate(widths) if _saves_output(settings, i, layers[i].t.weight)])
    return sum(widths) >= few * settings.layers[0].dtype.itemsize


class _Forward:
    """Forward pass of :func:`csp_layer`, with what it saves.

    Args:
        settings (CSPSettings): Settings.
        layers (list[Layer]): The layers.
        needs (list | None): Which parameters of each layer need gradients. If ``None``, nothing is saved.

    Attributes:
        saved (CSPSaved): What is saved, apart from maps.
        recomputes (bool): Whether outputs of pointwise and depthwise convolutions are recomputed.
        maps (list[KeptMap | None]): The saved output of each layer's convolution, or the input of its activation.
        saved_layers (list[KeptLayer | None]): Statistics of each layer's norm.
    """

    def __init__(self, settings, layers, needs):
        self.settings, self.layers, self.needs, self.saved = settings, layers, needs, None
        self.maps, self.saved_layers = [None] * len(layers), [None] * len(layers)
        self.sums, self.recomputes = [], False

    def run(self, x: Tensor, gate) -> Tensor:
        """Return the output."""
        s, given, first = self.settings, x, self.settings.layers[0]
        x = cast(x, first.dtype)
        self.recomputes = _recomputes(s, self.layers)
        source = keep_input(given, x, first.form.storage) if self._needs_source() else None
        if keeps_full_precision(first, x):
            x = given
        if not s.whole:
            y = self._blocks(x, 0)
            self.saved = CSPSaved(source, tuple(self.sums))
            if self.needs is not None:
                self._share_output(y, source)
            return y
        short = self._layer(0, x)
        both = torch.cat((self._blocks(self._layer(1, x), 2), short), 1)
        del short
        pooled = inside = None
        if gate[0] is not None:
            pooled = cast(both.mean((2, 3), keepdim=True), first.dtype)
            inside = torch.conv2d(pooled, *[cast(p, first.dtype) for p in gate])
            both = both * F.hardsigmoid(inside)
        self.saved = CSPSaved(source, tuple(self.sums), pooled, inside)
        y = self._layer(len(self.layers) - 1, both)
        if self.needs is not None:
            self._share_output(y, source)
        return y

    def _needs_source(self):
        """Return whether the backward pass reads the values of the layer's input."""
        s = self.settings
        if self.needs is None or self.recomputes or not s.whole:
            return self.needs is not None
        return any([weight_needed(*pair) for pair in zip(s.layers[:2], self.needs[:2], strict=True)])

    def _layer(self, i, x):
        """Run a layer and save what its backward pass needs: the output of the convolution, or of the norm."""
        layer = self.layers[i]
        act, storage = layer.s.activation, layer.s.form.storage
        z, u, self.saved_layers[i] = run_layer(layer, x)
        if self.needs is None or (self.recomputes and not _saves_output(self.settings, i, layer.t.weight)):
            return act(u, inplace=True)
        if self.saved_layers[i] is None:
            if act.name == 'relu':  # its output has the signs
                u = act(u, inplace=True)
                self.maps[i] = keep(u, storage, positive=True)
                return u
            self.maps[i] = keep(u, storage, 0 if act.jumps_at_zero else None)
            return act(u)
        threshold = None
        if storage != 'native' and act.jumps_at_zero:
            scale, shift = affine_of_norm(layer.s, layer.t, self.saved_layers[i].statistics, z.shape[1])
            threshold = zero_of(scale, shift)
        self.maps[i] = keep(z, storage, threshold)
        return act(u, inplace=True)

    def _blocks(self, x, i):
        """Run the blocks, whose first layer has the index ``i``, and save the input of each further group of blocks."""
        for n, (number, adds) in enumerate(zip(self.settings.blocks, self.settings.adds, strict=True)):
            if n and n % GROUP == 0 and self.needs is not None:
                # The output of a block without a shortcut is that of its last layer.
                is_saved = not self.settings.adds[n - 1] and self.maps[i - 1] is not None
                s = self.layers[i].s
                self.sums.append(None if is_saved else keep(cast(x, s.dtype), s.form.storage))
            given = x
            for _ in range(number):
                x = self._layer(i, x)
                i += 1
            if adds:
                free = self.maps[i - 1] is None or self.maps[i - 1].values is not x
                x = x.add_(given) if free else x + given
        return x

    def _share_output(self, y, source):
        """Share the saved form of the output with the next layer, if it adds up at most ``DEEPEST`` maps."""
        map, i = self._output_map(len(self.layers) - 1), len(self.layers) - 1
        adds, sizes = [*self.settings.adds], [*self.settings.blocks]
        terms = [map]
        while not self.settings.whole and adds.pop():
            i -= sizes.pop()
            saved = len(sizes) % GROUP == 0 and (self.sums[-1] if sizes else source)
            terms.append(saved or self._output_map(i))
            if saved:
                break
        if None in terms or sum([term.depth for term in terms]) > DEEPEST:
            return
        map = terms.pop()
        while terms:
            map = terms.pop()._replace(shortcut=map)
        if getattr(map, 'values', None) is not y:
            share_map(y, map)

    def _output_map(self, i):
        """Return the saved form of a layer's output, or ``None`` if it is recomputed."""
        map, layer, saved = self.maps[i], self.layers[i], self.saved_layers[i]
        if map is None or saved is None:
            return map and map._replace(activation=layer.s.activation)
        scale, shift = affine_of_norm(layer.s, layer.t, saved.statistics, map.width)
        return map._replace(scale=scale, shift=shift, activation=layer.s.activation)

    def flatten_maps(self):
        """Return the tensors of the saved maps and statistics of all layers, for :class:`.CSPBackward`."""
        flat = []
        for map, saved in zip(self.maps, self.saved_layers, strict=True):
            flat += (None, None, None) if map is None else map[:3]
            flat += (None, None, None) if saved is None else (*saved.statistics, saved.extra)
        return flat
