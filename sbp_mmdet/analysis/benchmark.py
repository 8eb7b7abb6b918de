"""Bytes and times of backbones and their blocks, mode against mode in one run."""

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.utils.checkpoint as cp
from torch import Tensor, nn

from sbp_mmdet.models.convnext import SBPConvNeXt
from sbp_mmdet.ops import autocast_dtype

from .cuda_rules import autocast
from .memory import peak_bytes, saved_bytes
from .modes import backbone_options

__all__ = ['PARTS', 'build_case', 'keep_freed_memory', 'measure', 'stage_shape']

PARTS = ('mlp', 'block', 'backbone')


def keep_freed_memory() -> None:
    """For times on a CPU: this process keeps what it frees, as CUDA's allocator does. Without glibc nothing happens.

    By its defaults glibc gives large blocks back to the system, which fills them with zeros when they are asked for
    again: a setting would pay for each byte that it stores.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap too
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads


def stage_shape(arch: str, stage: int, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Shape (N, C, H, W) of a stage's feature map; stages count from 0."""
    with torch.device('meta'):
        model = SBPConvNeXt(arch)
    return batch, model.channels[stage], *model.stage_sizes(height, width)[stage]


def build_case(
    part: str, arch: str, mode: str, stage: int, shape: tuple[int, int, int, int], device: str, **sbp_options
) -> tuple[nn.Module, Callable[[Tensor], object]]:
    """A module in the given mode, and how to run it.

    Args:
        part (str): 'mlp' (the channel MLP with its residual connection), 'block' (with the depthwise convolution)
            or 'backbone'.
        arch (str): Architecture.
        mode (str): A key of :data:`sbp_mmdet.analysis.MODES`.
        stage (int): Stage of the block, counted from 0; its first block is taken.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where it runs.
        **sbp_options: Further keys of ``sbp_cfg``.

    Returns:
        tuple: The module in training mode, and a function of the input.
    """
    torch.manual_seed(0)
    options = dict(out_indices=[0, 1, 2, 3], gap_before_final_norm=False, layer_scale_init_value=1.0)
    model = SBPConvNeXt(arch, **options, **backbone_options(mode, **sbp_options)).to(device).train()
    if part == 'backbone':
        return model, model
    block = model.stages[stage][0]
    stride = model.min_size // 2 ** (model.num_stages - 1 - stage)
    image = torch.empty(1, device=device).expand(1, 1, shape[2] * stride, shape[3] * stride)
    keep = model.draw(image).positions.get((stage, 0))
    if part == 'block':
        return block, lambda x: block(x, keep)

    def mlp(x):
        return block.mlp(x.to(autocast_dtype(x) or x.dtype), x, keep)

    del block.depthwise_conv
    return block, lambda x: cp.checkpoint(mlp, x, use_reentrant=False) if block.with_cp else mlp(x)


def measure(
    cases: dict[str, tuple[nn.Module, Callable[[Tensor], object]]],
    shape: tuple[int, int, int, int],
    *,
    device: str,
    dtype: torch.dtype | None,
    rounds: int,
) -> Iterator[tuple[str, dict]]:
    """Bytes of each case, then times, the cases in turn within each round, so that a drift of the machine hits all.

    Args:
        cases (dict): From :func:`build_case`, the baseline first.
        shape (tuple): (N, C, H, W) of the input.
        device (str): Where it runs.
        dtype (torch.dtype | None): Autocast; None: off.
        rounds (int): Timed rounds, after one that is not counted. 0: no times.

    Yields:
        tuple[str, dict]: After each step ``('progress', {})``; at the end for each case its name and ``saved_bytes``,
        ``peak_bytes``, ``forward_s``, ``backward_s`` (medians), ``forward_ratio``, ``backward_ratio`` and
        ``total_ratio`` (medians of the ratios to the baseline, round by round).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device)
    rows = {}
    for name, (module, run) in cases.items():
        x.requires_grad_(not isinstance(module, SBPConvNeXt))  # a block's input has a gradient, an image has not

        def forward(run=run):
            with autocast(device, dtype):
                return run(x)

        def step(forward=forward):
            x.grad = None
            _scalar(forward()).backward()

        # A block's input is an activation of the block before; an image is there anyway.
        known = [*module.parameters(), *([x] if isinstance(module, SBPConvNeXt) else [])]
        rows[name] = dict(saved_bytes=saved_bytes(forward, known), peak_bytes=peak_bytes(step, device), times=[])
        module.zero_grad()  # the next case needs the memory
        yield 'progress', {}
    for i in range(rounds + 1 if rounds else 0):
        for name, (module, run) in cases.items():
            x.requires_grad_(not isinstance(module, SBPConvNeXt))
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
