"""Support for resuming killed runs, beyond mmengine.

- Checkpoints that are never half written: ``default_hooks.checkpoint.backend_args = dict(backend='atomic')``.
- The evaluation of a run that was killed in its last one: ``default_hooks.evaluation.type = 'EvaluateEndedHook'``.
- On upstream mmengine 0.10.7 with torch 2.6 or newer: checkpoints that can be read at all, by importing the package.

tools/train.py sets the first two by itself.
"""

import codecs
import os
import pickle
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import numpy as np
import torch
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS
from mmengine.runner import checkpoint
from mmengine.utils import digit_version

__all__ = ['AtomicBackend', 'EvaluateEndedHook', 'allow_mmengine_checkpoints', 'read_checkpoint', 'safe_globals']

# From here on torch.load reads weights only by default, and what else is allowed can be given under a name of its own.
_ALLOWS_BY_NAME = digit_version(torch.__version__) >= digit_version('2.6')


@register_backend('atomic', force=True)  # force: reloading the module is no error
class AtomicBackend(LocalBackend):
    """File backend whose local files appear whole or not at all.

    mmengine writes a checkpoint in place, and, after an evaluation that found a new best, writes the newest one, which
    ``last_checkpoint`` names by then, a second time: killed there, a run has nothing to be resumed from.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write to a file beside ``filepath``, wait until it is on the disk, and give it its name.

        Args:
            obj (bytes): Content.
            filepath (str | Path): Path.
        """
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        # One fixed name: what a killed run left is overwritten and does not pile up.
        unfinished = path.with_name(f'{path.name}.unfinished')
        with unfinished.open('wb') as file:
            file.write(obj)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Write text; see :meth:`put`.

        Args:
            obj (str): Content.
            filepath (str | Path): Path.
            encoding (str): Encoding. Default: 'utf-8'.
        """
        self.put(obj.encode(encoding), filepath)


@HOOKS.register_module(force=True)
class EvaluateEndedHook(Hook):
    """Evaluates a resumed run that has nothing left to train.

    mmengine writes the last checkpoint before the last evaluation. A run that was killed between them, and is resumed,
    trains nothing, evaluates nothing and ends well: its AP is missing.

    Example:
        ``default_hooks = dict(evaluation=dict(type='EvaluateEndedHook'))``
    """

    def before_train(self, runner) -> None:
        """Remember the first iteration. mmengine's runner calls this after reading the checkpoint."""
        self._first = runner.iter

    def after_train(self, runner) -> None:
        """Run the evaluation if this run trained no step."""
        if runner.val_loop is not None and runner.iter == self._first:
            runner.logger.info(f'all {runner.iter} steps were trained before; evaluating what came out')
            runner.val_loop.run()


def safe_globals() -> list:
    """Return the types that mmengine's checkpoints hold, for ``torch.load(weights_only=True)``.

    That is the log history: a class of mmengine, its arrays and numbers, and its four methods, which pickle stores as
    calls of ``getattr``. A general ``getattr`` would lead from there to any module; this one knows the four.

    Returns:
        list: For ``torch.serialization.add_safe_globals``.
    """
    numeric = {type(np.dtype(code)) for code in '?bBhHiIlLqQefdFD'}
    functions = []
    for function in (np.ndarray(0).__reduce__()[0], np.float64(0).__reduce__()[0]):  # numpy's _reconstruct and scalar
        # numpy 1 and 2 write different names for them.
        functions += [(function, f'numpy.{core}.multiarray.{function.__name__}') for core in ('core', '_core')]
    return [HistoryBuffer, np.ndarray, np.dtype, *numeric, *functions, (_statistics_method, 'builtins.getattr')]


def _statistics_method(owner, name):
    if owner is HistoryBuffer and name in ('min', 'max', 'current', 'mean'):
        return getattr(HistoryBuffer, name)
    raise UnpicklingError(f'the checkpoint asks for {name!r} of {owner!r}, which no checkpoint of mmengine does')


def read_checkpoint(path: str | Path):
    """Read a checkpoint without trusting it: tensors, plain containers and what :func:`safe_globals` lists.

    Args:
        path (str | Path): Local file, in torch's format of 1.6 and newer.

    Returns:
        What was saved. Tensors are on the CPU, and read from the disk when they are looked at.

    Raises:
        pickle.UnpicklingError: For anything else in it.
    """
    options = dict(map_location='cpu', mmap=True)
    if not _ALLOWS_BY_NAME:
        restricted = SimpleNamespace(__name__='pickle', Unpickler=_Unpickler)
        return torch.load(str(path), pickle_module=restricted, weights_only=False, **options)
    # At its end the context takes back what it allowed, and with it what was allowed before.
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([item for item in safe_globals() if item not in allowed]):
        return torch.load(path, weights_only=True, **options)


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows what a newer torch would allow, and imports nothing else."""

    def find_class(self, module, name):
        module = module.replace('__builtin__', 'builtins')  # its name in torch's version of the format
        known = {**torch._weights_only_unpickler._get_allowed_globals(), '_codecs.encode': codecs.encode}
        for item in safe_globals():
            item, path = item if isinstance(item, tuple) else (item, f'{item.__module__}.{item.__name__}')
            known[path] = item
        if f'{module}.{name}' not in known:
            raise UnpicklingError(f'the checkpoint asks for {module}.{name}, which no checkpoint of mmengine does')
        return known[f'{module}.{name}']


def allow_mmengine_checkpoints() -> None:
    """Let ``torch.load`` read mmengine's checkpoints where mmengine itself has not seen to it.

    From torch 2.6 on ``torch.load`` refuses classes that it does not know; mmengine 0.10.7 fails on its own files then.
    Weights-only loading stays on. onedl-mmengine has a list of its own.
    """
    if _ALLOWS_BY_NAME and not hasattr(checkpoint, 'get_torch_safe_globals'):
        torch.serialization.add_safe_globals(safe_globals())


allow_mmengine_checkpoints()
