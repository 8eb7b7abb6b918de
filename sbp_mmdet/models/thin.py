"""Layers of a live model that look up their positions: what is mixed into their classes, and their place in the model.

A mixin derives from :class:`Thin` and says in ``thin_forward`` what the layer does in training. It finds there

- ``self.positions()``: which positions send gradients; None: all;
- ``self.sbp_settings``: the checked ``sbp_cfg``;
- ``self.on_position(f, x)``: Algorithm 1 for a feature map, for layers that need nothing better.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.utils.checkpoint as cp
from torch import Tensor, nn

from ..masks import Positions
from ..ops import accumulator, autocast_dtype
from ..ops.images import on_images
from ..settings import SBPSettings
from ..shared_draws import LayerDraws, run_again_as_now
from ..surgery import Mixin, mix_in
from .heads import sbp_map

__all__ = ['Place', 'Thin', 'ThinnedStages', 'branch_factor', 'thin_out']


class ThinnedStages:
    """Which layers of a backbone are thinned out, see :class:`sbp_mmdet.draws.Thinned`.

    Args:
        sbp (SBPSettings): The settings.
        layers (Mapping[tuple, nn.Module]): Those of :meth:`.SBPSettings.layer_ratios` that are there. Frozen ones
            stay exact.
        stride (int): Pixels for each position of the first stage, in each direction.
        rounds_up (bool): A map whose size is odd is padded before it is halved; False: it is cropped.
        last (bool): ``sbp_cfg`` counts the last blocks of the one stage, as for ViT. Default: False.
    """

    def __init__(
        self, sbp: SBPSettings, layers: Mapping[tuple, nn.Module], stride: int, rounds_up: bool, last: bool = False
    ):
        self.sbp, self.layers, self.stride, self.rounds_up = sbp, dict(layers), stride, rounds_up
        self._first = len(self.layers) - sbp.blocks[0] if last else 0

    def keep_ratios(self) -> dict[tuple, float]:
        """See :class:`sbp_mmdet.draws.Thinned`."""
        ratios = self.sbp.layer_ratios()
        if self._first:
            ratios = {(stage, self._first + block): r for (stage, block), r in ratios.items()}
        return {k: r for k, r in ratios.items() if k in self.layers and _trains(self.layers[k])}

    def stage_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """See :class:`sbp_mmdet.draws.Thinned`."""
        extra = self.rounds_up
        sizes = [tuple((n + extra * (self.stride - 1)) // self.stride for n in (height, width))]
        while len(sizes) < len(self.sbp.blocks):
            sizes.append(tuple((n + extra) // 2 for n in sizes[-1]))
        return sizes

    def rates(self) -> dict[tuple, float]:
        """Branches that leave out images, ``(stage, block, ...)``, and their rate of stochastic depth."""
        if not self.sbp.skip_dropped_images:
            return {}
        found = {}
        for key, layer in self.layers.items():
            drops = layer.drop_paths() if layer.training else {}
            found |= {(*key, *name): p for name, drop in drops.items() if (p := getattr(drop, 'drop_prob', 0))}
        return found


def _trains(layer):
    return any(p.requires_grad for p in layer.parameters())


class Place(NamedTuple):
    """Where a layer stands.

    Attributes:
        draws (LayerDraws): Of the backbone.
        layer (tuple): Which one of its layers.
        settings (SBPSettings): Of the backbone.
    """

    draws: LayerDraws
    layer: tuple
    settings: SBPSettings


class Thin(Mixin):
    """Base of what is mixed into the class of a layer with SBP; see this module.

    Attributes:
        stride (int): Of blocks: pixels for each position of the first stage. Default: 4.
        rounds_up (bool): Of blocks: whether odd maps are padded, not cropped, before they are halved. Default: False.
        last (bool): Of blocks: whether ``sbp_cfg`` counts them from the end. Default: False.
        absent (tuple[str, ...]): Of blocks: keys of ``sbp_cfg``, or one value of a key, that ``thin_forward`` does not
            carry out, so that they are refused. Default: all that :meth:`on_position` does not.
    """

    stride = 4
    rounds_up = False
    last = False
    absent = ('implementation', 'recompute', 'storage', 'compile', 'skip_dropped_images', 'dropped=nearest')

    def forward(self, *args, **kwargs):
        """The layer's own forward pass; in training :meth:`thin_forward`, with the same arguments."""
        settings = self._sbp_place.settings
        if not self.training or not (torch.is_grad_enabled() or settings.skip_dropped_images):
            return super().forward(*args, **kwargs)
        if getattr(self, 'with_cp', False) and torch.is_grad_enabled():
            return cp.checkpoint(run_again_as_now(self, self.thin_forward), *args, use_reentrant=False, **kwargs)
        return self.thin_forward(*args, **kwargs)

    def thin_forward(self, *args, **kwargs):
        """What the layer does in training."""
        raise NotImplementedError(f'{type(self).__name__} has no thin_forward')

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """Why a layer stays as it is; None: it can be changed.

        Args:
            layer (nn.Module): The layer, not changed yet.
            settings (SBPSettings): Of the backbone.
        """
        return None

    @classmethod
    def others(cls, backbone: nn.Module, settings: SBPSettings) -> dict[tuple, tuple[nn.Module, type['Thin']]]:
        """What else can be changed in a backbone of such blocks: layers with their mixins.

        Args:
            backbone (nn.Module): The backbone.
            settings (SBPSettings): Of the backbone.

        Returns:
            dict: By ``(stage, 'downsample')``, or by another name for what has no positions.
        """
        return {}

    def drop_paths(self) -> dict[tuple, nn.Module]:
        """Stochastic depth of the branches that leave out images, by what stands behind (stage, block)."""
        return {}

    @property
    def _sbp_draws(self):
        return self._sbp_place.draws

    @property
    def sbp_settings(self) -> SBPSettings:
        """Those of the backbone."""
        return self._sbp_place.settings

    def positions(self) -> Positions | None:
        """Of this layer, in this pass; None: all send gradients."""
        return self._sbp_place.draws.of(self._sbp_place.layer) if torch.is_grad_enabled() else None

    def on_position(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``f(x)`` with gradients from this layer's positions (Algorithm 1, or pooled), see :func:`.heads.sbp_map`.

        Args:
            f (Callable): Maps (N, C, H, W) to (N, C', H, W), each position for itself.
            x (Tensor): Shape (N, C, H, W).
        """
        positions = self.positions()
        if positions is None:
            return f(x)
        self.check_size(positions, x.shape[2] * x.shape[3])
        return sbp_map(f, x, positions)

    def check_size(self, positions: Positions | None, number: int) -> None:
        """Raises a ValueError where positions were drawn for a map of another size."""
        if positions is not None and positions.keep.shape[-1] + positions.drop.shape[-1] != number:
            known = positions.keep.shape[-1] + positions.drop.shape[-1]
            stages = self._sbp_place.draws.model
            raise ValueError(
                f'{type(self).__name__} {self._sbp_place.layer} has a map of {number} positions, and {known} were '
                f'expected: the mixin of its class must say how maps shrink (stride={stages.stride}, '
                f'rounds_up={stages.rounds_up})'
            )

    def on_branch(
        self,
        run: Callable,
        x: Tensor,
        drop: nn.Module,
        parameters: Sequence,
        name: tuple = (),
        promote: Tensor | None = None,
    ) -> Tensor:
        """A residual branch with stochastic depth, drawn by it or, with ``skip_dropped_images``, by the backbone.

        Args:
            run (Callable): ``(x, factor)`` to the same shape: ``x + factor * branch(x)``, factor of shape (N,) or None.
            x (Tensor): Shape (N, ...).
            drop (nn.Module): Stochastic depth.
            parameters (Sequence[nn.Parameter]): Of the branch.
            name (tuple): See :meth:`drop_paths`. Default: ().
            promote (Tensor | None): Layer scale that the plain branch is multiplied by, in its precision.
                Default: None.
        """
        images = None
        if self.sbp_settings.skip_dropped_images:
            images = self._sbp_place.draws.images((*self._sbp_place.layer, *name))
        if images is None:
            dtype = autocast_dtype(x) or x.dtype
            return run(
                x, branch_factor(drop, x, dtype if promote is None else torch.promote_types(dtype, promote.dtype))
            )
        kept = 1 / (1 - drop.drop_prob)
        return on_images(lambda x: run(x, x.new_full((len(x),), kept, dtype=accumulator(x))), x, images, parameters)


def branch_factor(drop: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Stochastic depth as a factor for each image, by the random numbers that ``drop(branch)`` would draw.

    Args:
        drop (nn.Module): mmcv's ``DropPath``, or what drops nothing.
        x (Tensor): Shape (N, ...).
        dtype (torch.dtype): Of the branch: its precision is that of the random numbers, not of the factor.

    Returns:
        Tensor | None: Shape (N,); None where nothing is dropped.
    """
    rate = getattr(drop, 'drop_prob', 0) if drop.training else 0
    if not rate:
        return None
    kept = drop(x.new_ones(len(x), *[1] * (x.dim() - 1), dtype=dtype)).flatten() != 0
    return kept.to(accumulator(x)) / (1 - rate)


def thin_out(
    backbone: nn.Module,
    settings: SBPSettings,
    layers: Mapping[tuple, tuple[nn.Module, type[Thin]]],
    stride: int,
    rounds_up: bool,
    last: bool = False,
) -> LayerDraws:
    """Changes layers of a backbone in place.

    Args:
        backbone (nn.Module): The backbone.
        settings (SBPSettings): The checked ``sbp_cfg``.
        layers (Mapping): By layer, the module and what to mix into its class.
        stride, rounds_up, last: See :class:`ThinnedStages`.

    Returns:
        LayerDraws: What its passes draw; ``backbone`` begins and ends them by hooks.
    """
    stages = ThinnedStages(settings, {key: module for key, (module, _) in layers.items()}, stride, rounds_up, last)
    draws = LayerDraws(stages)
    for key, (module, mixin) in layers.items():
        mix_in(module, mixin)
        module._sbp_place = Place(draws, key, settings)
    backbone.register_forward_pre_hook(draws.begin, with_kwargs=True)
    backbone.register_forward_hook(draws.end)
    return draws
