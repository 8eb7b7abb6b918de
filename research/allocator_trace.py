"""The allocations and frees of a GPU, replayed by the planner's model of torch's caching allocator."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from sbp_mmdet.plan.caching_allocator import CachingAllocator, replay

__all__ = ['events_of', 'record_and_replay', 'replay_history']

_MOST = 2_000_000  # entries of the history; a training step has some ten thousand


@contextlib.contextmanager
def record_and_replay() -> Iterator[dict[str, int]]:
    """Record the allocations of the current GPU within the context, and replay them at its end.

    Yields:
        dict[str, int]: After the end, ``replayed``: the most bytes that the model of the allocator reserves. The dict
        stays empty if the allocator ran out of memory meanwhile.
    """
    found = {}
    device = torch.cuda.current_device()
    before = [
        block['size']
        for segment in torch.cuda.memory_snapshot()
        if segment['device'] == device
        for block in segment['blocks']
        if block['state'] == 'active_allocated'
    ]
    # Without stack traces: they would take longer than the step.
    torch.cuda.memory._record_memory_history('all', context=None, stacks='python', max_entries=_MOST)
    try:
        yield found
        trace = torch.cuda.memory._snapshot()['device_traces'][device]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    if not any(entry['action'] == 'oom' for entry in trace):
        found['replayed'] = replay_history(before, trace)


def events_of(trace: Sequence[dict]) -> list[tuple[int, int]]:
    """Return the events of a history for :func:`sbp_mmdet.plan.caching_allocator.replay`.

    Args:
        trace (Sequence[dict]): Entries of ``device_traces`` of torch's snapshot: ``action``, ``addr`` and ``size``.

    Returns:
        list[tuple[int, int]]: The number of an allocation with its bytes, and with 0 when it is freed. Blocks that were
        allocated before the history stay allocated.
    """
    events, number_at = [], {}
    for entry in trace:
        if entry['action'] == 'alloc':
            number_at[entry['addr']] = len(events)
            events.append((len(events), entry['size']))
        elif entry['action'] == 'free_completed' and entry['addr'] in number_at:
            events.append((number_at.pop(entry['addr']), 0))
    return events


def replay_history(before: Sequence[int], trace: Sequence[dict]) -> int:
    """Replay a history, and return the most bytes that the model of the allocator reserves.

    Args:
        before (Sequence[int]): Bytes of the blocks that were allocated before the history.
        trace (Sequence[dict]): See :func:`events_of`.
    """
    return replay(CachingAllocator(), before, [events_of(trace)]).most_reserved
