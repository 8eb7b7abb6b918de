"""Times of steps that take turns on one device: until a step is issued, until it is done, and within its kernels."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ['compute_ratios', 'count_kernels', 'kernels_of', 'profile_step', 'take_turns', 'time_step']

_OFTEN = 5.0  # seconds; whoever waits for rows sees that the process goes on


def time_step(step: Callable[[], object], device: torch.device | str) -> dict[str, float]:
    """Run a step once, and time it.

    A GPU works while the CPU issues the next operations. Beginning with an idle GPU, ``issue`` is the time until the
    step returns on the CPU, and ``seconds`` the time until its last kernel ends. If both are alike, the GPU waits for
    the CPU.

    Args:
        step (Callable): The step. It ran at least once before, so that caches are filled.
        device (torch.device | str): Device that it runs on.

    Returns:
        dict[str, float]: ``seconds``, and on CUDA ``issue``, in seconds.
    """
    if torch.device(device).type != 'cuda':
        start = time.perf_counter()
        step()
        return dict(seconds=time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    start = time.perf_counter()
    step()
    issue = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize(device)
    return dict(seconds=begin.elapsed_time(end) / 1e3, issue=issue)


def compute_ratios(times: list[list[float]]) -> list[dict]:
    """Return the median time of each case, and its ratios to the first case within the rounds."""
    rows = []
    for seconds in zip(*times, strict=True):
        ratios = [own / first for own, (first, *_) in zip(seconds, times, strict=True)]
        row = dict(seconds=statistics.median(seconds), ratio=statistics.median(ratios))
        rows.append(dict(row, ratio_min=min(ratios), ratio_max=max(ratios)))
    return rows


def take_turns(cases: list[tuple], rounds: int, timed: Callable, note: Callable, warm_up: int = 0) -> None:
    """Time cases in turns; after the first and the last round, and every few seconds, their rows get the times so far.

    Args:
        cases (list[tuple]): Row and case of each; ratios are to the first.
        rounds (int): Number of turns of each case.
        timed (Callable): Runs a case once, given the case and the round. Returns a result of :func:`time_step`.
        note (Callable): Called with each row that has new times.
        warm_up (int): Number of earlier rounds that do not count, in which CUDA's allocator settles. Default: 0.
    """
    times, noted = [], 0.0
    with _no_collection():
        for i in range(-warm_up, rounds) if rounds and cases else ():
            round_times = [timed(case, max(i, 0)) for _, case in cases]
            gc.collect(1)
            if i < 0:
                continue
            times.append(round_times)
            if i in (0, rounds - 1) or time.monotonic() > noted + _OFTEN:
                _note_times(cases, times, note)
                noted = time.monotonic()


def _note_times(cases, times, note):
    by_key = {key: compute_ratios([[own[key] for own in found] for found in times]) for key in times[0][0]}
    for number, (row, _) in enumerate(cases):
        row.update(by_key['seconds'][number])
        if 'issue' in by_key:
            issue = by_key['issue'][number]
            row.update(issue=issue['seconds'], issue_ratio=issue['ratio'])
        note(row)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector within the context, so that it is not timed."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def profile_step(step: Callable[[], object]) -> profile:
    """Run a step under torch's profiler, and wait until the GPU has finished it."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return profiler


def kernels_of(profiler: profile) -> dict[str, list[float]]:
    """Return the seconds of each kernel, copy and fill that ran on the GPU, by name."""
    seconds = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and not _is_range(event):
            seconds.setdefault(event.name(), []).append(_seconds(event))
    return seconds


def _is_range(event):
    """Return whether an event is a range of ``record_function`` that is projected onto the GPU, and not a kernel."""
    told = getattr(event, 'is_user_annotation', None)  # torch 2.5 and newer
    return bool(told and told()) or event.name().startswith(('Optimizer.', 'ProfilerStep', 'autograd::'))


def _seconds(event):
    return event.duration_ns() / 1e9 if hasattr(event, 'duration_ns') else event.duration_us() / 1e6  # torch before 2.4


def count_kernels(step: Callable[[], object]) -> dict[str, float]:
    """Count the kernels that a step launches, and the time that the GPU needs for them.

    Returns:
        dict[str, float]: ``launches``, and ``busy`` in seconds. Empty without a GPU, or if the profiler sees no
        kernels.
    """
    if not torch.cuda.is_available():
        return {}
    profiler = profile_step(step)
    number = sum('LaunchKernel' in event.name() for event in profiler.profiler.kineto_results.events())
    return dict(launches=number, busy=sum(map(sum, kernels_of(profiler).values()))) if number else {}
