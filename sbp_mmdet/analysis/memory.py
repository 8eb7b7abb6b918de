"""What a training step keeps in memory, counted from the tensors themselves."""

import contextlib
import weakref
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ['autocast', 'peak_bytes', 'saved_bytes']


class _Packed:
    """Stands in the autograd graph for a saved tensor, and goes when the graph lets go of it."""

    __slots__ = ('__weakref__', 'tensor')

    def __init__(self, tensor):
        self.tensor = tensor


def saved_bytes(fn: Callable, exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd holds for the backward pass when `fn` returns.

    Counts each storage once, whole, whoever saved it (torch's own operations or `ctx.save_for_backward` of a custom
    function). Tensors that a custom function keeps as plain attributes of `ctx` are not seen.

    Args:
        fn (Callable): runs the forward pass and returns what the graph hangs on: a tensor, or any container of them.
        exclude (Iterable[torch.Tensor]): tensors whose storages are not counted, such as parameters, buffers and the
            input. Defaults to none.

    Returns:
        int: bytes.
    """
    packed = weakref.WeakSet()

    def pack(tensor):
        held = _Packed(tensor)
        packed.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        output = fn()  # noqa: F841  keeps the graph alive while it is counted
    # Only what is saved still is looked at: a storage freed on the way may have lent its address to another one.
    storages = [held.tensor.untyped_storage() for held in packed]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in exclude:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


class _LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes, until it is freed. Storages that are older do not count."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def _freed(self, nbytes):
        self.live -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out


def peak_bytes(fn: Callable, device: torch.device | str = 'cpu') -> int:
    """The most bytes that tensors made by ``fn`` hold at a time.

    On CUDA the caching allocator's own statistics, elsewhere counted from the storages of all results of all
    operations. What an operation uses inside itself is seen on CUDA only.

    Args:
        fn (Callable): Runs what is measured, usually a forward and a backward pass.
        device (torch.device | str): Where it runs. Default: 'cpu'.

    Returns:
        int: Bytes on top of those that were held before.
    """
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _LiveBytes() as counter:
        fn()
    return counter.peak


class _LayerNormInFullPrecision(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.layer_norm:
            with torch.autocast('cpu', enabled=False):
                return func(*(a.float() if isinstance(a, Tensor) else a for a in args), **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def autocast(device: torch.device | str, dtype: torch.dtype | None):
    """Autocast with CUDA's rules on either device.

    CUDA's autocast runs layer norm in full precision and so stores its input in full precision; the CPU's does not.
    Left alone, a count on the CPU would come out too low.

    Args:
        device (torch.device | str): Where the model runs.
        dtype (torch.dtype | None): Reduced precision; None: no autocast.
    """
    kind = torch.device(device).type
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            if kind == 'cpu':
                stack.enter_context(_LayerNormInFullPrecision())
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield
