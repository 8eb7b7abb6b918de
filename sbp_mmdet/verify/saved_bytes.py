"""Bytes that the modules of a model save for the backward pass."""

from collections.abc import Callable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..surgery import Mixin, mix_in
from .module_run import floating, storage_of

__all__ = ['SavedBytes', 'note_inputs']


class _Noted(Mixin):
    """Mixin of modules that report their inputs."""

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            vars(self)['_note'](args, kwargs)
        return super().forward(*args, **kwargs)


def note_inputs(module: nn.Module, note: Callable[[tuple, dict], None]) -> None:
    """Call ``note`` with a module's inputs whenever its forward pass runs without gradients.

    Args:
        module (nn.Module): The module, changed in place.
        note (Callable): Called with the arguments and the keyword arguments.
    """
    mix_in(module, _Noted)
    vars(module)['_note'] = note


class SavedBytes:
    """Counts of the bytes that calls of modules save; a tensor that two calls save counts once.

    There are three counts: 'now', 'before' the model was changed, and 'with_cp', with its blocks checkpointed.
    """

    def __init__(self):
        self._calls, self._references = [], []

    def add(self, kind, keys, inputs, outputs=()) -> None:
        """Add a call.

        Args:
            kind (Kind | None): Kind of the module, whose saved tensors are known. If ``None``, the call saves its
                inputs only.
            keys (Collection[str]): The counts that the call belongs to.
            inputs: Arguments of the call, nested.
            outputs: Its result, nested. Default: none.
        """
        self._calls.append((kind, keys, self._list_storages(inputs), self._list_storages(outputs)))

    def _list_storages(self, tree):
        tensors = floating(tree)
        self._references += [StorageWeakRef(t.untyped_storage()) for t in tensors]  # keep addresses from being reused
        return [(storage_of(t), t.untyped_storage().nbytes()) for t in tensors]

    def count(self) -> int:
        """Add up the bytes of each kind in ``Kind.bytes``, and return those of calls without a kind."""
        counted, others = dict(now=set(), before=set(), with_cp=set()), 0
        for kind, keys, inputs, outputs in self._calls:
            for key in keys:
                saved = _find_saved(kind, key, inputs, outputs)
                if saved is None:
                    continue
                inside, tensors = saved
                new = {storage: size for storage, size in tensors if storage not in counted[key]}
                counted[key].update(new)
                if kind is None:
                    others += sum(new.values())
                else:
                    kind.bytes[key] += inside + sum(new.values())
        return others


def _find_saved(kind, key, inputs, outputs):
    """Return the bytes of tensors inside of a call, and its saved inputs and outputs; ``None`` if they are unknown."""
    if kind is None or (key == 'with_cp' and kind.checkpointed and kind.stored):
        return 0, inputs
    stored = kind.stored.get('before' if key == 'with_cp' else key)
    if stored is None:
        return None
    counts = (inputs, stored.inputs), (outputs, stored.outputs)
    return stored.inside, [tensors[i] for tensors, which in counts for i in which if i < len(tensors)]
