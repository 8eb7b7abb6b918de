"""What a training step draws: which positions of each map are kept, and which images a block runs on.

Everything is drawn from seed, rank, step and pass, so a resumed run continues the sequence. There are two ways to the
layers. A backbone of this package draws once in its forward pass and gives each layer its positions as an argument
(:class:`Draws`). Layers whose callers know nothing of SBP, as in heads and in models that are changed in place, share
an object and look their positions up in it (:mod:`.shared_draws`).

Masks of ``sampler='objects'`` need the boxes of the ground truth, which no backbone sees. :func:`objects` lays them out
for all passes inside of its ``with``; :class:`.object_masks.ObjectMasksHook` puts it around a detector's ``loss``.
"""

import collections
import contextlib
import contextvars
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from mmengine.dist import get_rank
from mmengine.logging import MessageHub, print_log
from torch import Tensor

from .masks import Positions, mask_generator, object_mask, positions, stage_masks

__all__ = [
    'Drawn',
    'Draws',
    'Step',
    'StepCounter',
    'Thinned',
    'aligned',
    'draw',
    'drawing',
    'generator_of',
    'is_drawing',
    'is_replay',
    'objects',
    'sizes_of',
]


class Step(NamedTuple):
    """A forward pass.

    Attributes:
        iteration (int): Of mmengine's runner, which a resumed run continues; 0 without one.
        repeat (int): How many passes the iteration saw before this one (all passes, where there is no runner).
    """

    iteration: int
    repeat: int


class Drawn(NamedTuple):
    """What a training step draws, layer by layer.

    Attributes:
        positions (dict[tuple, Positions]): The kept positions, for every layer of :meth:`Thinned.keep_ratios`.
        images (dict[tuple, Tensor]): With ``skip_dropped_images``, ``(stage, block)`` to the images that run the block:
            bool, shape (N,), on the CPU.
        heads (dict[tuple, Tensor]): With ``attention='head'``, the kept attention heads of every layer of
            :meth:`Thinned.keep_ratios`: int64, sorted. Default: none.
    """

    positions: dict[tuple, Positions]
    images: dict[tuple, Tensor]
    heads: dict[tuple, Tensor] = {}  # a plain dict: copies of a model copy what it has drawn


@runtime_checkable
class Thinned(Protocol):
    """Something whose layers SBP thins out: a backbone, or what says of another backbone how to do that.

    Attributes:
        sbp (SBPSettings | None): With ``sampler``, ``dropped``, ``attention`` ('head' needs an attribute
            ``num_heads``), and for the sampler 'objects' ``object_share``; None where nothing is thinned out.
    """

    sbp: object

    def keep_ratios(self) -> dict[tuple, float]:
        """Layer to keep ratio. A layer is a tuple that begins with its stage, counted from 0."""

    def stage_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) of each stage's map for images of a size in pixels; a stage halves the one before it."""


def warn_where_frozen(backbone: Thinned) -> None:
    """Logs, once, that SBP thins out nothing because all of its layers are frozen.

    Args:
        backbone (Thinned): A backbone that begins to train.
    """
    asked = backbone.sbp is not None and backbone.sbp.layer_ratios()
    if asked and not backbone.keep_ratios() and not getattr(backbone, '_told_of_frozen_layers', False):
        backbone._told_of_frozen_layers = True
        text = f'{type(backbone).__name__}: all layers that sbp_cfg thins out are frozen, so it changes nothing'
        print_log(text, logger='current', level=logging.WARNING)


_OBJECTS = contextvars.ContextVar('objects', default=None)


