"""Bytes and times of backbones and their blocks, preset against preset in one run."""

import contextlib
import ctypes
import statistics
import time
from collections.abc import Collection, Iterator

import torch

from ..families import Family, Unit
from ..settings import preset_named
from .cuda_rules import autocast
from .memory import held_bytes, peak_bytes, saved_bytes

__all__ = ['build_unit', 'keep_freed_memory', 'measure']


def keep_freed_memory(device: torch.device | str = 'cpu') -> None:
    """For times on a CPU: this process keeps what it frees, as CUDA's allocator does.

    Without glibc nothing happens, and nothing for times on a GPU.

    By its defaults glibc gives large blocks back to the system, which fills them with zeros when they are asked for
    again: a unit would pay for each byte that it stores.

    Args:
        device (torch.device | str): Where times are taken. Default: 'cpu'.
    """
    if torch.device(device).type == 'cuda':
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads


def build_unit(
    family: Family, unit: str, arch: str, preset: str, stage: int, shape: tuple[int, ...], device: str, **sbp_options
) -> Unit:
    """A unit under a preset; weights and what is drawn are the same in each call.

    Args:
        family (Family): Record of the backbone's family.
        unit (str): One of ``settings.UNITS``: 'mlp' (the channel MLP with its residual connection), 'block' (with its
            convolution or attention) or 'backbone'.
        arch (str): Architecture.
        preset (str): A key of ``settings.PRESETS``.
        stage (int): Stage of the block, counted from 0; which of its blocks is taken is up to the family.
        shape (tuple): Of the input, (N, C, H, W).
        device (str): Where it runs.
        **sbp_options: Further keys of ``sbp_cfg``.

    Returns:
        Unit: The module in training mode, and how to run it.

    Raises:
        ValueError: For an unknown preset, or one that does not apply to the unit or the family.
    """
    found = preset_named(preset)
    if unit not in found.units or not family.has_preset(preset):
        raise ValueError(f'preset {preset!r} does not apply to the {unit} of {family.name}; leave it out')
    torch.manual_seed(0)
    return family.build_unit(unit, arch, stage, shape, device, **found.arguments(**sbp_options))


def measure(
    units: dict[str, Unit],
    shape: tuple[int, int, int, int],
    *,
    device: str,
    dtype: torch.dtype | None,
    rounds: int,
    by_allocator: Collection[str] = (),
    layout: torch.memory_format = torch.contiguous_format,
) -> Iterator[tuple[str, dict]]:
    """Bytes of each unit, then times, the units in turn within each round, so that a drift of the machine hits all.

    Args:
        units (dict[str, Unit]): From :func:`build_unit` by name, the baseline first.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where it runs.
        dtype (torch.dtype | None): Autocast; None: off.
        rounds (int): Timed rounds, after one that is not counted. 0: no times.
        by_allocator (Collection[str]): Units whose bytes the allocator tells, which sees compiled code too; see
            :func:`.memory.held_bytes`. Default: none.
        layout (torch.memory_format): Of input and weights. Default: ``torch.contiguous_format``.

    Yields:
        tuple[str, dict]: After each step ``('progress', {})``; at the end for each unit its name and ``saved_bytes``,
        ``peak_bytes``, ``forward_s``, ``backward_s`` (medians), ``forward_ratio``, ``backward_ratio`` and
        ``total_ratio`` (medians of the ratios to the baseline, round by round).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device).to(memory_format=layout)
    rows = {}
    for name, (module, run, reads_image) in units.items():
        module.to(memory_format=layout)
        x.requires_grad_(not reads_image)  # a block's input has a gradient, an image has not

        def forward(run=run, x=x):
            with autocast(device, dtype):
                return run(x)

        def step(forward=forward):
            x.grad = None
            _scalar(forward()).backward()

        # A block's input is an activation of the block before; an image is there anyway.
        known = [*module.parameters(), *([x] if reads_image else [])]

        def clear(module=module):
            module.zero_grad()
            x.grad = None

        if name in by_allocator:
            step()  # what the first run makes for good does not count
            clear()
            # The input is made anew, so that it counts where the block keeps it, and only there.
            saved, peak = held_bytes(lambda: forward(x=x if reads_image else x.clone()), device)  # noqa: B023
        else:
            saved, peak = saved_bytes(forward, known), peak_bytes(step, device, clear)
        rows[name] = dict(saved_bytes=saved, peak_bytes=peak, times=[])
        clear()  # the next unit needs the memory
        yield 'progress', {}
    for i in range(rounds + 1 if rounds else 0):
        for name, (module, run, reads_image) in units.items():
            x.requires_grad_(not reads_image)
            times = _timed_step(module, run, x, device, dtype)
            if i:
                rows[name]['times'].append(times)
            yield 'progress', {}
    base = rows[next(iter(rows))]['times']
    for name, row in rows.items():
        times = row.pop('times')
        if times:
            row['forward_s'], row['backward_s'] = (statistics.median(t) for t in zip(*times, strict=True))
            for key, of in dict(forward_ratio=lambda t: t[0], backward_ratio=lambda t: t[1], total_ratio=sum).items():
                row[key] = statistics.median(of(t) / of(b) for t, b in zip(times, base, strict=True))
        yield name, row


def _scalar(out):
    outs = out if isinstance(out, tuple) else (out,)
    return sum(o.float().mean() for o in outs)


def _timed_step(module, run, x, device, dtype):
    x.grad = None
    start = _now(device)
    with autocast(device, dtype):
        out = run(x)
    outs = out if isinstance(out, tuple) else (out,)
    middle = _now(device)
    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    end = _now(device)
    module.zero_grad()
    return middle - start, end - middle


def _now(device):
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()
