"""The random choices of one training step: the positions, attention heads and images that send gradients.

The draws depend only on the seed, the rank, the iteration, the number of the forward pass within the iteration and, in
all backbones of a model but the first, the backbone's name. So a resumed run continues the sequence, several forward
passes may precede one backward pass, and backbones that train side by side draw independently.

A forward pass of a backbone has a beginning and an end (:meth:`StepDraws.forward_pass`). In between, its layers look up
their draws; at its end all draws are discarded.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch
from mmengine.dist import get_rank
from mmengine.logging import MessageHub
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..ops.common.uncompiled import uncompiled
from .masks import Positions, grid_positions, level_positions, mask_generator, positions, stage_masks, token_positions
from .running_pass import RunningPass

if TYPE_CHECKING:
    from ..presets import Settings

__all__ = ['StepDraws', 'ThinnedStages', 'TokenDraws', 'next_pass']


class ThinnedStages(NamedTuple):
    """The layers of a backbone, with the keep ratios of those that are thinned.

    Attributes:
        settings (Settings): Settings of the model.
        layers (Mapping[tuple, nn.Module]): Modules by layer: ``(stage, block)``, ``(stage, 'downsample')`` and others.
        ratios (Mapping[tuple, float]): Keep ratios of the thinned layers.
        stride (int): Pixels for each position of the first stage, in each direction; each stage halves the previous.
        rounds_up (bool): Whether odd maps are padded before they are halved. If ``False``, they are cropped.
        num_heads (int | None): Number of attention heads of a block. Default: None.
        name (str): Name of the backbone, by which its draws differ from those of other backbones of the model. It is
            empty for the first one. Default: ''.
    """

    settings: 'Settings'
    layers: Mapping[tuple, nn.Module]
    ratios: Mapping[tuple, float]
    stride: int
    rounds_up: bool
    num_heads: int | None = None
    name: str = ''

    def keep_ratios(self) -> dict[tuple, float]:
        """Return the keep ratios of the thinned layers that train; frozen layers are exact and omitted."""
        return {key: ratio for key, ratio in self.ratios.items() if self._is_changed(key) and _trains(self.layers[key])}

    def _is_changed(self, key):
        """Return whether a layer is changed still: part of a backbone may have got its own code back since then."""
        return '_lean' in self.layers[key].__dict__

    def rates(self) -> dict[tuple, float]:
        """Return the rate of stochastic depth of each branch, ``(stage, block, branch)``, that skips dropped images."""
        if not self.settings.skip_dropped_images:
            return {}
        return {
            (*key, branch): rate
            for key, layer in self.layers.items()
            if layer.training and self._is_changed(key)
            for branch, rate in layer.drop_rates().items()
        }

    def is_random(self, layer: tuple) -> bool:
        """Return whether something is drawn for a layer in training, so that a checkpoint cannot recompute it.

        Args:
            layer (tuple): A key of :attr:`layers`.
        """
        leaves_out = self.settings.skip_dropped_images and self.layers[layer].drop_rates()
        return layer in self.keep_ratios() or bool(leaves_out)

    def any_random(self) -> bool:
        """Return whether something is drawn for any layer."""
        return any(map(self.is_random, self.layers))

    def device(self, key: tuple) -> torch.device:
        """Return the device of a layer's parameters, where its positions are needed."""
        return next(self.layers[key].parameters()).device

    def sizes(self, height: int, width: int, deepest: int) -> list[tuple[int, int]]:
        """Return (height, width) of the feature maps of an image, from the first stage to a deeper one.

        Args:
            height (int): Height of the image in pixels.
            width (int): Width of the image in pixels.
            deepest (int): Number of the last stage; stages count from 0.
        """
        extra = (self.stride - 1) * self.rounds_up
        height, width = (height + extra) // self.stride, (width + extra) // self.stride
        sizes = [(height, width)]
        for _ in range(deepest):
            height, width = (height + self.rounds_up) // 2, (width + self.rounds_up) // 2
            sizes.append((height, width))
        return sizes


def _trains(layer):
    for parameter in layer.parameters():
        if parameter.requires_grad:
            return True
    return False


class _Pass(NamedTuple):
    """State of one forward pass.

    Attributes:
        iteration (int): Training iteration.
        number (int): Number of the pass within the iteration.
        sizes (list[tuple[int, int]]): Possible (height, width) of the images.
        drawn (dict): Draws so far.
    """

    iteration: int
    number: int
    sizes: list[tuple[int, int]]
    drawn: dict

    def generator(self, purpose):
        return mask_generator(torch.initial_seed(), get_rank(), self.iteration, self.number, purpose)

    def once(self, key, draw: Callable):
        """Return the draw of this key. It is drawn when it is first asked for."""
        if key not in self.drawn:
            self.drawn[key] = draw()
        return self.drawn[key]


