"""State of the modules that a changed module bypasses, to find out in each step whether they have changed since."""

import copy
import enum
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from mmengine.logging import print_log
from torch import nn

from ..library_code import FunctionSnapshot, library_code
from ..mixed_classes import mixed_classes, names_set_on
from ..ops.common.shared_maps import unchanged_code
from ..surgery import foreign_classes, stock_class
from .inputs import precisions_of_products
from .predicate import GLOBAL_HOOKS, cached_answers, is_hooked_globally

__all__ = ['OF_EVERY_MODULE', 'PLAIN', 'BypassedModules']


class BypassedModules:
    """Modules whose forward is bypassed, with the state in which :mod:`.predicate` checked them.

    Args:
        root (nn.Module): The changed module.
        modules (Iterable[nn.Module]): The checked modules: submodules of ``root``, or itself.

    Attributes:
        modules (tuple[nn.Module, ...]): The checked modules without ``root``.
        precisions (frozenset[torch.dtype]): Precisions of their weights, see :func:`.precisions_of_products`.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module]):
        inside = {id(module): module for module in modules if module is not root}
        parents = [root]
        if inside:
            keys = inside.keys()
            parents += [
                m for m in root.modules() if m is not root and not keys.isdisjoint(map(id, m._modules.values()))
            ]
        self.modules = tuple(inside.values())
        self._parents, self._children = parents, [dict(parent._modules) for parent in parents]
        ((settings, values, numbers),) = _settings_of([root])
        # With the attribute that a changed module has: a module is bound before it gets this attribute.
        number = len(root.__dict__) + ('_lean' not in root.__dict__)
        self._kind, self._root = type(root), (foreign_classes(type(root)), number, settings, values)
        self._state, self._numbers = _State.of(self.modules), numbers
        self._own_dtypes, self._warned = _dtypes_of_weights(root), False
        self.precisions = precisions_of_products((root, *self.modules))
        self._hooked_globally = is_hooked_globally()
        self._patches, self._mixed = self._count_patches(root), None
        kinds = {stock_class(type(module)) for module in (root, *self.modules)}
        self._code = [(id(code), code) for code in map(library_code, kinds)]
        self._functions = FunctionSnapshot({place: None for _, code in self._code for place in code.places})

    def __getstate__(self):
        # A copy has other modules, and classes made at run time cannot be pickled: the copy is bound anew.
        return dict(modules=(), precisions=frozenset(), _kind=None, _root=None)

    def _count_patches(self, root):
        return sum(map(len, map(names_set_on, mixed_classes((root, *self.modules)))))

    def warn_of_input(self, name: str) -> None:
        """Log once that the module runs its own code for an input that :mod:`.inputs` or its adapter does not know.

        Args:
            name (str): Name of the module.
        """
        if not self._warned:
            text = (
                f'{name} runs its own code for an input that its operations do not take: a tensor of a class, '
                'precision or shape that they do not compute with, or an argument that they do not use'
            )
            print_log(text, logger='current', level=logging.WARNING)
        self._warned = True

    def unchanged(self, root: nn.Module) -> bool:
        """Return whether submodules, their classes and code, hooks, settings and the kind of parameters are unchanged.

        This runs in each step, so what can be compared by one call is compared by one, not module by module. Functions
        of libraries are looked at once in a scope, see :mod:`..passes`.

        Args:
            root (nn.Module): The changed module.
        """
        if self._root is None or self._parents[0] is not root:  # a shallow copy may have other children
            return False
        kinds, length, settings, values = self._root
        if length != len(root.__dict__):  # a new attribute may hide a method of the class
            return False
        if self._kind is not type(root) or self._mixed is None:
            if kinds != foreign_classes(type(root)) or self._count_patches(root) != self._patches:
                return False
            mixed = mixed_classes((root, *self.modules))  # on which users may set methods
            self._sizes = [*map(len, map(vars, mixed))]
            self._kind, self._mixed = type(root), mixed  # last: another thread may run the module
        try:
            own = root.__dict__
            if settings(own) != values or [n for n in self._numbers if own[n].__class__ not in _NUMBERS]:
                return False
        except _DIFFERS:
            return False
        if any(GLOBAL_HOOKS) != self._hooked_globally or [*map(len, map(vars, self._mixed))] != self._sizes:
            return False
        if self._own_dtypes and _dtypes_of_weights(root) != self._own_dtypes:
            return False
        checked = unchanged_code()
        if checked is None:
            if not self._functions.are_unchanged():
                return False
        else:
            for key, code in self._code:
                if key not in checked:
                    if not code.functions.are_unchanged():
                        return False
                    checked.add(key)
        if [*map(_get_children, self._parents)] != self._children:
            return False
        return not self.modules or self._state.matches(self.modules)


class _State(NamedTuple):
    """State of modules that :meth:`BypassedModules.unchanged` compares, one item for each module.

    Attributes:
        kinds (list[type]): Classes.
        lengths (list[int]): Numbers of attributes. One more may be a forward of the instance, or hide another method.
        settings (list[Callable]): Functions of a module's ``__dict__``, which return its hooks and its settings.
        values (list[tuple]): What they return.
        scalars (list[tuple[int, str]]): Indices of modules, and names of their settings that are numbers.
        numbers (list[int]): Numbers of parameters.
        parameters (list[type]): Classes of all parameters.
        dtypes (list[torch.dtype]): Precision of all parameters.
        views (list[tuple[int, torch.dtype]]): Indices of modules that have a tensor in the place of their weight, as
            FSDP puts it there, and its precision.
    """

    kinds: list[type]
    lengths: list[int]
    settings: list[Callable[[dict], tuple]]
    values: list[tuple]
    scalars: list[tuple[int, str]]
    numbers: list[int]
    parameters: list[type]
    dtypes: list[torch.dtype]
    views: list[tuple[int, torch.dtype]]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> '_State':
        """Return the state of modules now."""
        owns = [*map(vars, modules)]
        views = [(i, own['weight'].dtype) for i, own in enumerate(owns) if isinstance(own.get('weight'), torch.Tensor)]
        settings, values, numbers = [*zip(*_settings_of(modules), strict=True)] or ((),) * 3
        scalars = [(i, name) for i, names in enumerate(numbers) for name in names]
        read = _parameters(owns)
        return cls([*map(type, modules)], [*map(len, owns)], [*settings], [*values], scalars, *read, views)

    def matches(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether modules still have this state."""
        owns = [*map(vars, modules)]
        if [*map(len, owns)] != self.lengths:
            return False
        try:
            if [settings(own) for settings, own in zip(self.settings, owns, strict=True)] != self.values:
                return False
            # A tensor may be equal to the number in whose place it is, and need a gradient.
            if [name for i, name in self.scalars if owns[i][name].__class__ not in _NUMBERS]:
                return False
            for i, dtype in self.views:
                if owns[i]['weight'].dtype is not dtype:
                    return False
        except _DIFFERS:
            return False
        kinds = [*map(type, modules)]
        if kinds != self.kinds and [*map(foreign_classes, kinds)] != [*map(foreign_classes, self.kinds)]:
            return False
        return _parameters(owns) == (self.numbers, self.parameters, self.dtypes)


