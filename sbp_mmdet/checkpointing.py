"""Checkpointing of submodules: their forward pass is recomputed in the backward pass."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.utils.checkpoint as cp
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmengine.logging import print_log
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ops.common.gathered import record_gathered, replay_gathered
from .ops.common.kept_maps import KeptMap
from .ops.common.modes import runs_within_others
from .ops.common.module_state import ModuleState, submodules
from .ops.common.shared_maps import Scope, open_scope, share_map
from .surgery import Mixin, mix_in, mix_out, named_submodules

__all__ = [
    'Checkpointed',
    'DrawsInside',
    'checkpoint_modules',
    'find_override',
    'keep_buffers',
    'mix_out_checkpoint',
    'refuse_replays',
    'run_checkpointed',
]

# Norms that never read a buffer that they change: in training mode they normalise with the statistics of the batch, in
# evaluation mode they change nothing.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS += (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# ``__torch_function__`` of classes of tensors that do not override torch's functions, such as Parameter and DTensor.
_NO_FUNCTIONS = torch._C._disabled_torch_function_impl
_PLAIN_KINDS = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str, tuple, torch.Size))


class _Buffer:
    """A buffer of a submodule, and its value at some point.

    Args:
        module (nn.Module): Submodule that holds the buffer.
        name (str): Name of the buffer in the submodule.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name, self.tensor = module, name, module._buffers[name]
        self.version, self.value = self.tensor._version, None

    @property
    def changed(self) -> bool:
        """Return whether the buffer was written to, or replaced, since then."""
        buffers = self.module._buffers
        now = buffers[self.name] if self.name in buffers else None  # those of scripted modules have no `get`
        return now is not self.tensor or now._version != self.version


def _buffers(parts: Sequence[nn.Module]) -> list[_Buffer]:
    return [_Buffer(part, name) for part in parts for name, tensor in part._buffers.items() if tensor is not None]


@contextlib.contextmanager
def keep_buffers(module: nn.Module, values: Sequence[_Buffer]) -> Iterator[None]:
    """Replace the buffers of a module by copies within the context, so that a forward pass updates the copies.

    The buffers themselves are not written to, because the graph of another forward pass may have saved them. This holds
    for every kind of buffer: running statistics, the vectors of a spectral norm, counters.

    Args:
        module (nn.Module): Module that runs within the context.
        values (Sequence): Buffers whose copies begin with other values; the others begin with their present values.

    Example:
        >>> with keep_buffers(model, ()):
        ...     model(images)  # running statistics do not change
    """
    before, copies = _buffers(submodules([module])), {}
    start = {(id(b.module), b.name): b.value for b in values}
    for buffer in before:
        if id(buffer.tensor) not in copies:  # several modules may share one
            value = start.get((id(buffer.module), buffer.name), buffer.tensor)
            copies[id(buffer.tensor)] = value.detach().clone()
        buffer.module._buffers[buffer.name] = copies[id(buffer.tensor)]
    try:
        yield
    finally:
        for buffer in before:
            buffer.module._buffers[buffer.name] = buffer.tensor


class Checkpointed(Mixin):
    """A module whose forward pass saves its inputs only, see :func:`run_checkpointed`.

    Attributes:
        replays_draws (bool): Whether a recomputation finds the draws of the first run. Default: False.
        has_run (bool): Whether the forward pass has run. Default: False.
    """

    outermost = True  # classes that are mixed in later are recomputed, too
    replays_draws = False
    has_run = False

    def forward(self, *args, **kwargs):
        if not self.has_run:
            self.has_run = True
        if not self.checkpoints_now():
            return super().forward(*args, **kwargs)
        return run_checkpointed(self, self.replayable(super().forward), args, kwargs)

    def replayable(self, forward: Callable) -> Callable:
        """Return a function that computes the same as ``forward`` each time that it is called.

        Args:
            forward (Callable): The forward pass.

        Returns:
            Callable: The function. By default ``forward`` itself.
        """
        return forward

    def checkpoints_now(self) -> bool:
        """Return whether this forward pass saves its inputs only."""
        return self.training


def mix_out_checkpoint(module: nn.Module, mixin: type[Mixin] | tuple[type[Mixin], ...]) -> None:
    """Remove a class that checkpoints a module, with the attribute that it has set. Others are left unchanged.

    Args:
        module (nn.Module): The module, changed in place.
        mixin (type[Mixin] | tuple[type[Mixin], ...]): The class, or several.
    """
    was_checkpointed = isinstance(module, Checkpointed)
    mix_out(module, mixin)
    if was_checkpointed and not isinstance(module, Checkpointed):
        vars(module).pop('has_run', None)


