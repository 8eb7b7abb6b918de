"""A layer of a residual block, convolution and norm, in a chain: see :mod:`.residual_block`."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .common.batch_and_group_norms import Statistics, affine_of_norm, compute_shift, normalise, normalise_backward
from .common.fixed_norms import Factors, FixedGradients, FixedNorms, gradients_of_fixed
from .common.folded_convolution import convolve, convolve_backward
from .common.kept_maps import affine
from .common.precision import accumulator, cast, cast_all
from .conv_norm_act import ConvNormGradients, ConvNormSettings, ConvNormTensors

__all__ = [
    'NUM_TENSORS',
    'PARAMETERS',
    'KeptLayer',
    'Layer',
    'affines_of_norms',
    'flatten_tensors',
    'layer_backward',
    'layers_of_pass',
    'parameter_gradients',
    'renormalise',
    'rerun_layer',
    'run_layer',
    'unflatten_tensors',
]


class KeptLayer(NamedTuple):
    """Statistics that a norm is recomputed with. A layer whose norm has no statistics of the map saves ``None``.

    Attributes:
        statistics (Statistics): Mean and reciprocal deviation of a batch norm in training mode or a group norm.
        extra (Tensor | None): What else the norm's backward pass needs, see :func:`.normalise`.
    """

    statistics: Statistics
    extra: Tensor | None


class Layer(NamedTuple):
    """A layer in one forward or backward pass.

    Attributes:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters and buffers.
        norms (FixedNorms): The fixed norms of all layers of the pass.
        number (int): Number of the layer among them.
        split_factor (tuple[Tensor, Tensor] | None): In the backward pass in fp16, the factor of its fixed norm, see
            :meth:`.FixedNorms.split_factors`.
    """

    s: ConvNormSettings
    t: ConvNormTensors
    norms: FixedNorms
    number: int
    split_factor: tuple[Tensor, Tensor] | None

    def convolve(self, x: Tensor) -> Tensor:
        """Run the convolution, and the norm if it is fixed.

        Args:
            x (Tensor): Input of the layer, in any precision.
        """
        s, t, norms, number, _ = self
        return convolve(s, t, x if x.dtype is s.dtype else x.to(s.dtype), norms, number)


NUM_TENSORS = len(ConvNormTensors._fields) - 2  # of a layer, apart from maps


def flatten_tensors(pairs: Sequence[tuple[ConvNormSettings, ConvNormTensors]]) -> list[Tensor | None]:
    """Return the tensors that the backward pass reads, apart from maps: :data:`NUM_TENSORS` for each layer.

    Running statistics that it does not read are ``None``: the next forward pass updates them in place, which autograd
    would report for a saved tensor.

    Args:
        pairs (Sequence[tuple[ConvNormSettings, ConvNormTensors]]): Settings and tensors of each layer.
    """
    flat = []
    for s, t in pairs:
        flat += t[1:-1] if s.norm == 'fixed' else (*t[1:5], None, None)
    return flat


def unflatten_tensors(flat: Sequence[Tensor | None]) -> list[ConvNormTensors]:
    """Reverse :func:`flatten_tensors`.

    Args:
        flat (Sequence[Tensor | None]): Its result.
    """
    return [ConvNormTensors(None, *flat[i : i + NUM_TENSORS]) for i in range(0, len(flat), NUM_TENSORS)]


def layers_of_pass(
    pairs: Sequence[tuple[ConvNormSettings, ConvNormTensors]], backward: bool = False, factors: Factors | None = None
) -> list[Layer]:
    """Return the layers of a forward or backward pass.

    Args:
        pairs (Sequence[tuple[ConvNormSettings, ConvNormTensors]]): Settings and tensors of each layer.
        backward (bool): Whether it is a backward pass. Default: False.
        factors (Factors | None): Numbers of the fixed norms, if they are known. Default: None.
    """
    norms, split, dtype = FixedNorms(pairs, factors), {}, pairs[0][0].dtype
    if backward and dtype is torch.float16 and norms.numbers:
        split = norms.split_factors()
    if not backward and dtype is not pairs[0][1].weight.dtype:
        # One launch for all casts. In the backward pass, where memory peaks, each layer's weight is cast as it is used.
        weights = cast_all([t.weight for _, t in pairs], dtype)
        pairs = [  # a weight is standardised before it is cast
            (s, t if s.standardise is not None else t._replace(weight=weight))
            for (s, t), weight in zip(pairs, weights, strict=True)
        ]
    return [Layer(s, t, norms, i, split[i] if i in split else None) for i, (s, t) in enumerate(pairs)]


def run_layer(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, KeptLayer | None]:
    """Run convolution and norm.

    Args:
        layer (Layer): The layer.
        x (Tensor): Input of the layer, shape (N, C, H, W).

    Returns:
        tuple[Tensor, Tensor, KeptLayer | None]: The convolution's output, that of the norm in the norm's precision, and
        what the layer needs to run again.
    """
    s, t, z = layer.s, layer.t, layer.convolve(x)
    if s.norm in ('none', 'fixed'):
        return z, z, None
    u, statistics, extra = normalise(s, t, z)
    return z, u, KeptLayer(statistics, extra)


def rerun_layer(layer: Layer, x: Tensor, saved: KeptLayer | None) -> tuple[Tensor, Tensor]:
    """Recompute convolution and norm with the saved statistics, and return the outputs of both.

    Args:
        layer (Layer): The layer.
        x (Tensor): Input of the layer, shape (N, C, H, W).
        saved (KeptLayer | None): What the layer saved.
    """
    z = layer.convolve(x)
    if saved is None:
        return z, z
    return z, renormalise(layer, saved, z)


def layer_backward(
    layer: Layer, x: Tensor, z: Tensor | None, saved: KeptLayer | None, grad: Tensor, needs: list[bool], needs_x: bool
) -> tuple[Tensor | None, FixedGradients | dict]:
    """Compute the gradients of a layer.

    Args:
        layer (Layer): The layer.
        x (Tensor): The layer's input.
        z (Tensor | None): Output of the convolution, which batch statistics and group norm need.
        saved (KeptLayer | None): What the layer saved.
        grad (Tensor): Gradient of the norm's output.
        needs (list[bool]): Which parameters need gradients.
        needs_x (bool): Whether the input needs one.

    Returns:
        tuple[Tensor | None, FixedGradients | dict]: See :func:`.convolve_backward`.
    """
    s, t, norms, number, split_factor = layer
    needs = ConvNormGradients(needs_x, *needs, False)
    if saved is None:
        return convolve_backward(s, t, x, grad, needs, norms if s.norm == 'fixed' else None, number, split_factor)
    grad, weight, bias = normalise_backward(s, t, saved.statistics, saved.extra, z, grad, needs)
    dx, gradients = convolve_backward(s, t, x, grad, needs)
    return dx, dict(gradients, norm_weight=weight, norm_bias=bias)


# Parameters of a layer: weight, bias, norm_weight, norm_bias.
PARAMETERS = ConvNormGradients._fields[1:-1]
_in_order = operator.itemgetter(*PARAMETERS)


def parameter_gradients(layers: list[Layer], found: list[FixedGradients | dict]) -> list[Tensor | None]:
    """Return the gradients of weight, bias, norm weight and norm bias of each layer, one layer after the other.

    Args:
        layers (list[Layer]): The layers.
        found (list[FixedGradients | dict]): What :func:`layer_backward` has found for each layer; changed in place.
    """
    fixed = [i for i, own in enumerate(found) if isinstance(own, FixedGradients)]
    if fixed:
        gradients = gradients_of_fixed([found[i] for i in fixed], layers[0].norms)
        for i, own in zip(fixed, gradients, strict=True):
            found[i] = own
    return [gradient for own in found for gradient in _in_order(own)]


def renormalise(layer: Layer, saved: KeptLayer, z: Tensor) -> Tensor:
    """Run a norm with statistics of the map again.

    Args:
        layer (Layer): The layer.
        saved (KeptLayer): What the layer saved.
        z (Tensor): Output of the convolution.
    """
    s, t = layer.s, layer.t
    if z.is_cuda and s.norm == 'batch':  # one pass over the map, whatever its precision
        return torch.batch_norm_elemt(z, t.norm_weight, t.norm_bias, *saved.statistics, s.eps)
    return affine(z, *affine_of_norm(s, t, saved.statistics, z.shape[1]), z.dtype)


def affines_of_norms(layers: list[Layer], saved: list[KeptLayer | None]) -> list[tuple[Tensor, Tensor] | None]:
    """Return :func:`.affine_of_norm` of each layer, ``None`` if its norm has no statistics of the map.

    Args:
        layers (list[Layer]): The layers.
        saved (list[KeptLayer | None]): What each layer saved.
    """
    affines, batch = [None] * len(layers), []
    for i, (layer, own) in enumerate(zip(layers, saved, strict=True)):
        if own is None:
            continue
        if layer.s.norm == 'group':
            affines[i] = affine_of_norm(layer.s, layer.t, own.statistics, layer.t.weight.shape[0])
        else:
            batch.append(i)
    if batch:  # numbers for each channel of all layers in the same few calls
        statistics, tensors = ([of[i] for i in batch] for of in (saved, layers))
        mean, rstd = (torch.cat([x.statistics[n] for x in statistics]) for n in (0, 1))
        scale = cast(rstd, accumulator(rstd)) * torch.cat([x.t.norm_weight for x in tensors])
        shift = compute_shift(torch.cat([x.t.norm_bias for x in tensors]), cast(mean, accumulator(mean)), scale)
        sizes = [x.statistics.mean.shape[0] for x in statistics]
        parts = (torch.split_with_sizes(x.view(1, -1, 1, 1), sizes, 1) for x in (scale, shift))
        for i, *numbers in zip(batch, *parts, strict=True):
            affines[i] = numbers
    return affines
