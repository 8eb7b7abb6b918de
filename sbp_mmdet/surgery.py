"""Changing a live model: finding its submodules, mixing into their classes, and hooks that do so by a config's line."""

from collections.abc import Iterable, Iterator, Sequence

from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch import nn

__all__ = ['Mixin', 'ModelHook', 'members', 'mix_in', 'mix_out', 'model_hook_class', 'model_hooks', 'unwrapped']


class Mixin:
    """Base of what is mixed into the class of a module, see :func:`mix_in`.

    Attributes:
        outermost (bool): Stays in front of what is mixed in later. Default: False.
    """

    outermost = False


def mix_in(module: nn.Module, mixin: type[Mixin]) -> None:
    """Puts a class in front of the class of a module, or behind an outermost one.

    Args:
        module (nn.Module): Changed in place; its class keeps its name.
        mixin (type[Mixin]): The class.
    """
    kind, front = type(module), [mixin]
    if getattr(kind.__bases__[0], 'outermost', False):
        outermost, kind = kind.__bases__
        front.append(outermost)
    # Not an attribute of the instance: a copy of the model, as EMA makes it, would call the original.
    for cls in front:
        kind = type(kind.__name__, (cls, kind), {'__module__': kind.__module__})
    module.__class__ = kind


def mix_out(module: nn.Module, mixin: type[Mixin]) -> None:
    """The reverse of :func:`mix_in`: takes a class away, whatever was mixed in after it.

    Args:
        module (nn.Module): Changed in place.
        mixin (type[Mixin]): The class, or a base of it.
    """
    kind, fronts = type(module), []
    while kind.__bases__ and issubclass(kind.__bases__[0], Mixin):
        front, kind = kind.__bases__
        if not issubclass(front, mixin):
            fronts.append(front)
    for front in reversed(fronts):
        kind = type(kind.__name__, (front, kind), {'__module__': kind.__module__})
    module.__class__ = kind


def members(model: nn.Module, modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules by their names.

    Args:
        model (nn.Module): The model.
        modules (Sequence[str]): Names of submodules. A list of modules means each of its members.

    Yields:
        tuple[str, nn.Module]: Name and submodule.

    Raises:
        ValueError: If the model has no such submodule.
    """
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
    """The model that a distributed wrapper holds, or the model itself."""
    return model.module if is_model_wrapper(model) else model


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
