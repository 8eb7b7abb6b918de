"""Support for resuming killed runs, in addition to mmengine's.

- Checkpoints that are never half written: ``default_hooks.checkpoint.backend_args = dict(backend='atomic')``.
- The evaluation of a run that was killed during its last one: ``default_hooks.evaluation.type = 'EvaluateEndedHook'``.
- Reading of checkpoints on upstream mmengine 0.10.7 with torch 2.6 or newer, by importing the package.

tools/train.py sets the first two.
"""

import codecs
import contextlib
import os
import pickle
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import numpy as np
import torch
from mmengine.dataset import DefaultSampler
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer
from mmengine.registry import HOOKS
from mmengine.runner import checkpoint
from mmengine.utils import digit_version
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

__all__ = [
    'AtomicBackend',
    'EvaluateEndedHook',
    'NoBatch',
    'allow_mmengine_checkpoints',
    'read_checkpoint',
    'refuse_empty_loader',
    'safe_globals',
]

# From this version on, torch.load reads weights only by default, and further classes can be allowed by name.
_ALLOWS_BY_NAME = digit_version(torch.__version__) >= digit_version('2.6')


@register_backend('atomic', force=True)  # force: the module may be reloaded
class AtomicBackend(LocalBackend):
    """File backend that writes local files whole or not at all.

    mmengine writes checkpoints in place. After an evaluation with a new best result, it writes the newest checkpoint,
    to which ``last_checkpoint`` already refers, a second time. A run that is killed then cannot be resumed.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write a temporary file in the same folder, wait until it is on the disk, and rename it.

        Args:
            obj (bytes): Content of the file.
            filepath (str | Path): Path of the file.

        Raises:
            OSError: If it cannot be written. No part of it is left, because the disk may be full, and the error names
                the file.
        """
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A fixed name, so that the file of a killed run is overwritten.
        unfinished = path.with_name(f'{path.name}.unfinished')
        try:
            with unfinished.open('wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            if error.errno and error.filename is None:  # of a call that has no path
                error.filename = str(path)
            raise

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Write text; see :meth:`put`.

        Args:
            obj (str): Content of the file.
            filepath (str | Path): Path of the file.
            encoding (str): Encoding of the file. Default: 'utf-8'.
        """
        self.put(obj.encode(encoding), filepath)


class NoBatch(ValueError):
    """Error of a data loader that gives no batch."""


def refuse_empty_loader(loader: DataLoader) -> None:
    """Refuse a data loader without a batch.

    mmengine would train no step and write checkpoints of random weights, or end with a ``StopIteration``.

    Args:
        loader (DataLoader): The loader of the training data.

    Raises:
        NoBatch: If it drops its only batch because that batch is not full.
    """
    if not isinstance(loader, DataLoader):  # a loop of the user's own may have several
        return
    batches = loader.batch_sampler
    sampler = getattr(batches, 'sampler', loader.sampler)  # a loader with a batch sampler of its own has another one
    # The length of an endless sampler says nothing, and another class's may mean anything.
    if type(sampler) not in (DefaultSampler, RandomSampler, SequentialSampler, DistributedSampler):
        return
    images, size = len(sampler), getattr(batches, 'batch_size', None)
    if size and images < size and getattr(batches, 'drop_last', False):
        raise NoBatch(
            f'train_dataloader: drop_last=True leaves no batch, because a process has {images} images, fewer than '
            f'batch_size={size}; set drop_last=False, or batch_size={max(images, 1)} or less'
        )


@HOOKS.register_module(force=True)
class EvaluateEndedHook(Hook):
    """Hook that evaluates a resumed run that has nothing left to train, and refuses one that has no batch.

    mmengine writes the last checkpoint before the last evaluation. A run that was killed in between and is resumed
    trains no step and evaluates nothing, and ends without an error and without its AP.

    Example:
        ``default_hooks = dict(evaluation=dict(type='EvaluateEndedHook'))``
    """

    def before_train(self, runner) -> None:
        """Remember the first iteration. mmengine's runner calls this after reading the checkpoint.

        Raises:
            NoBatch: See :func:`refuse_empty_loader`.
        """
        refuse_empty_loader(runner.train_dataloader)
        self._first = runner.iter

    def after_train(self, runner) -> None:
        """Run the evaluation if this run trained no step."""
        if runner.val_loop is not None and runner.iter == self._first:
            runner.logger.info(f'all {runner.iter} steps are already trained; evaluating the model')
            runner.val_loop.run()


def safe_globals() -> list:
    """Return the types in mmengine's checkpoints, for ``torch.load(weights_only=True)``.

    These belong to the log history: a class of mmengine, arrays and numbers, and four methods, which pickle stores as
    calls of ``getattr``. A general ``getattr`` would give access to any module, so this one allows only the four.

    Returns:
        list: Argument of ``torch.serialization.add_safe_globals``.
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
    raise UnpicklingError(
        f"the checkpoint contains {name!r} of {owner!r}, which is not in mmengine's checkpoints; do not load this file"
    )


def read_checkpoint(path: str | Path):
    """Load a checkpoint from an untrusted source: only tensors, plain containers and the types of :func:`safe_globals`.

    Args:
        path (str | Path): Local file, in the format of torch 1.6 and newer.

    Returns:
        The content. Tensors are on the CPU and are read from the disk on first use.

    Raises:
        pickle.UnpicklingError: If the file contains anything else.
    """
    options = dict(map_location='cpu', mmap=True)
    if not _ALLOWS_BY_NAME:
        restricted = SimpleNamespace(__name__='pickle', Unpickler=_Unpickler)
        return torch.load(str(path), pickle_module=restricted, weights_only=False, **options)
    # The context manager removes its types at its end, even those that were allowed before.
    allowed = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([item for item in safe_globals() if item not in allowed]):
        return torch.load(path, weights_only=True, **options)


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows the types that newer versions of torch would allow, and imports no others."""

    def find_class(self, module, name):
        module = module.replace('__builtin__', 'builtins')  # its name in torch's version of the format
        known = {**torch._weights_only_unpickler._get_allowed_globals(), '_codecs.encode': codecs.encode}
        for item in safe_globals():
            item, path = item if isinstance(item, tuple) else (item, f'{item.__module__}.{item.__name__}')
            known[path] = item
        if f'{module}.{name}' not in known:
            raise UnpicklingError(
                f"the checkpoint contains {module}.{name}, which is not in mmengine's checkpoints; "
                'do not load this file'
            )
        return known[f'{module}.{name}']


def allow_mmengine_checkpoints() -> None:
    """Make ``torch.load`` accept mmengine's checkpoints, unless mmengine itself has done so.

    From torch 2.6 on, ``torch.load`` refuses unknown classes, so mmengine 0.10.7 cannot load its own files.
    Weights-only loading remains enabled. onedl-mmengine has a list of its own.
    """
    if _ALLOWS_BY_NAME and not hasattr(checkpoint, 'get_torch_safe_globals'):
        torch.serialization.add_safe_globals(safe_globals())


allow_mmengine_checkpoints()
