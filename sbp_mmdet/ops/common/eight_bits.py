"""Feature maps in eight bits, with a step of their own for each image, channel and group of rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from .precision import FEW, accumulator, cast, compute_in_parts

__all__ = ['in_groups', 'quantise', 'quantise_positive']

_GROUP = 32  # least number of positions that share a step: neighbours are alike, so their steps are finer


def quantise(x: Tensor, threshold: Tensor | float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round a feature map to eight bits.

    Values are rounded to the nearest step. If there is a threshold, steps are counted from it: a value is rounded up to
    the end of its step and read as the middle of that step. So each value stays on its side of the threshold (a ReLU's
    mask is that of the forward pass), and the mean error is zero.

    A value that is not finite makes its group NaN when it is read, so that gradient scaling skips the step.

    Args:
        x (Tensor): Shape (N, C, H, W), not empty.
        threshold (Tensor | float | None): Threshold, broadcastable. If ``None``, there is none.

    Returns:
        tuple[Tensor, Tensor, Tensor]: Values, of the shape and layout of ``x``, and step and offset of each of B groups
        of rows, shape (N, C, B, 1). The map is read as values * step + offset.
    """
    full, groups = accumulator(x), in_groups(x, _count_groups(x))
    low, high = _limits(groups, full)
    step = (high - low) / 252  # of 254 steps: counted from a threshold, both ends may lie within a step
    divisor = step.clamp_min(torch.finfo(full).tiny)
    if threshold is None:
        # n = round((x - offset) / step) in [-127, 125] for offset = low + 127 * step, read as offset + n * step.
        offset = torch.add(low, step, alpha=127)
        values = _convert(groups, offset, divisor, torch.round_)
    else:
        # Step k = ceil((x - t) / step) ends at t + k * step. Kept as n = k - (lowest + 127), the first step as -127 or
        # -126; read as n * step + t + (lowest + 126.5) * step = t + (k - 1/2) * step, on the same side of t as x. A
        # threshold below all values is one step away at the most, so that the least of them lies above it.
        # No `as_tensor` of a number, which would copy it to a GPU and wait.
        threshold = cast(threshold, full) if isinstance(threshold, Tensor) else x.new_full((), threshold, dtype=full)
        if threshold.dim() == 4 < low.dim():
            threshold = threshold.unsqueeze(4)
        threshold = threshold.clamp(low - step, high)
        lowest = ((low - threshold) / divisor).floor_()
        values = _convert(groups, threshold, divisor, lambda steps, first: steps.ceil_().sub_(first), lowest + 127)
        offset = torch.addcmul(threshold, lowest + 126.5, step)
    if step.dim() == 5:
        step, offset = step.squeeze(4), offset.squeeze(4)
    return values.reshape(x.shape), step, offset


def quantise_positive(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round the output of a ReLU to eight bits, in which -127 stands for zero.

    It goes into weight gradients alone, whose errors do not add up over layers, so one step for each image and channel
    is enough.

    Args:
        x (Tensor): Shape (N, C, H, W), not empty, without negative values.

    Returns:
        tuple[Tensor, Tensor]: Values, of the shape and layout of ``x``, and step of each channel, shape (N, C, 1, 1).
        The map is read as (values + 126.5) * step where it is not zero.
    """
    # (0, max] has 252 steps, which are kept as -126 ... 125 and read as (n + 126.5) * step, the middle of each.
    full = accumulator(x)
    step = x.amax((2, 3), keepdim=True).to(full) / 252
    divisor = step.clamp_min(torch.finfo(full).tiny)
    return compute_in_parts(lambda x, divisor: (x / divisor).ceil_().sub_(127), x, divisor), step


def _count_groups(x):
    """Return the number of groups of rows that share a step."""
    height, width = x.shape[2:]
    return next(n for n in range(height, 0, -1) if n == 1 or (height % n == 0 and height // n * width >= _GROUP))


def in_groups(x: Tensor, number: int) -> Tensor:
    """Return a view of a map as groups of rows.

    Args:
        x (Tensor): Shape (N, C, H, W).
        number (int): Number of groups B.

    Returns:
        Tensor: Shape (N, C, B, positions), or (N, C, B, H / B, W) if the map is not contiguous.
    """
    n, channels, height, width = x.shape
    if x.is_contiguous():
        return x.view(n, channels, number, height // number * width)
    return x.view(n, channels, number, height // number, width)


def _limits(groups, dtype):
    """Return the least and the largest value of each group in ``dtype``, with ones in the place of positions."""
    # One pass; on a CPU two are faster for large maps, and torch 2.1 has no `aminmax` for half precision there.
    if groups.is_cuda or (groups.numel() < FEW and groups.dtype is dtype):
        limits = groups.flatten(3).aminmax(dim=3, keepdim=True)
        limits = limits if groups.dim() == 4 else [limit.unsqueeze(4) for limit in limits]
    else:
        positions = tuple(range(3, groups.dim()))
        limits = groups.amin(positions, keepdim=True), groups.amax(positions, keepdim=True)
    return [cast(limit, dtype) for limit in limits]


def _convert(x: Tensor, start: Tensor, step: Tensor, finish: Callable, *numbers: Tensor) -> Tensor:
    """Return the number of steps from ``start`` to each value, made whole by ``finish(steps, *numbers)``, as int8."""

    def convert(x, start, step, *numbers):
        steps = torch.addcdiv(start, x, step) if x.is_cuda else (x - start).div_(step)
        return finish(steps, *numbers)

    if x.is_cuda:  # x / step - start / step takes one pass
        start = torch.div(start, step).neg_()
    return compute_in_parts(convert, x, start, step, *numbers)
