"""Beginning and end of forward passes, for modules whose layers draw positions or share feature maps.

Both are mixed into the class of the module (:class:`.surgery.Mixin`) and are no hooks. So ``module.forward(x)`` works
like ``module(x)``, and a pass ends with the call even if an error is raised.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .library_code import FunctionSnapshot, library_code, replaced_code
from .mixed_classes import mixed_classes, names_set_on
from .ops.common.modes import evaluates_lean
from .ops.common.shared_maps import Scope, open_scope
from .ops.common.uncompiled import uncompiled
from .stochastic_backprop.step_draws import StepDraws
from .surgery import Mixin, mix_in, mix_out, refuse_tracing, stock_class

__all__ = [
    'PLANNER',
    'DrawsInPasses',
    'SharesMaps',
    'attach_draws',
    'detach_draws',
    'has_hooks_of_others',
    'is_known_inside',
    'is_of_known_library',
    'share_maps_within',
]

# Packages whose modules write to feature maps through autograd only.
_LIBRARIES = ('mmcv', 'mmdet', 'mmengine', 'mmpose', 'mmpretrain', 'mmrotate', 'mmseg', 'mmyolo', 'sbp_mmdet')
# Folders in mmdet's `projects/`. A folder of another name there is the user's own.
_PROJECTS = ('AlignDETR', 'CO-DETR', 'DiffusionDet', 'EfficientDet', 'HDINO', 'SparseInst', 'ViTDet')
_KNOWN = (*(f'{name}.' for name in (*_LIBRARIES, 'torch.nn')), *(f'projects.{name}.' for name in _PROJECTS))
PLANNER = 'sbp_mmdet.plan.'  # modules of hooks that only observe
# Modules whose hooks only observe, so that feature maps are shared in spite of them.
_WATCHERS = ('torch.distributed.', PLANNER)
# torch saves the noise of this class before it draws it, and a checkpoint stops its recomputation in between.
_NOT_RECOMPUTABLE = (nn.RReLU,)
_DEPTH = 2  # levels below the outermost known module that open a scope of their own where that one does not


class DrawsInPasses(Mixin):
    """Mixin of a backbone whose layers draw in its forward passes.

    Attributes:
        step_draws (list[StepDraws]): Draws of its layers, one object for each call of :func:`.apply.apply_lean` that
            changed some of them.
    """

    def forward(self, *args, **kwargs):
        refuse_tracing(self, args)
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return self._draw_in_pass(super().forward, args, kwargs)

    @functools.partial(uncompiled, recursive=False)
    def _draw_in_pass(self, forward, args, kwargs):
        with contextlib.ExitStack() as passes:
            for draws in self.step_draws:
                passes.enter_context(draws.forward_pass(args, kwargs))
            return forward(*args, **kwargs)


def attach_draws(owner: nn.Module, draws: StepDraws) -> None:
    """Make a backbone open a forward pass of some draws in each call in training.

    Args:
        owner (nn.Module): The module that holds all layers; changed in place.
        draws (StepDraws): Draws of its layers.
    """
    if not isinstance(owner, DrawsInPasses):
        mix_in(owner, DrawsInPasses)
        owner.step_draws = []
    owner.step_draws.append(draws)


def detach_draws(model: nn.Module, used: list[StepDraws]) -> None:
    """Undo :func:`attach_draws`, except for draws that are still used.

    Args:
        model (nn.Module): A model.
        used (list[StepDraws]): Draws of the layers that are changed now.
    """
    for module in model.modules():
        if isinstance(module, DrawsInPasses):
            module.step_draws = [draws for draws in module.step_draws if draws in used]
            if not module.step_draws:
                mix_out(module, DrawsInPasses)
                del module.step_draws


class SharesMaps(Mixin):
    """Mixin of a module whose layers may share saved maps, see :mod:`.ops.common.shared_maps`.

    It opens a scope if all code inside of it is known: modules of known libraries, unchanged and without hooks. This is
    looked at in each pass, so a hook that is registered later counts.
    """

    def forward(self, *args, **kwargs):
        refuse_tracing(self, args)
        if not (self.training or evaluates_lean()):
            return super().forward(*args, **kwargs)
        return self._share_maps(super().forward, args, kwargs)

    @functools.partial(uncompiled, recursive=False)
    def _share_maps(self, forward, args, kwargs):
        with self._scope_of_maps():
            return forward(*args, **kwargs)

    @uncompiled
    def _scope_of_maps(self):
        if open_scope() is not None or not torch.is_grad_enabled() or not _is_known_inside(self):
            return _NO_SCOPE
        return Scope(self._inside.code)


_NO_SCOPE = contextlib.nullcontext()


def share_maps_within(model: nn.Module) -> None:
    """Make the largest modules whose code is known open a scope, within which layers share their saved maps.

    Args:
        model (nn.Module): A model, changed in place. The effects of an earlier call are undone first.
    """
    for module in model.modules():
        if isinstance(module, SharesMaps):
            mix_out(module, SharesMaps)
        vars(module).pop('_inside', None)
    for module in dict.fromkeys(_find_scopes(model, 0)):  # one that several modules share comes several times
        mix_in(module, SharesMaps)


def _find_scopes(module, depth) -> Iterator[nn.Module]:
    """Yield the outermost known modules with several layers that share maps, and some below them.

    Where a part becomes unknown later, those around it open no scope any more, and those beside it still do.
    """
    inside = [*module.modules()]
    sharing = [m for m in inside if getattr(m, 'shares_maps', False) or isinstance(m, nn.Conv2d)]
    if len(sharing) < 2 or not any([getattr(m, 'shares_maps', False) for m in sharing]):
        return
    known = is_of_known_library(module) and is_known_inside(module)
    if known and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
        depth += 1
    if depth <= _DEPTH:
        for child in module.children():
            yield from _find_scopes(child, depth)


class _Inside(NamedTuple):
    """Snapshot of the modules inside of a module.

    Copies and pickles of the module begin without.

    Attributes:
        modules (list[nn.Module]): The modules; the outermost, whose own hooks run before and after its forward pass,
            is not among them.
        kinds (list[type]): Their classes.
        inside (list[dict]): Their children.
        children (dict): Children of the outermost module.
        mixed (list[type]): The classes of all modules that this package made.
        lengths (list[int]): Numbers of attributes of the modules, of the outermost one and of ``mixed``. One more may
            hide a function.
        code (dict[int, LibraryCode]): The code of all classes by its id.
        functions (FunctionSnapshot | None): All functions of that code.
    """

    modules: Sequence[nn.Module] = ()
    kinds: Sequence[type] = ()
    inside: Sequence[dict] = ()
    children: dict | None = None
    mixed: Sequence[type] = ()
    lengths: Sequence[int] = ()
    code: dict | None = None
    functions: FunctionSnapshot | None = None

    def __reduce_ex__(self, protocol):
        return _Inside, ()

    def unchanged(self, root: nn.Module) -> bool:
        """Return whether classes and children are the same, and nothing runs besides their forward passes.

        Args:
            root (nn.Module): The outermost module.
        """
        if not self.modules or self.children != root._modules:
            return False
        if not self.functions.are_unchanged():
            return False
        owns = [*map(vars, self.modules)]
        if [*map(type, self.modules)] != self.kinds or [own['_modules'] for own in owns] != self.inside:
            return False
        lengths = [*map(len, (*owns, vars(root))), *map(len, map(vars, self.mixed))]
        return lengths == self.lengths and not _any_touched(self.modules, owns)


def _is_known_inside(root: nn.Module) -> bool:
    """Return whether all modules inside of a module are of known libraries and run nothing else.

    Args:
        root (nn.Module): The module. Its own hooks, and a forward that was set on it, are not looked at.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    snapshot = vars(root).get('_inside')
    if snapshot is None or not snapshot.unchanged(root):
        root._inside = None
        inside = [m for m in root.modules() if m is not root]
        kinds = {*map(stock_class, {*map(type, inside)})}
        if not all([_is_recomputable(kind) for kind in kinds]) or _any_touched(inside, map(vars, inside)):
            return False
        code = {id(code): code for code in map(library_code, {*kinds, stock_class(type(root))})}
        if any([one.replaced for one in code.values()]) or _hides_code(inside) or _hides_code([root], ('forward',)):
            return False
        children, places = [dict(m._modules) for m in inside], (place for one in code.values() for place in one.places)
        mixed = mixed_classes((root, *inside))
        lengths = [len(vars(one)) for one in (*inside, root, *mixed)]
        functions = FunctionSnapshot(dict.fromkeys(places))
        kept = inside, [*map(type, inside)], children, dict(root._modules), mixed, lengths, code, functions
        root._inside = _Inside(*kept)
    return True


