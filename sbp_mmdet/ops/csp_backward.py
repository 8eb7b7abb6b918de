"""Backward pass of :mod:`.csp_layer`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common.batch_and_group_norms import Statistics
from .common.fixed_norms import NO_GRADIENTS
from .common.kept_maps import KeptCat, KeptMap, affine
from .common.precision import cast
from .residual_layer import (
    NUM_TENSORS,
    KeptLayer,
    affines_of_norms,
    layer_backward,
    layers_of_pass,
    parameter_gradients,
    renormalise,
    rerun_layer,
    unflatten_tensors,
)

__all__ = ['GROUP', 'CSPBackward', 'CSPSaved']

GROUP = 4  # blocks whose inputs exist together in the backward pass; their output is saved

aten = torch.ops.aten


class CSPSaved(NamedTuple):
    """Tensors saved for the backward pass, apart from parameters.

    Attributes:
        source (KeptMap | KeptCat | None): Input of the first layers. ``None`` if nothing needs it.
        sums (tuple[KeptMap | None, ...]): Outputs of every fourth block, apart from the last block. ``None`` where the
            block adds nothing and the map of its last layer is saved.
        pooled, gate (Tensor | None): Mean of the concatenated maps, and input of the hard sigmoid, shape (N, C, 1, 1).
    """

    source: KeptMap | KeptCat | None
    sums: tuple[KeptMap | None, ...]
    pooled: Tensor | None = None
    gate: Tensor | None = None


def _unflatten_maps(flat):
    """Return the maps and the statistics of each layer, given the list of :meth:`._Forward.flatten_maps`."""
    maps, saved_layers = [], []
    for i in range(0, len(flat), 6):
        maps.append(None if flat[i] is None else KeptMap(*flat[i : i + 3]))
        mean, rstd, extra = flat[i + 3 : i + 6]
        saved_layers.append(None if mean is None else KeptLayer(Statistics(mean, rstd), extra))
    return maps, saved_layers


class CSPBackward:
    """One backward pass of :func:`.csp_layer`.

    Args:
        settings (CSPSettings): Settings.
        saved (CSPSaved): What was saved.
        flat (list): Results of :func:`.flatten_tensors` and :meth:`._Forward.flatten_maps`, one after the other.
        gate (tuple): Weight and bias of the channel attention's layer.
        shape (torch.Size): Shape of the input.
        needs (list): Which parameters of each layer need gradients.
        others (Sequence[bool]): Whether the input and the parameters of the attention's layer need gradients.
    """

    def __init__(self, settings, saved, flat, gate, shape, needs, others):
        number = len(settings.layers) * NUM_TENSORS
        tensors = unflatten_tensors(flat[:number])
        self.maps, self.saved_layers = _unflatten_maps(flat[number:])
        self.settings, self.saved, self.gate, self.shape = settings, saved, gate, shape
        self.layers = layers_of_pass([*zip(settings.layers, tensors, strict=True)], backward=True)
        self.dtype, self.needs, self.needs_gate = settings.layers[0].dtype, needs, others[1:]
        self.found = [NO_GRADIENTS] * len(needs)
        self.affines = None  # of all norms, if they are needed
        # Whether the input of each layer needs a gradient.
        self.before, first, needed = [], 2 if settings.whole else 1, others[0]
        for i, own in enumerate(needs):
            self.before.append(others[0] if i < first else needed)
            needed = needed or any(own[1:5])
        if any(self.needs_gate):
            self.before[-1] = True

    def run(self, grad: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input and, in their order, of all parameters."""
        grad, dgate = cast(grad, self.dtype), (None, None)
        if self.settings.whole:
            dx, dgate = self._whole_backward(grad)
        else:
            dx = self._blocks_backward(None, grad)
        return dx, [*dgate, *parameter_gradients(self.layers, self.found)]

    def _load_source(self, like):
        """Return the input of the first layers, or one number for all of it if its values are not read."""
        source = self.saved.source
        return like.new_empty(1).expand(self.shape) if source is None else source.load(self.dtype)

    def _whole_backward(self, grad):
        last, dgate = len(self.layers) - 1, (None, None)
        missing = [i for i in (0, 1) if self.maps[i] is None]
        x = self._load_source(grad) if missing else None
        for i in missing:
            self._recompute(i, x)
        del x
        last_groups, out = self._block_inputs(len(self.saved.sums), grad)
        whole = torch.cat((self._layer_output(last - 1) if out is None else out, self._layer_output(0)), 1)
        del out
        gate = None if self.saved.gate is None else F.hardsigmoid(self.saved.gate)
        grad = self._activation_backward(last, grad)
        grad = self._layer_backward(last, whole if gate is None else whole * gate, grad)
        if gate is not None and grad is not None:
            grad, dgate = self._attention_backward(whole, gate, grad)
        del whole
        if grad is None:
            return None, dgate
        width = self.layers[0].t.weight.shape[0]
        grad, past = grad.split_with_sizes((grad.shape[1] - width, width), 1)
        dx, x = self._blocks_backward(last_groups, grad), self._load_source(grad)
        if dx is not None:
            dx = self._layer_backward(1, x, self._activation_backward(1, dx))
        past = self._layer_backward(0, x, self._activation_backward(0, past))
        return dx if past is None else past if dx is None else dx.add_(past), dgate

    def _attention_backward(self, x, gate, grad):
        """Compute the gradients of the attention's input x and parameters from that of x * gate."""
        weight = self.gate[0]
        dgate = aten.hardsigmoid_backward.default((grad * x).sum((2, 3), keepdim=True), self.saved.gate)
        geometry = (1, 1), (0, 0), (1, 1), False, (0, 0), 1
        dpooled, *gradients = aten.convolution_backward.default(
            dgate, self.saved.pooled, cast(weight, dgate.dtype), weight.shape[:1], *geometry, (True, *self.needs_gate)
        )
        gradients = [None if g is None else cast(g, p.dtype) for g, p in zip(gradients, self.gate, strict=True)]
        return grad.mul_(gate).add_(dpooled, alpha=1 / (x.shape[2] * x.shape[3])), gradients

    def _blocks(self):
        """Return (start, stop, adds) of each block: the range of its layers, and whether it adds its input."""
        blocks, start = [], 2 if self.settings.whole else 0
        for layers, adds in zip(self.settings.blocks, self.settings.adds, strict=True):
            blocks.append((start, start + layers, adds))
            start += layers
        return blocks

    def _block_inputs(self, group, like):
        """Return the inputs of a group of blocks, and the output of the last block if there is a CSP layer around it.

        ``None`` stands for the output of the layer in front, which is recomputed when it is needed. Outputs of
        convolutions that were not saved are recomputed, and stay until their gradients are there.

        Args:
            group (int): Number of the group. All but the first begin at a saved sum.
            like (Tensor): Any tensor of the same device.
        """
        x, inputs, blocks = None, [], self._blocks()
        if group:
            saved = self.saved.sums[group - 1]
            x = saved and saved.load(self.dtype)
        elif not self.settings.whole:
            x = self._load_source(like)
        for start, stop, adds in blocks[group * GROUP : (group + 1) * GROUP]:
            inputs.append(x)
            for i in range(start, stop):
                if self.maps[i] is None:
                    self._recompute(i, self._layer_output(i - 1) if i > start or x is None else x)
            within = len(inputs) < GROUP and stop < len(self.layers)
            if not adds:
                x = None
            elif within or (self.settings.whole and stop == len(self.layers) - 1):
                inputs[-1] = past = self._layer_output(start - 1) if x is None else x
                out = self._layer_output(stop - 1)
                x = out.add_(past) if self._is_new(stop - 1) else out + past
        return inputs, x

    def _blocks_backward(self, inputs, grad):
        """Return the gradient of the first block's input, or ``None`` if it is not needed.

        Args:
            inputs (list[Tensor | None] | None): Inputs of the last group, see :meth:`_block_inputs`. If ``None``, they
                are recomputed.
            grad (Tensor): Gradient of the last block's output.
        """
        blocks = self._blocks()
        for n in reversed(range(len(blocks))):
            start, stop, adds = blocks[n]
            inputs = inputs or self._block_inputs(n // GROUP, grad)[0]
            given, past = inputs.pop(), grad
            given = self._layer_output(start - 1) if given is None else given
            grad = self._activation_backward(stop - 1, grad)
            for i in reversed(range(start, stop)):
                below = self._activation_input(i - 1) if i > start else None
                source = given if below is None else self.layers[i - 1].s.activation(below)
                grad = self._layer_backward(i, source, grad)
                if grad is None:
                    return None
                if below is not None:
                    grad = self.layers[i - 1].s.activation.backward(grad, below)
            grad = grad.add_(past) if adds else grad
        return grad

    def _activation_backward(self, i, grad):
        return self.layers[i].s.activation.backward(grad, self._activation_input(i))

    def _layer_backward(self, i, x, grad):
        """Compute the gradients of convolution and norm; return that of the input x, or ``None`` if it is not needed.

        This is the last use of the layer's saved map, which is freed.

        Args:
            i (int): Number of the layer.
            x (Tensor): Input of the layer.
            grad (Tensor): Gradient of the norm's output.
        """
        needs, saved = self.needs[i][1:5], self.saved_layers[i]
        if not (self.before[i] or any(needs)):
            return None
        z = None if saved is None else self.maps[i].before_norm(self.dtype)
        self.maps[i] = None
        dx, self.found[i] = layer_backward(self.layers[i], x, z, saved, grad, needs, self.before[i])
        return dx

    def _recompute(self, i, x):
        """Recompute the output of a layer's convolution."""
        z, u = rerun_layer(self.layers[i], x, self.saved_layers[i])
        self.maps[i] = KeptMap(u if self.saved_layers[i] is None else z)

    def _activation_input(self, i):
        """Return the input of a layer's activation, which must not be written to unless :meth:`_is_new`."""
        map, layer, saved = self.maps[i], self.layers[i], self.saved_layers[i]
        if map.unit is None and saved is None:
            return cast(map.values, self.dtype)
        if map.unit is None and map.values.is_cuda and layer.s.norm == 'batch':
            return renormalise(layer, saved, map.values)
        if self.affines is None:
            self.affines = affines_of_norms(self.layers, self.saved_layers)
        norm = self.affines[i]
        if map.unit is None:
            return affine(map.values, *norm, self.dtype)
        map = map if norm is None else map._replace(scale=norm[0], shift=norm[1])
        return map.before_activation(self.dtype)

    def _is_new(self, i):
        """Return whether :meth:`_activation_input` returns a new tensor for a layer, not a saved one."""
        return self.saved_layers[i] is not None or self.maps[i].unit is not None

    def _layer_output(self, i):
        """Return the output of a layer, which may be written to if :meth:`_is_new`."""
        return self.layers[i].s.activation(self._activation_input(i), inplace=self._is_new(i))
