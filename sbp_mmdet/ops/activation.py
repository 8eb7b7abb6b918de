"""Activation of a feature map by itself, which saves its input; the next layer recomputes the output from it."""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from .common.activations import Activation
from .common.autograd_function import (
    Form,
    Operation,
    apply_function,
    differentiable_once,
    gradients_of,
    put_tensors_back,
    saved_tensors_of,
    take_tensors_out,
)
from .common.kept_maps import KeptMap, keep
from .common.shared_maps import find_shared_map, share_map

__all__ = ['ActivationSettings', 'ActivationTensors', 'activate']


@dataclasses.dataclass(frozen=True)
class ActivationSettings:
    """Settings of :func:`activate`.

    Attributes:
        form (Form): How the operation is computed and what it saves.
        activation (Activation): The activation.
        inplace (bool): Whether the output is written to the input, which others may read afterwards. Default: False.
    """

    form: Form
    activation: Activation
    inplace: bool = False


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
        return settings.activation(tensors.x, settings.inplace)
    if not settings.inplace:
        return _activate(settings, tensors)
    saved = []
    y = apply_function(_InPlace, settings, saved, tensors.x)
    if saved:
        share_map(y, *saved)  # not before autograd has counted the write
    return y


def _forward(settings, tensors, needs):
    x, act = tensors.x, settings.activation
    y = act(x)
    if not needs.x:
        return y, None
    map = _saved_form(settings, x)
    share_map(y, map)
    return y, ActivationSaved(map)


def _saved_form(settings, x):
    """Return the saved form of the output. Where the input will be written to, it does not hold the input itself."""
    act, storage, map = settings.activation, settings.form.storage, find_shared_map(x)
    linear = isinstance(map, KeptMap) and map.activation is None and map.shortcut is None
    if not linear or (storage == 'native' and not map.is_exact) or (settings.inplace and _holds(map, x)):
        source = x.clone() if settings.inplace and storage == 'native' else x
        map = keep(source, storage, threshold=0 if act.jumps_at_zero else None)
    return map._replace(activation=act)


def _holds(map, x):
    tensors = []
    take_tensors_out(map, tensors)
    return any(tensor.untyped_storage()._cdata == x.untyped_storage()._cdata for tensor in tensors)


class _InPlace(torch.autograd.Function):
    """The activation as an operation that writes to its input."""

    @staticmethod
    def forward(ctx, settings, saved, x):
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[2]:
            saved.append(_saved_form(settings, x))
            tensors = []
            ctx.structure = take_tensors_out(saved[0], tensors)
            ctx.save_for_backward(*tensors)
        return settings.activation(x, inplace=True)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        map = put_tensors_back(ctx.structure, iter(saved_tensors_of(ctx)))
        return None, None, map.activation_backward(grad)


def _backward(settings, saved, grad, needs):
    return ActivationGradients(saved.map.activation_backward(grad))


_activate = Operation('Activation', _forward, _backward, ActivationGradients)
