"""What a training step draws: which positions of each map are kept, and which images a block runs on.

A pass of a backbone is a number. What it draws follows from seed, rank, iteration and that number, so a resumed run
continues the sequence, and several passes may stand before one backward pass. A hook on the backbone begins each pass,
and its layers look up in :class:`Draws` what was drawn for them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from mmengine.dist import get_rank
from mmengine.logging import MessageHub
from torch import Tensor, nn

from ..ops.common.autograd_function import Sample
from ..presets import Settings
from .masks import Positions, grid_positions, level_positions, mask_generator, positions, stage_masks, token_positions

__all__ = ['Draws', 'LevelDraws', 'Phases', 'Stages']


class Phases:
    """Draws the sample of each operation that estimates gradients of weights, independently, so that errors of layers
    do not add up: by seed, rank, iteration, name of the module, and how often it ran in this iteration."""

    def __init__(self):
        self._latest = {}

    @torch.compiler.disable
    def draw(self, name: str, ratio: float) -> Sample:
        """A share of the rows, for a module of this name."""
        self._latest[name] = found = _next(self._latest.get(name))
        generator = mask_generator(torch.initial_seed(), get_rank(), *found, f'sample of {name}')
        return Sample(ratio, generator.initial_seed() / 2**63)  # a digest is as good as a draw, and needs no tensor


class Stages(NamedTuple):
    """What of a backbone is thinned.

    Attributes:
        settings (Settings): The settings.
        layers (Mapping[tuple, nn.Module]): ``(stage, block)``, ``(stage, 'downsample')`` and others to the modules.
        ratios (Mapping[tuple, float]): Keep ratio of those layers that are thinned.
        stride (int): Pixels for each position of the first stage, in each direction; a stage halves the one before.
        rounds_up (bool): Odd maps are padded before they are halved; False: they are cropped.
        num_heads (int | None): Attention heads of a block. Default: None.
    """

    settings: Settings
    layers: Mapping[tuple, nn.Module]
    ratios: Mapping[tuple, float]
    stride: int
    rounds_up: bool
    num_heads: int | None = None

    def keep_ratios(self) -> dict[tuple, float]:
        """Layer to keep ratio; frozen layers stay exact and do not appear."""
        return {key: ratio for key, ratio in self.ratios.items() if _trains(self.layers[key])}

    def rates(self) -> dict[tuple, float]:
        """Branches that leave out images, ``(stage, block, branch)``, and their rate of stochastic depth."""
        if not self.settings.skip_dropped_images:
            return {}
        return {
            (*key, branch): rate
            for key, layer in self.layers.items()
            if layer.training
            for branch, rate in layer.drop_rates().items()
        }

    def draws_for(self, key: tuple) -> bool:
        """Whether something is drawn for a layer in training, so that it cannot run again in a checkpoint."""
        leaves_out = self.settings.skip_dropped_images and self.layers[key].drop_rates()
        return key in self.keep_ratios() or bool(leaves_out)

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) of the maps of an image in pixels, from the first stage to the deepest thinned one."""
        extra = int(self.rounds_up)
        sizes = [tuple((n + extra * (self.stride - 1)) // self.stride for n in (height, width))]
        for _ in range(max((key[0] for key in self.keep_ratios()), default=0)):
            sizes.append(tuple((n + extra) // 2 for n in sizes[-1]))
        return sizes


def _trains(layer):
    return any(p.requires_grad for p in layer.parameters())


class _Pass(NamedTuple):
    """A forward pass: where its draws come from, its images, and what was drawn so far."""

    iteration: int
    number: int
    images: int
    size: tuple[int, int]
    device: torch.device
    drawn: dict

    def generator(self, purpose=''):
        return mask_generator(torch.initial_seed(), get_rank(), self.iteration, self.number, purpose)

    def once(self, key, draw: Callable):
        """What was drawn under this key, drawn when it is asked for first."""
        if key not in self.drawn:
            self.drawn[key] = draw()
        return self.drawn[key]


def _next(latest):
    """Iteration, and number of a pass in it, behind the latest, which begins with these two; None: there is none."""
    iteration = MessageHub.get_current_instance().get_info('iter', 0)
    return iteration, latest[1] + 1 if latest and latest[0] == iteration else 0


class LevelDraws:
    """What the passes of an encoder or of one of its layers draw: the tokens of all levels that are kept. Each counts
    its own passes, and layers of one encoder draw alike.

    Args:
        settings (Settings): The settings.
    """

    def __init__(self, settings: Settings):
        self._settings, self._latest = settings, None

    def ratio(self, layer: tuple | None) -> float:
        """Keep ratio of a layer."""
        return self._settings.keep_ratio

    def draws_for(self, layer: tuple | None) -> bool:
        """See :meth:`Stages.draws_for`."""
        return True

    @torch.compiler.disable
    def positions(self, sizes: list[tuple[int, int]], device: torch.device) -> Positions:
        """Those of the next pass.

        Args:
            sizes (list[tuple[int, int]]): (height, width) of each level, in the order of the tokens.
            device (torch.device): Where the tokens are.
        """
        self._latest = _next(self._latest)
        generator = mask_generator(torch.initial_seed(), get_rank(), *self._latest, 'levels')
        return level_positions(sizes, self._settings.keep_ratio, self._settings.sampler, generator, device)


class Draws:
    """What the passes of a backbone draw. ``backbone.register_forward_pre_hook(draws.begin, with_kwargs=True)`` begins
    each pass.

    Args:
        stages (Stages): What of the backbone is thinned.
    """

    def __init__(self, stages: Stages):
        self.stages, self._pass = stages, None

    def ratio(self, layer: tuple) -> float | None:
        """Keep ratio of a layer; None: it keeps all."""
        return self.stages.keep_ratios().get(layer)

    def draws_for(self, layer: tuple) -> bool:
        """See :meth:`Stages.draws_for`."""
        return self.stages.draws_for(layer)

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        """Begins a pass, where it is one of training.

        Args:
            module (nn.Module): The backbone.
            args (tuple): Its arguments; the first of these, or else of ``kwargs``, are the images (N, 3, H, W).
            kwargs (dict | None): Its arguments that were given by name. Default: None.
        """
        if not (module.training and torch.is_grad_enabled()):
            return
        x = next(iter((*args, *(kwargs or {}).values())))
        self._pass = _Pass(*_next(self._pass), len(x), tuple(x.shape[-2:]), x.device, {})

    @torch.compiler.disable
    def positions(self, layer: tuple, length: int, class_tokens: bool = False) -> Positions | None:
        """The positions of a layer in this pass.

        Args:
            layer (tuple): A key of :attr:`Stages.layers`.
            length (int): Positions of its map, or tokens.
            class_tokens (bool): Other tokens may stand in front of those of the map; they are always kept.
                Default: False.

        Returns:
            Positions | None: On the device of the images; None: all are kept.

        Raises:
            ValueError: If no pass has begun, the map has another size than expected, or somebody's checkpointing runs
                the layer again.
        """
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_replay(layer)
        if self._pass is None:
            raise ValueError(
                f'layer {layer} is thinned, and no pass of its backbone has begun: call backbone(x), not '
                'backbone.forward(x), which skips hooks'
            )
        ratio, stage = ratios[layer], layer[0]
        drawn = self._pass.once(ratio, lambda: self._masks(ratio, ratios))[stage]
        before = length - len(drawn.keep) - len(drawn.drop)
        if before and not (class_tokens and before > 0):
            raise ValueError(
                f'layer {layer} has a map of {length} positions, and {length - before} were expected: its adapter must '
                f'say how maps shrink (stride={self.stages.stride}, rounds_up={self.stages.rounds_up})'
            )
        return self._pass.once((ratio, stage, before), lambda: token_positions(drawn, before))

    @torch.compiler.disable
    def heads(self, layer: tuple) -> Tensor | None:
        """The attention heads of a layer that send gradients, int64, sorted; None: all. Raises as :meth:`positions`."""
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_replay(layer)
        return self._pass.once('heads', lambda: self._heads(ratios))[layer]

    @torch.compiler.disable
    def images(self, branch: tuple, number: int) -> Tensor | None:
        """Which of a batch's images run a branch, ``(stage, block, branch)``: bool, on the CPU; None: all of them, and
        the branch draws its stochastic depth itself."""
        rates = self._of_pass('rates', self.stages.rates)
        if branch not in rates or self._pass is None or self._pass.images != number:
            return None
        self._refuse_replay(branch)
        return self._pass.once('images', lambda: self._images(rates))[branch]

    def _of_pass(self, key, find):
        return self._pass.once(key, find) if self._pass else find()

    def _refuse_replay(self, layer):
        # Inside a backward pass a forward pass is somebody's checkpointing. It would have to find what was drawn the
        # first time; and what runs again stores less without it.
        if torch._C._current_graph_task_id() != -1:
            name = self.stages.settings.preset.name
            raise ValueError(
                f"layer {layer} of a backbone with preset='{name}' runs again inside of a checkpoint; it stores less "
                'than the checkpoint, so take that out (with_cp, torch.utils.checkpoint '
                'around the backbone or a block), or leave that part to it: modules=[...]'
            )

    def _masks(self, ratio, ratios):
        """Stage to positions, for the stages with layers of a ratio."""
        settings, drawn = self.stages.settings, {}
        masks = stage_masks(self.stages.sizes(*self._pass.size), ratio, settings.sampler, self._pass.generator())
        for stage in {key[0] for key, r in ratios.items() if r == ratio}:
            find = grid_positions if settings.sampler == 'grid' else positions
            drawn[stage] = find(masks[stage], self._pass.device)
        return drawn

    def _heads(self, ratios):
        """Of each layer its own, for heads of different layers have nothing to do with each other; at least one."""
        number, generator = self.stages.num_heads, self._pass.generator('heads')
        kept = {key: max(round(ratio * number), 1) for key, ratio in ratios.items()}
        return {
            key: torch.randperm(number, generator=generator)[:k].sort()[0].to(self._pass.device)
            for key, k in kept.items()
        }

    def _images(self, rates: Mapping[tuple, float]) -> dict[tuple, Tensor]:
        numbers = torch.rand(len(rates), self._pass.images, generator=self._pass.generator('images'))
        return {key: row >= rate for (key, rate), row in zip(rates.items(), numbers, strict=True)}