def next_pass(latest: tuple | None) -> tuple[int, int]:
    """Return the (iteration, number of the pass in it) that follows ``latest``.

    Args:
        latest (tuple | None): The latest pass, which begins with the same two numbers. If ``None``, there is none.
    """
    iteration = MessageHub.get_current_instance().get_info('iter', 0)
    return iteration, latest[1] + 1 if latest and latest[0] == iteration else 0


def _in_backward_pass():
    """Return whether a backward pass is running. A forward pass inside of it is a checkpoint's recomputation.

    It would need the draws of the first run, and the layer saves less memory without the checkpoint.
    """
    return torch._C._current_graph_task_id() != -1


def _describe_replay(what, settings):
    return (
        f"{what} with preset='{settings.preset.name}' is recomputed by a checkpoint. The layer stores less than the "
        'checkpoint, so remove that (with_cp, torch.utils.checkpoint around the backbone or a block), or leave the '
        'checkpointed part unchanged: modules=[...]'
    )


class TokenDraws:
    """Draws of the tokens that an encoder, or one of its layers, keeps in all levels.

    Each object counts its own passes, so the layers of one encoder draw the same tokens.

    Args:
        settings (Settings): Settings of the model.
    """

    def __init__(self, settings: 'Settings'):
        self._settings, self._latest = settings, None

    def ratio(self, layer: tuple | None) -> float:
        """Return the keep ratio of a layer."""
        return self._settings.keep_ratio

    def is_random(self, layer: tuple | None) -> bool:
        """See :meth:`ThinnedStages.is_random`."""
        return True

    @uncompiled
    def positions(self, sizes: list[tuple[int, int]], device: torch.device) -> Positions:
        """Draw the positions of the next pass.

        Args:
            sizes (list[tuple[int, int]]): (height, width) of each level, in the order of the tokens.
            device (torch.device): Device of the tokens.

        Returns:
            Positions: Kept and dropped tokens.

        Raises:
            ValueError: If a checkpoint recomputes the encoder.
        """
        if _in_backward_pass():
            raise ValueError(_describe_replay('an encoder', self._settings))
        self._latest = next_pass(self._latest)
        generator = mask_generator(torch.initial_seed(), get_rank(), *self._latest, 'levels')
        return level_positions(sizes, self._settings.keep_ratio, self._settings.sampler, generator, device)


