"""A training step that leaves nothing behind: weights, attributes, gradients, random states, the message hub."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..apply import draws_of
from ..verify.dry_run import put_tensor_back, restored_messages, restored_random_states
from .held import MUTABLE, held_objects, is_of_the_user

__all__ = ['restored_state']


@contextlib.contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore at the end of the context what a step changes, except the states of an optimizer.

    These are random states, parameters and buffers, gradients, mmengine's message hub, and the attributes of modules:
    numbers, tensors, arrays, containers, random generators, and instances of the user's own classes.

    Args:
        model (nn.Module): The model in training mode, not wrapped.
    """
    devices = [torch.device('cuda')] if torch.cuda.is_available() else []
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    passes = [(draws, dict(vars(draws))) for draws in draws_of(model)]
    found = [*held_objects(model)]
    generators = [g for one in found if hasattr(one, '__dict__') for g in vars(one).values() if _generator_state(g)]
    states = [(generator, *_generator_state(generator)) for generator in generators]
    arrays = [array for one in found for array in _inside(one) if isinstance(array, np.ndarray)]
    arrays = [(array, array.copy()) for array in arrays]
    tensors = [(t, t.detach().to('cpu', copy=True)) for t in found if isinstance(t, Tensor) and t.is_leaf]
    contents = [(one, [*one.items()] if isinstance(one, dict) else [*one]) for one in found if type(one) in MUTABLE]
    attributes = [(one, dict(vars(one))) for one in found if isinstance(one, nn.Module) or is_of_the_user(one)]
    try:
        with restored_random_states(devices), restored_messages():
            yield
    finally:
        for one, before in attributes:
            if not _hold_same_objects(vars(one), before):
                vars(one).clear()
                vars(one).update(before)
        for one, before in contents:
            _put_back(one, before)
        with torch.no_grad():
            for tensor, before in tensors:
                put_tensor_back(tensor, before)
        for array, before in arrays:
            array[...] = before
        for parameter, before in gradients:
            parameter.grad = before
        for draws, values in passes:
            vars(draws).update(values)
        for generator, name, state in states:
            _set_generator(generator, name, state)


def _inside(one):
    if isinstance(one, dict):
        return dict.values(one)
    return vars(one).values() if hasattr(one, '__dict__') else one if isinstance(one, (list, tuple)) else ()


def _hold_same_objects(now, before):
    return now.keys() == before.keys() and all(now[key] is before[key] for key in now)


def _put_back(one, before):
    """Give a container its content back, if that is another one now."""
    now = [*one.items()] if isinstance(one, dict) else [*one]
    pairs = zip(now, before, strict=False)
    if len(now) == len(before) and all(a is b or isinstance(one, dict) and _is_same_entry(a, b) for a, b in pairs):
        return
    one.clear()
    one.update(dict(before)) if isinstance(one, dict) else (one.update if isinstance(one, set) else one.extend)(before)


def _is_same_entry(item, other):
    return item[0] is other[0] and item[1] is other[1]


def _generator_state(value):
    """Return the name of a random generator's state and the state itself, or ``None`` for other objects."""
    if isinstance(value, torch.Generator):
        return 'torch', value.get_state()
    if isinstance(value, random.Random):
        return 'python', value.getstate()
    if isinstance(value, np.random.RandomState):
        return 'legacy', value.get_state()
    return ('numpy', value.bit_generator.state) if isinstance(value, np.random.Generator) else None


def _set_generator(generator, name, state):
    if name == 'torch':
        generator.set_state(state)
    elif name == 'python':
        generator.setstate(state)
    elif name == 'legacy':
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
