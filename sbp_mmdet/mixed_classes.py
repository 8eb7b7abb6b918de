"""Classes that this package made at run time, and what users set on them later: the class of a live module is one."""

import functools

from .surgery import MADE_OF

__all__ = ['mixed_classes', 'names_set_on']


@functools.cache
def mixed_classes(kind: type) -> tuple[type, ...]:
    """Return the classes that :func:`.surgery.mix_in` made, among a class and its bases.

    Args:
        kind (type): The class of a module.
    """
    return tuple(base for base in kind.__mro__ if base in MADE_OF)


def names_set_on(kind: type) -> set[str]:
    """Return the names that users set on a class that :func:`.surgery.mix_in` made: ``type(block).forward = mine``.

    Args:
        kind (type): The class of a module.
    """
    names = {name for mixed in mixed_classes(kind) for name in vars(mixed)}
    return {name for name in names if name == '__call__' or not (name.startswith('__') or name == '_abc_impl')}
