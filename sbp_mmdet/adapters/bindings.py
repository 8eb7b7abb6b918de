"""Bindings of operations to modules: which module's parameters are which inputs of an operation.

A binding holds modules, never their parameters. It is made when a model is changed, and loading weights, FSDP or
quantisation may replace the parameters later.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..ops.attention import AttentionSettings, AttentionTensors, attention
from ..ops.channel_mlp import MLPSettings, MLPTensors, channel_mlp
from ..ops.channel_mlp_grn import GRNSettings, GRNTensors, grn_mlp
from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype, cast
from ..ops.common.rerun_conv import convolve
from ..ops.downsample import NormLinearSettings, NormLinearTensors, norm_linear
from ..ops.layer_norm import NormSettings, NormTensors, layer_norm
from ..stochastic_backprop.masks import Positions
from .parameters import CachedSettings, weight_and_bias, weights_and_biases
from .predicate import find_problems, tensors_in

__all__ = [
    'Binding',
    'ChannelMLPBinding',
    'LayerNormBinding',
    'NormLinearBinding',
    'PatchNormBinding',
    'SelfAttentionBinding',
    'mlp_of_ffn',
]

Problems = list[tuple[nn.Module, str]]
Bypassed = list[tuple[nn.Module, str]]  # modules whose forward is bypassed, with their roles


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """Base class of bindings. A call takes a form, the input and further arguments of the operation.

    Attributes:
        drop (nn.Module | None): Stochastic depth of the branch. Default: None.
        scaled_by (nn.Module | None): Module that holds the layer scale as its parameter ``gamma``, ``weight`` or
            ``scale``. Default: None.
        thinned (bool): Whether the operation can drop positions (it has an argument ``positions``). Default: False.
        by_heads (bool): Whether the operation can drop attention heads. Default: False.
        shares_modules (bool): Whether its modules have adapters of their own too. Default: False.
        one_precision (bool): Whether all parameters must be in one precision, since weights of several modules are
            folded. Default: True.
    """

    drop = None
    scaled_by = None
    thinned = False
    by_heads = False
    shares_modules = False
    one_precision = True

    def __call__(self, form: Form, x: Tensor, **options) -> Tensor:
        """Run the operation."""
        raise NotImplementedError

    def bypasses(self, form: Form) -> Iterable[tuple[nn.Module, str]]:
        """Return or yield every module whose forward is bypassed, with its role, see :mod:`.predicate`.

        Args:
            form (Form): Form of the operations.
        """
        raise NotImplementedError

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed) -> tuple['Binding | None', Problems]:
        """Return the binding of the modules that may be bypassed, and the modules that run their own code.

        Args:
            form (Form): Form of the operations.
            root (nn.Module): The changed module. It is called itself, so hooks on it run in any case.
            bypassed (list): Result of :meth:`bypasses`.

        Returns:
            tuple[Binding | None, list]: The binding, or ``None`` if the operation cannot be used at all; and the
            modules that run their own code, with the reasons.
        """
        problems = self.problems(root, bypassed)
        return (None if problems else self), problems

    def problems(self, root: nn.Module, bypassed: Bypassed) -> Problems:
        """Return the modules whose forward may not be bypassed, with the reasons.

        Args:
            root (nn.Module): The changed module.
            bypassed (list): Result of :meth:`bypasses`.
        """
        by_id = {}
        for module, role in bypassed:
            by_id[id(module)] = module, role  # a module that is read twice has one problem
        problems = find_problems(by_id.values(), called=root)
        if problems or not self.one_precision:
            return problems
        return _mixed_precision([module for module, _ in by_id.values()])

    @property
    def scale(self) -> Tensor | None:
        """Layer scale, shape (C,), or ``None``."""
        if self.scaled_by is None:
            return None
        own, instance = self.scaled_by._parameters, vars(self.scaled_by)
        for name in _SCALES:  # FSDP keeps the parameters elsewhere and puts views of them into the instance
            scale = instance.get(name, own.get(name))
            if isinstance(scale, Tensor):
                return scale
        return None

    def length(self, x: Tensor) -> int:
        """Return the number of positions of the output for a map (N, C, H, W) or tokens (N, L, C)."""
        return x.shape[1] if x.dim() == 3 else x.shape[2] * x.shape[3]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the operation reads."""
        if self.scale is not None:
            yield self.scale
        for module, _ in self.bypasses(Form()):
            if module is not self.scaled_by:
                yield from tensors_in(module).values()


