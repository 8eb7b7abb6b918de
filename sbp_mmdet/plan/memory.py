"""What a training step keeps in memory, counted from the tensors themselves."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ['LiveBytes', 'SavedByPart', 'held_bytes', 'peak_bytes', 'saved_bytes']


class _Packed:
    """Stands in the autograd graph for a saved tensor, and goes when the graph lets go of it."""

    __slots__ = ('__weakref__', 'tensor')

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # an operation's output holds its node, which would hold this for good


def _dense(tensor):
    """Return the dense tensors that hold a tensor's numbers: itself, or the indices and values of a sparse one."""
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


class SavedByPart:
    """Counts what autograd holds for the backward pass, by the part of the model that saved it.

    Counts each storage once, whole, for whoever saved it first (torch's own operations or `ctx.save_for_backward` of a
    custom function). Tensors that a custom function keeps as plain attributes of `ctx` are not seen.

    Args:
        part (Callable): Gives the name of the part that is running. Default: one part, named None.
    """

    def __init__(self, part: Callable[[], str | None] = lambda: None):
        self._part = part
        self._packed = []  # of weak references, in the order of saving

    def hooks(self):
        """Return the context manager within which the forward pass has to run."""

        def pack(tensor):
            held = _Packed(tensor)
            self._packed.append((weakref.ref(held), self._part()))
            return held

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)

    def count(self, exclude: Iterable[Tensor] = ()) -> dict:
        """Return the bytes that are held now.

        Args:
            exclude (Iterable[torch.Tensor]): tensors whose storages are not counted, such as parameters, buffers and
                the input. Defaults to none.

        Returns:
            dict: part to bytes.
        """
        seen = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        parts = {}
        # Only what is saved still is looked at: a storage freed on the way may have lent its address to another one.
        for reference, part in self._packed:
            if (held := reference()) is not None:
                for storage in (tensor.untyped_storage() for tensor in _dense(held.tensor)):
                    if storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        parts[part] = parts.get(part, 0) + storage.nbytes()
        return parts