# Errors of a comparison of settings: another attribute stands in the place of one that was deleted, or in the place of
# a number a tensor or array, whose comparison has no truth value.
_DIFFERS = (KeyError, RuntimeError, TypeError, ValueError)
_get_children, _get_parameters = operator.attrgetter('_modules'), operator.itemgetter('_parameters')
_values = operator.methodcaller('values')
_LEVELS = 8  # of collections inside of each other that are compared, since one may contain itself


def _dtypes_of_weights(module):
    """Return the precisions of a module's own parameters that its input may be multiplied with."""
    return [p.dtype for p in module.__dict__['_parameters'].values() if p is not None and p.ndim > 1]


def _parameters(owns):
    """Return the number of parameters of each module, and the classes and dtypes of all, given each ``__dict__``."""
    given = [*map(_get_parameters, owns)]
    every = [*itertools.chain.from_iterable(map(_values, given))]
    return [*map(len, given)], [*map(type, every)], [p.dtype for p in every if p is not None]


def _settings_of(modules):
    """Return the result of :func:`_settings` for each module; within :func:`.ask_once` it is found once."""
    known = cached_answers('settings')
    for module in modules:
        if id(module) not in known:
            known[id(module)] = _settings(module)
    return [known[id(module)] for module in modules]


def _settings(module):
    """Return a function that gives the hooks of a module and its settings, what it gives now, and names of numbers.

    Settings are all attributes whose values are numbers, strings and the like, or collections of these, since any of
    them may decide what the module computes.
    """
    own = module.__dict__
    names, values = [*_HOOKS], [*map(dict, _get_hooks(own))]
    for name, value in own.items():
        if name in OF_EVERY_MODULE:
            continue
        if type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value))):
            names.append(name)
            values.append(value)
        elif _is_setting(value):
            names.append(name)
            values.append(copy.deepcopy(value))
    if '_compiled_call_impl' in own:
        names.append('_compiled_call_impl')
        values.append(own['_compiled_call_impl'])
    numbers = [name for name, value in own.items() if type(value) in _NUMBERS]
    return operator.itemgetter(*names), tuple(values), numbers


def _is_setting(value, levels=_LEVELS):
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return PLAIN.issuperset(map(type, value)) or (levels and all([_is_setting(x, levels - 1) for x in value]))
    return isinstance(value, _VALUES)


_HOOKS = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'
_get_hooks = operator.itemgetter(*_HOOKS)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes of every module, and whether it is in training
_NUMBERS = frozenset((int, float))
PLAIN = frozenset((bool, int, float, str, bytes, type(None), torch.dtype, torch.device))  # never changed in place
_VALUES = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device, enum.Enum)