_SCALES = ('gamma', 'weight', 'scale')


def _mixed_precision(modules) -> Problems:
    """Return the first module in another precision than those before it: operations fold weights of several modules."""
    kinds = [(m, p.dtype) for m in modules for p in tensors_in(m).values()]
    return [
        (module, f'its parameters are {dtype}, and others of the operation {kinds[0][1]}')
        for module, dtype in kinds
        if dtype != kinds[0][1]
    ][:1]


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelMLPBinding(Binding):
    """``x + drop(gamma * down(act(grn(up(norm(conv(x)))))))``: the channel MLP with its residual connection.

    Attributes:
        norm (nn.LayerNorm): Layer norm over the channels.
        up, down (nn.Linear | nn.Conv2d): Pointwise layers: linear layers or 1x1 convolutions (the paper's PW-Convs).
        act (nn.Module): GELU, or any activation if the form is the reference.
        scaled_by (nn.Module | None): Module that holds the layer scale. Default: None.
        drop (nn.Module | None): Stochastic depth. Default: None.
        conv (nn.Conv2d | None): Convolution in front of the norm. Default: None.
        grn (nn.Module | None): Global response normalisation of ConvNeXt V2. Default: None.
        holders (tuple): Parent modules whose forward is bypassed too, with their roles. Default: ().
        recomputes_conv (bool): Whether the backward pass may recompute ``conv``. Default: True.
    """

    norm: nn.LayerNorm
    up: nn.Module
    act: nn.Module
    down: nn.Module
    scaled_by: nn.Module | None = None
    drop: nn.Module | None = None
    conv: nn.Conv2d | None = None
    grn: nn.Module | None = None
    holders: tuple[tuple[nn.Module, str], ...] = ()
    recomputes_conv: bool = True
    thinned = True

    def __call__(self, form: Form, x: Tensor, positions: Positions | None = None, factor: Tensor | float | None = None):
        """Run the operation on a map (N, C, H, W) or on tokens (N, L, C)."""
        shortcut, conv, dtype = x, None, autocast_dtype(x) or x.dtype
        if self.conv is not None and not self.recomputes_conv:
            x = self.conv(x)
            dtype = autocast_dtype(x) or x.dtype
        elif self.conv is not None:
            # Cast here, not by autocast inside the convolution, so that its saved input can be shared.
            x, conv = convolve(self.conv, weight_and_bias(self.conv), cast(x, dtype), form.storage)
            # If positions are dropped, saving x-hat of the kept ones is cheaper than recomputing the convolution.
            conv = conv if positions is None else None
        *norm, weight1, bias1, weight2, bias2 = weights_and_biases((self.norm, self.up, self.down))
        if weight1.dim() == 4:  # of a 1x1 convolution
            weight1, weight2 = weight1.flatten(1), weight2.flatten(1)
        eps, approximate = self.norm.eps, vars(self.act).get('approximate', 'none')
        if self.grn is not None:
            grn = (self.grn.gamma, self.grn.beta)
            tensors = GRNTensors(x, shortcut, *norm, weight1, bias1, *grn, weight2, bias2, self.scale, factor, conv)
            return grn_mlp(GRNSettings(form, eps, self.grn.eps, approximate), tensors)
        activation = self.act if form.implementation == 'reference' else None
        settings = self._settings(form, eps, approximate, activation, None, dtype)
        tensors = MLPTensors(x, shortcut, *norm, weight1, bias1, weight2, bias2, self.scale, factor, positions, conv)
        return channel_mlp(settings, tensors)

    @functools.cached_property
    def _settings(self):
        return CachedSettings(MLPSettings)

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        yield self.norm, 'layer norm'
        yield from ((self.up, 'pointwise with bias'), (self.down, 'pointwise with bias'), *self.holders)
        if form.implementation == 'fused':  # the reference form calls the activation
            yield self.act, 'GELU'
        if self.drop is not None:
            yield self.drop, 'stochastic depth'
        if self.grn is not None:
            yield self.grn, 'GRN'
        if self.conv is not None and self.recomputes_conv:
            yield self.conv, 'recomputed convolution'

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed):
        """See :meth:`Binding.usable`. An unsupported convolution runs its own code in front of the operation."""
        if self.grn is not None and form.implementation == 'reference':
            return None, [(self.grn, 'the reference form has no GRN')]
        problems = self.problems(root, bypassed)
        if self.conv is not None and [module for module, _ in problems] == [self.conv]:
            return dataclasses.replace(self, recomputes_conv=False), problems
        return (None if problems else self), problems


