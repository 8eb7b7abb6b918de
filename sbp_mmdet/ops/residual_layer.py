"""A layer of a residual block, convolution and norm, in a chain: see :mod:`.residual_block`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .common.map_norms import (
    Factors,
    FixedGradients,
    Statistics,
    affine_of_norm,
    factors_of_fixed,
    normalise,
    normalise_backward,
    shifts_of_fixed,
)
from .common.precision import cast
from .conv_norm_act import ConvNormGradients, ConvNormSettings, ConvNormTensors, convolve, convolve_backward, folds

__all__ = ['FixedNorms', 'KeptLayer', 'Layer', 'layer_backward', 'rerun_layer', 'run_layer']


class KeptLayer(NamedTuple):
    """Statistics that a layer is recomputed with.

    Attributes:
        statistics (Statistics | None): Mean and reciprocal deviation of a batch norm in training mode or a group norm.
        count (Tensor | None): Number of positions that the statistics of a SyncBN are computed over.
    """

    statistics: Statistics | None
    count: Tensor | None


class Layer(NamedTuple):
    """A layer in one forward or backward pass.

    Attributes:
        s (ConvNormSettings): Settings.
        t (ConvNormTensors): Parameters and buffers.
        norms (FixedNorms): The fixed norms of all layers of the pass.
        number (int): Number of the layer among them.
        parts (tuple[Tensor, Tensor] | None): Those of the factors of its fixed norm, see :func:`.parts_in_half`.
    """

    s: ConvNormSettings
    t: ConvNormTensors
    norms: 'FixedNorms'
    number: int
    parts: tuple[Tensor, Tensor] | None

    def convolve(self, x: Tensor) -> Tensor:
        """Run the convolution, and the norm if it is fixed.

        Args:
            x (Tensor): Input of the layer.
        """
        s, t, norms, number, _ = self
        return convolve(s, t, x, *norms.folded(number)) if folds(s, t, x) else convolve(s, t, x)


class FixedNorms:
    """Factors and shifts of the fixed norms of all layers in a pass, computed together when the first layer asks.

    Args:
        layers (list[tuple]): Settings and tensors of each layer.
    """

    def __init__(self, layers: list[tuple]):
        self._layers, self._factors, self._shifts = layers, None, None

    def factors(self, number: int) -> Factors | None:
        """Return the factors of a layer, ``None`` if its norm is of another kind.

        Args:
            number (int): Number of the layer.
        """
        if self._factors is None:
            self._factors = factors_of_fixed(self._layers)
        return self._factors[number]

    def folded(self, number: int) -> tuple[Tensor, Tensor]:
        """Return what the norm of a layer multiplies the convolution's weight by, and the bias of that convolution.

        Args:
            number (int): Number of the layer.
        """
        column = self.factors(number).column
        if self._shifts is None:
            self._shifts = shifts_of_fixed(self._layers, self._factors)
        return column, self._shifts[number]


_NOTHING = KeptLayer(None, None)


def run_layer(member: Layer, x: Tensor) -> tuple[Tensor, Tensor, KeptLayer]:
    """Run convolution and norm.

    Args:
        member (Layer): The layer.
        x (Tensor): Input of the layer, shape (N, C, H, W).

    Returns:
        tuple[Tensor, Tensor, KeptLayer]: The convolution's output, that of the norm, and what the layer needs to run
        again.
    """
    s, t, z = member.s, member.t, member.convolve(x)
    if s.norm in ('none', 'fixed'):
        return z, z, _NOTHING
    u, statistics, count = normalise(s, t, z)
    return z, cast(u, z.dtype), KeptLayer(statistics, count)


def rerun_layer(member: Layer, x: Tensor, layer: KeptLayer) -> tuple[Tensor, Tensor]:
    """Recompute convolution and norm with the saved statistics, and return the outputs of both.

    Args:
        member (Layer): The layer.
        x (Tensor): Input of the layer, shape (N, C, H, W).
        layer (KeptLayer): What the layer saved.
    """
    s, t, z = member.s, member.t, member.convolve(x)
    if layer.statistics is None:
        return z, z
    scale, shift = affine_of_norm(s, t, layer.statistics, z.shape[1])
    return z, cast(torch.addcmul(shift, z, scale), z.dtype)


def layer_backward(
    member: Layer, x: Tensor, z: Tensor | None, layer: KeptLayer, grad: Tensor, needs: list[bool], needs_x: bool
) -> tuple[Tensor | None, FixedGradients | dict]:
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
    s, t, norms, number, parts = member
    needs = ConvNormGradients(needs_x, *needs, False)
    if layer.statistics is None:
        return convolve_backward(s, t, norms.factors(number), parts, x, grad, needs)
    grad, weight, bias = normalise_backward(s, t, layer.statistics, layer.count, z, grad, needs)
    dx, found = convolve_backward(s, t, None, None, x, grad, needs)
    return dx, dict(found, norm_weight=weight, norm_bias=bias)
