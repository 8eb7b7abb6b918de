"""Bodies of operations through ``torch.compile``: what lies between their gathers and their sums over all rows.

A body is a plain function on rows, whose number is free: so images of other sizes need no other graph. Each width and
data type has a version of its own, known by its arguments. torch compiles at most a few versions of one function and
then gives up without a word, so each version is a function of its own to it.

Whoever watches each operation of torch (a ``TorchDispatchMode``, as counts of memory are) sees the bodies uncompiled:
torch does not compile under its eyes.

Masks, random numbers, autograd and accumulation stay outside, and so do loops over chunks.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import math
import os
import shutil
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ['BACKEND', 'SKIPS', 'body', 'check_compiler', 'compiling', 'graphs', 'no_compiler', 'why_not']

BACKEND = 'inductor'  # of torch.compile
SKIPS = True  # bodies stay uncompiled where that is faster; tests compile all of them
_compiles = contextvars.ContextVar('compiles', default=False)
_checked = set()  # kinds of devices that have a compiler
_versions = {}  # name of a body and kinds of its arguments: the compiled function


def no_compiler(device: str | None = None) -> str | None:
    """Why ``torch.compile`` cannot run here.

    Args:
        device (str | None): Kind of device; None: none yet. Default: None.

    Returns:
        str | None: The reason; None: it can.
    """
    dynamo = importlib.import_module('torch._dynamo')  # slow, so only where something is compiled
    if not dynamo.is_dynamo_supported():
        return f'torch {torch.__version__} has no torch.compile for this Python'
    if device == 'cuda':
        return None if importlib.util.find_spec('triton') else 'torch.compile needs triton, which is not installed'
    compiler = os.environ.get('CXX', 'g++')
    if device == 'cpu' and not shutil.which(compiler):
        return f'torch.compile needs a C++ compiler, and there is no {compiler}'
    return None


def why_not(device: str | None = None) -> str | None:
    """Why bodies cannot be compiled; see :func:`no_compiler`."""
    version = tuple(int(part) for part in torch.__version__.split('.')[:2])
    if version < (2, 4):
        return f'it needs torch 2.4 or newer, and this is torch {torch.__version__}'
    return no_compiler(device)


def check_compiler(device: str | None = None) -> None:
    """Checks that the key ``compile`` can be honoured.

    Args:
        device (str | None): See :func:`why_not`. Default: None.

    Raises:
        ValueError: If not, with the reason.
    """
    reason = why_not(device)
    if reason:
        raise ValueError(f'sbp_cfg: compile=True cannot be honoured: {reason}; install that, or leave the key out')


@contextlib.contextmanager
def compiling(active: bool) -> Iterator[None]:
    """Bodies that are called inside of ``with`` are compiled, or not."""
    token = _compiles.set(active)
    try:
        yield
    finally:
        _compiles.reset(token)


def body(f: Callable | None = None, *, cpu_from: float = math.inf) -> Callable:
    """Makes a body of a function.

    Args:
        f (Callable): Takes matrices of as many rows each, the first of them first, other tensors, None, and constants;
            without side effects on what it is given.
        cpu_from (float): Elements of the first matrix from which on it is compiled on a CPU. There a call of compiled
            code takes longer than a small norm does, and inductor's GELU and sums over rows take longer than torch's.
            Default: it is never compiled there.
    """
    if f is None:
        return functools.partial(body, cpu_from=cpu_from)

    @functools.wraps(f)
    def run(*args):
        rows, device = len(args[0]), args[0].device.type
        # One row would need a graph of its own.
        if not _compiles.get() or rows < 2 or torch._C._len_torch_dispatch_stack():
            return f(*args)
        if device not in _checked:
            check_compiler(device)
            _checked.add(device)
        if SKIPS and device == 'cpu' and args[0].numel() < cpu_from:
            return f(*args)
        key = f.__qualname__, *map(_kind, args)
        if key not in _versions:
            _versions[key] = _compiled(f)
        return _versions[key](*(_free(arg, rows) for arg in args))

    return run


def graphs() -> dict[str, int]:
    """Versions of each body so far."""
    found = {}
    for name, *_ in _versions:
        found[name] = found.get(name, 0) + 1
    return found


def _kind(arg):
    return (arg.dtype, arg.device, arg.shape[1:]) if isinstance(arg, Tensor) else arg


def _free(arg, rows):
    """The same tensor in the one form that a version is compiled for, with the number of rows free."""
    if not isinstance(arg, Tensor):
        return arg
    arg = arg.detach()  # the mark stays on a tensor, and whether it requires a gradient makes a difference
    if arg.dim() == 2 and len(arg) == rows:
        arg = arg.contiguous()
        torch._dynamo.maybe_mark_dynamic(arg, 0)
    return arg


def _compiled(f):
    own = types.FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    return torch.compile(own, backend=BACKEND, fullgraph=True)
