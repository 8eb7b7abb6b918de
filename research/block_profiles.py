"""Profiler tables of a module by preset: kernels of the GPU, operations of the CPU, and launches."""

import sys
from collections.abc import Sequence

from case import Case, get_keys_for_all_images, try_and_note
from mmengine.config import Config
from module_runs import build_and_capture
from provenance import CHECKOUT
from turns import kernels_of, profile_step

from sbp_mmdet.plan.batch import at_the_first_step

sys.path.append(str(CHECKOUT / 'tests'))
from launches import Launches  # noqa: E402

__all__ = ['profile_module']

_WARM_UP = 3  # passes before the one that counts
_MOST = 25  # kernels, and operations of the CPU, that a row names


def profile_module(
    config: Config,
    names: Sequence[str],
    module: str,
    *,
    amp: str,
    channels_last: bool = False,
    note=lambda row: None,
    **case,
):
    """Profile a forward and backward pass of a module by preset.

    Args:
        config (Config): Config of a plain detector.
        names (Sequence[str]): Names of presets, the baseline first.
        module (str): Name of the submodule.
        amp (str): Precision of autocast: 'off', 'bf16' or 'fp16'.
        channels_last (bool): Whether input and weights are stored as (N, H, W, C). Default: False.
        note (Callable): Is called with each row. Default: does nothing.
        **case: ``batch``, ``height``, ``width``, ``boxes``, ``device``.

    Returns:
        list[dict]: For each name ``preset``, and ``operations`` of the CPU; on CUDA ``launches``, ``busy`` (the seconds
        of all kernels), ``kernels``, and ``counted_launches`` and ``moved`` (bytes) by the rules of
        `tests/launches.py`. Kernels and operations are lists of name, number and seconds, the longest first. Or
        ``reason``.
    """
    with at_the_first_step():
        model, runner = build_and_capture(config, module, amp, channels_last, **case)
    rows = []

    def measure(row, name):
        own = Case(name, model, module, get_keys_for_all_images(name))
        for _ in range(_WARM_UP):
            runner.times(own)
        profiler = profile_step(lambda: runner.step(own))
        runner.clear(model)
        operations = [(found.key, found.count, found.self_cpu_time_total / 1e6) for found in profiler.key_averages()]
        row.update(operations=_longest(operations))
        ran = kernels_of(profiler)
        if ran:
            events = profiler.profiler.kineto_results.events()
            row.update(
                launches=sum('LaunchKernel' in event.name() for event in events),
                busy=sum(map(sum, ran.values())),
                kernels=_longest([(name, len(seconds), sum(seconds)) for name, seconds in ran.items()]),
            )
        row.update(_counted(lambda: runner.step(own)))
        runner.clear(model)

    for name in names:
        rows.append(dict(preset=name))
        if not try_and_note(rows[-1], False, lambda: measure(rows[-1], name), note):  # noqa: B023
            runner.clear(model)
    return rows


def _longest(found):
    return sorted(found, key=lambda one: -one[2])[:_MOST]


def _counted(step):
    """Count launches of a step as they are counted without a GPU."""
    with Launches() as launches:
        step()
    return dict(counted_launches=launches.total, moved=launches.bytes) if launches.total else {}
