"""Which inputs operations take: an allow-list, as :mod:`.predicate` is one of modules.

An operation reads its input past the functions that a module calls. So it takes plain tensors only, since a tensor of
another class may define what these functions compute, and nested, sparse and MKL-DNN tensors have no shape or strides
of their own. And it casts its input to one precision, where a convolution or a linear layer raises an error if input
and weight differ. With any other input a module runs its own code.
"""

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..ops.common.precision import autocast_dtype

__all__ = ['PLAIN_INPUTS', 'are_known_inputs', 'precisions_of_products', 'put_in_position', 'renamed_arguments']

# Classes of tensors that operations take. The last one is the planner's.
PLAIN_INPUTS = {Tensor, nn.Parameter, FakeTensor}
_CAST_BY_AUTOCAST = frozenset((torch.float16, torch.bfloat16, torch.float32))


def precisions_of_products(modules: Iterable[nn.Module]) -> frozenset[torch.dtype]:
    """Return the precisions of the weights that modules multiply their input with.

    Scales and shifts, which have one dimension, may be in another precision than the input.

    Args:
        modules (Iterable[nn.Module]): The modules.
    """
    # FSDP keeps parameters elsewhere and sets views of them as attributes.
    values = [value for module in modules for value in (*module._parameters.values(), *vars(module).values())]
    return frozenset([value.dtype for value in values if isinstance(value, Tensor) and value.ndim > 1])


def are_known_inputs(precisions: frozenset[torch.dtype], args: tuple, kwargs: dict) -> bool:
    """Return whether operations take the arguments of a module's call.

    Args:
        precisions (frozenset[torch.dtype]): Result of :func:`precisions_of_products` for the modules that are bypassed.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.
    """
    first = None
    if not kwargs:
        for value in args:  # as most calls are, in few steps
            if type(value) is not Tensor or value.dtype not in precisions:
                break
            if value.is_nested or value.layout is not torch.strided:
                break
        else:
            return True
    left = [*args, *kwargs.values()] if kwargs else [*args]
    for value in left:  # tensors in tuples and lists are appended
        kind = type(value)
        if kind in PLAIN_INPUTS:
            if value.is_nested or value.layout is not torch.strided:
                return False
            if first is None and value.is_floating_point():
                first = value
        elif kind is tuple or kind is list:
            left += value
        elif isinstance(value, Tensor):
            return False
    if not precisions or (first is not None and first.dtype in precisions):
        return True
    if first is None:
        return False
    return first.dtype in _CAST_BY_AUTOCAST and autocast_dtype(first) is not None and torch.float64 not in precisions


def put_in_position(kind: type[nn.Module], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a call with those in position that were given by name, up to the first missing one.

    The names of a module's arguments are those of its own forward pass, for example ``input`` in torch.

    Args:
        kind (type[nn.Module]): Class of the module, without mixins of this package.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.
    """
    given, left = [*args], dict(kwargs)
    for name in _positional_names(kind.forward)[len(args) :]:
        if name not in left:
            break
        given.append(left.pop(name))
    return tuple(given), left


@functools.cache
def renamed_arguments(function: Callable) -> frozenset[str]:
    """Return the former names of arguments that mmengine's ``deprecated_api_warning`` accepts for a function.

    The signature of the function does not have them. One with ``**kwargs`` would swallow them.

    Args:
        function (Callable): The function.
    """
    names = set()
    while hasattr(function, '__wrapped__'):
        code, cells = getattr(function, '__code__', None), getattr(function, '__closure__', None) or ()
        if code is not None and 'name_dict' in code.co_freevars:
            names.update(cells[code.co_freevars.index('name_dict')].cell_contents)
        function = function.__wrapped__
    return frozenset(names)


@functools.cache
def _positional_names(function):
    """Return the names of a method's arguments that may be given in position or by name."""
    _, *parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
