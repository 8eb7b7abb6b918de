"""Check whether a class runs the code that its library defines, or a function of it has been replaced.

``nn.LayerNorm.forward = mine`` changes no instance. But a function's ``__globals__`` are those of the module that it
was written in, so a replaced method is recognised by the globals of another module. All functions that a method reaches
by name are checked: methods and properties of the class (``Conv2d._conv_forward``, ``Bottleneck.norm1``), functions of
its library, and those of ``torch.nn.functional``.
"""

import contextlib
import functools
import itertools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

__all__ = ['LibraryCode', 'check_code_once', 'library_code', 'replaced_code']

# Packages that build on one another: a class of one may use functions of another.
_LIBRARIES = ('torch', 'mmengine', 'mmcv', 'mmdet', 'mmpretrain', 'mmseg', 'mmpose', 'mmrotate', 'mmyolo', 'sbp_mmdet')
# Modules whose decorators these packages use. The function that is checked is the one inside.
_DECORATORS = ('contextlib', 'mmengine.utils.misc', 'torch.utils._contextlib')
# Modules whose functions are checked, but not the functions that these call.
_FUNCTIONS = ('torch', 'torch.nn.functional')
# The planner replaces kernels by functions that compute the same and allocate what CUDA's would.
_STAND_INS = 'sbp_mmdet.plan.'
# Methods of every module that lead to its forward.
_CALL_METHODS = '__call__', '_call_impl', '_wrapped_call_impl'


class FunctionSnapshot:
    """Snapshot of functions, to find out later whether one of them was replaced.

    Args:
        places (Iterable[tuple]): For each function its class or module, its name in it, and the function.
    """

    def __init__(self, places: Iterable[tuple]):
        self._owners, self._names, self._values = [*zip(*places, strict=True)] or ((), (), ())

    def are_unchanged(self) -> bool:
        """Return whether no function was replaced since the snapshot was taken."""
        now = map(getattr, self._owners, self._names, itertools.repeat(None))
        return not any(map(operator.is_not, now, self._values))


class LibraryCode(NamedTuple):
    """The functions that a method of a class reaches.

    Attributes:
        places (tuple[tuple]): For each function its class or module, its name in it, and the function.
        functions (FunctionSnapshot): Snapshot of these functions.
        replaced (str | None): Name of a function that is not the library's own. If ``None``, all are.
    """

    places: tuple
    functions: FunctionSnapshot
    replaced: str | None


_library_code: dict[tuple[type, str], LibraryCode] = {}


class _Checked(threading.local):
    """Classes and methods whose code was found unchanged within :func:`check_code_once`, or ``None`` outside of it."""

    keys: set[tuple[type, str]] | None = None


_checked = _Checked()


@contextlib.contextmanager
def check_code_once() -> Iterator[None]:
    """Check the code of each class once within the context, in which nobody may replace a function."""
    outer = _checked.keys
    _checked.keys = set() if outer is None else outer
    try:
        yield
    finally:
        _checked.keys = outer


def library_code(kind: type, method: str = 'forward') -> LibraryCode:
    """Return the functions that a method of a class reaches now.

    Args:
        kind (type): The class, without mixins of this package.
        method (str): Name of the method. Default: 'forward'.
    """
    key, checked = (kind, method), _checked.keys
    if checked is not None and key in checked:
        return _library_code[key]
    found = _library_code.get(key)
    if found is None or not found.functions.are_unchanged():
        found = _library_code[key] = _Search(kind).run(method)
    if checked is not None:
        checked.add(key)
    return found


def replaced_code(kind: type, method: str = 'forward') -> str | None:
    """Return which function that a method of a class reaches is not the one of its library, or ``None``.

    Args:
        kind (type): The class, without mixins of this package.
        method (str): Name of the method. Default: 'forward'.
    """
    return library_code(kind, method).replaced