class StepDraws:
    """The random draws of a backbone: in each forward pass, the kept positions of its layers, and the kept images.

    Args:
        stages (ThinnedStages): The layers of the backbone.

    Example:
        >>> with draws.forward_pass(images):
        ...     outputs = backbone(images)  # its layers call draws.positions(...)
    """

    def __init__(self, stages: ThinnedStages):
        self.stages, self._running = stages, RunningPass()
        self._latest = None  # iteration, number and image sizes of the latest pass
        self._purpose = f'of {stages.name}' if stages.name else ''

    def ratio(self, layer: tuple) -> float | None:
        """Return the keep ratio of a layer, or ``None`` if it keeps all positions."""
        return self.stages.keep_ratios().get(layer)

    def is_random(self, layer: tuple) -> bool:
        """See :meth:`ThinnedStages.is_random`."""
        return self.stages.is_random(layer)

    @contextlib.contextmanager
    def forward_pass(self, *inputs) -> Iterator[None]:
        """Open the next forward pass within the context. It ends also if an error is raised. Passes may be nested.

        Args:
            *inputs: Arguments of the backbone, tensors or nested containers of them. The size of the images is that of
                tensors (N, C, H, W) in them.
        """
        shapes = [x.shape for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]
        sizes = [*dict.fromkeys(tuple(shape[-2:]) for shape in shapes if len(shape) == 4)]
        self._latest = this = (*next_pass(self._latest), sizes)
        with self._running.within(_Pass(*this, {})):
            yield

    def latest_pass(self) -> AbstractContextManager:
        """Open the latest pass again within the context, to inspect it: its draws are drawn again."""
        return self._running.within(_Pass(*self._latest, {}))

    def in_this_pass(self, run: Callable) -> Callable:
        """Bind a function to the pass that is running, so that later calls use the draws of this pass.

        Args:
            run (Callable): The function, such as the forward pass of a layer that a checkpoint recomputes.

        Returns:
            Callable: The bound function.
        """
        this = self._running.now

        def run_within(*args, **kwargs):
            with self._running.within(this, again=True):
                return run(*args, **kwargs)

        return run_within

    @uncompiled
    def positions(self, layer: tuple, length: int, class_tokens: bool = False) -> Positions | None:
        """Return the kept and dropped positions of a layer in this pass.

        Args:
            layer (tuple): A key of :attr:`ThinnedStages.layers`.
            length (int): Number of positions of its feature map, or of its tokens.
            class_tokens (bool): Whether other tokens, which are always kept, may precede those of the map. Default:
                False.

        Returns:
            Positions | None: Positions on the device of the layer's parameters. ``None`` if all are kept.

        Raises:
            ValueError: If no pass is open, the map has an unexpected size, or a checkpoint recomputes the layer.
        """
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_outside(layer, 'positions')
        ratio, stage = ratios[layer], layer[0]
        device = self.stages.device(layer)
        size = self._size(layer, length, class_tokens)
        drawn = self._running.now.once((ratio, device, size), lambda: self._masks(ratio, ratios, size, device))[stage]
        before = length - len(drawn.keep) - len(drawn.drop)
        return self._running.now.once((ratio, device, size, stage, before), lambda: token_positions(drawn, before))

    @uncompiled
    def heads(self, layer: tuple) -> Tensor | None:
        """Return the attention heads of a layer that send gradients: int64, sorted, or ``None`` for all of them.

        Args:
            layer (tuple): A key of :attr:`ThinnedStages.layers`.

        Raises:
            ValueError: See :meth:`positions`.
        """
        ratios = self._of_pass('ratios', self.stages.keep_ratios)
        if layer not in ratios:
            return None
        self._refuse_outside(layer, 'attention heads')
        return self._running.now.once('heads', lambda: self._heads(ratios))[layer]

    @uncompiled
    def images(self, branch: tuple, number: int) -> Tensor | None:
        """Return the images of a batch that run a branch.

        Args:
            branch (tuple): ``(stage, block, branch)``.
            number (int): Number of images that the branch gets. That of the first branch of a pass is the batch's.

        Returns:
            Tensor | None: Whether each image runs the branch, bool, shape (N,), on the CPU. ``None`` if the branch
            draws its stochastic depth itself, because it has no rate, gets another number of images than the first
            branch of this pass, or runs outside of a pass.
        """
        rates = self._of_pass('rates', self.stages.rates)
        if branch not in rates or self._latest is None:
            return None
        self._refuse_replay(branch)  # also after the end of the pass, in which the first run drew other images
        if self._running.now is None:
            return None
        drawn = self._running.now.once('images', lambda: self._images(rates, number))[branch]
        return drawn if len(drawn) == number else None

    def _of_pass(self, key, find):
        return self._running.now.once(key, find) if self._running.now else find()

    def _size(self, layer, length, class_tokens):
        """Return the first size of this pass for which the layer's map has ``length`` positions."""
        for size in self._running.now.sizes:
            height, width = self.stages.sizes(*size, layer[0])[-1]
            if height * width == length or (class_tokens and height * width < length):
                return size
        if not self._running.now.sizes:
            raise ValueError(
                f'layer {layer} is thinned, but the size of the images is unknown, because the backbone got no tensor '
                '(N, C, H, W); pass the images to it as an argument'
            )
        height, width = self.stages.sizes(*self._running.now.sizes[0], layer[0])[-1]
        raise ValueError(
            f'layer {layer} has a map of {length} positions, but {height * width} were expected; correct how maps '
            f'shrink in its adapter (stride={self.stages.stride}, rounds_up={self.stages.rounds_up})'
        )

    def _refuse_outside(self, layer, what):
        """Raise an error if a layer that drops something runs outside of a pass, or a checkpoint recomputes it."""
        self._refuse_replay(layer)
        if self._running.now is None:
            raise ValueError(
                f'layer {layer} drops {what}, and the backbone draws them once for a forward pass; call the backbone, '
                'not the layer alone'
            )

    def _refuse_replay(self, layer):
        if _in_backward_pass() and not self._running.again:
            raise ValueError(_describe_replay(f'layer {layer} of a backbone', self.stages.settings))

    def _generator_of_layers(self, what):
        """Return a generator for draws that differ from those of other parts of the backbone, changed by themselves."""
        return self._running.now.generator(f'{what} from {next(iter(self.stages.layers))} {self._purpose}')

    def _masks(self, ratio, ratios, size, device):
        """Draw the positions of each stage that has layers of this ratio."""
        settings, drawn = self.stages.settings, {}
        sizes = self.stages.sizes(*size, max(key[0] for key in ratios))
        # Parts of a backbone that were changed one by one drop the same positions of the image.
        masks = stage_masks(sizes, ratio, settings.sampler, self._running.now.generator(self._purpose))
        for stage in {key[0] for key, r in ratios.items() if r == ratio}:
            find = grid_positions if settings.sampler == 'grid' else positions
            drawn[stage] = find(masks[stage], device)
        return drawn

    def _heads(self, ratios):
        """Draw the heads of each layer, at least one, independently of other layers."""
        number, generator = self.stages.num_heads, self._generator_of_layers('heads')
        drawn = {}
        for key, ratio in ratios.items():
            order = torch.randperm(number, generator=generator, device='cpu')
            drawn[key] = order[: max(round(ratio * number), 1)].sort()[0].to(self.stages.device(key))
        return drawn

    def _images(self, rates, number):
        numbers = torch.rand(len(rates), number, generator=self._generator_of_layers('images'), device='cpu')
        return {key: row >= rate for (key, rate), row in zip(rates.items(), numbers, strict=True)}
