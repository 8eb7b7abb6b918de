"""The predicate that every adapter asks: may the forward of this module be bypassed?

An operation takes the parameters and settings of modules and computes their output without calling them. That is right
only if everything that a call would do is known. So this is an allow-list. The forward of a module may be bypassed if

- its class is exactly one of :data:`.ROLES` (without mixins of this package), which excludes modules that are
  quantised, wrapped, jitted or of a derived class;
- its settings are among those that the operation computes, for example zero padding;
- a call runs nothing else: no hooks on the module or on all modules, no forward that was set on the instance, compiled
  or not, or on the class (:mod:`..library_code`), no parametrization, and no observer of torch's quantisation;
- its parameters are plain parameters of its own.

Every other module runs its own code.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..library_code import check_code_once, replaced_code
from ..mixed_classes import names_set_on
from ..passes import has_hooks_of_others
from ..surgery import stock_class
from .copies import original_class, path_of
from .quantisation import problem_of_preparation
from .roles import ROLES

__all__ = [
    'GLOBAL_HOOKS',
    'PLAIN_TENSORS',
    'ask_once',
    'cached_answers',
    'derives_plainly',
    'fairscale_forward',
    'find_problems',
    'find_interference',
    'is_hooked_globally',
    'is_replaced',
    'tensors_in',
    'unsupported',
]

GLOBAL_HOOKS = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


_MOST_NAMES = 8  # largest number of supported classes that a reason lists


def unsupported(module: nn.Module | None, role: str, called: bool = False) -> str | None:
    """Return why the forward of a module may not be bypassed.

    Args:
        module (nn.Module | None): The module.
        role (str): Role of the module in the operation, a key of :data:`.ROLES`.
        called (bool): Whether the module itself is called, so that hooks on it run in any case. Default: False.

    Returns:
        str | None: The reason, or ``None`` if the forward may be bypassed.
    """
    answers, question = _answers.modules, (id(module), role, called)
    if answers is None:
        return _find_problem(module, role, called, {})
    if question not in answers:
        answers[question] = _find_problem(module, role, called, answers)
    return answers[question]


def find_problems(
    bypassed: Iterable[tuple[nn.Module | None, str]], called: nn.Module | None = None
) -> list[tuple[nn.Module, str]]:
    """Return the modules whose forward may not be bypassed, with the reasons, see :func:`unsupported`.

    Args:
        bypassed (Iterable): Modules with their roles in the operation, keys of :data:`.ROLES`.
        called (nn.Module | None): Which of the modules is called itself. If ``None``, none is. Default: None.
    """
    answers, problems = {} if _answers.modules is None else _answers.modules, []
    for module, role in bypassed:
        question = id(module), role, module is called and called is not None
        if question not in answers:
            answers[question] = _find_problem(module, role, question[2], answers)
        if answers[question]:
            problems.append((module, answers[question]))
    return problems


def _find_problem(module, role, called, answers):
    """Return the answer of :func:`unsupported`; what holds for a class or in every role is kept in ``answers``."""
    if isinstance(module, nn.Module) and 'parametrizations' in module._modules:
        return 'it is parametrized'
    kind = stock_class(type(module))
    if (kind, role) not in answers:
        answers[kind, role] = _check_of(kind, role)
    check, problem = answers[kind, role]
    if check is None:
        return problem
    key = id(module)
    if key not in answers:
        answers[key] = find_interference(module), _odd_parameter(module)
    own, odd = answers[key]
    return (None if called else own) or problem or odd or check(module)


def _check_of(kind, role):
    """Return the check of a class's settings, or ``None`` if it is unknown in this role; and what is wrong with it."""
    known = ROLES[role]
    for known_as in (kind, original_class(kind)):
        for key in (known_as, path_of(known_as)):
            if key in known:
                return known[key], replaced_code(kind)
    paths = [other if isinstance(other, str) else path_of(other) for other in known]
    name, names = kind.__name__, [*dict.fromkeys(path.rpartition('.')[2] for path in paths)]
    if name in names:
        name = path_of(kind)  # such as torch.ao's Conv2d
    it_is = f'it is a{"n" * name.startswith(("A", "E", "I", "O"))} {name}'
    names = [one for one in names if not one.startswith('_')]  # users do not know private classes
    if not 0 < len(names) <= _MOST_NAMES:
        return None, f'{it_is}, which is not supported as {role}'
    *others, last = names
    supported = f'{", ".join(others)} and {last} are' if others else f'{last} is'
    place = '' if names == [role] else f' as {role}'
    return None, f'{it_is}, and only {supported} supported{place}'


class _Answers(threading.local):
    """Answers within :func:`ask_once`: of :func:`unsupported`, and those of :func:`cached_answers` by topic."""

    modules: dict | None = None
    others: dict[str, dict] | None = None


_answers = _Answers()


@contextlib.contextmanager
def ask_once() -> Iterator[None]:
    """Cache the answers of :func:`unsupported` within the context, in which no module and no function may change."""
    outer = _answers.modules, _answers.others
    if _answers.modules is None:
        _answers.modules, _answers.others = {}, collections.defaultdict(dict)
    try:
        with check_code_once():
            yield
    finally:
        _answers.modules, _answers.others = outer


