"""Bytes that the modules of a model save for the backward pass."""

from collections.abc import Callable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..surgery import Mixin, mix_in
from .module_run import find_floating, storage_of

__all__ = ['SavedBytes', 'note_calls']


class _Noted(Mixin):
    """Mixin of modules whose calls are noted, see :func:`note_calls`."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            vars(self)['_note'](args, kwargs, out)
        return out


def note_calls(module: nn.Module, note: Callable) -> None:
    """Call ``note`` after each call of a module without gradients.

    Args:
        module (nn.Module): The module, changed in place.
        note (Callable): Gets the arguments, the keyword arguments and the result of a call.
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
            kind (Kind): Kind of the module. A count that its ``stored`` does not have omits the call.
            keys (Collection[str]): The counts that the call belongs to.
            inputs: Arguments of the call, nested.
            outputs: Its result, nested. Default: none.
        """
        self._calls.append((kind, keys, self._list_storages(inputs), self._list_storages(outputs)))

    def _list_storages(self, tree):
        tensors = find_floating(tree)
        self._references += [StorageWeakRef(t.untyped_storage()) for t in tensors]  # keep addresses from being reused
        return [(storage_of(t), t.untyped_storage().nbytes()) for t in tensors]

    def count(self) -> None:
        """Add up the bytes of each kind in ``Kind.bytes``."""
        counted = dict(now=set(), before=set(), with_cp=set())
        for kind, keys, inputs, outputs in self._calls:
            for key in keys:
                saved = _find_saved(kind, key, inputs, outputs)
                if saved is None:
                    continue
                inside, tensors = saved
                new = {storage: size for storage, size in tensors if storage not in counted[key]}
                counted[key].update(new)
                kind.bytes[key] += inside + sum(new.values())


def _find_saved(kind, key, inputs, outputs):
    """Return the bytes of tensors inside of a call, and its saved inputs and outputs; ``None`` if they are unknown."""
    if key == 'with_cp' and kind.checkpointed and kind.stored:
        return 0, inputs
    stored = kind.stored.get(key, kind.stored.get('before') if key == 'with_cp' else None)
    if stored is None:
        return None
    counts = (inputs, stored.inputs), (outputs, stored.outputs)
    return stored.inside, [tensors[i] for tensors, which in counts for i in which if i < len(tensors)]
