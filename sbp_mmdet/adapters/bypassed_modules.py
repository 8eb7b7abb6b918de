"""State of the modules that a changed module bypasses, to find out in each step whether they have changed since."""

import copy
import enum
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..library_code import library_code
from ..ops.common.handed_maps import code_seen
from ..surgery import foreign_classes, stock_class
from .predicate import GLOBAL_HOOKS, is_hooked_globally

__all__ = ['BypassedModules']


class BypassedModules:
    """Modules whose forward is bypassed, with the state in which :mod:`.predicate` checked them.

    Args:
        root (nn.Module): The changed module.
        modules (Iterable[nn.Module]): The checked modules: submodules of ``root``, or itself.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module]):
        inside = {id(module): module for module in modules if module is not root}
        parents = [root]
        if inside:
            parents += [m for m in root.modules() if m is not root and inside.keys() & set(map(id, m.children()))]
        self.modules = tuple(inside.values())
        self._children = tuple((parent, dict(parent._modules)) for parent in parents)
        self._kind, self._root = type(root), (foreign_classes(type(root)), len(root.__dict__), *_settings(root))
        self._states = tuple(map(_state, self.modules))
        self._hooked_globally = is_hooked_globally()
        kinds = {stock_class(type(module)) for module in (root, *self.modules)}
        self._code = tuple((id(code), code) for code in map(library_code, kinds))
        self._functions = tuple({place: place for _, code in self._code for place in code.functions})

    def __getstate__(self):
        return {}  # a copy has other modules, and classes made at run time cannot be pickled: the copy is bound anew

    def __setstate__(self, state):
        self.modules, self._kind, self._root = (), None, None

    def unchanged(self, root: nn.Module) -> bool:
        """Return whether submodules, their classes and code, hooks, settings and the kind of parameters are unchanged.

        This runs in each step, so it calls no other function unless a class has changed. Functions of libraries are
        looked at once in a scope, see :mod:`..passes`.

        Args:
            root (nn.Module): The changed module.
        """
        if self._root is None:
            return False
        kinds, length, settings, values = self._root
        # A new attribute may hide a method of the class.
        if length != len(root.__dict__) or (self._kind is not type(root) and kinds != foreign_classes(type(root))):
            return False
        try:
            if settings(root.__dict__) != values:
                return False
        except KeyError:
            return False
        if any(GLOBAL_HOOKS) != self._hooked_globally:
            return False
        seen = code_seen()
        if seen is None:
            for owner, name, function in self._functions:
                if getattr(owner, name, None) is not function:
                    return False
        else:
            for key, code in self._code:
                if key not in seen:
                    if not code.holds():
                        return False
                    seen.add(key)
        for parent, children in self._children:
            if parent._modules != children:
                return False
        for module, kind, length, dtype, kinds, settings, values in self._states:
            own = module.__dict__
            try:
                if len(own) != length or settings(own) != values:
                    return False
            except KeyError:  # another attribute stands in the place of one that was deleted
                return False
            if type(module) is not kind and foreign_classes(type(module)) != foreign_classes(kind):
                return False
            parameters = own['_parameters']
            weight = parameters['weight'] if 'weight' in parameters else None
            weight = own['weight'] if weight is None and 'weight' in own else weight
            if dtype is not (None if weight is None else weight.dtype) or kinds != [*map(type, parameters.values())]:
                return False
        return True


class _State(NamedTuple):
    """State of a module that :meth:`BypassedModules.unchanged` compares.

    Attributes:
        module (nn.Module): The module.
        kind (type): Its class.
        length (int): Number of its attributes. One more may be a forward of the instance, or hide another method.
        dtype (torch.dtype | None): Precision of its weight.
        kinds (list[type]): Classes of its parameters, in their order.
        settings (Callable): Takes the module's ``__dict__`` and returns its hooks and the values of its settings.
        values (tuple): These values.
    """

    module: nn.Module
    kind: type
    length: int
    dtype: torch.dtype | None
    kinds: list[type]
    settings: Callable[[dict], tuple]
    values: tuple


def _state(module):
    own, weight = module.__dict__, module._parameters.get('weight')
    weight = own.get('weight') if weight is None else weight
    dtype = None if weight is None else weight.dtype
    kinds = [*map(type, module._parameters.values())]
    return _State(module, type(module), len(own), dtype, kinds, *_settings(module))


def _settings(module):
    """Return a function that gives the hooks of a module and its settings, and what it gives now.

    Settings are all attributes whose values are numbers, strings and the like, or collections of these, since any of
    them may decide what the module computes.
    """
    own = module.__dict__
    names = [name for name, value in own.items() if name not in _NO_SETTINGS and _is_setting(value)]
    if '_compiled_call_impl' in own:
        names.append('_compiled_call_impl')
    values = [dict(own[name]) for name in _HOOKS], [copy.deepcopy(own[name]) for name in names]
    return operator.itemgetter(*_HOOKS, *names), tuple(itertools.chain(*values))


def _is_setting(value):
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_setting, value))
    return isinstance(value, _VALUES)


_HOOKS = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'
_NO_SETTINGS = frozenset(vars(nn.Module()))  # attributes of every module, and whether it is in training
_VALUES = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device, enum.Enum)
