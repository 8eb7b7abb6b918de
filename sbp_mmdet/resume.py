"""What resuming a killed run needs beyond mmengine: checkpoints that are never half written, and, on upstream mmengine
0.10.7 with torch 2.6 or newer, checkpoints that can be read at all.

Both take effect by importing the package. The file backend is used where a config asks for it,
``default_hooks = dict(checkpoint=dict(backend_args=dict(backend='atomic')))``, which tools/train.py does by itself.
"""

import os
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.fileio import LocalBackend, register_backend
from mmengine.logging import HistoryBuffer
from mmengine.runner import checkpoint
from mmengine.utils import digit_version

__all__ = ['AtomicBackend', 'allow_mmengine_checkpoints', 'safe_globals']


@register_backend('atomic', force=True)  # force: reloading the module is no error
class AtomicBackend(LocalBackend):
    """Local files that appear whole or not at all.

    mmengine writes a checkpoint in place, and, after an evaluation that found a new best, writes the newest one, which
    ``last_checkpoint`` names by then, a second time: killed there, a run has nothing to be resumed from.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Writes to a file beside ``filepath``, waits until it is on the disk, and gives it its name.

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
        """As :meth:`put`, for text.

        Args:
            obj (str): Content.
            filepath (str | Path): Path.
            encoding (str): Encoding. Default: 'utf-8'.
        """
        self.put(obj.encode(encoding), filepath)


def safe_globals() -> list:
    """What mmengine's checkpoints hold beside tensors and plain containers, for ``torch.load(weights_only=True)``.

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


def allow_mmengine_checkpoints() -> None:
    """Lets ``torch.load`` read mmengine's checkpoints where mmengine itself has not seen to it.

    From torch 2.6 on ``torch.load`` refuses classes that it does not know; mmengine 0.10.7 fails on its own files then.
    Weights-only loading stays on. onedl-mmengine has a list of its own.
    """
    refuses = digit_version(torch.__version__) >= digit_version('2.6')
    if refuses and not hasattr(checkpoint, 'get_torch_safe_globals'):
        torch.serialization.add_safe_globals(safe_globals())


allow_mmengine_checkpoints()
