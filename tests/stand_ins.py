"""Classes of tests in the place of those of projects that are not installed."""

import types

__all__ = ['of_module']


def of_module(module: str, *kinds: type, name: str | None = None) -> type:
    """Makes classes look as if a module had defined them: by their names, and by the global names of their functions.

    Args:
        module (str): Name of the module.
        *kinds (type): The classes, changed in place.
        name (str | None): Name of a class in the module. If ``None``, its own. Default: None.

    Returns:
        type: The last class.
    """
    for kind in kinds:
        kind.__module__, kind.__qualname__ = module, name or kind.__name__
        for key, value in [*vars(kind).items()]:
            if isinstance(value, types.FunctionType):
                scope = {**value.__globals__, '__name__': module}
                made = types.FunctionType(value.__code__, scope, key, value.__defaults__, value.__closure__)
                made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, f'{kind.__qualname__}.{key}'
                setattr(kind, key, made)
    return kind