class _Search:
    """A search for all functions that a method of a class reaches by name.

    Args:
        kind (type): The class.
    """

    def __init__(self, kind):
        self.kind, self.functions, self.replaced, self._visited = kind, {}, None, set()

    def run(self, method) -> LibraryCode:
        for name in (method, *_CALL_METHODS):
            self._look_in_class(name)
        places = tuple((*place, value) for place, value in self.functions.items())
        return LibraryCode(places, FunctionSnapshot(places), self.replaced)

    def _look_in_class(self, name):
        """Check a method or property of the class, and those of its base classes, which ``super()`` finds."""
        for owner in self.kind.__mro__[:-1]:
            if name not in vars(owner) or (owner, name) in self._visited:
                continue
            member = vars(owner)[name]
            if isinstance(member, classmethod) or (owner is nn.Module and name not in _CALL_METHODS):
                continue
            function = _function_of(member)
            if function is None:
                continue
            self._visited.add((owner, name))
            for found_in in (self.kind, owner):  # a function that the class gets later hides that of its base
                self.functions[found_in, name] = getattr(found_in, name, None)
            if not _is_written_in(function, owner, name):
                self._blame(owner, name, function)
            elif owner is not nn.Module:
                self._follow(function)

    def _follow(self, function):
        """Look at what a function of a library uses by name."""
        names, scope = _names_in(function.__code__), function.__globals__
        home = _get_module_name(function)
        user, package = sys.modules.get(home), _package(home)
        for name in sorted(names):
            self._look_in_class(name)
            if name not in scope:
                continue
            value = scope[name]
            if not isinstance(value, ModuleType):
                self._look_in_module(user, name, value, package)
            elif value.__name__ in _FUNCTIONS or _package(value.__name__) == package != 'torch':
                for inside in sorted(names & vars(value).keys()):
                    self._look_in_module(value, inside, vars(value)[inside], package)

    def _look_in_module(self, module, name, value, package):
        """Look at a function that one of a package uses."""
        function = None if module is None or (module, name) in self._visited else _function_of(value)
        if function is None:
            return
        self._visited.add((module, name))
        self.functions[module, name] = value
        written_in = _get_module_name(function)
        if written_in.startswith(_STAND_INS):
            return
        renamed = module.__name__ in _FUNCTIONS and _plain(getattr(value, '__name__', '')) != _plain(name)
        home = package if isinstance(function, BuiltinFunctionType) else _package(written_in)
        if renamed or home not in (*_LIBRARIES, package):
            self._blame(module, name, function)
        elif isinstance(function, FunctionType) and home == package != 'torch':
            self._follow(function)

    def _blame(self, owner, name, function):
        home = _get_module_name(function) or type(function).__name__
        self.replaced = self.replaced or f'{owner.__name__}.{name} was replaced by a function of {home}'


def _function_of(member):
    """Return a function, or that in a method, a property or a decorator of a library; ``None`` of anything else."""
    for attribute in ('fget', 'func', '__func__'):
        member = getattr(member, attribute, member)
    while hasattr(member, '__wrapped__') and _get_module_name(member) in _DECORATORS:
        member = member.__wrapped__
    if not callable(member) or isinstance(member, type) or getattr(member, '__module__', '') == 'typing':
        return None
    return member


def _is_written_in(function, kind, name):
    """Return whether a function is the method of a class that its source defines, or the planner's in its place."""
    written_in = _get_module_name(function)
    if written_in.startswith(_STAND_INS):
        return True
    if not isinstance(function, FunctionType) or written_in != kind.__module__:
        return False
    return kind is nn.Module or function.__qualname__ == f'{kind.__qualname__}.{name}'


def _get_module_name(function):
    """Return the name of the module that a function is written in."""
    scope = getattr(function, '__globals__', None)
    return '' if scope is None else scope.get('__name__', 'builtins')  # what classes made by ``exec`` say of theirs


def _package(module):
    return module.partition('.')[0]


def _plain(name):
    return name.replace('_', '')


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names that a function uses, and the functions inside of it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)
