"""State of modules in a forward pass, which their recomputation in the backward pass has to find again.

Between a forward pass and its backward pass, modules may change: ``torch.func.functional_call`` returns and puts the
parameters back, a model is set to evaluation mode, layers are frozen, hooks are registered. Autograd has saved what it
needs, so gradients do not depend on any of this. A recomputation calls the modules, so it has to put their state back.
"""

import contextlib
import functools
import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn

__all__ = ['ModuleState', 'replaced', 'submodules']

# Attributes of a module that are dicts and change in place.
_TENSORS = '_parameters', '_buffers'
_DICTS = *_TENSORS, '_modules', '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'
_PLAIN = frozenset((Tensor, nn.Parameter))  # tensors of other classes are left to those who made them
_get_dicts = operator.itemgetter(*_DICTS)
_get_keys, _get_values = operator.methodcaller('keys'), operator.methodcaller('values')
_get_requires_grad, _get_version = operator.attrgetter('requires_grad'), operator.attrgetter('_version')
_ABSENT = object()


class ModuleState:
    """Parameters, hooks, mode and other attributes of modules, and which parameters need gradients.

    Plain attributes may be weights too, which a hypernetwork or an old spectral norm computes anew for each pass. Those
    of modules in FSDP and parameters of special classes are excluded, because FSDP replaces them itself. Values of
    buffers are not part of the state either, only which tensors they are. Attributes that a pass itself writes have the
    values that it left.

    Args:
        modules (Iterable[nn.Module]): The modules, without those inside of them; see :func:`submodules`.

    Example:
        >>> state = ModuleState(submodules([model.train()]))
        >>> model.eval()
        >>> with state.restored():
        ...     assert model.training
    """

    def __init__(self, modules: Iterable[nn.Module]):
        # Checkpoints take a state in each forward pass, so this makes few calls.
        self._modules = [*modules]
        self._kinds, now = [*map(type, self._modules)], self._read_dicts()
        self._dicts, self._items = [*map(dict, now)], _read_items(now)
        parameters = chain.from_iterable(map(_get_values, now[len(self._modules) :: len(_DICTS)]))
        self._parameters = [p for p in parameters if type(p) in _PLAIN]
        self._needed, self._versions = self._read_parameters()

    def _read_dicts(self):
        """Return the attributes of each module, and then the dicts among them, those with its parameters first."""
        owns = [*map(vars, self._modules)]
        return [*owns, *chain.from_iterable(map(_get_dicts, owns))]

    def _read_parameters(self):
        needed = [*map(_get_requires_grad, self._parameters)]
        try:
            return needed, [*map(_get_version, self._parameters)]
        except RuntimeError:  # parameters that were made in inference mode have no versions
            return needed, [None if p.is_inference() else p._version for p in self._parameters]

    def _is_present(self):
        """Return whether the modules are as they were."""
        if [*map(type, self._modules)] != self._kinds:
            return False
        *names, values = _read_items(self._read_dicts())
        *before, known = self._items
        return names == before and all(map(operator.is_, values, known))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the state back within the context.

        Parameters that were written to since then must not be read within the context. Others may have been written
        to: where the optimizer steps within the backward pass, it is done with what runs after the recomputed part,
        such as the loss of a head, or other levels of it.

        Raises:
            RuntimeError: If a parameter is read that was written to since then, as autograd does for tensors that it
                has saved.
        """
        undo, changed = [], None
        try:
            needed, versions = self._read_parameters()
            if versions != self._versions:
                pairs = zip(self._parameters, versions, self._versions, strict=True)
                changed = {id(p) for p, now, before in pairs if now != before}
            if needed != self._needed:
                for p, before, now in zip(self._parameters, self._needed, needed, strict=True):
                    if now != before:
                        undo.append(functools.partial(p.requires_grad_, now))
                        p.requires_grad_(before)
            if not self._is_present():
                self._restore_modules(undo)
            with _refused(self._modules, changed) if changed else contextlib.nullcontext():
                yield
        finally:
            for step in undo:
                step()

    def _restore_modules(self, undo):
        """Put classes and attributes back, and add the calls that undo it to a list."""
        number = len(self._modules)
        inner = iter(self._dicts[number:])
        for module, kind, attributes in zip(self._modules, self._kinds, self._dicts[:number], strict=True):
            if type(module) is not kind:
                undo.append(functools.partial(setattr, module, '__class__', type(module)))
                module.__class__ = kind
            own = vars(module)
            undo += _put_back(own, _attributes(own), _attributes(attributes))
            for name, before in zip(_DICTS, inner):  # noqa: B905  each module takes its dicts from the iterator
                now = dict(own[name])
                if name in _TENSORS and _is_sharded(own):  # FSDP takes parameters away and puts them back itself
                    undo += _put_back(own[name], now, before, now.keys() & before.keys())
                elif steps := _put_back(own[name], now, before):
                    _sort(own[name], before)
                    undo += [*steps, functools.partial(_sort, own[name], now)]


class _Refusing(dict):
    """Parameters of a module, some of which must not be read by their names.

    Listing them is allowed, because settings such as their precision are found that way.

    Args:
        parameters (dict[str, nn.Parameter | None]): The parameters by their names.
        changed (set[int]): Parameters that must not be read, by id.
    """

    def __init__(self, parameters, changed):
        super().__init__(parameters)
        self.changed = changed

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if id(value) in self.changed:
            raise _error(value)
        return value

    def get(self, name, default=None):
        return self[name] if name in self else default


def _error(parameter):
    return RuntimeError(
        f'a parameter of shape {tuple(parameter.shape)} was modified in place between the forward pass and its '
        'recomputation in the backward pass; call backward() before the optimizer steps'
    )


@contextlib.contextmanager
def _refused(modules, changed):
    """Let modules raise an error within the context where they read a parameter that was written to."""
    before = []
    try:
        for module in modules:
            own = vars(module)
            parameters = own['_parameters']
            # Modules may read parameters in other ways: recurrent ones from a list, scripted ones in C++.
            others = [own] if type(parameters) in (dict, OrderedDict, _Refusing) else [own, parameters]
            for value in chain.from_iterable(_members(values) for values in others):
                if id(value) in changed:
                    raise _error(value)
            if not changed.isdisjoint(map(id, parameters.values())):
                outer = parameters.changed if isinstance(parameters, _Refusing) else set()
                own['_parameters'] = _Refusing(parameters, changed | outer)
                before.append((own, parameters))
        yield
    finally:
        for own, parameters in before:
            now = own['_parameters']
            own['_parameters'] = parameters
            parameters.clear()
            parameters.update(dict.items(now))  # FSDP may have put others there


def _members(values):
    """Yield the values of a dict, and those inside of lists, tuples and dicts among them."""
    for name, value in values.items():
        if name not in _DICTS:
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _read_items(dicts):
    """Return the number of items of each dict, and the keys and the values of all of them."""
    return [*map(len, dicts)], *([*chain.from_iterable(map(get, dicts))] for get in (_get_keys, _get_values))


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
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return left


def _is_sharded(own):
    return '_is_fsdp_managed_module' in own


def _attributes(own):
    sharded = _is_sharded(own)
    return {key: x for key, x in own.items() if key not in _DICTS and not (sharded and isinstance(x, Tensor))}


def _put_back(mapping, now, before, keys=None):
    """Make the items of a dict those that they were before, and return the calls that undo it.

    Args:
        mapping (dict): The dict, changed in place.
        now (Mapping): Its present items that are looked at.
        before (Mapping): The items before.
        keys (Iterable | None): Keys that may change. If ``None``, all may.
    """
    undo = []
    for key in dict.fromkeys((*now, *before)) if keys is None else keys:
        new, old = now.get(key, _ABSENT), before.get(key, _ABSENT)
        is_special = any(isinstance(x, Tensor) and type(x) not in _PLAIN for x in (new, old))
        if new is not old and not is_special:
            _put(mapping, key, old)
            undo.append(functools.partial(_put, mapping, key, new))
    return undo


def _sort(mapping, keys):
    """Bring items into the order of some keys, in which a container runs its modules."""
    mapping.update({key: mapping.pop(key) for key in keys if key in mapping})


def _put(mapping, key, value):
    if value is _ABSENT:
        mapping.pop(key, None)
    else:
        mapping[key] = value
