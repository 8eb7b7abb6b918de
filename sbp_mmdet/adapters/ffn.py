"""mmcv's feed-forward network (``FFN``), alone and as a part of transformer layers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch.utils.checkpoint as cp
from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..ops.common.autograd_function import Form
from ..ops.common.module_state import ModuleState, submodules
from ..ops.common.precision import autocast_dtype
from ..ops.ffn import FFNSettings, FFNTensors, feed_forward
from .base import LeanModule, adapter
from .bindings import Binding, Bypassed, Problems
from .conv_module import activation_of
from .parameters import CachedSettings, weights_and_biases

__all__ = ['LeanFFN', 'modules_of_ffn', 'problem_of_ffn', 'rate_of', 'recomputed']


def rate_of(dropout: nn.Module) -> float:
    """Return the rate of a dropout layer: 0 in evaluation mode, and for other layers such as identity.

    Args:
        dropout (nn.Module): The layer.
    """
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def recomputed(run: Callable, module: nn.Module, *args):
    """Run a function and recompute it in the backward pass, by ``torch.utils.checkpoint``.

    The recomputation finds parameters, mode and settings of the modules as they were in the forward pass.

    Args:
        run (Callable): The function.
        module (nn.Module): Module whose parameters and settings, and those of the modules inside of it, the function
            uses.
        *args: Arguments of the function: tensors, other values, and lists, tuples and dicts of them.

    Returns:
        The result of the function.
    """
    leaves, structure = tree_flatten(args)  # checkpointing saves tensors, but not those inside of lists
    # The recomputation gets new tensor objects, and torch's attention checks whether query, key and value are the same
    # object. A tensor that is given twice is saved twice nevertheless: a checkpoint around this one may give it as two
    # objects when it recomputes, and compares the numbers of saved tensors.
    first = {}
    places = [first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves)]

    inside, state = submodules([module]), None

    def run_with(*leaves):
        nonlocal state
        given = tree_unflatten([leaves[i] for i in places], structure)
        if state is not None:
            with state.restored():
                return run(*given)
        out, state = run(*given), ModuleState(inside)
        return out

    return cp.checkpoint(run_with, *leaves, use_reentrant=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _FFNBinding(Binding):
    """``drop(linear(drop(act(linear(x)))))``: the layers of an ``FFN`` without residual connection and layer scale.

    Attributes:
        ffn (FFN): The network.
    """

    ffn: FFN

    def __call__(self, form: Form, x: Tensor):
        """Run the operation on tokens (N, L, C)."""
        layers, dropouts, settings = self._structure
        rates = [rate_of(dropout) for dropout in dropouts]
        settings = settings(form, autocast_dtype(x) or x.dtype, *rates)
        return feed_forward(settings, FFNTensors(x, *weights_and_biases(layers)))

    @functools.cached_property
    def _structure(self):
        """Layers in the order of :class:`.FFNTensors`, those of dropout, and cached settings."""
        (up, act, first), down, second = self.ffn.layers
        return (up, down), (first, second), CachedSettings(functools.partial(_settings_of_ffn, activation_of(act)))

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        yield from modules_of_ffn(self.ffn)

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed):
        """See :meth:`.Binding.usable`. Layers of other kinds are recomputed in the backward pass, if allowed."""
        problems = problem_of_ffn(self.ffn) or self.problems(root, bypassed)
        if not problems:
            return self, []
        again = _RecomputedBinding(self.ffn.layers)
        return (again, []) if not again.problems(root, [*again.bypasses(form)]) else (None, problems)


@dataclasses.dataclass(frozen=True, eq=False)
class _RecomputedBinding(Binding):
    """Module that runs its own code and is recomputed in the backward pass.

    Attributes:
        module (nn.Module): The module.
    """

    module: nn.Module

    def __call__(self, form: Form, x: Tensor):
        """Run the module, and run it again in the backward pass."""
        return recomputed(self.module, self.module, x)

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        yield from ((module, 'recomputable') for module in self.module.modules())


def problem_of_ffn(ffn: FFN) -> Problems:
    """Return the network and why its layers are unsupported, as a list with one pair, or an empty list.

    Args:
        ffn (FFN): The network.
    """
    if ffn.num_fcs != 2 or len(ffn.layers) != 3 or len(ffn.layers[0]) != 3:
        return [(ffn, f'its FFN has {ffn.num_fcs} linear layers; only 2 are supported')]
    return []


def modules_of_ffn(ffn: FFN) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that the operation bypasses, with their roles, see :mod:`.predicate`.

    Args:
        ffn (FFN): The network.
    """
    yield ffn.layers, 'list of layers'
    if problem_of_ffn(ffn):
        return
    hidden, down, second = ffn.layers
    up, act, first = hidden
    yield from ((hidden, 'list of layers'), (up, 'linear with bias'), (act, 'activation'), (first, 'dropout'))
    yield from ((down, 'linear with bias'), (second, 'dropout'))


def _settings_of_ffn(activation, form, dtype, *rates):
    """Return the settings of :func:`.feed_forward`; those after the activation are read in each step."""
    return FFNSettings(activation, rates, dtype=dtype, form=form)


@adapter(FFN)
class LeanFFN(LeanModule):
    """mmcv's ``FFN``, which saves its input and recomputes the hidden layer."""

    has_reference = False
    reorders_dropout = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(layers=_FFNBinding(self))

    def lean_forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        """Run the network on (..., C); the arguments are those of mmcv's ``FFN``."""
        layers = self.binding('layers')
        if isinstance(layers, _FFNBinding) and not (x.dim() == 3 and x.numel()):
            layers = None
        out = self.layers(x) if layers is None else layers(self.sampled_form(), x)
        out = self.dropout_layer(getattr(self, 'gamma2', nn.Identity())(out))
        if not self.add_identity:
            return out
        return (x if identity is None else identity) + out
