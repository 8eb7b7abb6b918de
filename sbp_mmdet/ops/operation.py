"""One thin way to make an autograd function of a pair of plain functions, with every tensor by name.

An operation is written as

- a frozen dataclass of settings, which the pair shares;
- ``forward(settings, tensors, needs) -> output, saved`` and ``backward(settings, saved, grad, needs) -> gradients``;
- two NamedTuples: ``tensors`` and ``saved``, whose fields may be NamedTuples of tensors themselves; and a third,
  ``gradients``, with the tensors that get a gradient (:func:`gradients_of`); ``needs`` holds a bool for each of these.

Both functions run without gradients and outside of autocast. They hold no Python state, so that they can be compiled.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .compiled import compiling
from .precision import no_autocast

__all__ = ['OnHost', 'Operation', 'check_form', 'gradients_of']


class OnHost:
    """A tensor that the backward pass reads numbers from on the CPU: it is kept as it is, past all hooks on saved
    tensors, and counts for nothing on the device.

    Args:
        tensor (Tensor): On the CPU.
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Operation:
    """An operation with a backward pass of its own. Call it with settings and tensors to get its output.

    What ``forward`` returns as saved is saved by autograd, tensor by tensor, however deep it lies, so that hooks on
    saved tensors see it; :class:`OnHost` is the exception.

    Args:
        name (str): What autograd's graph calls it.
        forward (Callable): See this module; its output is one tensor. Where ``saved`` is None, ``backward`` gets None.
        backward (Callable): See this module.
        gradients (type): The NamedTuple of the gradients. Its fields are fields of the tensors, default None.
    """

    def __init__(self, name: str, forward: Callable, backward: Callable, gradients: type):
        self.forward, self.backward, self.gradients = forward, backward, gradients
        self._function = type(name, (_Function,), {})

    @torch.compiler.disable
    def __call__(self, settings, tensors: NamedTuple) -> Tensor:
        leaves = [getattr(tensors, name) for name in self.gradients._fields]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves):
            return self._function.apply(self, settings, tensors, *leaves)
        with torch.no_grad(), no_autocast(tensors.x), compiling(getattr(settings, 'compile', False)):
            return self.forward(settings, tensors, self.gradients(*[False] * len(leaves)))[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, settings, tensors, *leaves):
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        with no_autocast(tensors.x), compiling(getattr(settings, 'compile', False)):
            output, saved = operation.forward(settings, tensors, needs)
        found = []
        ctx.operation, ctx.settings, ctx.structure = operation, settings, _without_tensors(saved, found)
        ctx.save_for_backward(*found)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operation = ctx.operation
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        saved = _with_tensors(ctx.structure, iter(ctx.saved_tensors))
        with no_autocast(grad), compiling(getattr(ctx.settings, 'compile', False)):
            gradients = operation.backward(ctx.settings, saved, grad, needs)
        return None, None, None, *gradients


def gradients_of(tensors: type, *others: str) -> type:
    """The NamedTuple of the gradients of an operation's tensors.

    Args:
        tensors (type): Their NamedTuple, named 'XTensors'.
        *others: Fields that never get a gradient.

    Returns:
        type: 'XGradients' with the other fields, in their order, None where nothing is given.
    """
    names = [name for name in tensors._fields if name not in others]
    return namedtuple(tensors.__name__.replace('Tensors', 'Gradients'), names, defaults=[None] * len(names))


def check_form(implementation: str, **options) -> None:
    """Checks which form of an operation its settings ask for.

    Args:
        implementation (str): 'fused' or 'reference'.
        **options: Values of those settings that the reference does not have.

    Raises:
        ValueError: For an unknown form, or an option that the reference does not have.
    """
    if implementation not in ('fused', 'reference'):
        raise ValueError(f"implementation={implementation!r} is unknown; choose 'fused' or 'reference'")
    for key, value in options.items():
        if implementation == 'reference' and value not in (False, 'native', 'zero', 'pool'):
            raise ValueError(f"{key}={value!r} needs implementation='fused'; the reference stores what autograd stores")


_SLOT = object()  # stands where a tensor was


def _without_tensors(value, found):
    """The same value with a slot for each tensor; the tensors are appended to ``found``."""
    if isinstance(value, Tensor):
        found.append(value)
        return _SLOT
    if hasattr(value, '_fields'):
        return type(value)(*(_without_tensors(v, found) for v in value))
    return value


def _with_tensors(value, tensors):
    """The reverse of :func:`_without_tensors`."""
    if value is _SLOT:
        return next(tensors)
    if hasattr(value, '_fields'):
        return type(value)(*(_with_tensors(v, tensors) for v in value))
    return value