def cached_answers(topic: str) -> dict:
    """Return a dictionary for answers that follow from the state of modules, by their ids.

    Args:
        topic (str): What is asked. Within :func:`ask_once` each topic has one dictionary, otherwise it is a new one.
    """
    return {} if _answers.others is None else _answers.others[topic]


def _is(kind: type, known: type | str) -> bool:
    """Return whether a class is a known one, given by itself or by its module and name, or a copy of it."""
    return (
        kind is known
        or path_of(kind) == known
        or (original_class(kind) is not kind and _is(original_class(kind), known))
    )


def find_interference(module: nn.Module, observers: tuple[str, ...] = ()) -> str | None:
    """Return what a call of a module runs besides the forward of its class, or ``None`` if it runs nothing else.

    Args:
        module (nn.Module): The module.
        observers (tuple[str, ...]): Beginnings of the names of modules whose forward hooks are ignored. Default: ().
    """
    if module._backward_hooks or module._backward_pre_hooks or has_hooks_of_others(module, observers):
        return 'it has hooks, which a bypass would skip'
    if module.__dict__.get('_compiled_call_impl') is not None:
        return 'it is compiled'
    if 'parametrizations' in module._modules:
        return 'it is parametrized'
    if 'qconfig' in module.__dict__ and (problem := problem_of_preparation(module)):
        return problem
    return 'its forward pass was replaced' if is_replaced(module) else None


def is_replaced(module: nn.Module, but: tuple[str, ...] = ()) -> bool:
    """Return whether an attribute of the instance or of its changed class hides a method, for example ``forward``.

    Args:
        module (nn.Module): The module.
        but (tuple[str, ...]): Names of methods that are ignored. Default: ().
    """
    kind = type(module)
    for name, value in vars(module).items():
        if callable(value) and name not in but and callable(getattr(kind, name, None)):
            return True
    return not names_set_on(kind).issubset(but)


def fairscale_forward(module: nn.Module) -> Callable | None:
    """Return the forward that fairscale's checkpointing set on the instance (mmdet's ``num_cp``), or ``None``.

    Args:
        module (nn.Module): The module.
    """
    forward = vars(module).get('forward')
    home = getattr(getattr(forward, 'func', None), '__module__', None) or ''
    return forward if home.startswith('fairscale.') else None


def is_hooked_globally() -> bool:
    """Return whether hooks are registered that run at every call of every module."""
    return any(GLOBAL_HOOKS)


def tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module by name, and tensors that replace them.

    FSDP keeps the parameters elsewhere and sets views of them as attributes of the instance.

    Args:
        module (nn.Module): The module.
    """
    values = {**module._parameters, **vars(module)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _odd_parameter(module) -> str | None:
    """Return a sentence about the first parameter of a special class, such as a quantised one, or ``None``.

    Tensors in the place of numbers are unsupported too, because operations compute no gradients of numbers.
    """
    for name, tensor in (*module._parameters.items(), *vars(module).items()):
        kind = type(tensor)
        if not isinstance(tensor, torch.Tensor):
            continue
        if kind is not nn.Parameter and kind is not torch.Tensor and kind.__name__ not in PLAIN_TENSORS:
            return f'its {name} is a {kind.__name__}'
        if tensor.is_complex():
            return f'its {name} is complex'
        if name not in module._parameters and name not in _PARAMETERS and tensor.numel() == 1:
            return f'its {name} is a tensor, not a number'
    for name in module._buffers:
        if name in _PARAMETERS:
            return f'its {name} is a buffer'
    return None


# Names of parameters that operations read. A user may have registered a buffer instead, for example to freeze a layer.
_PARAMETERS = 'weight', 'bias', 'gamma', 'beta', 'in_proj_weight', 'in_proj_bias'
# Names of tensor classes that compute as plain tensors do: those of FSDP, which replaces them by plain tensors during a
# forward pass, and that of the planner.
PLAIN_TENSORS = {'DTensor', 'FlatParameter', 'FakeTensor'}


def derives_plainly(kind: type, known: Iterable[type | str]) -> bool:
    """Return whether a class is a known one, or derives from it without any method but ``__init__``.

    Args:
        kind (type): The class, without mixins of this package.
        known (Iterable[type | str]): The known classes, or their modules and names.
    """
    known = tuple(known)
    while not any(_is(kind, other) for other in known):
        if len(kind.__bases__) != 1 or not all(_is_plain(*item) for item in vars(kind).items()):
            return False
        (kind,) = kind.__bases__
    return True


def _is_plain(name: str, value) -> bool:
    if name == '_abc_impl':  # of every class whose metaclass is ABCMeta, such as mmengine's BaseModule
        return True
    dunder = name.startswith('__') and name.endswith('__')
    if dunder and name not in ('__call__', '__getattr__', '__getattribute__', '__setattr__', '__iter__', '__len__'):
        return True
    constants = (bool, int, float, str, tuple, list, dict)
    return isinstance(value, constants) and not hasattr(nn.Module, name)
