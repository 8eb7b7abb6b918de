"""What a training holds between its steps: weights, copies and caches of model and hooks, states of the optimizer."""

import collections
import copy
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ['CONTAINERS', 'MUTABLE', 'held_objects', 'held_tensors', 'is_of_the_user', 'state_bytes', 'storage_bytes']

CONTAINERS = (list, tuple, set, frozenset, collections.deque)
# Containers whose content may be put back in place.
MUTABLE = (list, dict, set, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque)
# Packages whose objects are known to hold no tensors of the device besides modules, or to hold the whole training.
_LIBRARIES = {*sys.stdlib_module_names, 'torch', 'numpy', 'mmengine', 'mmcv', 'mmdet', 'mmpretrain', 'sbp_mmdet'}
_ON_THE_HOST = (Dataset, DataLoader, Sampler)


def is_of_the_user(value: object) -> bool:
    """Return whether an object is an instance of a class that belongs to none of the known libraries.

    Args:
        value (object): Any object. The answer for classes and functions is ``False``.
    """
    if isinstance(value, type) or not hasattr(value, '__dict__') or callable(getattr(value, '__code__', None)):
        return False
    package = (getattr(type(value), '__module__', None) or 'builtins').partition('.')[0]
    return package == '__main__' or package not in _LIBRARIES


def held_objects(*owners: object) -> Iterator[object]:
    """Yield objects, and everything that they hold: in attributes, containers and objects of the user's own classes.

    Args:
        *owners (object): Modules or hooks.

    Yields:
        object: Modules, tensors, containers, and instances of the user's classes, each once.
    """
    seen, waiting, first = {}, [*owners], {*map(id, owners)}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, Tensor):
            inside = []
        elif isinstance(value, dict):
            inside = [*dict.values(value)]
        elif isinstance(value, CONTAINERS):
            inside = [*value]
        elif isinstance(value, nn.Module) or id(value) in first or is_of_the_user(value):
            if isinstance(value, _ON_THE_HOST):
                continue
            inside = [*vars(value).values()]
        else:
            continue
        seen[id(value)] = value  # it lives on, so that no other object gets its number
        waiting += [one for one in inside if not isinstance(one, (str, bytes, int, float, type(None)))]
        yield value


def held_tensors(*owners: object) -> list[Tensor]:
    """Return the tensors that modules and hooks hold between steps.

    Args:
        *owners (object): Modules or hooks.

    Returns:
        list[torch.Tensor]: Parameters and buffers, also those of modules outside of the tree, such as the teacher of a
        distillation; and plain tensors, such as a queue of features.
    """
    return [value for value in held_objects(*owners) if isinstance(value, Tensor)]


def storage_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the bytes of each storage of some tensors.

    Args:
        tensors (Iterable[Tensor]): The tensors; those that share a storage count once.
    """
    tensors = [t for t in tensors if t.layout == torch.strided]
    return [*{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()]


def state_bytes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes of each state that an optimizer will make in its first step, by steps of a copy of it.

    Args:
        optimizer (torch.optim.Optimizer): The optimizer. Parameters that have states already are left out.

    Returns:
        list[int]: The bytes. If a copy cannot step on a CPU, those of Adam or of momentum by the optimizer's settings.
    """
    sizes, known = [], {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group['params']:
            if p.requires_grad and p not in optimizer.state:
                key = number, p.shape, p.dtype
                if key not in known:
                    known[key] = _states_of(optimizer, group, p)
                sizes += known[key]
    return sizes


def _states_of(optimizer, group, parameter):
    twin = object.__new__(type(optimizer))
    own = dict(vars(optimizer))
    own.pop('step', None)  # a scheduler's, which counts
    own = {key: copy.copy(value) if isinstance(value, (list, dict)) else value for key, value in own.items()}
    hooks = {key: type(value)() for key, value in own.items() if key.endswith('_hooks') and isinstance(value, dict)}
    zeros = nn.Parameter(torch.zeros_like(parameter, device='cpu'))
    zeros.grad = torch.zeros_like(zeros)
    on_host = {key: False for key in ('foreach', 'fused', 'capturable') if key in group}
    groups = [dict(group, params=[zeros], **on_host)]
    vars(twin).update(own, **hooks, state=collections.defaultdict(dict), param_groups=groups)
    try:
        twin.step()
    except Exception:  # noqa: BLE001  kernels of a GPU alone, or a step that wants more arguments
        size = 1 if '8bit' in type(optimizer).__name__ else parameter.element_size()
        return [parameter.numel() * size] * (2 if 'betas' in group else bool(group.get('momentum')))
    return [value.nbytes for value in twin.state[zeros].values() if isinstance(value, Tensor) and value.dim()]