@contextlib.contextmanager
def objects(boxes: Sequence[Tensor]) -> Iterator[None]:
    """Where the objects are, for the passes inside of ``with``: what ``sampler='objects'`` draws its masks from.

    A pass that checkpointing runs again, after the ``with`` too, gets the boxes of its first time.

    Args:
        boxes (Sequence[Tensor]): For each image of the batch the boxes of its objects, shape (B, 4), (x1, y1, x2, y2)
            in pixels of the image that the backbone gets. On another device than the CPU: one copy, which waits.

    Raises:
        ValueError: For boxes of another shape.
    """
    for i, found in enumerate(boxes):
        if found.dim() != 2 or found.shape[1] != 4:
            raise ValueError(
                f'boxes of image {i} have the shape {tuple(found.shape)}; they must be (B, 4): x1 y1 x2 y2'
            )
    on_host = torch.cat([*boxes]).detach().float().cpu().split([len(found) for found in boxes]) if len(boxes) else ()
    token = _OBJECTS.set(on_host)
    try:
        yield
    finally:
        _OBJECTS.reset(token)


_DRAWING = contextvars.ContextVar('drawing', default=False)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Around all that draws: the values inside say how many rows layers store. So what counts bytes without arithmetic
    (:mod:`.analysis.hollow`) computes them, whoever draws, and whichever function was imported from where."""
    token = _DRAWING.set(True)
    try:
        yield
    finally:
        _DRAWING.reset(token)


def is_drawing() -> bool:
    """Whether this runs inside of :func:`drawing`."""
    return _DRAWING.get()


def is_replay() -> bool:
    """Whether this pass runs inside a backward pass: it is somebody's checkpointing."""
    return torch._C._current_graph_task_id() != -1


def generator_of(step: Step, purpose: str = '') -> torch.Generator:
    """What this rank's masks of a step are drawn from, or whatever else the purpose names."""
    return mask_generator(torch.initial_seed(), get_rank(), *step, purpose)


class StepCounter:
    """Counts the forward passes of a module in training.

    Attributes:
        latest (Step | None): Of the latest pass; None before the first.
    """

    def __init__(self):
        self.latest = None
        self._passes = collections.deque(maxlen=16)  # the last ones: data pointer of the input, step, objects

    def of(self, x: Tensor) -> Step:
        """The step of a pass that begins now.

        A replay has to keep as many positions as the first time, so it gets the step of the pass over the same input.

        Args:
            x (Tensor): The input.

        Returns:
            Step: Iteration and repeat.
        """
        replay = is_replay()
        if replay:
            for pointer, step, _ in reversed(self._passes):
                if pointer == x.data_ptr():
                    return step
        iteration = MessageHub.get_current_instance().get_info('iter', 0)
        same = self.latest is not None and self.latest.iteration == iteration
        self.latest = Step(iteration, self.latest.repeat + 1 if same else 0)
        if not replay:
            self._passes.append((x.data_ptr(), self.latest, _OBJECTS.get()))
        return self.latest

    def objects_of(self, step: Step) -> tuple[Tensor, ...] | None:
        """The boxes of a pass, see :func:`objects`; None: there were none."""
        return next((boxes for _, known, boxes in reversed(self._passes) if known == step), None)


@drawing()
def draw(
    model: Thinned,
    x: Tensor,
    step: Step,
    rates: dict[tuple, float] | None = None,
    boxes: Sequence[Tensor] | None = None,
) -> Drawn:
    """Draws for all layers of a backbone.

    Args:
        model (Thinned): Which layers, how far, and the sizes of their maps.
        x (Tensor): Images, shape (N, 3, H, W).
        step (Step): The pass.
        rates (dict[tuple, float] | None): Blocks that leave out images, and their rate of stochastic depth.
            Default: None.
        boxes (Sequence[Tensor] | None): Of each image, for the sampler 'objects', see :func:`objects`. Default: None.

    Returns:
        Drawn: Positions on the device of ``x``, none of them without gradients, and images. Positions of each image
        are those of the images that run the layer.

    Raises:
        ValueError: If there are no boxes for the sampler 'objects', or those of another number of images.
    """
    images = {}
    if rates:
        numbers = torch.rand(len(rates), len(x), generator=generator_of(step, 'images'))
        images = {key: row >= rate for (key, rate), row in zip(rates.items(), numbers, strict=True)}
    layers = model.keep_ratios() if torch.is_grad_enabled() else {}
    if not layers:
        return Drawn({}, images)
    sizes, drawn = sizes_of(model, layers, x), {}
    for ratio in set(layers.values()):
        stages = {key[0] for key, r in layers.items() if r == ratio}
        if model.sbp.sampler == 'objects':
            masks = _object_masks(model, x, step, boxes, {i: sizes[i] for i in stages}, ratio)
        else:
            masks = stage_masks(sizes, ratio, model.sbp.sampler, generator_of(step), aligned(model))
        for i in stages:
            drawn[ratio, i] = positions(masks[i], x.device, model.sbp.dropped != 'zero')
    found = {key: drawn[ratio, key[0]] for key, ratio in layers.items()}
    found = {key: p.of_images(images[key]) if key in images else p for key, p in found.items()}
    heads = (
        _heads(model, layers, generator_of(step, 'heads'), x.device)
        if getattr(model.sbp, 'attention', None) == 'head'
        else {}
    )
    return Drawn(found, images, heads)