is_known_inside = uncompiled(_is_known_inside)


def _hides_code(modules, but=()):
    """Return whether an attribute of a module, or a name set on its changed class, hides code that its forward runs.

    Methods whose names are in ``but`` may be hidden.
    """
    names_of = {}
    for kind in {*map(type, modules)}:
        stock = stock_class(kind)
        names_of[kind] = names = {name for owner, name, _ in library_code(stock).places if owner is stock}
        names.difference_update(but)
        if not names.isdisjoint(names_set_on(kind)):
            return True
    return any([callable(own[name]) for m in modules for own in [vars(m)] for name in names_of[type(m)] & own.keys()])


def _any_touched(modules, owns):
    """Return whether a call of any module, given the attributes of each, runs more than the forward pass of its class.

    This runs in each step, so modules are looked at one by one only if any of them has a hook or the like.
    """
    looked_at = [
        'forward' in own
        or own['_forward_hooks']
        or own['_forward_pre_hooks']
        or ('_compiled_call_impl' in own and own['_compiled_call_impl'] is not None)
        for own in owns
    ]
    return any(looked_at) and any(map(_is_touched, modules))


def _is_touched(module):
    """Return whether a call of a module runs more than the forward pass of its class."""
    own = vars(module)
    if 'forward' in own or own.get('_compiled_call_impl') is not None:
        return True
    return has_hooks_of_others(module, _WATCHERS)


def has_hooks_of_others(module: nn.Module, observers: str | tuple[str, ...]) -> bool:
    """Return whether a module has forward hooks or pre-hooks apart from those of some packages.

    Args:
        module (nn.Module): The module.
        observers (str | tuple[str, ...]): Beginnings of the names of the modules in which the other hooks are written.
    """
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all((getattr(hook, '__module__', None) or '').startswith(observers) for hook in hooks)


def is_of_known_library(module: nn.Module) -> bool:
    """Return whether the class of a module, as it was before this package changed it, and its code are of a library.

    Args:
        module (nn.Module): The module.
    """
    kind = stock_class(type(module))
    return _is_recomputable(kind) and not replaced_code(kind)


@functools.cache
def _is_recomputable(kind):
    return f'{kind.__module__}.'.startswith(_KNOWN) and kind not in _NOT_RECOMPUTABLE
