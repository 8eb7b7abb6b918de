"""What all adapters share: how a module of a live model trains lean.

An adapter is mixed into the class of a module. It says which parts of the module's forward pass are which operations:

    @adapter('my_project.MyBlock')                  # or the class itself
    class MyBlock(Block):
        def parts(self):
            return dict(mlp=MLP(self.norm, self.fc1, self.act, self.fc2, drop=self.drop_path))

Everything else is written here: evaluation and passes without gradients run the module's own code; kept positions,
images that stochastic depth leaves out, and the form of the operations come from the model's settings. Checkpointing
of the module itself (``with_cp``) is off: an operation stores less.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.precision import accumulator, autocast_dtype
from ..ops.common.stochastic_depth import on_images
from ..presets import Settings
from ..stochastic_backprop.layers import thinned_blocks
from ..stochastic_backprop.step_draws import RowDraws, StepDraws, TokenDraws
from ..surgery import Mixin, stock_class
from .bindings import Part

__all__ = ['ADAPTERS', 'Block', 'Lean', 'Place', 'Whole', 'adapter', 'adapter_of', 'kind_of']

# Class of a module, by its module and name, to what is mixed into it.
ADAPTERS: dict[str, type['Lean']] = {}


def adapter(*kinds: str | type[nn.Module]) -> Callable[[type['Lean']], type['Lean']]:
    """Decorates what is to be mixed into classes of modules; see this module for an example.

    Args:
        *kinds (str | type[nn.Module]): The classes, or their modules and names. Classes that derive from them count.

    Returns:
        Callable: The decorator.
    """

    def register(mixin):
        if not issubclass(mixin, Lean):
            raise ValueError(f'{mixin.__name__} must derive from sbp_mmdet.adapters.Lean or Block')
        ADAPTERS.update({kind if isinstance(kind, str) else _path(kind): mixin for kind in kinds})
        if issubclass(mixin, Whole) and 'stock' not in vars(mixin):
            mixin.stock = kinds
        return mixin

    return register


def adapter_of(module: nn.Module) -> type['Lean'] | None:
    """What is to be mixed into a module; None: nothing."""
    return next((ADAPTERS[path] for path in map(_path, type(module).__mro__) if path in ADAPTERS), None)


def _path(kind):
    return f'{kind.__module__}.{kind.__qualname__}'


def kind_of(module: nn.Module) -> type:
    """Returns the class of a module without what was mixed into it: adapters, checkpointing."""
    return stock_class(type(module))


class Place(NamedTuple):
    """Where a changed module stands.

    Attributes:
        settings (Settings): Of the model.
        layer (tuple | None): Which layer of its backbone it is; None: none that has positions. Default: None.
        draws (StepDraws | TokenDraws | None): Of its backbone, or of itself. Default: None.
        name (str): Of the module. Default: ''.
        phases (RowDraws | None): Of the model's samples. Default: None.
    """

    settings: Settings
    layer: tuple | None = None
    draws: StepDraws | TokenDraws | None = None
    name: str = ''
    phases: RowDraws | None = None


class Lean(Mixin):
    """Base of adapters. A changed module has its :class:`Place` in ``_lean``.

    Attributes:
        checkpointed (bool): A block, which ``preset='with_cp'`` checkpoints. Default: False.
        class_tokens (bool): Tokens may stand in front of those of the map; they are always kept. Default: False.
        samples (bool): Estimates gradients of weights where a preset says so. Default: True.
        thins_only (bool): Changes nothing where it drops no tokens. Default: False.
        hands_on (bool): Hands to the next layer what it keeps, see :mod:`sbp_mmdet.passes`. Default: False.
    """

    checkpointed = False
    class_tokens = False
    samples = True
    thins_only = False
    runs_blocks = False
    hands_on = False

    def forward(self, *args, **kwargs):
        """The module's own forward pass; in training :meth:`lean_forward`, with the same arguments."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return self.lean_forward(*args, **kwargs)

    def lean_forward(self, x: Tensor) -> Tensor:
        """The forward pass in training: the parts one after the other, where nothing else is said."""
        for name, part in self.parts().items():
            x = self.run(name, part, x)
        return x

    def parts(self) -> Mapping[str, Part]:
        """The operations of the forward pass, in its order."""
        return {}

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """Why a module stays as it is; None: it can be changed.

        Args:
            module (nn.Module): The module, not changed yet.
            settings (Settings): Of the model.
        """
        form = settings.preset.form
        return next(filter(None, (part.refusal(form) for part in cls.parts(module).values())), None)

    @classmethod
    def token_ratio(cls, settings: Settings) -> float | None:
        """Keep ratio of a module that draws for itself, by :class:`.TokenDraws`; None: it keeps all.

        Args:
            settings (Settings): Of the model.
        """
        return None

    @classmethod
    def members(cls, module: nn.Module) -> Iterable[nn.Module]:
        """The module and those inside of it that the adapter runs, so that they need none; none: nothing to change.

        Args:
            module (nn.Module): The module, not changed yet.
        """
        return module.modules()

    def extra_repr(self) -> str:
        """For ``print(model)``: what is said of the module, its preset, and how much it keeps."""
        settings, layer, draws, *_ = self._lean
        ratio = draws and draws.ratio(layer)
        said = super().extra_repr(), f"preset='{settings.preset.name}'", ratio and f'keeps {ratio:g} of the positions'
        return ', '.join(filter(None, said))

    @classmethod
    def aside(cls, module: nn.Module) -> Iterable[tuple[nn.Module, str]]:
        """Modules inside that run their own code although the adapter knows them, and why.

        Args:
            module (nn.Module): The module.
        """
        return ()

    @property
    def form(self) -> Form:
        """How operations store."""
        return self._lean.settings.preset.form

    def drawn_form(self) -> Form:
        """The same, with rows that are drawn anew where gradients of weights come from a sample."""
        place = self._lean
        if place.phases is None:
            return self.form
        return dataclasses.replace(self.form, sample=place.phases.draw(place.name, float(place.settings.keep_ratio)))

    def drop_rates(self) -> dict[str, float]:
        """Rate of stochastic depth of the parts that leave out images."""
        rates = {name: getattr(part.drop, 'drop_prob', 0) or 0 for name, part in self.parts().items()}
        return {name: rate for name, rate in rates.items() if rate}

    def run(self, name: str, part: Part, x: Tensor, **options) -> Tensor:
        """Runs a part, with this pass's positions and stochastic depth.

        Args:
            name (str): Of the part in :meth:`parts`.
            part (Part): The part.
            x (Tensor): Its input.
            **options: Further arguments of the part.

        Returns:
            Tensor: Its output.
        """
        settings, layer, draws, *_ = self._lean
        if draws is not None and part.thinned:
            heads = part.by_heads and settings.attention == 'head'
            length = part.length(x)
            options['positions'] = None if heads else draws.positions(layer, length, self.class_tokens)
            if part.by_heads:
                options.update(mode=settings.attention, heads=draws.heads(layer) if heads else None)
        form = self.drawn_form()
        rate = getattr(part.drop, 'drop_prob', 0) if getattr(part.drop, 'training', False) else 0
        if not rate:
            return part(form, x, **options)
        images = None if draws is None else draws.images((*layer, name), len(x))
        if images is None:
            return part(form, x, factor=_drawn_factor(part, x, rate), **options)

        def on_some(x):
            return part(form, x, factor=x.new_full((len(x),), 1 / (1 - rate), dtype=accumulator(x)), **options)

        return on_images(on_some, x, images, part.parameters())