def _object_masks(model, x, step, boxes, sizes, ratio):
    """Stage to masks (N, height, width) of the sampler 'objects'."""
    if boxes is None:
        raise ValueError(
            "sampler='objects' needs the boxes of the ground truth, and none have arrived; add "
            "dict(type='ObjectMasksHook') to custom_hooks, or run a backbone that is alone, or called outside of its "
            "detector's loss() as in SoftTeacher, inside of sbp_mmdet.objects(boxes); a checkpoint around a whole "
            'backbone needs use_reentrant=False'
        )
    if len(boxes) != len(x):
        raise ValueError(f'boxes of {len(boxes)} images have arrived for a batch of {len(x)}; give those of each image')
    # A stage halves the one before it, with whatever rounding; so the first one says what a pixel is in all of them.
    first = [round(pixels / n) for pixels, n in zip(x.shape[-2:], model.stage_sizes(*x.shape[-2:])[0], strict=True)]
    masks = {}
    for i, (height, width) in sizes.items():
        generator = generator_of(step, f'stage {i}')  # whatever the ratios of other stages are
        stride = [n * 2**i for n in first]
        drawn = [object_mask(b, height, width, stride, ratio, model.sbp.object_share, generator) for b in boxes]
        masks[i] = torch.stack(drawn)
    return masks


def _heads(model, layers, generator, device):
    """Of each layer its own, for heads of different layers have nothing to do with each other; at least one."""
    number = model.num_heads
    kept = {key: max(round(ratio * number), 1) for key, ratio in layers.items()}
    return {key: torch.randperm(number, generator=generator)[:k].sort()[0].to(device) for key, k in kept.items()}


def sizes_of(model, layers, x):
    """Of the stages down to the deepest one that is thinned out."""
    return model.stage_sizes(*x.shape[-2:])[: max(key[0] for key in layers) + 1]


def aligned(model):
    """Whether stages share a base mask: not where dropped positions need a kept one near, or where objects decide."""
    return model.sbp.dropped == 'zero' and model.sbp.sampler != 'objects'


class Draws:
    """What the passes of a backbone draw, to be given to its layers as arguments."""

    def __init__(self):
        self._counter = StepCounter()

    @torch.compiler.disable
    def of(self, model: Thinned, x: Tensor, rates: dict[tuple, float] | None = None, again: bool = False) -> Drawn:
        """Draws for a pass that begins now.

        Args:
            model, x, rates: See :func:`draw`.
            again (bool): What the latest pass drew, while seed and iteration are still its own. Counts no pass.
                Default: False.

        Returns:
            Drawn: Positions and images. Where nothing is to be drawn the pass does not count.

        Raises:
            ValueError: With ``again``, if no pass has drawn anything; and see :func:`draw`.
        """
        if not rates and not (torch.is_grad_enabled() and model.keep_ratios()):
            return Drawn({}, {})
        step = self._counter.latest if again else self._counter.of(x)
        if step is None:
            raise ValueError('again=True: no pass has drawn anything; run one in training mode first')
        return draw(model, x, step, rates, self._counter.objects_of(step))
