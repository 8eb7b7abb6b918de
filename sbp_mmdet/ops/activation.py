"""Activation of a feature map by itself, which saves its input; the layer behind recomputes the output from it."""

import dataclasses
from typing import NamedTuple

from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import Form, Operation, gradients_of
from .common.handed_maps import hand_on, handed_on
from .common.kept_maps import KeptMap, keep

__all__ = ['ActivationSettings', 'ActivationTensors', 'activate']


@dataclasses.dataclass(frozen=True)
class ActivationSettings:
    """Settings of :func:`activate`.

    Attributes:
        form (Form): How the operation is computed and what it saves.
        activation (Activation): The activation.
    """

    form: Form
    activation: Activation


class ActivationTensors(NamedTuple):
    """Input of :func:`activate`.

    Attributes:
        x (Tensor): Feature map, shape (N, C, H, W).
    """

    x: Tensor


ActivationGradients = gradients_of(ActivationTensors)


class ActivationSaved(NamedTuple):
    """Tensors saved for the backward pass.

    Attributes:
        map (KeptMap): The output, in a form from which the input can be computed.
    """

    map: KeptMap


def activate(settings: ActivationSettings, tensors: ActivationTensors) -> Tensor:
    """Compute ``activation(x)``.

    Args:
        settings (ActivationSettings): Settings.
        tensors (ActivationTensors): Input.

    Returns:
        Tensor: Shape (N, C, H, W).
    """
    if settings.form.implementation == 'reference':
        return settings.activation(tensors.x)
    return _activate(settings, tensors)


def _forward(settings, tensors, needs):
    x, act, storage = tensors.x, settings.activation, settings.form.storage
    y = act(x)
    if not needs.x:
        return y, None
    map = handed_on(x)
    linear = isinstance(map, KeptMap) and map.activation is None and map.shortcut is None
    if not linear or (storage == 'native' and not map.is_exact):
        map = keep(x, storage, threshold=0 if act.jumps_at_zero else None)
    map = map._replace(activation=act)
    hand_on(y, map)
    return y, ActivationSaved(map)


def _backward(settings, saved, grad, needs):
    return ActivationGradients(saved.map.activation_backward(grad))


_activate = Operation('Activation', _forward, _backward, ActivationGradients)