class Whole(Lean):
    """Base of adapters that take the place of a whole forward pass of their own, and not of its parts alone.

    Attributes:
        stock (tuple[type, ...]): Classes whose forward pass the adapter knows. Default: those that it is registered
            for.
    """

    samples = False
    stock = ()

    def forward(self, *args, **kwargs):
        if self.form.implementation == 'reference':
            return super(Lean, self).forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    @classmethod
    def has_stock_forward(cls, module: nn.Module) -> bool:
        """Whether the class of a module has no forward pass of its own."""
        return any(kind_of(module).forward is kind.forward for kind in cls.stock)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        if cls.has_stock_forward(module):
            return None
        return f'its class, {kind_of(module).__name__}, has a forward pass of its own'


class Block(Lean):
    """Base of adapters of blocks. Blocks of one parent module are a stage; each stage halves the map before it.

    Attributes:
        stride (int): Pixels for each position of the first stage, where the patch embedding does not say it.
            Default: 4.
        rounds_up (bool): Odd maps are padded, not cropped, before they are halved. Default: False.
        from_end (bool): The key ``blocks`` counts the last blocks. Default: False.
        absent (tuple[str, ...]): Keys that mean nothing here, so that they are refused. Default: ('attention',).
    """

    checkpointed = True
    stride = 4
    rounds_up = False
    from_end = False
    absent = ('attention',)

    @classmethod
    def thinned_blocks(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Default of the key ``blocks``: every stage but the last.

        Args:
            depths (tuple[int, ...]): Blocks of each stage.
        """
        return thinned_blocks(depths)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict[tuple, tuple[nn.Module, type[Lean]]]:
        """What else can be changed in a backbone of such blocks.

        Args:
            backbone (nn.Module): The backbone.
            settings (Settings): Of the model.

        Returns:
            dict: Modules and their adapters, by ``(stage, 'downsample')``, or by another name for what has no
            positions.
        """
        return {}


def _drawn_factor(part, x, rate):
    """Stochastic depth as a factor for each image, by the random numbers that the plain branch would draw.

    Its precision is that of these numbers, not of the factor.
    """
    dtype = autocast_dtype(x) or x.dtype
    if part.gamma is not None:
        dtype = torch.promote_types(dtype, part.gamma.dtype)
    kept = part.drop(x.new_ones(len(x), *[1] * (x.dim() - 1), dtype=dtype)).flatten() != 0
    return kept.to(accumulator(x)) / (1 - rate)
