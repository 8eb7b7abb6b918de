"""Feature map whose channels are multiplied with a number each, as channel attention does.

    y = g x,   dx = g dy,   dg = sum of x dy over the positions

x is what the layer in front saves, and g is small, so the next layer recomputes y from both and saves no map.
"""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from .common.autograd_function import Form, Operation, gradients_of
from .common.kept_maps import KeptProduct, keep_input
from .common.precision import accumulator, cast
from .common.shared_maps import share_map

__all__ = ['GateSettings', 'GateTensors', 'gate_channels']


@dataclasses.dataclass(frozen=True)
class GateSettings:
    """Settings of :func:`gate_channels`.

    Attributes:
        form (Form): How the operation is computed and what it saves. Default: ``Form()``.
    """

    form: Form = Form()


class GateTensors(NamedTuple):
    """Inputs of :func:`gate_channels`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
        gate (Tensor): Number of each channel, shape (N, C, 1, 1).
    """

    x: Tensor
    gate: Tensor


GateGradients = gradients_of(GateTensors)


class GateSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        product (KeptProduct): The output.
        dtypes (tuple[torch.dtype, torch.dtype]): Precision of ``x`` and ``gate``.
    """

    product: KeptProduct
    dtypes: tuple


def gate_channels(settings: GateSettings, tensors: GateTensors) -> Tensor:
    """Compute ``x * gate``.

    Args:
        settings (GateSettings): Settings.
        tensors (GateTensors): Inputs.

    Returns:
        Tensor: Shape (N, C, H, W).
    """
    if settings.form.implementation == 'reference':
        return tensors.x * tensors.gate
    return _gate(settings, tensors)


def _forward(settings, tensors, needs):
    x, gate = tensors
    y = x * gate
    if not any(needs):
        return y, None
    product = KeptProduct(keep_input(x, x, settings.form.storage), gate)
    share_map(y, product)
    return y, GateSaved(product, (x.dtype, gate.dtype))


def _backward(settings, saved, grad, needs):
    source, gate = saved.product
    x, dtypes = source.load(saved.dtypes[0]), saved.dtypes
    dx = cast(grad * gate, dtypes[0]) if needs.x else None
    if not needs.gate:
        return GateGradients(dx)
    return GateGradients(dx, cast((grad * x).sum((2, 3), keepdim=True, dtype=accumulator(grad)), dtypes[1]))


_gate = Operation('ChannelGate', _forward, _backward, GateGradients)
