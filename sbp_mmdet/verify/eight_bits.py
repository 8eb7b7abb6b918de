"""Check of rounding to eight bits against its definition, because gradients hide errors of half a step."""

import torch
from torch import Tensor

from ..ops.common.kept_maps import keep
from ..ops.common.precision import store
from .random_parts import Disagreement

__all__ = ['check_eight_bits']

_NUMBERS = 2**20  # largest number of values that are rounded


def check_eight_bits(x: Tensor) -> None:
    """Check all forms of rounding to eight bits on a feature map like a given one.

    Each rounded value must differ from the original by at most half a step, where images and channels have steps of
    their own, and the mean error must be as small as that of unbiased rounding. The largest value of a channel is left
    out of the mean for outputs of a ReLU: it ends the last step, and is read as the middle of it. Signs that serve as
    masks must not change.

    Args:
        x (Tensor): A map (N, C, H, W) or tokens (N, L, C). Values of different magnitude for each image and channel are
            made from it.

    Raises:
        Disagreement: If a form violates one of these conditions.
    """
    map = _vary_channels(x if x.dim() == 4 else x.flatten(1, -2).mT[..., None])
    tokens = map.flatten(2).mT.contiguous()
    high, low = map.amax((2, 3), keepdim=True), map.amin((2, 3), keepdim=True)
    largest = torch.maximum(high, -low).flatten(1)[:, None]
    stored = store(tokens, 'int8')
    _compare('int8 tokens', stored.load(torch.float32), tokens, largest / 127)
    if map.shape[2] * map.shape[3] < 16:
        return
    active = map.relu()
    shift = low + 0.3 * (high - low)  # zero of the ReLU after a norm
    for kind, kept, original, step in (
        ('int8 map', keep(map, 'int8'), map, (high - low) / 252),
        ('int8 map with a threshold', keep(map, 'int8', shift), map, (high - low) / 252),
        ('int8 output of a ReLU', keep(active, 'int8', positive=True), active, high.clamp_min(0) / 252),
    ):
        rounded = kept.load(torch.float32)
        where = original > 0 if kind.endswith('ReLU') else None
        _compare(kind, rounded, original, step, where)
        above = (rounded > 0, original > 0) if where is not None else (rounded > shift, original > shift)
        if kind != 'int8 map' and not torch.equal(*above):
            raise Disagreement(f'{kind}: {(above[0] != above[1]).double().mean():.1e} of the signs differ')


def _vary_channels(x):
    """Return a part of a map with noise, scaled so that its images and channels differ in magnitude."""
    x = x[:2, : max(_NUMBERS // max(x[:2, 0].numel(), 1), 1)].detach().to(torch.float32)
    generator = torch.Generator(x.device).manual_seed(0)
    noise, sizes = (torch.randn(s, generator=generator, device=x.device) for s in (x.shape, (*x.shape[:2], 1, 1)))
    return (x + noise * x.abs().amax().clamp_min(1e-3)) * sizes.clamp_(-1.5, 1.5).exp()


def _compare(kind, rounded, original, step, where=None):
    error = (rounded - original) / step.clamp_min(torch.finfo(torch.float32).tiny)
    inner = error
    if where is not None:
        inner, error = error[where & (original < original.amax((2, 3), keepdim=True))], error[where]
    if not inner.numel():
        return
    most, mean = float(error.abs().max()), float(inner.mean())
    # Rounding errors have a standard deviation of 0.29 steps.
    if not most <= 0.51:
        raise Disagreement(f'{kind}: {most:.2f} steps off, more than the half step of rounding')
    if not abs(mean) <= 6 * 0.29 / inner.numel() ** 0.5 + 0.01:
        raise Disagreement(f'{kind}: {mean:.2f} steps off on average')
