"""Positions for layers whose callers know nothing of SBP, as in heads and in models that are changed in place.

They share an object that notes when a pass begins, and look their positions up in it; see :mod:`.draws`.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .draws import Drawn, Step, StepCounter, Thinned, aligned, draw, generator_of, sizes_of
from .masks import Positions, positions, sample_mask, stage_masks

__all__ = ['LayerDraws', 'MapDraws', 'SharedDraws']


class SharedDraws:
    """What the passes of a model draw, to be looked up by its layers.

    ``backbone.register_forward_pre_hook(draws.begin)`` begins each pass. What a layer looks up is drawn when it is
    asked for first. A layer that runs again inside a backward pass (checkpointing) finds the draws of the latest pass
    that began; where the backbone itself runs again, that is the pass over the same images.
    """

    def __init__(self):
        self._counter, self.step = StepCounter(), Step(0, 0)
        self._drawn = {}

    def begin(self, module: nn.Module, args: tuple) -> None:
        """Begins a pass, where it is one of training with gradients.

        Args:
            module (nn.Module): The backbone.
            args (tuple): Its arguments; the first one are the images, shape (N, 3, H, W).
        """
        if module.training and (torch.is_grad_enabled() or self.leaves_out()):
            self.step, self._drawn = self._counter.of(args[0]), {}
            self._begin(module, args[0])

    def leaves_out(self) -> bool:
        """Whether images are left out, as they are without gradients too: so begins a pass that is replayed."""
        return False

    def _begin(self, module, x):
        """What else a pass needs."""


class LayerDraws(SharedDraws):
    """Positions, and images left out, for the layers of a backbone that was changed in place.

    Args:
        model (Thinned): Says which layers, how far, and the sizes of their maps; with ``rates()`` also which
            layers leave out images, and how often.
    """

    def __init__(self, model: Thinned):
        super().__init__()
        self.model = model
        self._like = None  # the images without their values: size and device
        self._lent = None

    def leaves_out(self) -> bool:
        """See :meth:`SharedDraws.leaves_out`."""
        return bool(self._rates())

    def _rates(self):
        rates = getattr(self.model, 'rates', None)
        return rates() if rates else {}

    def _begin(self, module, x):
        self._like = x.new_empty(()).expand(x.shape)

    @property
    def has_begun(self) -> bool:
        """Whether there was a pass."""
        return self._like is not None

    def of(self, layer: tuple) -> Positions | None:
        """The positions of a layer of :meth:`Thinned.keep_ratios`; None: the layer is exact, or no pass has begun."""
        return self.latest().positions.get(layer)

    def images(self, layer: tuple) -> Tensor | None:
        """Which images run a layer, see :class:`Drawn`; None: all, and the layer draws its stochastic depth itself."""
        return self.latest().images.get(layer)

    @torch.compiler.disable
    def latest(self) -> Drawn:
        """What the pass that began last draws."""
        if self._lent is not None or self._like is None:
            return self._lent or Drawn({}, {})
        gradients = torch.is_grad_enabled()
        if gradients not in self._drawn:
            boxes = self._counter.objects_of(self.step)
            self._drawn[gradients] = draw(self.model, self._like, self.step, self._rates(), boxes=boxes)
        return self._drawn[gradients]

    @contextlib.contextmanager
    def again(self, drawn: Drawn) -> Iterator[None]:
        """What an earlier pass drew, for layers that run again although others have begun since."""
        before, self._lent = self._lent, drawn
        try:
            yield
        finally:
            self._lent = before


class MapDraws(SharedDraws):
    """Positions for feature maps of any size, as those of neck and heads: one set for each size.

    Args:
        keep_ratio (float): r in (0, 1].
        sampler (str): 'grid' or 'random'.
    """

    def __init__(self, keep_ratio: float, sampler: str):
        super().__init__()
        self.keep_ratio, self.sampler = keep_ratio, sampler
        self._sizes, self._aligned = [], True

    def _begin(self, module, x):
        self._sizes = []
        if isinstance(module, Thinned) and (layers := module.keep_ratios()):
            self._sizes, self._aligned = sizes_of(module, layers, x), aligned(module)

    @torch.compiler.disable
    def of(self, x: Tensor, as_backbone: bool = False) -> Positions:
        """Kept and dropped positions of a map.

        What is next to the backbone takes the masks of its stages where sizes agree (with its ratio and sampler these
        are its positions), or what is kept here and there would be a quarter. Behind a 3x3 convolution nothing is
        gained by that, and the fine mask of the map's own size estimates better than a stage's blocks.

        Args:
            x (Tensor): The map, shape (N, C, H, W).
            as_backbone (bool): Whether it is next to the backbone. Default: False.

        Returns:
            Positions: On the device of ``x``.
        """
        size = tuple(x.shape[2:])
        as_backbone &= size in self._sizes
        if (size, as_backbone) not in self._drawn:
            generator = generator_of(self.step)
            if as_backbone:
                masks = stage_masks(self._sizes, self.keep_ratio, self.sampler, generator, self._aligned)
                mask = masks[self._sizes.index(size)]
            else:
                mask = sample_mask(*size, self.keep_ratio, self.sampler, generator)
            self._drawn[size, as_backbone] = positions(mask, x.device)
        return self._drawn[size, as_backbone]
