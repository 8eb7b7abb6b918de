"""Checkpointing of submodules: their forward pass runs again in the backward pass."""

import contextlib
from collections.abc import Sequence

import torch
import torch.utils.checkpoint as cp
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ops.common.handed_maps import Scope
from .surgery import Mixin, members, mix_in, mix_out

__all__ = ['Checkpointed', 'checkpoint_modules', 'keep_running_stats', 'refuse_replays']


@contextlib.contextmanager
def keep_running_stats(module: nn.Module):
    """Batch norms in here normalise as in training, but leave their running statistics as they are."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.num_batches_tracked is not None]
    before = [(m, m.momentum, m.num_batches_tracked.clone()) for m in norms]
    for norm in norms:
        norm.momentum = 0.0  # the share of the new batch in the running statistics
    try:
        yield
    finally:
        for norm, momentum, tracked in before:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(tracked)


class Checkpointed(Mixin):
    """Its forward pass stores its input only."""

    outermost = True  # what is mixed in later is run again too

    def forward(self, *args, **kwargs):
        forward = super().forward
        self._has_run = True
        if not (self.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        replay = False
        # Tensors are passed one by one: checkpointing saves those, but holds on to what stands inside of lists.
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves):
            nonlocal replay
            args, kwargs = tree_unflatten(leaves, structure)
            with keep_running_stats(self) if replay else contextlib.nullcontext():
                replay = True
                with Scope():  # nothing from outside is read in here: it would not be found when this runs again
                    return forward(*args, **kwargs)

        return cp.checkpoint(run, *leaves, use_reentrant=False)


def checkpoint_modules(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """Checkpoints submodules: their forward pass runs again in the backward pass, and the gradients stay as they are.

    Random numbers are the same in both runs, and batch norms update their running statistics in the first only. Names
    and shapes of parameters do not change.

    Args:
        model (nn.Module): The model; changed in place.
        modules (Sequence[str]): Names of submodules. A list of modules means each of its members.

    Returns:
        list[str]: Names of the modules that are checkpointed now.

    Raises:
        ValueError: If the model has no such submodule, one that is never called, or one that cannot run again.
    """
    found = list(members(model, modules))
    for name, module in found:
        if isinstance(module, BaseRoIHead):
            parts = [f'{name}.{part}' for part, _ in module.named_children() if part.endswith('head')]
            raise ValueError(
                f'modules: the detector calls the loss of {name}, not its forward; name its parts: {parts}'
            )
    new = [module for _, module in found if not isinstance(module, Checkpointed)]
    for module in new:
        mix_in(module, Checkpointed)
    try:
        refuse_replays(model)
    except ValueError:
        for module in new:
            mix_out(module, Checkpointed)
        raise
    return [name for name, _ in found]


def refuse_replays(model: nn.Module) -> None:
    """Refuses checkpoints around layers that drop positions or images: they would run again with other draws.

    Args:
        model (nn.Module): The model.

    Raises:
        ValueError: If there is such a checkpoint.
    """
    for outer, module in model.named_modules():
        if not isinstance(module, Checkpointed):
            continue
        for inner, layer in module.named_modules(prefix=outer):
            place = vars(layer).get('_lean')
            if place is not None and place.draws is not None and place.draws.draws_for(place.layer):
                raise ValueError(
                    f"{outer} is checkpointed, and {inner} in it, with preset='{place.settings.preset.name}', drops "
                    'positions or images, and stores less than the checkpoint: take it out of CheckpointModulesHook, '
                    'or leave that part to it: LeanHook(modules=[...])'
                )
