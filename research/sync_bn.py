"""SyncBN in a process group of one, beside batch norm: with one process both have to give the same."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import try_and_note
from turns import count_kernels, take_turns, time_step

from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm
from sbp_mmdet.plan.cuda_rules import full_fp32
from sbp_mmdet.plan.device import use_device

__all__ = ['measure_sync_bn']

_CHANNELS = 64


def measure_sync_bn(names: Sequence[str], *, device: str, size: tuple[int, int], rounds: int, note=lambda row: None):
    """Measure a convolution with batch norm, with and without a process group, in fp32.

    On CUDA the group's kernels are torch's own for SyncBN, which no test without a GPU runs.

    Args:
        names (Sequence[str]): 'none' (batch norm) and 'SyncBN', or one of them.
        device (str): 'cpu' or 'cuda:N'.
        size (tuple[int, int]): Height and width of the images in pixels; maps have an eighth of it.
        rounds (int): Number of timed rounds.
        note (Callable): Is called with each row. Default: does nothing.

    Returns:
        list[dict]: For each name ``preset``, ``outputs`` and ``gradients`` (relative differences from torch's own
        convolution and batch norm in fp64), ``seconds`` and ``ratio``, on CUDA ``issue``, ``launches`` and ``busy``.
    """
    device = use_device(device)
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, _CHANNELS, size[0] // 8, size[1] // 8), (_CHANNELS, _CHANNELS, 1, 1), (_CHANNELS,), (_CHANNELS,)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in sizes]
    leaves[2] += 2  # the norm's weight
    wanted = _results(_reference, leaves)
    leaves = [leaf.to(device, torch.float32) for leaf in leaves]
    rows, ready, own_group = [], [], not dist.is_initialized()

    def measure(row, name):
        group = dist.group.WORLD if name == 'SyncBN' else None
        run = _conv_norm(ConvNormSettings(norm='batch', process_group=group))
        with full_fp32():
            results = _results(run, leaves)
        row.update(outputs=_off(results[:1], wanted[:1]), gradients=_off(results[1:], wanted[1:]))
        row.update(count_kernels(lambda: _results(run, leaves)))
        ready.append((row, run))

    if own_group:
        os.environ.setdefault('NCCL_SOCKET_IFNAME', 'lo')  # there may be no network
        backend = 'nccl' if device.type == 'cuda' else 'gloo'
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in names:
            rows.append(dict(preset=name))
            try_and_note(rows[-1], False, lambda: measure(rows[-1], name), note)  # noqa: B023
        cuda = device.type == 'cuda'
        take_turns(ready, rounds, lambda run, i: time_step(lambda: _results(run, leaves), device), note, warm_up=cuda)
    finally:
        if own_group:
            dist.destroy_process_group()
    return rows


def _reference(x, weight, norm_weight, norm_bias):
    return F.batch_norm(F.conv2d(x, weight), None, None, norm_weight, norm_bias, training=True)


def _conv_norm(settings):
    def run(x, weight, norm_weight, norm_bias):
        running = torch.zeros_like(norm_weight), torch.ones_like(norm_weight)
        return conv_norm(settings, ConvNormTensors(x, weight, None, norm_weight, norm_bias, *running))

    return run


def _results(run, leaves):
    """Return output and gradients; the gradient that comes in differs from position to position."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    ramp = torch.linspace(0, 1, out.shape[-1], dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, ramp.expand_as(out))]


def _off(actual, wanted):
    pairs = [(a.double().cpu(), b) for a, b in zip(actual, wanted, strict=True)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)
