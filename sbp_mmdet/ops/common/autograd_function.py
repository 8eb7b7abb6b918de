"""One thin way to make an autograd function of a pair of plain functions, with every tensor by name.

An operation is written as

- a frozen dataclass of settings, which the pair shares;
- ``forward(settings, tensors, needs) -> output, saved`` and ``backward(settings, saved, grad, needs) -> gradients``;
- two NamedTuples: ``tensors`` and ``saved``, whose fields may be NamedTuples of tensors themselves; and a third,
  ``gradients``, with the tensors that get a gradient (:func:`gradients_of`); ``needs`` holds a bool for each of these.
  A gradient that nobody needs is not looked at.

Both functions run without gradients and outside of autocast.
"""

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...stochastic_backprop.masks import Positions
from .precision import autocast_dtype, no_autocast

__all__ = [
    'Form',
    'OnHost',
    'Operation',
    'Sample',
    'gradients_of',
    'in_precision',
    'put_tensors_back',
    'take_tensors_out',
]

_CHOICES = dict(implementation=('fused', 'reference'), storage=('native', 'int8'))


class Sample(NamedTuple):
    """The share of rows that gradients of weights are estimated from, and where the draws begin, in [0, 1)."""

    ratio: float
    at: float


@dataclasses.dataclass(frozen=True)
class Form:
    """Form in which operations are computed and stored; a preset sets it for all of them.

    Attributes:
        implementation (str): 'fused', or 'reference': plain autograd, and Algorithm 1 as the paper writes it.
            Default: 'fused'.
        storage (str): How normalised inputs wait for the backward pass: as they are ('native'), or rounded to eight
            bits ('int8'). Default: 'native'.
        minimal (bool): Whether operations store no more than their input where the rest can be recomputed. Default:
            False.
        sample (Sample | None): Rows that gradients of weights are estimated from, where no position is dropped, see
            :func:`.row_sampling.draw`; None: all, and they are exact. Default: None.

    Raises:
        ValueError: For an unknown value, or one that the reference does not have.
    """

    implementation: str = 'fused'
    storage: str = 'native'
    sample: Sample | None = None
    minimal: bool = False

    def __post_init__(self):
        if self.sample and self.implementation != 'fused':
            raise ValueError(f"sample={self.sample} needs implementation='fused'; leave it out (None)")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f'{name}={value!r} is unknown; choose {known[0]!r} or {known[1]!r}')
            if self.implementation == 'reference' and name != 'implementation' and value != known[0]:
                raise ValueError(
                    f"{name}={value!r} needs implementation='fused', for the reference stores what autograd stores; "
                    f'write {name}={known[0]!r} for the reference'
                )

    def kept(self, positions: Positions | None) -> Tensor | None:
        """Return the indices of the positions that send gradients.

        Args:
            positions (Positions | None): Positions of the operation. If ``None``, all are kept.

        Returns:
            Tensor | None: The indices, or ``None`` if all positions send gradients.

        Raises:
            ValueError: If there are positions and a sample of the rows.
        """
        if positions is not None and self.sample:
            raise ValueError(f'sample={self.sample} is one of all positions; give no positions, or no sample')
        return positions and positions.keep


def in_precision(settings, x: Tensor):
    """Return the settings with a ``dtype``. If they have none, it is that of autocast, or of ``x``.

    Args:
        settings: Settings of an operation, with a field ``dtype``.
        x (Tensor): Input of the operation.
    """
    if settings.dtype is not None:
        return settings
    return dataclasses.replace(settings, dtype=autocast_dtype(x) or x.dtype)


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
        if torch.is_grad_enabled():
            for leaf in leaves:
                if leaf is not None and leaf.requires_grad:
                    return self._function.apply(self, settings, tensors, *leaves)
        with torch.no_grad(), no_autocast(tensors.x):
            return self.forward(settings, tensors, self.gradients(*[False] * len(leaves)))[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, settings, tensors, *leaves):
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        with no_autocast(tensors.x):
            output, saved = operation.forward(settings, tensors, needs)
        found = []
        ctx.operation, ctx.settings, ctx.structure = operation, settings, take_tensors_out((saved,), found)
        ctx.save_for_backward(*found)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operation = ctx.operation
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        (saved,) = put_tensors_back(ctx.structure, iter(ctx.saved_tensors))
        with no_autocast(grad):
            gradients = operation.backward(ctx.settings, saved, grad, needs)
        return None, None, None, *[g if needed else None for g, needed in zip(gradients, needs, strict=True)]


def gradients_of(tensors: type, *others: str) -> type:
    """Make the NamedTuple of the gradients of an operation's tensors.

    Args:
        tensors (type): NamedTuple of the tensors, named 'XTensors'.
        *others (str): Names of fields that never get a gradient.

    Returns:
        type: NamedTuple 'XGradients' with the remaining fields in their order. The default of each is ``None``.
    """
    names = [name for name in tensors._fields if name not in others]
    return namedtuple(tensors.__name__.replace('Tensors', 'Gradients'), names, defaults=[None] * len(names))


_SLOT = object()  # stands where a tensor was


def take_tensors_out(value: tuple, found: list[Tensor]) -> tuple[type, list]:
    """Append the tensors in a nested tuple to a list.

    Args:
        value (tuple): Tensors, other values and tuples of them, named or not. Sizes of tensors count as values.
        found (list[Tensor]): Changed in place.

    Returns:
        tuple[type, list]: What :func:`put_tensors_back` makes the nested tuple of.
    """
    members = []
    for member in value:
        if isinstance(member, Tensor):
            found.append(member)
            member = _SLOT
        elif isinstance(member, tuple) and type(member) is not torch.Size:
            member = take_tensors_out(member, found)
        members.append(member)
    return type(value), members


def put_tensors_back(structure: tuple[type, list], tensors: Iterator[Tensor]) -> tuple:
    """Reverse :func:`take_tensors_out`.

    Args:
        structure (tuple[type, list]): What that returned.
        tensors (Iterator[Tensor]): The tensors that it found.
    """
    kind, members = structure
    found = []
    for member in members:
        if member is _SLOT:
            member = next(tensors)
        elif type(member) is tuple:
            member = put_tensors_back(member, tensors)
        found.append(member)
    return tuple.__new__(kind, found)
