"""Autograd functions made of two plain functions, a forward and a backward pass, whose tensors have names.

An operation is written as

- a frozen dataclass of settings, which the two functions share;
- ``forward(settings, tensors, needs) -> output, saved`` and ``backward(settings, saved, grad, needs) -> gradients``;
- if that needs no output, ``save(settings, tensors, needs) -> saved``, for a last operation that is recomputed
  (:mod:`.operation_sequence`);
- the NamedTuples ``tensors`` and ``saved``, whose fields may be NamedTuples of tensors themselves, and the NamedTuple
  ``gradients`` of the tensors that get a gradient (:func:`gradients_of`). ``needs`` has the same fields as
  ``gradients`` and says for each whether it is needed. Gradients that are not needed are ignored.

The functions run without gradients and outside of autocast.
"""

import dataclasses
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...stochastic_backprop.masks import Positions
from .precision import autocast_dtype, no_autocast
from .recorded_steps import Step, recorded_steps
from .uncompiled import uncompiled

__all__ = [
    'Form',
    'OnHost',
    'Operation',
    'Sample',
    'apply_function',
    'differentiable_once',
    'gradients_of',
    'with_dtype',
    'put_tensors_back',
    'saved_tensors_of',
    'take_tensors_out',
]

_CHOICES = dict(implementation=('fused', 'reference'), storage=('native', 'int8'))


class Sample(NamedTuple):
    """Sample of the rows that weight gradients are estimated from.

    Attributes:
        ratio (float): Share of the rows, in (0, 1].
        at (float): Where the draws begin, in [0, 1), see :func:`.row_sampling.sample_rows`.
    """

    ratio: float
    at: float


@dataclasses.dataclass(frozen=True)
class Form:
    """How operations are computed and what they save. A preset sets one form for all operations.

    Attributes:
        implementation (str): 'fused' (own backward pass) or 'reference' (plain autograd, with Algorithm 1 as the paper
            writes it). Default: 'fused'.
        storage (str): How activations are saved for the backward pass: unchanged ('native') or rounded to eight bits
            ('int8'). Default: 'native'.
        sample (Sample | None): Sample of the rows that weight gradients are estimated from, if no position is dropped,
            see :func:`.row_sampling.sample_rows`. If ``None``, weight gradients are exact. Default: None.
        minimal (bool): Whether operations save no more than their input where the rest can be recomputed. Default:
            False.
        recomputed (bool): Whether the operation runs within a checkpoint of its layer. Then nothing of it waits for the
            backward pass, so it also saves what would otherwise be recomputed once more. Default: False.

    Raises:
        ValueError: If a value is unknown, or the reference does not have it.
    """

    implementation: str = 'fused'
    storage: str = 'native'
    sample: Sample | None = None
    minimal: bool = False
    recomputed: bool = False

    def __post_init__(self):
        if self.sample and self.implementation != 'fused':
            raise ValueError(f"sample={self.sample} needs implementation='fused'; write sample=None for the reference")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f'{name}={value!r} is unknown; choose {known[0]!r} or {known[1]!r}')
            if self.implementation == 'reference' and name != 'implementation' and value != known[0]:
                raise ValueError(
                    f"{name}={value!r} needs implementation='fused', because the reference saves what autograd saves; "
                    f'write {name}={known[0]!r} for the reference'
                )

    @property
    def small_chunks(self) -> bool:
        """Whether attention and transformer layers compute less at a time, because memory comes first."""
        return self.minimal or self.storage == 'int8'

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
            raise ValueError(
                f'sample={self.sample} estimates weight gradients from all positions, but positions are dropped; '
                'give either positions or a sample'
            )
        return positions and positions.keep


def with_dtype(settings, x: Tensor):
    """Return the settings with a ``dtype``. If they have none, it is that of autocast, or of ``x``.

    Args:
        settings: Settings of an operation, with a field ``dtype``.
        x (Tensor): Input of the operation.
    """
    if settings.dtype is not None:
        return settings
    return dataclasses.replace(settings, dtype=autocast_dtype(x) or x.dtype)


