"""The modules that a changed module bypasses, and whether they are still as they were when that was allowed."""

from collections.abc import Iterable

from torch import nn

from ..surgery import foreign_classes
from .predicate import GLOBAL_HOOKS, is_hooked_globally

__all__ = ['BypassedModules']


class BypassedModules:
    """Modules whose forward is bypassed, and the state in which they were when that was found to be right.

    Args:
        root (nn.Module): The changed module.
        modules (Iterable[nn.Module]): Modules inside it, or itself, that were asked about.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module]):
        inside = {id(module): module for module in modules if module is not root}
        parents = [root]
        if inside:
            parents += [m for m in root.modules() if m is not root and inside.keys() & set(map(id, m.children()))]
        self.modules = tuple(inside.values())
        self._children = tuple((parent, dict(parent._modules)) for parent in parents)
        self._root = foreign_classes(type(root)), len(root.__dict__)  # one more may be one that hides a method
        self._states = tuple(map(_state, self.modules))
        self._hooked_globally = is_hooked_globally()

    def __getstate__(self):
        return {}  # a copy has other modules, and classes that were made here cannot be pickled: it is bound anew

    def __setstate__(self, state):
        self.modules, self._root = (), None

    def unchanged(self, root: nn.Module) -> bool:
        """Return whether everything is as it was: submodules, their classes, hooks, forwards and precision.

        It is asked in each step, so it calls no other function unless a class has changed.

        Args:
            root (nn.Module): The changed module.
        """
        if (
            self._root != (foreign_classes(type(root)), len(root.__dict__))
            or any(GLOBAL_HOOKS) != self._hooked_globally
        ):
            return False
        for parent, children in self._children:
            if parent._modules != children:
                return False
        for module, kind, length, touched, dtype, padding in self._states:
            own = module.__dict__
            if len(own) != length or touched != bool(
                own['_forward_hooks']
                or own['_forward_pre_hooks']
                or own['_backward_hooks']
                or own['_backward_pre_hooks']
                or 'forward' in own
                or own.get('_compiled_call_impl') is not None
            ):
                return False
            if type(module) is not kind and foreign_classes(type(module)) != foreign_classes(kind):
                return False
            weight = own['_parameters'].get('weight')
            weight = own.get('weight') if weight is None else weight
            if dtype is not (None if weight is None else weight.dtype) or padding != own.get('padding_mode'):
                return False
        return True


def _state(module):
    """Return a module and what is compared in each step: class, attributes, whether a call runs more, precision."""
    own = module.__dict__
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    touched = bool(hooks) or 'forward' in own or own.get('_compiled_call_impl') is not None
    weight = module._parameters.get('weight')
    weight = own.get('weight') if weight is None else weight
    dtype = None if weight is None else weight.dtype
    return module, type(module), len(own), touched, dtype, own.get('padding_mode')