def mlp_of_ffn(norm: nn.Module, ffn: nn.Module) -> Binding:
    """Return the channel MLP of a pre-norm block with mmcv's or mmpretrain's ``FFN``.

    Args:
        norm (nn.Module): Layer norm in front of the ``FFN``.
        ffn (nn.Module): The ``FFN``.

    Returns:
        Binding: The binding; an :class:`UnsupportedBinding` if the ``FFN`` is of another form.
    """
    layers = getattr(ffn, 'layers', ())
    if len(layers) != 3 or not isinstance(layers[0], nn.Sequential) or len(layers[0]) != 3:
        return UnsupportedBinding(ffn, 'its FFN does not consist of two linear layers')
    if not ffn.add_identity:
        return UnsupportedBinding(ffn, 'its FFN has no residual connection')
    (up, act, first), down, second = layers
    scaled_by = getattr(ffn, 'gamma2', None)
    holders = [(ffn, 'FFN'), (layers, 'list of layers'), (layers[0], 'list of layers')]
    holders += [(first, 'dropout of rate 0'), (second, 'dropout of rate 0')]
    holders += [] if scaled_by is None else [(scaled_by, 'layer scale')]
    return ChannelMLPBinding(norm, up, act, down, scaled_by=scaled_by, drop=ffn.dropout_layer, holders=tuple(holders))


@dataclasses.dataclass(frozen=True, eq=False)
class UnsupportedBinding(Binding):
    """Binding of modules that no operation supports.

    Attributes:
        module (nn.Module): The unsupported module.
        reason (str): Why it is unsupported.
    """

    module: nn.Module
    reason: str

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        return iter(())

    def usable(self, form: Form, root: nn.Module, bypassed: Bypassed):
        """See :meth:`Binding.usable`."""
        return None, [(self.module, self.reason)]


@dataclasses.dataclass(frozen=True, eq=False)
class SelfAttentionBinding(Binding):
    """``x + drop(gamma * proj(attention(qkv(norm(x)))))``: global self-attention of tokens.

    Attributes:
        norm (nn.LayerNorm): Layer norm over the channels.
        qkv, proj (nn.Linear): Linear layers to Q, K and V, and after the attention.
        num_heads (int): Number of heads.
        scaled_by (nn.Module | None): Module that holds the layer scale. Default: None.
        drop (nn.Module | None): Stochastic depth. Default: None.
        holders (tuple): Parent modules whose forward is bypassed too, with their roles. Default: ().
    """

    norm: nn.LayerNorm
    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    scaled_by: nn.Module | None = None
    drop: nn.Module | None = None
    holders: tuple[tuple[nn.Module, str], ...] = ()
    thinned = True
    by_heads = True

    def __call__(
        self,
        form: Form,
        x: Tensor,
        positions: Positions | None = None,
        factor: Tensor | float | None = None,
        mode: str = 'qkv',
        heads: Tensor | None = None,
    ):
        """Run the operation on tokens (N, L, C)."""
        layers = weights_and_biases((self.norm, self.qkv, self.proj))
        settings = self._settings(form, self.num_heads, mode, self.norm.eps, autocast_dtype(x) or x.dtype)
        return attention(settings, AttentionTensors(x, *layers, self.scale, factor, positions, heads))

    @functools.cached_property
    def _settings(self):
        return CachedSettings(AttentionSettings)

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        yield self.norm, 'layer norm'
        yield from ((self.qkv, 'linear'), (self.proj, 'linear with bias'), *self.holders)
        if self.drop is not None:
            yield self.drop, 'stochastic depth'


