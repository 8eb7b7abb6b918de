"""Changing a live model: finding its submodules, mixing into their classes, and hooks that do so by a config's line."""

import functools
from collections.abc import Iterable, Iterator, Sequence

from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn

__all__ = [
    'Mixin',
    'ModelHook',
    'detectors',
    'has_methods_of',
    'members',
    'mix_in',
    'mix_out',
    'model_hook_class',
    'model_hooks',
    'stock_class',
    'unwrapped',
]


class Mixin:
    """Base of what is mixed into the class of a module, see :func:`mix_in`.

    Attributes:
        outermost (bool): Stays in front of what is mixed in later. Default: False.
    """

    outermost = False

    def __reduce_ex__(self, protocol):
        # A class that was made here cannot be found by its name: a pickle names what it was made of.
        kind, fronts = _apart(type(self))
        _, (_, *args), *state = super().__reduce_ex__(protocol)
        return _new, (kind, fronts, *args), *state


@functools.cache
def _mixed(mixin, kind):
    """One class for each pair: torch.compile takes modules of another class for other code."""
    return type(kind.__name__, (mixin, kind), {'__module__': kind.__module__})


def _apart(kind):
    """A class without what was mixed in, and that, from the front."""
    fronts = []
    while kind.__bases__ and issubclass(kind.__bases__[0], Mixin):
        front, kind = kind.__bases__
        fronts.append(front)
    return kind, fronts


def has_methods_of(obj: object, kind: type, *names: str) -> bool:
    """Checks that an object runs methods of a class, and neither a subclass's nor its own.

    Args:
        obj (object): An object without :func:`mix_in` for these methods.
        kind (type): The class.
        *names (str): Names of the methods.
    """
    return isinstance(obj, kind) and all(
        name not in vars(obj) and getattr(type(obj), name) is getattr(kind, name) for name in names
    )


def _together(kind, fronts):
    for front in reversed(fronts):
        kind = _mixed(front, kind)
    return kind


def _new(kind, fronts, *args):
    kind = _together(kind, fronts)
    return kind.__new__(kind, *args)


def stock_class(kind: type) -> type:
    """Returns a class without what this package mixed in.

    Args:
        kind (type): The class of a module.
    """
    return _apart(kind)[0]


def mix_in(module: nn.Module, mixin: type[Mixin]) -> None:
    """Puts a class in front of the class of a module, or behind an outermost one.

    Args:
        module (nn.Module): Changed in place; its class keeps its name.
        mixin (type[Mixin]): The class.
    """
    # Not an attribute of the instance: a copy of the model, as EMA makes it, would call the original.
    kind, fronts = _apart(type(module))
    place = 1 if fronts and fronts[0].outermost and not mixin.outermost else 0
    module.__class__ = _together(kind, [*fronts[:place], mixin, *fronts[place:]])


def mix_out(module: nn.Module, mixin: type[Mixin] | tuple[type[Mixin], ...]) -> None:
    """The reverse of :func:`mix_in`: takes a class away, whatever was mixed in after it.

    Args:
        module (nn.Module): Changed in place.
        mixin (type[Mixin] | tuple[type[Mixin], ...]): The class, or a base of it; or several.
    """
    kind, fronts = _apart(type(module))
    module.__class__ = _together(kind, [front for front in fronts if not issubclass(front, mixin)])


def members(model: nn.Module, modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules by their names.

    Args:
        model (nn.Module): The model.
        modules (Sequence[str]): Names of submodules. A list of modules means each of its members.

    Yields:
        tuple[str, nn.Module]: Name and submodule.

    Raises:
        ValueError: If the model has no such submodule, or none is named.
    """
    if not modules or '' in modules:
        raise ValueError(f"modules={list(modules)} must name submodules of the model, such as 'neck'")
    for name in modules:
        try:
            found = model.get_submodule(name)
        except AttributeError:
            children = [child for child, _ in model.named_children()]
            raise ValueError(f'modules={list(modules)}: there is no {name!r}; the model has {children}') from None
        if isinstance(found, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f'{name}.{key}', module) for key, module in found.named_children())
        else:
            yield name, found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of distributed wrappers and of test-time augmentation, or the model itself."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


def detectors(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a model that have a backbone.

    Args:
        model (nn.Module): A detector, or what holds several, such as the student and the teacher of semi-supervised
            training.

    Returns:
        dict[str, nn.Module]: By name: the model itself (''), or those inside of it, but not inside of one another; none
        for a backbone.
    """
    model = unwrapped(model)
    found = {}
    for name, module in model.named_modules():  # the outer ones first; a backbone may be made of one
        inside = any(not outer or name.startswith(f'{outer}.') for outer in found)
        if 'backbone' in module._modules and not inside:
            found[name] = module
    return found


class ModelHook(Hook):
    """Base of hooks that change the model before a run.

    A tool that builds a detector without mmengine's runner finds these hooks by their class and applies them too. So a
    hook of a project that changes the model should derive from this class.

    Attributes:
        exact (bool): Whether the gradients stay what they are without the hook. A study of gradients leaves the others
            out of its exact baseline. Default: False.
    """

    exact = False

    def apply(self, model: nn.Module) -> str:
        """Changes the model in place.

        Args:
            model (nn.Module): The detector, not wrapped.

        Returns:
            str: What was done, for the log.
        """
        raise NotImplementedError(f'{type(self).__name__} has no apply(model)')

    def before_run(self, runner) -> None:
        """Called by mmengine's runner."""
        runner.logger.info(f'{type(self).__name__}: {self.apply(unwrapped(runner.model))}')


def model_hook_class(cfg: dict) -> type[ModelHook] | None:
    """The class of a hook that changes the model.

    Args:
        cfg (dict): A member of a config's ``custom_hooks``.

    Returns:
        type[ModelHook] | None: None for any other hook.

    Raises:
        ValueError: If no such hook is registered.
    """
    kind = cfg['type']
    kind = HOOKS.get(kind) if isinstance(kind, str) else kind
    if kind is None:
        raise ValueError(f'custom_hooks: no hook is registered as {cfg["type"]!r}; name its module in custom_imports')
    return kind if isinstance(kind, type) and issubclass(kind, ModelHook) else None


def model_hooks(custom_hooks: Iterable[dict] | None) -> Iterator[ModelHook]:
    """Builds the hooks that change the model.

    Args:
        custom_hooks (Iterable[dict] | None): Of a config.

    Yields:
        ModelHook: In the order of the config.

    Raises:
        ValueError: If a hook is not registered.
    """
    for cfg in custom_hooks or []:
        if model_hook_class(cfg):
            yield HOOKS.build({key: value for key, value in cfg.items() if key != 'priority'})  # the runner's business
