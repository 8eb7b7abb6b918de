"""State of the modules that a changed module bypasses, to find out in each step whether they have changed since."""

from collections.abc import Iterable

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
        self._kind, self._root = type(root), (foreign_classes(type(root)), len(root.__dict__))
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
        """Return whether submodules, their classes and code, hooks, padding modes and precision are unchanged.

        This runs in each step, so it calls no other function unless a class has changed. Functions of libraries are
        looked at once in a scope, see :mod:`..passes`.

        Args:
            root (nn.Module): The changed module.
        """
        kinds, length = self._root or (None, None)
        # A new attribute may hide a method of the class.
        if length != len(root.__dict__) or (self._kind is not type(root) and kinds != foreign_classes(type(root))):
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
        for module, kind, length, touched, dtype, padding in self._states:
            own = module.__dict__
            if len(own) != length or touched != (
                True
                if own['_forward_hooks']
                or own['_forward_pre_hooks']
                or own['_backward_hooks']
                or own['_backward_pre_hooks']
                or 'forward' in own
                or ('_compiled_call_impl' in own and own['_compiled_call_impl'] is not None)
                else False
            ):
                return False
            if type(module) is not kind and foreign_classes(type(module)) != foreign_classes(kind):
                return False
            parameters = own['_parameters']
            weight = parameters['weight'] if 'weight' in parameters else None
            weight = own['weight'] if weight is None and 'weight' in own else weight
            if dtype is not (None if weight is None else weight.dtype):
                return False
            if padding != (own['padding_mode'] if 'padding_mode' in own else None):
                return False
        return True


def _state(module):
    """Return the state of a module that :meth:`BypassedModules.unchanged` compares.

    Returns:
        tuple: The module, its class, its number of attributes, whether it has hooks or a forward of its own, the
        precision of its weight, and its padding mode.
    """
    own = module.__dict__
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    touched = bool(hooks) or 'forward' in own or own.get('_compiled_call_impl') is not None
    weight = module._parameters.get('weight')
    weight = own.get('weight') if weight is None else weight
    dtype = None if weight is None else weight.dtype
    return module, type(module), len(own), touched, dtype, own.get('padding_mode')
