"""Kept positions, heads and images that are the same for both sides of a comparison."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..adapters import LeanState
from ..presets import PRESETS
from ..stochastic_backprop.masks import Positions
from ..stochastic_backprop.step_draws import StepDraws, TokenDraws

__all__ = ['as_reference', 'dropped_images', 'with_fixed_draws', 'with_fixed_images']


class FixedDraws:
    """Draws of positions and heads that are the same for both sides of a comparison.

    Args:
        draws (StepDraws | TokenDraws): The draws that they replace, for their keep ratio.
        layer (tuple | None): Layer of the compared module.
    """

    def __init__(self, draws: StepDraws | TokenDraws, layer: tuple | None):
        self._draws, self._layer = draws, layer

    def ratio(self, layer) -> float:
        """Return the keep ratio of the layer."""
        return self._draws.ratio(layer)

    def images(self, branch, number) -> None:
        """Return ``None``: no images are skipped, and the module draws its stochastic depth itself."""

    def positions(self, layer_or_sizes, length_or_device, class_tokens=False) -> Positions:
        """Return random positions, the same for the same number of positions."""
        if isinstance(length_or_device, int):
            length, device = length_or_device, next(iter(self._layer_device()))
        else:
            length, device = sum(h * w for h, w in layer_or_sizes), length_or_device
        keep, drop = self._split(length)
        return Positions(keep.to(device), drop.to(device))

    def heads(self, layer) -> Tensor:
        """Return random heads, the same in each call."""
        return self._split(self._draws.stages.num_heads)[0].to(next(iter(self._layer_device())))

    def _split(self, length):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(length), device='cpu')
        number = min(max(round(self._draws.ratio(self._layer) * length), 1), length)
        return order[:number].sort()[0], order[number:].sort()[0]

    def _layer_device(self):
        return (p.device for p in self._draws.stages.layers[self._layer].parameters())


class FixedImages(FixedDraws):
    """Draws of stochastic depth that drop every other image, and no position."""

    def images(self, branch, number) -> Tensor:
        """Return a mask that keeps every other image, beginning with the first."""
        return torch.arange(number, device='cpu') % 2 == 0

    def positions(self, layer_or_sizes, length_or_device, class_tokens=False) -> None:
        """Return ``None``: all positions are kept."""

    def heads(self, layer) -> None:
        """Return ``None``: all heads are kept."""


def with_fixed_images(state: LeanState) -> LeanState:
    """Return the state of a changed module with every other image dropped.

    Args:
        state (LeanState): State of the module.
    """
    return state._replace(draws=FixedImages(state.draws, state.layer), row_draws=None)


@contextlib.contextmanager
def dropped_images(state: LeanState) -> Iterator[None]:
    """Let the stochastic depth of a module's own code drop every other image, within the context.

    Args:
        state (LeanState): State of the module.
    """
    drops = [binding.drop for binding in state.bound.bindings.values() if getattr(binding.drop, 'drop_prob', 0)]
    for drop in drops:
        drop.forward = functools.partial(_drop_every_other, drop)
    try:
        yield
    finally:
        for drop in drops:
            vars(drop).pop('forward', None)


def _drop_every_other(drop, x):
    if not drop.training:
        return x
    kept = (torch.arange(len(x), device=x.device) % 2 == 0).to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    return x * kept / (1 - drop.drop_prob)


def with_fixed_draws(state: LeanState) -> LeanState:
    """Return the state of a changed module with :class:`FixedDraws` and without a sample of the rows.

    Args:
        state (LeanState): State of the module.
    """
    ratio = state.draws is not None and state.draws.ratio(state.layer)
    draws = FixedDraws(state.draws, state.layer) if ratio and ratio < 1 else None
    return state._replace(draws=draws, row_draws=None)


def as_reference(state: LeanState) -> LeanState:
    """Return the state of a changed module with the preset ``reference``, Algorithm 1 in plain autograd.

    Args:
        state (LeanState): State of the module.
    """
    return state._replace(settings=dataclasses.replace(state.settings, preset=PRESETS['reference']))