def run_checkpointed(module: nn.Module, forward: Callable, args: tuple, kwargs: dict):
    """Run a method of a module that saves its inputs only, and is recomputed in the backward pass.

    A call with an input or a parameter whose class overrides ``__torch_function__`` is not recomputed, because torch
    disables the override in a backward pass that begins at such a tensor. Nor is one with an input made in
    ``torch.inference_mode``, which autograd cannot save, while the module's own code may only read it.

    The recomputation begins with the buffers that the first run began with, so that it computes the same, and leaves
    them as the first run left them. Parameters, mode and settings of the modules are those of the first run, too.

    Args:
        module (nn.Module): The module.
        forward (Callable): Method of the module.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.

    Returns:
        The result of the method.
    """
    if not torch.is_grad_enabled() or runs_within_others():
        return forward(*args, **kwargs)
    # torch.utils.checkpoint saves tensors that are arguments, but not tensors inside of lists, so lists are flattened.
    leaves, structure = args, None
    if kwargs or any([isinstance(value, (tuple, list, dict)) and not _is_size(value) for value in args]):
        leaves, structure = tree_flatten((args, kwargs))
    parts, started, state, gathered = submodules([module]), None, None, []
    kinds = {*map(type, leaves), *[type(p) for part in parts for p in part._parameters.values()]}
    if not kinds <= _PLAIN_KINDS and (own := find_override(kinds)):
        _warn_of_tensors(type(module).__name__, own)
        return forward(*args, **kwargs)
    if any([isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves]):
        return forward(*args, **kwargs)

    def run(*leaves):
        nonlocal started, state
        args, kwargs = (leaves, {}) if structure is None else tree_unflatten(leaves, structure)
        if started is not None:
            # A scope of its own, in which no outer maps are shared.
            with state.restored(), keep_buffers(module, started), Scope(), replay_gathered(gathered):
                return forward(*args, **kwargs)
        buffers = [buffer for buffer in _buffers(parts) if type(buffer.module) not in _NORMS]
        for buffer in buffers:
            buffer.value = buffer.tensor.detach().clone()
        with Scope(), record_gathered(gathered):  # the recomputation would not find maps that outer layers share
            out = forward(*args, **kwargs)
        started, state = [buffer for buffer in buffers if buffer.changed], ModuleState(parts)
        return out

    if open_scope() is not None:
        for leaf in leaves:  # layers of the same input save no copy of it in eight bits or half precision
            if isinstance(leaf, Tensor) and leaf.dim() == 4:
                share_map(leaf, KeptMap(leaf))
    return cp.checkpoint(run, *leaves, use_reentrant=False)


def find_override(kinds: Iterable[type]) -> str | None:
    """Return the name of the first class of tensors that overrides ``__torch_function__``, or ``None``.

    Args:
        kinds (Iterable[type]): Classes of tensors and of other objects.
    """
    for kind in kinds:
        if issubclass(kind, Tensor) and kind is not Tensor and kind.__torch_function__ is not _NO_FUNCTIONS:
            return kind.__name__
    return None


@functools.cache
def _warn_of_tensors(module, tensors):
    """Log once for each class of modules that it is not recomputed."""
    text = (
        f'{module} is not recomputed in the backward pass, because {tensors}, the class of an input or a parameter, '
        'overrides __torch_function__'
    )
    print_log(text, logger='current', level=logging.WARNING)


def _is_size(value):
    """Return whether a container is the size of a map, so that there is no tensor in it."""
    return type(value) in (tuple, torch.Size) and all([type(member) is int for member in value])


def checkpoint_modules(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """Checkpoint submodules: their forward pass is recomputed in the backward pass. Gradients stay the same.

    The recomputation draws the same random numbers, and buffers such as running statistics are updated once. Names and
    shapes of parameters do not change. It makes no difference whether this or :func:`.apply.apply_lean` comes first.

    Args:
        model (nn.Module): Model, changed in place.
        modules (Sequence[str]): Names of submodules. The name of a list of modules stands for each of its members.

    Returns:
        list[str]: Names of the checkpointed modules.

    Raises:
        ValueError: If the model has no such submodule, one whose ``forward`` is never called, or one that cannot be
            recomputed.

    Example:
        >>> checkpoint_modules(detector, ['neck', 'rpn_head'])
        ['neck', 'rpn_head']
    """
    chosen = list(named_submodules(model, modules))
    for name, module in chosen:
        if isinstance(module, BaseRoIHead):
            parts = [f'{name}.{part}' for part, _ in module.named_children() if part.endswith('head')]
            raise ValueError(
                f'modules={list(modules)}: the detector calls the loss of {name}, not its forward; name its parts: '
                f'{parts}'
            )
    new = [module for _, module in chosen if not isinstance(module, Checkpointed)]
    for module in new:
        mix_in(module, Checkpointed)
    try:
        refuse_replays(model)
    except ValueError:
        for module in new:
            mix_out_checkpoint(module, Checkpointed)
        raise
    return [name for name, _ in chosen]


class DrawsInside(ValueError):
    """Error of a checkpoint around a layer that drops positions or images."""


def refuse_replays(model: nn.Module) -> None:
    """Refuse checkpointing around layers that drop positions or images: the recomputation would draw others.

    Args:
        model (nn.Module): Model.

    Raises:
        DrawsInside: If a checkpointed module contains such a layer.
    """
    for outer, module in model.named_modules():
        if not isinstance(module, Checkpointed):
            continue
        for inner, layer in module.named_modules(prefix=outer):
            state = vars(layer).get('_lean')
            if layer is module and module.replays_draws:
                continue
            if state is not None and state.draws is not None and state.draws.is_random(state.layer):
                raise DrawsInside(
                    f"{outer} is checkpointed, but {inner} inside of it, with preset='{state.settings.preset.name}', "
                    'drops positions or images. It stores less than the checkpoint: remove it from '
                    'CheckpointModulesHook, or leave that part out of LeanHook(modules=[...])'
                )
