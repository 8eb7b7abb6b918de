"""The random choices of one training step: which positions, attention heads, images and rows send gradients.

What is drawn depends on nothing but the seed, the rank, the iteration and the number of the forward pass within the
iteration. So a resumed run continues the sequence, and several passes may stand before one backward pass.

A forward pass of a backbone has a beginning and an end (:meth:`StepDraws.forward_pass`). In between, its layers look up
what was drawn for them; afterwards nothing of it is left.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from mmengine.dist import get_rank
from mmengine.logging import MessageHub
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..ops.common.autograd_function import Sample
from ..presets import Settings
from .masks import Positions, grid_positions, level_positions, mask_generator, positions, stage_masks, token_positions

__all__ = ['RowDraws', 'StepDraws', 'ThinnedStages', 'TokenDraws']


class RowDraws:
    """Draws of the row samples from which the preset ``sampled`` estimates gradients of weights.

    Each module has a draw of its own, so that errors of layers do not add up. It depends on the seed, the rank, the
    iteration, the module's name, and how often the module ran in this iteration.
    """

    def __init__(self):
        self._latest = {}

    @torch.compiler.disable
    def draw(self, name: str, ratio: float) -> Sample:
        """Draw the sample of the next run of a module.

        Args:
            name (str): Name of the module.
            ratio (float): Share of the rows.
        """
        self._latest[name] = found = _next(self._latest.get(name))
        generator = mask_generator(torch.initial_seed(), get_rank(), *found, f'sample of {name}')
        return Sample(ratio, generator.initial_seed() / 2**63)  # a digest is as good as a draw, and needs no tensor


class ThinnedStages(NamedTuple):
    """The layers of a backbone, and which of them are thinned.

    Attributes:
        settings (Settings): The settings of the model.
        layers (Mapping[tuple, nn.Module]): ``(stage, block)``, ``(stage, 'downsample')`` and others to the modules.
        ratios (Mapping[tuple, float]): Keep ratios of the thinned layers.
        stride (int): Pixels for each position of the first stage, in each direction; a stage halves the one before.
        rounds_up (bool): Whether odd maps are padded before they are halved. If False, they are cropped.
        num_heads (int | None): Attention heads of a block. Default: None.
    """

    settings: Settings
    layers: Mapping[tuple, nn.Module]
    ratios: Mapping[tuple, float]
    stride: int
    rounds_up: bool
    num_heads: int | None = None

    def keep_ratios(self) -> dict[tuple, float]:
        """Return the keep ratios of the thinned layers that train; frozen layers stay exact and do not appear."""
        return {key: ratio for key, ratio in self.ratios.items() if _trains(self.layers[key])}

    def rates(self) -> dict[tuple, float]:
        """Return the rate of stochastic depth of each branch, ``(stage, block, branch)``, that leaves out images."""
        if not self.settings.skip_dropped_images:
            return {}
        return {
            (*key, branch): rate
            for key, layer in self.layers.items()
            if layer.training
            for branch, rate in layer.drop_rates().items()
        }

    def draws_for(self, key: tuple) -> bool:
        """Return whether something is drawn for a layer in training, so that a checkpoint cannot run it again."""
        leaves_out = self.settings.skip_dropped_images and self.layers[key].drop_rates()
        return key in self.keep_ratios() or bool(leaves_out)

    def draws(self) -> bool:
        """Return whether something is drawn for any layer."""
        return any(map(self.draws_for, self.layers))

    def device(self, key: tuple) -> torch.device:
        """Return the device of a layer's parameters, where its positions are needed."""
        return next(self.layers[key].parameters()).device

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return (height, width) of the feature maps of an image, from the first stage to the deepest thinned one.

        Args:
            height (int): Height of the image in pixels.
            width (int): Width of the image in pixels.
        """
        extra = int(self.rounds_up)
        sizes = [tuple((n + extra * (self.stride - 1)) // self.stride for n in (height, width))]
        for _ in range(max((key[0] for key in self.keep_ratios()), default=0)):
            sizes.append(tuple((n + extra) // 2 for n in sizes[-1]))
        return sizes


def _trains(layer):
    for parameter in layer.parameters():
        if parameter.requires_grad:
            return True
    return False


class _Pass(NamedTuple):
    """State of one forward pass: iteration, number within it, possible image sizes, and what was drawn so far."""

    iteration: int
    number: int
    sizes: list[tuple[int, int]]
    drawn: dict

    def generator(self, purpose=''):
        return mask_generator(torch.initial_seed(), get_rank(), self.iteration, self.number, purpose)

    def once(self, key, draw: Callable):
        """Return what was drawn under this key, and draw it when it is asked for first."""
        if key not in self.drawn:
            self.drawn[key] = draw()
        return self.drawn[key]


def _next(latest):
    """Return the iteration and the number of the next pass in it; ``latest`` begins with those of the latest pass."""
    iteration = MessageHub.get_current_instance().get_info('iter', 0)
    return iteration, latest[1] + 1 if latest and latest[0] == iteration else 0


class TokenDraws:
    """Draws of the tokens that an encoder, or one of its layers, keeps in all levels.

    Each object counts its own passes, so the layers of one encoder draw the same tokens.

    Args:
        settings (Settings): The settings of the model.
    """

    def __init__(self, settings: Settings):
        self._settings, self._latest = settings, None

    def ratio(self, layer: tuple | None) -> float:
        """Return the keep ratio of a layer."""
        return self._settings.keep_ratio

    def draws_for(self, layer: tuple | None) -> bool:
        """See :meth:`ThinnedStages.draws_for`."""
        return True

    @torch.compiler.disable
    def positions(self, sizes: list[tuple[int, int]], device: torch.device) -> Positions:
        """Draw the positions of the next pass.

        Args:
            sizes (list[tuple[int, int]]): (height, width) of each level, in the order of the tokens.
            device (torch.device): Device of the tokens.
        """
        self._latest = _next(self._latest)
        generator = mask_generator(torch.initial_seed(), get_rank(), *self._latest, 'levels')
        return level_positions(sizes, self._settings.keep_ratio, self._settings.sampler, generator, device)


class StepDraws:
    """Draws of the forward passes of a backbone.

    Args:
        stages (ThinnedStages): The layers of the backbone.

    Example:
        ``with draws.forward_pass(images): ...  # layers call draws.positions(...) in here``
    """

    def __init__(self, stages: ThinnedStages):
        self.stages = stages
        self._open = None  # the pass that runs now
        self._again = False  # whether a pass that has ended runs again
        self._latest = None  # iteration, number and image sizes of the latest pass

    def ratio(self, layer: tuple) -> float | None:
        """Return the keep ratio of a layer, or ``None`` if it keeps all positions."""
        return self.stages.keep_ratios().get(layer)

    def draws_for(self, layer: tuple) -> bool:
        """See :meth:`ThinnedStages.draws_for`."""
        return self.stages.draws_for(layer)

    @contextlib.contextmanager
    def forward_pass(self, *inputs) -> Iterator[None]:
        """Open the next forward pass, and end it whatever happens in it. A pass may run inside of another one.

        Args:
            *inputs: Arguments of the backbone, tensors or any nested containers of them. Feature maps in here,
                (N, C, H, W), tell the size of the images.
        """
        shapes = [x.shape for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
        sizes = [*dict.fromkeys(tuple(shape[-2:]) for shape in shapes if len(shape) == 4)]
        self._latest = (*_next(self._latest), sizes)
        with self.latest_pass():
            yield

    @contextlib.contextmanager
    def latest_pass(self) -> Iterator[None]:
        """Open the latest pass once more: what was drawn in it is drawn again, to look at it."""
        outer, self._open = self._open, _Pass(*self._latest, {})
        try:
            yield
        finally:
            self._open = outer

    def in_this_pass(self, run: Callable) -> Callable:
        """Return what calls a function within the pass that runs now, however late: it finds what was drawn in it.

        Args:
            run (Callable): The function, such as the forward pass of a layer that a checkpoint runs again.
        """
        this = self._open

        def run_within(*args, **kwargs):
            outer, self._open, self._again = (self._open, self._again), this, True
            try:
                return run(*args, **kwargs)
            finally:
                self._open, self._again = outer

        return run_within

    @torch.compiler.disable
    def positions(self, layer: tuple, length: int, class_tokens: bool = False) -> Positions | None:
        """Return the kept and dropped positions of a layer in this pass.

        Args:
            layer (tuple): A key of :attr:`ThinnedStages.layers`.
            length (int): Number of positions of its feature map, or of its tokens.
            class_tokens (bool): Whether other tokens may stand in front of those of the map; they are always kept.
                Default: False.

        Returns:
            Positions | None: Positions on the device of the layer's parameters. ``None`` if all are kept.

        Raises:
            ValueError: If no pass is open, the map has another size, or a checkpoint recomputes the layer.
        """
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_replay(layer)
        if self._open is None:
            raise ValueError(
                f'layer {layer} is thinned, and all layers of a forward pass drop the same positions of the image; '
                'call the backbone that it belongs to, not the layer alone'
            )
        ratio, stage = ratios[layer], layer[0]
        device = self.stages.device(layer)
        size = self._size(layer, length, class_tokens)
        drawn = self._open.once((ratio, device, size), lambda: self._masks(ratio, ratios, size, device))[stage]
        before = length - len(drawn.keep) - len(drawn.drop)
        return self._open.once((ratio, device, size, stage, before), lambda: token_positions(drawn, before))

    @torch.compiler.disable
    def heads(self, layer: tuple) -> Tensor | None:
        """Return the attention heads of a layer that send gradients: int64, sorted, or ``None`` for all of them.

        Raises:
            ValueError: See :meth:`positions`.
        """
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_replay(layer)
        if self._open is None:
            raise ValueError(f'layer {layer} drops attention heads in passes of its backbone; call that, not the layer')
        return self._open.once('heads', lambda: self._heads(ratios))[layer]

    @torch.compiler.disable
    def images(self, branch: tuple, number: int) -> Tensor | None:
        """Return which images of a batch run a branch.

        Args:
            branch (tuple): ``(stage, block, branch)``.
            number (int): Images that the branch got. The first branch of a pass says how many the batch has.

        Returns:
            Tensor | None: bool, shape (N,), on the CPU. ``None`` if the branch draws its stochastic depth itself: it
            has no rate, got another number of images than others of this pass, or runs outside of a pass.
        """
        rates = self._of_pass('rates', self.stages.rates)
        if branch not in rates or self._latest is None:
            return None
        self._refuse_replay(branch)  # also where the pass has ended: its first run was in it, and drew other images
        if self._open is None:
            return None
        drawn = self._open.once('images', lambda: self._images(rates, number))[branch]
        return drawn if len(drawn) == number else None

    def _of_pass(self, key, find):
        return self._open.once(key, find) if self._open else find()

    def _size(self, layer, length, class_tokens):
        """Return the first size of this pass for which the layer's map has ``length`` positions."""
        for size in self._open.sizes:
            height, width = self.stages.sizes(*size)[layer[0]]
            if height * width == length or (class_tokens and height * width < length):
                return size
        if not self._open.sizes:
            raise ValueError(
                f'layer {layer} is thinned, and the size of the images is not known: the backbone got no tensor '
                '(N, C, H, W); give it the images as an argument'
            )
        height, width = self.stages.sizes(*self._open.sizes[0])[layer[0]]
        raise ValueError(
            f'layer {layer} has a map of {length} positions, and {height * width} were expected: its adapter must '
            f'say how maps shrink (stride={self.stages.stride}, rounds_up={self.stages.rounds_up})'
        )

    def _refuse_replay(self, layer):
        # Inside a backward pass a forward pass is somebody's checkpointing. It would have to find what was drawn the
        # first time; and what runs again stores less without it.
        if torch._C._current_graph_task_id() != -1 and not self._again:
            name = self.stages.settings.preset.name
            raise ValueError(
                f"layer {layer} of a backbone with preset='{name}' runs again inside of a checkpoint; it stores less "
                'than the checkpoint, so take that out (with_cp, torch.utils.checkpoint '
                'around the backbone or a block), or leave that part to it: modules=[...]'
            )

    def _masks(self, ratio, ratios, size, device):
        """Draw the positions of each stage that has layers of this ratio."""
        settings, drawn = self.stages.settings, {}
        masks = stage_masks(self.stages.sizes(*size), ratio, settings.sampler, self._open.generator())
        for stage in {key[0] for key, r in ratios.items() if r == ratio}:
            find = grid_positions if settings.sampler == 'grid' else positions
            drawn[stage] = find(masks[stage], device)
        return drawn

    def _heads(self, ratios):
        """Draw the heads of each layer, at least one; heads of different layers have nothing to do with each other."""
        number, generator = self.stages.num_heads, self._open.generator('heads')
        drawn = {}
        for key, ratio in ratios.items():
            order = torch.randperm(number, generator=generator, device='cpu')
            drawn[key] = order[: max(round(ratio * number), 1)].sort()[0].to(self.stages.device(key))
        return drawn

    def _images(self, rates, number):
        numbers = torch.rand(len(rates), number, generator=self._open.generator('images'), device='cpu')
        return {key: row >= rate for (key, rate), row in zip(rates.items(), numbers, strict=True)}
