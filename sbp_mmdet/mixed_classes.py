"""Classes that this package made at run time, and what users set on them later: the class of a live module is one."""

import functools
from collections.abc import Iterable

from torch import nn

from .surgery import MADE_OF

__all__ = ['mixed_classes', 'names_set_on']


def mixed_classes(modules: Iterable[nn.Module]) -> list[type]:
    """Return the classes that :func:`.surgery.mix_in` made, among the classes of modules and their bases.

    Args:
        modules (Iterable[nn.Module]): The modules.
    """
    return [*{mixed for kind in {*map(type, modules)} for mixed in _made_bases(kind)}]


def names_set_on(kind: type) -> set[str]:
    """Return the names that users set on a class that :func:`.surgery.mix_in` made: ``type(block).forward = mine``.

    Args:
        kind (type): The class of a module.
    """
    names = {name for mixed in _made_bases(kind) for name in vars(mixed)}
    return {name for name in names if name == '__call__' or not (name.startswith('__') or name == '_abc_impl')}


@functools.cache
def _made_bases(kind):
    return tuple(base for base in kind.__mro__ if base in MADE_OF)