@dataclasses.dataclass(frozen=True, eq=False)
class NormLinearBinding(Binding):
    """``linear(norm(x))`` on tokens, or on the 2x2 patches of a map: downsampling (section 3.2.2, the case s >= k).

    Attributes:
        norm (nn.LayerNorm): Layer norm over the channels.
        linear (nn.Linear | nn.Conv2d): Linear layer, or 2x2 convolution of stride 2.
    """

    norm: nn.LayerNorm
    linear: nn.Module
    thinned = True

    def __call__(self, form: Form, x: Tensor, positions: Positions | None = None):
        """Run the operation on tokens (N, L, C) or on a map (N, C, H, W)."""
        settings = self._settings(form, self.norm.eps, autocast_dtype(x) or x.dtype)
        return norm_linear(settings, NormLinearTensors(x, *weights_and_biases((self.norm, self.linear)), positions))

    @functools.cached_property
    def _settings(self):
        return CachedSettings(NormLinearSettings)

    def length(self, x: Tensor) -> int:
        """See :meth:`Binding.length`."""
        return x.shape[1] if x.dim() == 3 else (x.shape[2] // 2) * (x.shape[3] // 2)

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        yield from ((self.norm, 'layer norm'), (self.linear, 'linear or 2x2 convolution'))


@dataclasses.dataclass(frozen=True, eq=False)
class LayerNormBinding(Binding):
    """Layer norm over the channels of a map (N, C, H, W) or of tokens (N, L, C).

    Attributes:
        norm (nn.LayerNorm): The norm.
    """

    norm: nn.LayerNorm

    def __call__(self, form: Form, x: Tensor):
        """Run the operation."""
        settings = NormSettings(form, self.norm.eps)
        tokens = x.dim() == 3
        x = x.transpose(1, 2).unsqueeze(3) if tokens else x  # a map of one column
        out = layer_norm(settings, NormTensors(x, self.norm.weight, self.norm.bias))
        return out.squeeze(3).transpose(1, 2) if tokens else out

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        yield self.norm, 'layer norm'


@dataclasses.dataclass(frozen=True, eq=False)
class PatchNormBinding(Binding):
    """``norm(conv(x))`` for the patches of an image. Only the image is saved; the convolution is recomputed.

    Attributes:
        conv (nn.Conv2d): Patch embedding.
        norm (nn.LayerNorm): Layer norm over the channels.
        channels_last (bool): Whether the map has channels last, so that it becomes tokens without a copy. Default:
            False.
    """

    conv: nn.Conv2d
    norm: nn.LayerNorm
    channels_last: bool = False

    def __call__(self, form: Form, x: Tensor):
        """Run the operation on images (N, C, H, W)."""
        out, again = convolve(self.conv, weight_and_bias(self.conv), cast(x, autocast_dtype(x) or x.dtype))
        if self.channels_last:
            out = out.contiguous(memory_format=torch.channels_last)
        settings = NormSettings(form, self.norm.eps)
        return layer_norm(settings, NormTensors(out, self.norm.weight, self.norm.bias, again))

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`."""
        yield from ((self.conv, 'recomputed convolution'), (self.norm, 'layer norm'))