def _apply(function: type[torch.autograd.Function], *args):
    """Call an autograd function, as its method ``apply`` does, in less time. Compilers skip :data:`apply_function`.

    The method looks at every tensor for transforms of ``torch.func`` that have ended, which takes longer than all else
    in functions of many parameters. They cannot run such a function in any case.

    Args:
        function (type[torch.autograd.Function]): The function.
        *args: Its arguments.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # raises an error
    return super(torch.autograd.Function, function).apply(*args)


apply_function = uncompiled(_apply)


def differentiable_once(backward: Callable) -> Callable:
    """Decorate a backward pass that has no derivative of its own.

    With ``create_graph=True``, differentiating its gradients raises an error. torch's own decorator would silently
    return no second derivative in two cases: where the incoming gradient is constant, and where ``torch.autograd.grad``
    is asked for tensors that the error does not lie in front of. Compilers skip the method, because a compiled training
    step calls ``backward`` too.

    Where no output has a gradient, for example because no loss uses the map, there are no gradients, as in torch's own
    operations. The forward pass has to call ``ctx.set_materialize_grads(False)`` for that; zeros in their place would
    let an optimizer decay weights that have no part in the loss.

    Args:
        backward (Callable): Static method of a ``torch.autograd.Function``.

    Returns:
        Callable: The decorated method.
    """

    @uncompiled
    def run(ctx, *grads):
        if grads[0] is None and all([grad is None for grad in grads]):
            return (None,) * len(ctx.needs_input_grad)
        try:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                gradients = backward(ctx, *grads)
        except RuntimeError as error:
            if any(grad is not None and _is_batched(grad) for grad in grads):
                raise RuntimeError(_BATCHED) from error
            raise
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        tensors = [x for x in gradients if x is not None]
        if not tensors:
            return gradients
        sources = [*_leaves_behind(ctx), *[grad for grad in grads if grad is not None and grad.requires_grad]]
        refused = iter(_Refused.apply(len(sources), *(sources or [tensors[0].detach().requires_grad_()]), *tensors))
        return tuple(x if x is None else next(refused) for x in gradients)

    return run


# Gradients that are batched by `is_grads_batched`. Older versions of torch cannot tell.
_is_batched = getattr(torch._C._functorch, 'is_legacy_batchedtensor', lambda x: False)
_BATCHED = (
    'an operation of sbp_mmdet cannot compute several gradients at once (is_grads_batched=True, vectorize=True); '
    'compute them one by one, or leave the module out, LeanHook(modules=[...])'
)


class _Refused(torch.autograd.Function):
    """Identity of gradients that depend on other tensors, with an error in the place of a derivative."""

    @staticmethod
    def forward(ctx, number, *tensors):
        return tuple(tensor.clone() for tensor in tensors[max(number, 1) :])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            'trying to differentiate twice through an operation of sbp_mmdet, whose backward pass has no derivative. '
            "Leave the modules out that a second derivative needs, LeanHook(modules=[...]), or take preset='with_cp'"
        )


def _leaves_behind(node) -> list[Tensor]:
    """Return the leaves of the graph that a node's gradients are propagated to."""
    leaves, seen, left = [], set(), [node]
    while left:
        for other, _ in left.pop().next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                left.append(other)
                leaves += [other.variable] if hasattr(other, 'variable') else []
    return leaves


