"""Positions for layers whose callers know nothing of SBP, as in heads and in models that are changed in place.

They share an object that notes when a pass begins, and look their positions up in it; see :mod:`.draws`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .draws import Drawn, Step, StepCounter, Thinned, aligned, draw, drawing, generator_of, is_replay, sizes_of
from .masks import Positions, positions, sample_mask, stage_masks

__all__ = ['LayerDraws', 'MapDraws', 'Pass', 'SharedDraws', 'run_again_as_now']


class Pass(NamedTuple):
    """A forward pass of a model.

    Attributes:
        step (Step): What its draws depend on.
        images (Tensor): Its images without their values: size and device.
        drawn (dict): What its layers have asked for so far.
    """

    step: Step
    images: Tensor
    drawn: dict


class SharedDraws:
    """What the passes of a model draw, to be looked up by its layers.

    ``backbone.register_forward_pre_hook(draws.begin, with_kwargs=True)`` begins each pass. What a layer looks up is
    drawn when it is asked for first. A layer that runs again inside a backward pass finds the draws of its own pass
    where that was noted (:func:`run_again_as_now`, ``with_cp``), and otherwise those of :attr:`now`.

    Attributes:
        now (Pass | None): What layers look up: the pass that began last; None before the first.
    """

    def __init__(self):
        self._counter, self.now = StepCounter(), None

    def begin(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        """Begins a pass, where it is one of training.

        Args:
            module (nn.Module): The backbone.
            args (tuple): Its arguments; the first one of these, or else of ``kwargs``, are the images (N, 3, H, W).
            kwargs (dict | None): Its arguments that were given by name. Default: None.
        """
        x = next(iter((*args, *(kwargs or {}).values())))
        if self._draws_in(module):
            self.now = Pass(self._counter.of(x), x.new_empty(()).expand(x.shape), {})

    def _draws_in(self, module):
        """Whether something will be looked up in a pass of the backbone that begins now."""
        raise NotImplementedError

    @contextlib.contextmanager
    def again(self, earlier: Pass | None) -> Iterator[None]:
        """What an earlier pass drew, for layers that run again although others have begun since."""
        latest, self.now = self.now, earlier
        try:
            yield
        finally:
            self.now = latest


def run_again_as_now(module: nn.Module, run: Callable) -> Callable:
    """A function that finds the draws of the pass of now whenever it runs again.

    Args:
        module (nn.Module): What it runs: its submodules may look up draws.
        run (Callable): The function.

    Returns:
        Callable: To be given to checkpointing.
    """
    found = {getattr(m, '_sbp_draws', None) for m in module.modules()} - {None}
    noted = [(draws, draws.now) for draws in found]

    def as_now(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            for draws, earlier in noted:
                stack.enter_context(draws.again(earlier))
            return run(*args, **kwargs)

    return as_now if noted else run


class LayerDraws(SharedDraws):
    """Positions, and images left out, for the layers of a backbone that was changed in place.

    Somebody else's checkpoint around a part of the backbone tells no pass. So ``register_forward_hook(draws.end)`` lets
    a backward pass say which one it has come to, before its layers run again.

    Args:
        model (Thinned): Says which layers, how far, and the sizes of their maps; with ``rates()`` also which
            layers leave out images, and how often.
    """

    def __init__(self, model: Thinned):
        super().__init__()
        self.model = model

    def _draws_in(self, module):
        # Images are left out without gradients too: so begins a pass that is replayed.
        return module.training and (torch.is_grad_enabled() or bool(self._rates()))

    def _rates(self):
        rates = getattr(self.model, 'rates', None)
        return rates() if rates else {}

    @torch.compiler.disable
    def end(self, module: nn.Module, args: tuple, outputs: object) -> None:
        """Ends a pass.

        Args:
            module (nn.Module): The backbone.
            args (tuple): Its arguments.
            outputs (object): What it gave: tensors, however nested.
        """
        if self.now is None or not module.training or is_replay():
            return
        for out in tree_flatten(outputs)[0]:
            if isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(functools.partial(self._come_to, self.now))

    def _come_to(self, earlier, grad):
        self.now = earlier

    def of(self, layer: tuple) -> Positions | None:
        """The positions of a layer of :meth:`Thinned.keep_ratios`; None: the layer is exact, or no pass has begun."""
        return self.latest().positions.get(layer)

    def images(self, layer: tuple) -> Tensor | None:
        """Which images run a layer, see :class:`Drawn`; None: all, and the layer draws its stochastic depth itself."""
        return self.latest().images.get(layer)

    @torch.compiler.disable
    def latest(self) -> Drawn:
        """What the pass of :attr:`now` draws."""
        if self.now is None:
            return Drawn({}, {})
        step, images, drawn = self.now
        gradients = torch.is_grad_enabled()
        if gradients not in drawn:
            drawn[gradients] = draw(self.model, images, step, self._rates(), boxes=self._counter.objects_of(step))
        return drawn[gradients]


class MapDraws(SharedDraws):
    """Positions for feature maps of any size, as those of neck and heads: one set for each size.

    Args:
        backbone (nn.Module): What begins the passes.
        keep_ratio (float): r in (0, 1].
        sampler (str): 'grid' or 'random'.
        modules (Sequence[nn.Module]): What looks them up.
    """

    def __init__(self, backbone: nn.Module, keep_ratio: float, sampler: str, modules: Sequence[nn.Module]):
        super().__init__()
        self.backbone, self.keep_ratio, self.sampler, self.modules = backbone, keep_ratio, sampler, list(modules)

    def _draws_in(self, module):
        # A backbone that trains counts its passes alike; a frozen one runs in evaluation mode, or without gradients.
        return any(m.training for m in self.modules) and (torch.is_grad_enabled() or not module.training)

    def _thinned(self):
        """What says how the backbone is thinned out; None: nothing does."""
        for hook in self.backbone._forward_pre_hooks.values():  # one that was changed in place
            if isinstance(draws := getattr(hook, '__self__', None), LayerDraws):
                return draws.model
        return self.backbone if isinstance(self.backbone, Thinned) else None

    def _sizes_in_backbone(self, images):
        thinned = self._thinned()
        layers = thinned.keep_ratios() if thinned else {}
        return sizes_of(thinned, layers, images) if layers else []

    @torch.compiler.disable
    @drawing()
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

        Raises:
            ValueError: If no pass of the backbone has begun.
        """
        if self.now is None:
            raise ValueError(
                f'no pass of {type(self.backbone).__name__} has begun, and masks are drawn anew in each; call the '
                'backbone itself, not its forward()'
            )
        size = tuple(x.shape[2:])
        step, images, drawn = self.now
        sizes = self._sizes_in_backbone(images) if as_backbone else []
        key = size, size in sizes
        if key not in drawn:
            generator = generator_of(step)
            if size in sizes:
                masks = stage_masks(sizes, self.keep_ratio, self.sampler, generator, aligned(self._thinned()))
                mask = masks[sizes.index(size)]
            else:
                mask = sample_mask(*size, self.keep_ratio, self.sampler, generator)
            drawn[key] = positions(mask, x.device)
        return drawn[key]
