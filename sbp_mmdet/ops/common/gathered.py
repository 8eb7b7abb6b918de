"""Statistics that processes have exchanged (SyncBN), so that a recomputation does not exchange them again.

Another process may run the same layers without recomputing them, for example because somebody has registered a hook
there. If the recomputation communicated, it would wait for that process forever.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ['gather', 'record_gathered', 'replay_gathered']


class _Thread(threading.local):
    """State of a thread.

    Attributes:
        records (tuple[list, ...]): Lists that results of :func:`gather` are added to.
        replayed (Iterator | None): Results that are returned again. If ``None``, the processes communicate.
    """

    records: tuple[list, ...] = ()
    replayed: Iterator[list[Tensor]] | None = None


_thread = _Thread()


def gather(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return a tensor of each process. Within :func:`replay_gathered`, return those of the first run.

    Args:
        mine (Tensor): The tensor of this process, of the same shape in all of them.
        group (dist.ProcessGroup): The processes.
    """
    if _thread.replayed is not None:
        every = next(_thread.replayed)
    else:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, mine, group)
    for record in _thread.records:
        record.append(every)
    return every


@contextlib.contextmanager
def record_gathered(found: list[list[Tensor]]) -> Iterator[None]:
    """Add the results of :func:`gather` to a list within the context.

    Args:
        found (list[list[Tensor]]): The list.
    """
    outer, _thread.records = _thread.records, (*_thread.records, found)
    try:
        yield
    finally:
        _thread.records = outer


@contextlib.contextmanager
def replay_gathered(found: list[list[Tensor]]) -> Iterator[None]:
    """Make :func:`gather` return recorded results in their order within the context.

    Args:
        found (list[list[Tensor]]): Results of :func:`record_gathered`.
    """
    outer = _thread.records, _thread.replayed
    _thread.records, _thread.replayed = (), iter(found)
    try:
        yield
    finally:
        _thread.records, _thread.replayed = outer
