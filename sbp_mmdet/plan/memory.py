"""Counters of the bytes that a training step holds, from the storages of its tensors."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ['LiveBytes', 'SavedByPart', 'held_bytes', 'peak_bytes', 'saved_bytes', 'tensors_in']

_expired = torch.UntypedStorage._expired  # StorageWeakRef.expired calls it too, through three functions of Python


def tensors_in(*values: object) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation, a small part of the time of torch's ``tree_flatten``.

    Args:
        *values (object): Tensors, and lists, tuples and dicts of them. Other values are ignored.
    """
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(*value)
        elif isinstance(value, dict):
            tensors += tensors_in(*value.values())
    return tensors


class _Packed:
    """Holder of a saved tensor in the autograd graph, which is freed when the graph frees it."""

    __slots__ = ('__weakref__', 'tensor')

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # an operation's output holds its node, which would be a reference cycle


def _dense(tensor):
    """Return the dense tensors that hold a tensor's numbers: itself, or the indices and values of a sparse one."""
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


class SavedByPart:
    """Counter of the bytes that autograd saves for the backward pass, by the part of the model that saves them.

    Each storage is counted once and as a whole, for the part that saved it first, by torch's own operations or by
    ``ctx.save_for_backward`` of a custom function. Tensors that a custom function keeps as plain attributes of ``ctx``
    are not seen.

    Args:
        part (Callable): Returns the name of the part that is running. Default: a single part, named ``None``.
    """

    def __init__(self, part: Callable[[], str | None] = lambda: None):
        self._part = part
        self._packed = []  # weak references with their parts, in the order of saving

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
            exclude (Iterable[Tensor]): Tensors whose storages are not counted, such as parameters, buffers and the
                input. Default: none.

        Returns:
            dict[str | None, int]: Bytes by the name of the part.
        """
        seen = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        parts = {}
        # Only storages that are still saved are counted: another one may have the address of a freed one.
        for reference, part in self._packed:
            if (held := reference()) is not None:
                for storage in (tensor.untyped_storage() for tensor in _dense(held.tensor)):
                    if storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        parts[part] = parts.get(part, 0) + storage.nbytes()
        return parts


def saved_bytes(fn: Callable, exclude: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd saves for the backward pass until ``fn`` returns, see :class:`SavedByPart`.

    Args:
        fn (Callable): Runs the forward pass and returns its outputs, which hold the graph.
        exclude (Iterable[Tensor]): Tensors whose storages are not counted. Default: none.

    Returns:
        int: Number of bytes.
    """
    saved = SavedByPart()
    with saved.hooks():
        output = fn()  # noqa: F841  keeps the graph alive while it is counted
    return sum(saved.count(exclude).values())


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of all storages that operations make, until they are freed. Older storages do not count.

    Args:
        record (bool): Whether to record the order in which storages are made and freed. Default: False.

    Attributes:
        live (int): Bytes that are held now.
        phase (str | None): Phase of the step, set by the caller. Default: None.
        peaks (dict[str | None, int]): Largest number of bytes that were held at a time, by phase.
        peak (int): Largest of these numbers.
        peak_phase (str | None): Phase of the peak.
        events (list[tuple[int, int]] | None): With ``record``, the events for :func:`.caching_allocator.replay`: the
            number of a storage with its bytes when it is made, and with 0 when it has been freed.
    """

    # To check all small storages after each operation would take minutes, and hardly moves a block.
    _SMALL, _SMALL_ONES = 2**20, 32

    def __init__(self, record: bool = False):
        super().__init__()
        self.phase, self.peaks = None, {}
        self.events = [] if record else None
        self._alive, self._until_look = {True: {}, False: {}}, 0  # small or not: number to reference
        # Address of a storage -> a weak reference, which prevents that the address is used again.
        # torch's own weak references, because before torch 2.2 Python's refer to a wrapper that is freed at once.
        self._known = {}
        self._counted = {}  # address of a storage that counts -> its bytes
        self._upper = 0  # bytes of all counted storages, including those that were freed since the last check
        self._counting = True

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    @property
    def peak_phase(self) -> str | None:
        return max(self.peaks, key=self.peaks.get, default=None)

    @property
    def live(self) -> int:
        for address in [address for address in self._counted if _expired(address)]:
            self._upper -= self._counted.pop(address)
            del self._known[address]
        return self._upper

    @contextlib.contextmanager
    def paused(self):
        """Exclude storages that are made within the context, for as long as they live."""
        counting, self._counting = self._counting, False
        try:
            yield
        finally:
            self._counting = counting

    def _see(self, tensors, counting):
        for tensor in tensors:
            for part in _dense(tensor):
                if (address := (storage := part.untyped_storage())._cdata) in self._known:
                    continue
                self._known[address] = reference = StorageWeakRef(storage)
                if counting and (nbytes := storage.nbytes()):
                    self._counted[address] = nbytes
                    self._upper += nbytes
                    if self.events is not None:
                        self._record(reference, nbytes)

    def _record(self, reference, nbytes):
        small = nbytes <= self._SMALL
        self._until_look -= small
        if not small or self._until_look < 0:
            for number in [number for number, one in self._alive[small].items() if _expired(one.cdata)]:
                del self._alive[small][number]
                self.events.append((number, 0))
            if small:
                self._until_look = self._SMALL_ONES
        number = len(self.events)
        self._alive[small][number] = reference
        self.events.append((number, nbytes))

    @classmethod
    def _should_skip_dynamo(cls):
        """Return ``False``: otherwise torch wraps the next method in ``torch._dynamo.disable``, which takes long."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._see(tensors_in(args, kwargs), counting=False)
        out = func(*args, **kwargs)
        self._see(tensors_in(out), self._counting)
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
        fn (Callable): Function to measure, usually a forward and a backward pass.
        device (torch.device | str): Device that it runs on. Default: 'cpu'.
        clear (Callable): Frees tensors that ``fn`` leaves behind, such as gradients. Default: does nothing.

    Returns:
        int: Number of bytes, without those that were held before.
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
    """Measure the bytes that are held at the end of a forward pass, and the peak of forward and backward pass.

    Both come from the allocator, which sees what hooks on saved tensors and dispatch modes do not: compiled code, and
    tensors inside of an operation. Outputs count only if they are saved for the backward pass.

    Args:
        forward (Callable): Forward pass that ran at least once before. Parameters have no gradients.
        device (torch.device | str): Device that it runs on. Default: 'cpu'.

    Returns:
        tuple[int, int]: Bytes held, and the peak, without those that were held before.
    """
    if torch.device(device).type == 'cuda':
        return _held_on_cuda(forward)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = _get_graph(forward())
    held, _ = _sum_events(profiler)
    del out
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _backward(forward())
    return held, _sum_events(profiler)[1]


def _held_on_cuda(forward):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = _get_graph(forward())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del out
    torch.cuda.reset_peak_memory_stats()
    _backward(forward())
    torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated() - before


def _get_graph(out):
    """Return nodes that hold the graph that made the outputs, so that the outputs themselves can be freed.

    Before torch 2.13, the node of an `autograd.Function` in Python does not hold its graph, but a node of torch that
    follows it does.
    """
    return [o.expand_as(o).grad_fn for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]


def _backward(out: Tensor | tuple):
    """Run the backward pass of the mean of the outputs."""
    sum(o.float().mean() for o in (out if isinstance(out, tuple) else (out,))).backward()


def _sum_events(profiler):
    """Return the bytes that are held at the end of a profile, and their peak."""
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == '[memory]':
            held += event.nbytes()
            peak = max(peak, held)
    return held, peak
