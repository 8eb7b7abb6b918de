"""Base classes of adapters, which make a module of a live model train lean.

An adapter is mixed into the class of a module. It says by which operations the module's forward pass runs:

    @adapter('my_project.MyBlock')                  # or the class itself
    class LeanMyBlock(LeanBlock):
        def bindings(self):
            return dict(mlp=ChannelMLPBinding(self.norm, self.fc1, self.act, self.fc2, drop=self.drop_path))

The base classes do the rest. In evaluation mode and without gradients, the module runs its own code. It also runs its
own code in the place of an operation if the forward pass of a submodule may not be bypassed (:mod:`.predicate`), now or
in a later step. Kept positions, dropped images and the form of the operations follow from the model's settings. The
module's own ``with_cp`` is switched off.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from mmengine.logging import print_log
from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.modes import evaluates_lean, runs_within_others
from ..ops.common.stochastic_depth import draw_factor, run_on_images
from ..ops.common.uncompiled import uncompiled
from ..presets import Settings
from ..stochastic_backprop.layers import thinned_blocks
from ..stochastic_backprop.masks import format_keep_ratio
from ..surgery import Mixin, refuse_tracing, stock_class
from .bindings import Binding
from .bound import Bound, bind
from .copies import original_class, path_of
from .inputs import are_known_inputs, put_in_position, renamed_arguments
from .parameters import has_active_dropout, has_trained_parameters
from .predicate import derives_plainly
from .quantisation import refuse_late_preparation

__all__ = ['ADAPTERS', 'LeanBlock', 'LeanModule', 'adapter', 'adapter_of', 'adapter_of_class']

# Adapter of each known class, by the class's module and name.
ADAPTERS: dict[str, type['LeanModule']] = {}


def adapter(*kinds: str | type[nn.Module]) -> Callable[[type['LeanModule']], type['LeanModule']]:
    """Register a class as the adapter of some classes of modules; see this module for an example.

    Args:
        *kinds (str | type[nn.Module]): The classes, or strings of their modules and names. A class that derives from
            one of them counts as known if it defines no method but ``__init__``, since the adapter would bypass others.

    Returns:
        Callable: The decorator.

    Raises:
        ValueError: If the decorated class does not derive from :class:`LeanModule`, or says nothing of a forward pass.
    """

    def register(mixin):
        if not issubclass(mixin, LeanModule):
            raise ValueError(f'{mixin.__name__} must derive from sbp_mmdet.adapters.LeanModule or LeanBlock')
        if mixin.bindings is LeanModule.bindings and mixin.lean_forward is LeanModule.lean_forward:
            raise ValueError(
                f'{mixin.__name__} must define the method bindings(), which returns the bindings of the forward pass '
                'by name, or lean_forward(), which computes it'
            )
        ADAPTERS.update({kind if isinstance(kind, str) else path_of(kind): mixin for kind in kinds})
        adapter_of_class.cache_clear()
        if 'stock' not in vars(mixin):
            mixin.stock = ()
        mixin.stock = (*mixin.stock, *kinds)
        return mixin

    return register


def adapter_of(module: nn.Module) -> type['LeanModule'] | None:
    """Return the adapter for the class of a module or the nearest base class that has one, or ``None``.

    Args:
        module (nn.Module): The module.
    """
    return adapter_of_class(type(module))


@functools.cache
def adapter_of_class(kind: type) -> type['LeanModule'] | None:
    """Return the adapter for a class, see :func:`adapter_of`.

    Args:
        kind (type): The class of a module.
    """
    kinds = (known for base in kind.__mro__ for known in (base, original_class(base)))
    return next((ADAPTERS[path] for path in map(path_of, kinds) if path in ADAPTERS), None)


class LeanModule(Mixin):
    """Base class of adapters. A changed module has its :class:`.LeanState` in ``_lean``.

    Attributes:
        stock (tuple): Classes that the adapter knows, set by :func:`adapter`.
        dims (int | None): Number of dimensions of the input that :meth:`lean_forward` computes with, see
            :meth:`accepts`. If ``None``, any. Default: None.
        callers (tuple[str, ...]): Methods that call the forward pass and are not called by it. An instance may replace
            them, for example by another loss, and still run lean. Default: ().
        checkpointed (bool): Whether it is a block, which ``preset='with_cp'`` checkpoints. Default: False.
        calls_layers (bool): Whether it is a block whose layers save a map each. ``exact_min`` recomputes it as a whole
            where no larger operation does. Default: False.
        class_tokens (bool): Whether class tokens, which are always kept, may precede those of the map. Default: False.
        samples (bool): Whether it estimates weight gradients from a sample if the preset does. Default: True.
        thins_only (bool): Whether it changes nothing if no tokens are dropped. Default: False.
        runs_blocks (bool): Whether it runs blocks that have adapters themselves without calling them. Default: False.
        shares_modules (bool): Whether the modules of :meth:`bypasses` have adapters of their own too. Default: False.
        shares_maps (bool): Whether the next layer may use its saved maps, see :mod:`sbp_mmdet.passes`. Default: False.
        has_reference (bool): Whether its operations have the reference form. Default: True.
        folds_frozen_norms (bool): Whether it also runs lean when it is frozen and in evaluation mode while the rest of
            the model trains. Default: False.
        is_sequence (bool): Whether the operations run one after the other, the first on the module's input. With
            ``exact_min``, such a layer saves its input only. Default: False.
        reorders_dropout (bool): Whether :meth:`lean_forward` draws dropout in another order than the module's own code.
            Such a module with dropout also runs lean in training mode without gradients: a reentrant checkpoint runs it
            so at first, and with gradients when it recomputes it, and both have to drop the same numbers. Default:
            False.
        separable (bool): Whether :meth:`lean_forward` runs the module's own code in the place of an operation that
            cannot be used. If ``False``, the whole module then runs its own code. Default: False.
    """

    stock = ()
    dims = None
    checkpointed = False
    calls_layers = False
    callers = ()
    class_tokens = False
    samples = True
    thins_only = False
    runs_blocks = False
    shares_modules = False
    shares_maps = False
    has_reference = True
    folds_frozen_norms = False
    is_sequence = False
    reorders_dropout = False
    separable = False

    def forward(self, *args, **kwargs):
        """Run :meth:`lean_forward` in training, otherwise the module's own code, with the same arguments."""
        if 'qconfig' in self.__dict__:
            refuse_late_preparation(self)
        if self.training:
            refuse_tracing(self, args)
        elif not evaluates_lean():
            return super().forward(*args, **kwargs)
        output = self._forward_if_lean(args, kwargs)
        return super().forward(*args, **kwargs) if output is None else output[0]

    @uncompiled  # operations are no code for a compiler, and what calls them only looks at modules
    def _forward_if_lean(self, args, kwargs):
        if not self.runs_lean():
            return None
        bypassed, known = self._lean.bound.bypassed, True
        if kwargs:
            kind = stock_class(type(self))
            known = kwargs.keys().isdisjoint(renamed_arguments(kind.forward))
        if known and are_known_inputs(bypassed.precisions, args, kwargs):
            if kwargs:
                args, kwargs = put_in_position(kind, args, kwargs)
            if self.accepts(*args, **kwargs):
                return (self.lean_forward(*args, **kwargs),)
            if self.dims is not None:  # tokens in a layer of maps, or a call that the own code refuses
                return None
        bypassed.warn_of_input(self._lean.name or type(self).__name__)
        return None

    def runs_lean(self) -> bool:
        """Return whether a call runs lean now. If a bypassed module has changed, the operations are bound again."""
        if not torch.is_grad_enabled() and not (self.reorders_dropout and self.training and has_active_dropout(self)):
            return False
        bound = self._lean.bound
        if bound.lacks_reference or runs_within_others():
            return False
        if not self.training:
            if not self.folds_frozen_norms or has_trained_parameters(self):
                return False
        if not bound.bypassed.unchanged(self):
            bound = self.rebind()
        return bound.reason is None

    def rebind(self, warns: bool = True) -> Bound:
        """Bind the operations in the present state of the module. Warn of reasons against them that are new."""
        before, state = self._lean.bound, self._lean
        bound = bind(type(self), self, state.settings, running=True)
        self._lean = state._replace(bound=bound)
        reasons = [reason for reason in (bound.reason, *(reason for _, reason in bound.left)) if reason]
        known = {before.reason, *(reason for _, reason in before.left)}
        new_reasons = [reason for reason in dict.fromkeys(reasons) if reason not in known]
        if new_reasons and warns:
            name = state.name or type(self).__name__
            text = f'{name} runs its own code in part or whole now: {"; ".join(new_reasons)}'
            print_log(text, logger='current', level=logging.WARNING)
        return bound

    def accepts(self, *args, **kwargs) -> bool:
        """Return whether :meth:`lean_forward` computes what the module's own code does for the arguments of a call.

        With any others, the own code runs. By default, the first argument has to be a tensor of ``dims`` dimensions.
        """
        return self.dims is None or (bool(args) and isinstance(args[0], Tensor) and args[0].dim() == self.dims)

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the forward pass in training. By default the operations run one after the other, in their order."""
        for name in self._lean.bound.bindings:
            x = self.run(name, x)
        return x

    def bindings(self) -> Mapping[str, Binding]:
        """Return the bindings of the operations by name, in their order. It is called when the module is changed."""
        return {}

    def bypasses(self) -> Iterable[tuple[nn.Module, str]]:
        """Yield other modules that :meth:`lean_forward` bypasses, with their roles, see :mod:`.predicate`."""
        return ()

    def watches(self) -> Iterable[nn.Module]:
        """Return modules that :meth:`bindings` does not bypass now, but would if they changed."""
        return ()

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """Return why a module is unsupported, apart from the reasons of :mod:`.predicate`.

        Args:
            module (nn.Module): The module.
            settings (Settings): Settings of the model.

        Returns:
            str | None: The reason, or ``None`` if the module can be changed.
        """
        return None

    @classmethod
    def token_ratio(cls, settings: Settings) -> float | None:
        """Return the keep ratio of a module that draws its own tokens, by :class:`.TokenDraws`.

        Args:
            settings (Settings): Settings of the model.

        Returns:
            float | None: The keep ratio, or ``None`` if all tokens are kept.
        """
        return None

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """Return whether the adapter has anything to change in a module.

        Args:
            module (nn.Module): A module of a known class or of a class that derives from it.
        """
        return True

    @classmethod
    def thin_gradient(cls, module: nn.Module, grad: Tensor) -> Tensor:
        """Set those of an output's gradient to zero that no loss of the model ever reads, for the verification.

        Args:
            module (nn.Module): The module, in whichever class.
            grad (Tensor): A gradient without zeros, which may be changed.

        Returns:
            Tensor: The gradient. By default, all of it.
        """
        return grad

    @classmethod
    def is_stock(cls, module: nn.Module) -> bool:
        """Return whether the forward pass of the class of ``module`` is known."""
        return not cls.stock or derives_plainly(stock_class(type(module)), cls.stock)

    def extra_repr(self) -> str:
        """Return the text of ``print(model)`` for the module, with its preset and keep ratio."""
        settings, layer, draws, *_ = self._lean
        ratio = draws and draws.ratio(layer)
        kept = ratio and f'keeps {format_keep_ratio(ratio)} of the positions'
        said = super().extra_repr(), f"preset='{settings.preset.name}'", kept
        return ', '.join(filter(None, said))

    @property
    def form(self) -> Form:
        """Form of the operations: that of the preset, unless a mixin overrides it (:mod:`..checkpointed_parts`)."""
        return self._lean.settings.preset.form

    def sampled_form(self) -> Form:
        """Return the form of the operations; with the preset ``sampled``, a new sample of the rows is drawn."""
        state = self._lean
        if state.row_draws is None:
            return self.form
        return dataclasses.replace(self.form, sample=state.row_draws.draw(state.name, float(state.settings.keep_ratio)))

    def drop_rates(self) -> dict[str, float]:
        """Return the rates of stochastic depth by the names of the operations that have it."""
        rates = {
            name: getattr(binding.drop, 'drop_prob', 0) or 0 for name, binding in self._lean.bound.bindings.items()
        }
        return {name: rate for name, rate in rates.items() if rate}

    def binding(self, name: str) -> Binding | None:
        """Return the binding of an operation, or ``None`` if the module's own code has to run instead.

        Args:
            name (str): Name of the operation in :meth:`bindings`.
        """
        return self._lean.bound.bindings.get(name)

    def run(self, name: str, x: Tensor, **options) -> Tensor:
        """Run an operation with the kept positions and the stochastic depth of this pass.

        Args:
            name (str): Name of the operation in :meth:`bindings`.
            x (Tensor): Input of the operation.
            **options: Further arguments of the binding.

        Returns:
            Tensor: Output of the operation.
        """
        state = self._lean
        binding, layer, draws = state.bound.bindings[name], state.layer, state.draws
        if draws is not None and binding.thinned and state.settings.preset.thins:
            attention = state.settings.attention
            heads = binding.by_heads and attention == 'head'
            length = binding.length(x)
            options['positions'] = None if heads else draws.positions(layer, length, self.class_tokens)
            if binding.by_heads:
                options.update(mode=attention, heads=draws.heads(layer) if heads else None)
        form, drop = self.sampled_form(), binding.drop
        rate = 0 if drop is None or not drop.training else vars(drop).get('drop_prob', 0)
        if not rate:
            return binding(form, x, **options)
        images = None if draws is None else draws.images((*layer, name), len(x))
        if images is None:
            return binding(form, x, factor=draw_factor(drop, x, binding.scale, rate), **options)

        def on_some(x):
            return binding(form, x, factor=1 / (1 - rate), **options)

        return run_on_images(on_some, x, images, binding.parameters())


class LeanBlock(LeanModule):
    """Base class of adapters of blocks. Blocks of one parent module are a stage; each stage halves the previous map.

    Attributes:
        stride (int): Pixels for each position of the first stage, if the patch embedding does not say it. Default: 4.
        rounds_up (bool): Whether odd maps are padded, not cropped, before they are halved. Default: False.
        from_end (bool): Whether the key ``blocks`` counts from the last block. Default: False.
        absent (tuple[str, ...]): Keys of the settings that mean nothing here and are refused. Default: ('attention',).
    """

    checkpointed = True
    stride = 4
    rounds_up = False
    from_end = False
    absent = ('attention',)

    @classmethod
    def thinned_blocks(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the default of the key ``blocks``, the number of thinned blocks of each stage: all but the last stage.

        Args:
            depths (tuple[int, ...]): Number of blocks of each stage.
        """
        return thinned_blocks(depths)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict[tuple, tuple[nn.Module, type[LeanModule]]]:
        """Return further modules that can be changed in a backbone of such blocks, such as downsampling layers.

        Args:
            backbone (nn.Module): The backbone.
            settings (Settings): Settings of the model.

        Returns:
            dict: Modules and their adapters, by the layer: ``(stage, 'downsample')``, or ``(name,)`` for modules that
            are never thinned.
        """
        return {}