def saved_bytes(fn: Callable, exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd holds for the backward pass when `fn` returns; see :class:`SavedByPart`.

    Args:
        fn (Callable): runs the forward pass and returns what the graph hangs on: a tensor, or any container of them.
        exclude (Iterable[torch.Tensor]): tensors whose storages are not counted. Defaults to none.

    Returns:
        int: bytes.
    """
    saved = SavedByPart()
    with saved.hooks():
        output = fn()  # noqa: F841  keeps the graph alive while it is counted
    return sum(saved.count(exclude).values())


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes, until it is freed. Storages that are older do not count.

    Args:
        record (bool): Also keep the order in which storages are made and freed. Default: False.

    Attributes:
        live (int): Bytes held now.
        phase (str | None): What the step is doing, set from outside. Default: None.
        peaks (dict[str | None, int]): The most bytes that were held at a time, phase by phase.
        peak (int): The most of them all.
        peak_phase (str | None): What the step was doing at the peak.
        events (list[tuple[int, int]] | None): With ``record``, what :func:`.caching_allocator.replay` reads: a
            storage's number and bytes when it is made, its number and 0 when it has been freed.
    """

    # A look at all small storages after each operation would take minutes, and hardly moves a block.
    _SMALL, _SMALL_ONES = 2**20, 32

    def __init__(self, record: bool = False):
        super().__init__()
        self.phase, self.peaks = None, {}
        self.events = [] if record else None
        self._alive, self._until_look = {True: {}, False: {}}, 0  # small or not: number to reference
        # Address of a storage: a weak reference, which keeps the address from being given away, and the bytes to count.
        # torch's own kind of reference: before torch 2.2 Python's is to a wrapper that is gone at once.
        self._known = {}
        self._upper = 0  # bytes of all of these, the freed ones since the last look among them
        self._counting = True

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    @property
    def peak_phase(self) -> str | None:
        return max(self.peaks, key=self.peaks.get, default=None)

    @property
    def live(self) -> int:
        for address, (reference, nbytes) in list(self._known.items()):
            if reference.expired():
                del self._known[address]
                self._upper -= nbytes
        return self._upper

    @contextlib.contextmanager
    def paused(self):
        """Storages made in here never count."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting

    def _see(self, tensors, counting):
        found = (tensor for leaf in tree_flatten(tensors)[0] if isinstance(leaf, Tensor) for tensor in _dense(leaf))
        for tensor in found:
            if (storage := tensor.untyped_storage())._cdata not in self._known:
                nbytes = storage.nbytes() if counting else 0
                reference = StorageWeakRef(storage)
                self._known[storage._cdata] = reference, nbytes
                self._upper += nbytes
                if nbytes and self.events is not None:
                    self._record(reference, nbytes)

    def _record(self, reference, nbytes):
        small = nbytes <= self._SMALL
        self._until_look -= small
        if not small or self._until_look < 0:
            for number in [number for number, one in self._alive[small].items() if one.expired()]:
                del self._alive[small][number]
                self.events.append((number, 0))
            if small:
                self._until_look = self._SMALL_ONES
        number = len(self.events)
        self._alive[small][number] = reference
        self.events.append((number, nbytes))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._see((args, kwargs), counting=False)
        out = func(*args, **kwargs)
        self._see(out, self._counting)
        if self._upper > (peak := self.peaks.get(self.phase, 0)):
            self.peaks[self.phase] = max(peak, self.live)
        return out


def peak_bytes(fn: Callable, device: torch.device | str = 'cpu', clear: Callable = lambda: None) -> int:
    """Return the peak of the bytes that tensors made by ``fn`` hold.

    On CUDA, it is read from the statistics of the caching allocator. Elsewhere it is counted from the storages of all
    results of all operations, which leaves out what an operation allocates and frees inside itself.

    On CUDA ``fn`` runs twice, and the second run counts: the first one also allocates workspaces that libraries keep
    from then on for each of their threads.

    Args:
        fn (Callable): Runs what is measured, usually a forward and a backward pass.
        device (torch.device | str): Where it runs. Default: 'cpu'.
        clear (Callable): Frees what ``fn`` left behind, such as gradients. Default: nothing.

    Returns:
        int: Bytes on top of those that were held before.
    """
    if torch.device(device).type == 'cuda':
        fn()
        clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as counter:
        fn()
    return counter.peak


def held_bytes(forward: Callable[[], object], device: torch.device | str = 'cpu') -> tuple[int, int]:
    """Bytes that are held when a forward pass has ended, and the most that forward and backward pass hold at a time.

    Both from the allocator, which sees what hooks on saved tensors and modes do not: compiled code, and what an
    operation uses inside itself. The outputs do not count, unless they are stored for the backward pass.

    Args:
        forward (Callable): Forward pass, run at least once before; parameters have no gradients.
        device (torch.device | str): Where it runs. Default: 'cpu'.

    Returns:
        tuple[int, int]: Bytes held, and the peak, on top of what there was before.
    """
    if torch.device(device).type == 'cuda':
        return _held_on_cuda(forward)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = _graph_of(forward())
    held, _ = _sums(profiler)
    del out
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _backward(forward())
    return held, _sums(profiler)[1]


def _held_on_cuda(forward):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = _graph_of(forward())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del out
    torch.cuda.reset_peak_memory_stats()
    _backward(forward())
    torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated() - before


def _graph_of(out):
    """Return the nodes of the graph, without the outputs."""
    return [o.grad_fn for o in (out if isinstance(out, tuple) else (out,))]


def _backward(out: Tensor | tuple):
    sum(o.float().mean() for o in (out if isinstance(out, tuple) else (out,))).backward()


def _sums(profiler):
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == '[memory]':
            held += event.nbytes()
            peak = max(peak, held)
    return held, peak
