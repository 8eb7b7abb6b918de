"""Classes of the tests that replace classes of projects that are not installed."""

import types

__all__ = ['copy_into_module', 'define_in_module']


def define_in_module(module: str, *kinds: type, name: str | None = None) -> type:
    """Make classes look as if a module had defined them: by their names, and by the global names of their functions.

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
                setattr(kind, key, copy_into_module(module, value, f'{kind.__qualname__}.{key}'))
    return kind


def copy_into_module(module: str, function: types.FunctionType, name: str) -> types.FunctionType:
    """Return a function that looks as if a module had defined it.

    Args:
        module (str): Name of the module.
        function (types.FunctionType): The function.
        name (str): Its name in the module.
    """
    scope = {**function.__globals__, '__name__': module}
    made = types.FunctionType(
        function.__code__, scope, name.rpartition('.')[2], function.__defaults__, function.__closure__
    )
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, name
    return made
