"""State of modules in a forward pass, which their recomputation in the backward pass has to find again.

Between a forward pass and its backward pass, modules may change: ``torch.func.functional_call`` returns and puts the
parameters back, a model is set to evaluation mode, layers are frozen, hooks are registered. Autograd has saved what it
needs, so gradients do not depend on any of this. A recomputation calls the modules, so it has to put their state back.
"""

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

__all__ = ['ModuleState', 'replaced', 'submodules']

# Attributes of a module that are dicts and change in place.
_TENSORS = '_parameters', '_buffers'
_OTHERS = '_modules', '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'
_DICTS = frozenset((*_TENSORS, *_OTHERS))
_ABSENT = object()


class ModuleState:
    """Parameters, hooks, mode and other attributes of modules, and which parameters need gradients.

    Tensors that are plain attributes and parameters of special classes are excluded, because FSDP replaces them itself.
    Values of buffers are not part of the state either, only which tensors they are.

    Args:
        modules (Iterable[nn.Module]): The modules; the state includes all modules inside of them.

    Example:
        >>> state = ModuleState([model.train()])
        >>> model.eval()
        >>> with state.restored():
        ...     assert model.training
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._of_modules, parameters = [], {}
        for module in submodules(modules):
            own = vars(module)
            dicts = {name: dict(own[name]) for name in _DICTS}
            self._of_modules.append((module, type(module), _attributes(own), dicts))
            parameters.update((id(p), p) for p in own['_parameters'].values() if _is_plain(p))
        self._parameters = [(p, p.requires_grad, _version(p)) for p in parameters.values() if p is not None]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the state back within the context.

        Raises:
            RuntimeError: If a parameter was written to since then, as autograd does for tensors that it has saved.
        """
        undo = []
        try:
            for p, needed, version in self._parameters:
                if _version(p) != version:
                    raise RuntimeError(
                        f'a parameter of shape {tuple(p.shape)} was modified in place between the forward pass and its '
                        'recomputation in the backward pass; call backward() before the optimizer steps'
                    )
                if p.requires_grad != needed:
                    undo.append(functools.partial(p.requires_grad_, p.requires_grad))
                    p.requires_grad_(needed)
            for module, kind, attributes, dicts in self._of_modules:
                if type(module) is not kind:
                    undo.append(functools.partial(setattr, module, '__class__', type(module)))
                    module.__class__ = kind
                own = vars(module)
                undo += _put_back(own, _attributes(own), attributes)
                for name in _OTHERS:
                    undo += _put_back(own[name], own[name], dicts[name])
                for name in _TENSORS:  # FSDP takes parameters away and puts them back itself
                    undo += _put_back(own[name], own[name], dicts[name], own[name].keys() & dicts[name].keys())
            yield
        finally:
            for step in undo:
                step()


@contextlib.contextmanager
def replaced(places: Iterable[tuple[dict, str]], tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put tensors in the place of others within the context.

    Args:
        places (Iterable[tuple[dict, str]]): For each tensor, a dict such as the parameters of a module, and a key.
        tensors (Iterable[Tensor]): The tensors.
    """
    before = [(mapping, name, mapping[name]) for mapping, name in places]
    try:
        for (mapping, name, _), tensor in zip(before, tensors, strict=True):
            mapping[name] = tensor
        yield
    finally:
        for mapping, name, tensor in before:
            mapping[name] = tensor


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all modules inside of them, without repetitions.

    Args:
        modules (Iterable[nn.Module]): The modules.
    """
    found = dict.fromkeys(modules)
    left = [*found]
    for module in left:  # nn.Module.modules makes a generator for each level
        new = [child for child in module._modules.values() if child is not None and child not in found]
        found.update(dict.fromkeys(new))
        left += new
    return left


def _attributes(own):
    return {key: x for key, x in own.items() if key not in _DICTS and not isinstance(x, Tensor)}


def _is_plain(x):
    return x is None or type(x) in (Tensor, nn.Parameter)


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


def _put_back(mapping, now, before, keys=None):
    """Make the items of a dict those that they were before, and return the calls that undo it.

    Args:
        mapping (dict): The dict, changed in place.
        now (Mapping): Its present items that are looked at.
        before (Mapping): The items before.
        keys (Iterable | None): Keys that may change. If ``None``, all may.
    """
    if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
        return []
    undo, now = [], dict(now)
    for key in dict.fromkeys((*now, *before)) if keys is None else keys:
        new, old = now.get(key, _ABSENT), before.get(key, _ABSENT)
        is_special = any(isinstance(x, Tensor) and not _is_plain(x) for x in (new, old))
        if new is not old and not is_special:
            _put(mapping, key, old)
            undo.append(functools.partial(_put, mapping, key, new))
    return undo


def _put(mapping, key, value):
    if value is _ABSENT:
        mapping.pop(key, None)
    else:
        mapping[key] = value