class OnHost:
    """Tensor on the CPU that is saved for the backward pass as a plain attribute, past hooks on saved tensors.

    Args:
        tensor (Tensor): A tensor on the CPU, such as the state of a random generator.
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class Operation:
    """An operation with a backward pass of its own. Call it with settings and tensors to get its output.

    Every tensor in ``saved``, at any depth, is saved by ``ctx.save_for_backward``, so hooks on saved tensors see it;
    :class:`OnHost` is the exception.

    Args:
        name (str): Name of the node in autograd's graph.
        forward (Callable): Forward pass, see this module. Its output is one tensor; ``saved`` may be ``None``.
        backward (Callable): Backward pass, see this module.
        gradients (type): NamedTuple of the gradients, see :func:`gradients_of`.
        save (Callable | None): Returns what ``forward`` saves, without computing the output. If ``None``, ``forward``
            is called for that, too. Default: None.

    Attributes:
        inputs (list[str]): Names of the tensors that are the output of the operation in front: ``x`` and, where the
            operation has it, ``shortcut``.

    Example:
        >>> _square = Operation('Square', forward, backward, SquareGradients)
        >>> y = _square(SquareSettings(), SquareTensors(x))
    """

    def __init__(self, name: str, forward: Callable, backward: Callable, gradients: type, save: Callable | None = None):
        self.forward, self.backward, self.gradients, self.save = forward, backward, gradients, save
        self.inputs = [name for name in ('x', 'shortcut') if name in gradients._fields]
        self._function = type(name, (_Function,), {})
        # With one name, the getter would return no tuple.
        names = gradients._fields
        self._leaves = operator.attrgetter(*names) if len(names) > 1 else lambda tensors: (getattr(tensors, names[0]),)

    @uncompiled
    def __call__(self, settings, tensors: NamedTuple) -> Tensor:
        leaves, steps = self._leaves(tensors), recorded_steps()
        if steps is not None:
            steps.append(Step.of(self, settings, tensors))
        elif torch.is_grad_enabled():
            for leaf in leaves:
                if leaf is not None and leaf.requires_grad:
                    return _apply(self._function, self, settings, tensors, *leaves)  # skipped by compilers already
        with torch.no_grad(), no_autocast(tensors.x):
            return self.forward(settings, tensors, self.gradients(*[False] * len(leaves)))[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operation, settings, tensors, *leaves):
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        with no_autocast(tensors.x):
            output, saved = operation.forward(settings, tensors, needs)
        if output._is_view():  # autograd would refuse operations in place on it; this shares the count of its changes
            output = output.detach()
        tensors_saved = []
        ctx.operation, ctx.settings, ctx.structure = operation, settings, take_tensors_out((saved,), tensors_saved)
        ctx.save_for_backward(*tensors_saved)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        operation = ctx.operation
        needs = operation.gradients(*ctx.needs_input_grad[3:])
        (saved,) = put_tensors_back(ctx.structure, iter(ctx.saved_tensors))
        with no_autocast(grad):
            gradients = operation.backward(ctx.settings, saved, grad, needs)
        return None, None, None, *[g if needed else None for g, needed in zip(gradients, needs, strict=True)]


def saved_tensors_of(ctx) -> tuple[Tensor, ...]:
    """Return the tensors that a node saved, for its backward pass. Each is freed as soon as the caller drops it.

    Where the graph is retained, the node keeps its tensors.

    Args:
        ctx: Context of the node.
    """
    tensors = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    return tensors


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


class _Kinds(dict):
    """Cache of what a class is for :func:`take_tensors_out`: ``Tensor``, ``tuple``, or ``None`` for any other.

    A look-up takes a quarter of the time of ``isinstance``.
    """

    def __missing__(self, kind):
        self[kind] = next((known for known in (Tensor, tuple) if issubclass(kind, known)), None)
        return self[kind]


_kinds = _Kinds()


def take_tensors_out(value: tuple, found: list[Tensor]) -> tuple[type, list, list]:
    """Append the tensors in a nested tuple to a list.

    Args:
        value (tuple): Tensors, other values, and tuples and NamedTuples of them. What is in a list is not looked at.
        found (list[Tensor]): List that the tensors are appended to.

    Returns:
        tuple[type, list, list]: The structure without tensors, for :func:`put_tensors_back`: class of the tuple, its
        other members, and the indices of those that were taken out, with the structures of tuples.
    """
    members, places = [*value], []
    for i, member in enumerate(members):
        kind = _kinds[type(member)]
        if kind is None:
            continue
        if kind is Tensor:
            found.append(member)
            inside = None
        else:
            inside = take_tensors_out(member, found)
            if not inside[2]:
                continue
        members[i] = None
        places.append((i, inside))
    return type(value), members, places


def put_tensors_back(structure: tuple[type, list, list], tensors: Iterator[Tensor]) -> tuple:
    """Reverse :func:`take_tensors_out`.

    Args:
        structure (tuple[type, list, list]): Result of :func:`take_tensors_out`.
        tensors (Iterator[Tensor]): The tensors in the order in which they were found.

    Returns:
        tuple: The nested tuple.
    """
    kind, members, places = structure
    members = [*members]
    for i, inside in places:
        members[i] = next(tensors) if inside is None else put_tensors_back(inside, tensors)
    return tuple.__new__(kind, members)
