"""Layers of transformer detectors: mmcv's attention and feed-forward network, and what mmdet builds of them.

DETR, Conditional, DAB, Deformable DETR, DINO, DDQ, Grounding DINO, MaskFormer and Mask2Former are made of these. All
are exact with every preset but ``sbp``, which drops tokens in encoders of images. Queries of a decoder and tokens of
a text are never dropped.
"""

import inspect
import warnings
from collections.abc import Callable
from numbers import Real
from types import SimpleNamespace

import torch.utils.checkpoint as cp
from mmcv.cnn.bricks.drop import Dropout
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmcv.cnn.bricks.wrappers import Linear
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.layers.transformer.dab_detr_layers import DABDetrTransformerEncoder
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoder, DetrTransformerEncoderLayer
from mmdet.models.layers.transformer.utils import ConditionalAttention
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.deformable_attention import DeformableSettings, DeformableTensors, deformable_attention
from ..ops.deformable_encoder_layer import EncoderSettings, EncoderTensors, deformable_encoder_layer
from ..ops.ffn import FFNSettings, FFNTensors, feed_forward
from ..presets import Settings
from ..stochastic_backprop.algorithm1 import sbp
from ..stochastic_backprop.masks import Positions
from .base import Lean, Whole, adapter, kind_of
from .conv_module import _ACTS, known

__all__ = ['Attention', 'DeformableAttention', 'DeformableEncoderLayer', 'Encoder', 'FeedForward', 'RunAgain']


class _Layer(Whole):
    """Base of these adapters."""

    def given(self, args: tuple, kwargs: dict) -> SimpleNamespace:
        """The arguments of a call of the stock forward pass, by name."""
        bound = inspect.signature(self.stock[0].forward).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        return super().refusal(module, settings) or next(filter(None, cls.reasons(module)), None)

    @classmethod
    def reasons(cls, module: nn.Module):
        """Why a module stays as it is, None among them."""
        yield _replaced(module)


def _replaced(*modules):
    """Why the code of these modules cannot be passed by; None: it can."""
    for module in modules:
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks) or 'forward' in vars(module):
            return f'a {kind_of(module).__name__} in it has hooks, or a forward pass that was put in its place'
    return None


def _unlike(module, *kinds):
    """Why a submodule is none of the known ones; None: it is."""
    found = kind_of(module)
    return None if found in kinds else f'it has a {found.__name__} in place of a {kinds[0].__name__}'


def _rate(dropout):
    """Of a dropout layer in its present mode."""
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _again(run, *args):
    """Runs a function of tensors, modules' parameters among its own, again in the backward pass."""
    leaves, structure = tree_flatten(args)  # checkpointing saves tensors, but holds on to what stands inside of lists
    return cp.checkpoint(lambda *leaves: run(*tree_unflatten(leaves, structure)), *leaves, use_reentrant=False)


# Feed-forward network.


@adapter(FFN)
class FeedForward(_Layer):
    """Stores its input; the hidden layer is computed again. Layers of other kinds run again as they are."""

    samples = True

    def lean_forward(self, x: Tensor, identity: Tensor | None = None) -> Tensor:
        if x.dim() == 3 and x.numel() and not any(_ffn_reasons(self)):
            out = feed_forward(_ffn_settings(self, self.drawn_form()), FFNTensors(x, **_ffn_weights(self)))
        else:
            out = _again(self.layers, x)
        out = self.dropout_layer(getattr(self, 'gamma2', nn.Identity())(out))
        if not self.add_identity:
            return out
        return (x if identity is None else identity) + out


def _ffn_reasons(ffn):
    """Why the operation cannot stand in for its layers, None among them."""
    yield None if ffn.num_fcs == 2 else f'its FFN has {ffn.num_fcs} layers, not 2'
    (first, act, _), second = ffn.layers[0], ffn.layers[1]
    for linear in (first, second):
        yield _unlike(linear, Linear, nn.Linear)
        yield None if linear.bias is not None else 'its FFN has no biases'
    yield None if known(act, 'act') else f'its activation is {kind_of(act).__name__}'
    yield _replaced(*ffn.layers[0], *ffn.layers)


def _ffn_settings(ffn, form):
    rates = _rate(ffn.layers[0][2]), _rate(ffn.layers[2])
    act = ffn.layers[0][1]
    return FFNSettings(_ACTS[kind_of(act)](act), rates, sample=form.sample)


def _ffn_weights(ffn):
    first, second = ffn.layers[0][0], ffn.layers[1]
    return dict(weight1=first.weight, bias1=first.bias, weight2=second.weight, bias2=second.bias)


# Attention.


@adapter(MultiheadAttention)
class Attention(_Layer):
    """Runs torch's kernel, which stores no map of queries by keys; with a mask or dropout the layer runs again."""

    def lean_forward(self, *args, **kwargs) -> Tensor:
        a = self.given(args, kwargs)
        key = a.query if a.key is None else a.key
        value, key_pos = key if a.value is None else a.value, a.key_pos
        if key_pos is None and a.query_pos is not None:
            if a.query_pos.shape == key.shape:
                key_pos = a.query_pos
            else:
                warnings.warn(f'position encoding of key is missing in {type(self).__name__}.', stacklevel=2)
        tensors = (a.query, key, value, a.query_pos, key_pos, a.attn_mask, a.key_padding_mask)
        masked = a.attn_mask is not None or a.key_padding_mask is not None
        again = masked or (self.attn.dropout and self.attn.training)
        out = _again(self._attend, *tensors) if again else self._attend(*tensors)
        return (a.query if a.identity is None else a.identity) + self.dropout_layer(self.proj_drop(out))

    def _attend(self, query, key, value, query_pos, key_pos, attn_mask, key_padding_mask):
        query = query if query_pos is None else query + query_pos
        key = key if key_pos is None else key + key_pos
        if dtype := autocast_dtype(query):  # a mask takes the type of the query, and torch 2.1 does not cast it later
            cast = {id(x): x.to(dtype) for x in (query, key, value)}
            query, key, value = (cast[id(x)] for x in (query, key, value))
        if self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        out = self.attn(query, key, value, key_padding_mask, need_weights=False, attn_mask=attn_mask)[0]
        return out.transpose(0, 1) if self.batch_first else out

    @classmethod
    def reasons(cls, module: nn.Module):
        yield _unlike(module.attn, nn.MultiheadAttention)
        yield _replaced(module)


@adapter(ConditionalAttention, SpatialReductionAttention)
class RunAgain(_Layer):
    """Attention of other kinds runs again as it is."""

    def lean_forward(self, *args, **kwargs) -> Tensor:
        def run(args, kwargs):
            return super(Lean, self).forward(*args, **kwargs)

        return _again(run, args, kwargs)


# Encoders.


class _DropsTokens(_Layer):
    """Base of what sends gradients from kept tokens with ``sbp``.

    A list of keep ratios names blocks of a backbone, so all tokens of an encoder are kept then.
    """

    @classmethod
    def token_ratio(cls, settings: Settings) -> float | None:
        preset, ratio = settings.preset, settings.keep_ratio
        paper = preset.thins and preset.form == Form()
        return ratio if paper and isinstance(ratio, Real) and ratio < 1 else None

    def kept(self, x: Tensor, sizes: Callable[[], list[tuple[int, int]]]) -> Positions | None:
        """Returns the tokens that are kept in this pass; ``None``: all. Layers with the same maps keep the same ones.

        The sizes of the maps are a function, because asking a GPU for them would wait for it where nothing is drawn.
        """
        draws = self._lean.draws
        trains = draws is not None and any(p.requires_grad for p in self.parameters())
        return draws.positions(sizes(), x.device) if trains else None


@adapter(DetrTransformerEncoder, DABDetrTransformerEncoder)
class Encoder(_DropsTokens):
    """A plain encoder, whose layers are changed by their parts. With ``sbp`` attention (as queries; keys and values
    are exact) and feed-forward networks send gradients from kept tokens.

    The encoder gets its tokens without the size of their map, so the grid keeps every n-th token of the line.
    """

    thins_only = True

    def lean_forward(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> Tensor:
        positions = self.kept(query, lambda: [(1, query.shape[1])])
        if positions is None:
            return super(Lean, self).forward(query, query_pos, key_padding_mask, **kwargs)
        kwargs['key_padding_mask'] = key_padding_mask
        for layer in self.layers:
            scaled = query_pos * self.query_scale(query) if isinstance(self, DABDetrTransformerEncoder) else query_pos
            query = _thinned_layer(layer, query, scaled, positions, kwargs)
        return query

    @classmethod
    def members(cls, module: nn.Module) -> list[nn.Module]:
        return [module] if kind_of(module) in cls.stock else []

    @classmethod
    def reasons(cls, module: nn.Module):
        for layer in module.layers:
            attention, ffn = layer.self_attn, layer.ffn
            yield _unlike(layer, DetrTransformerEncoderLayer) or _unlike(attention, MultiheadAttention)
            yield _unlike(ffn, FFN) or (None if ffn.add_identity else 'its feed-forward network has no shortcut')
            for dropout in (attention.dropout_layer, ffn.dropout_layer):
                yield _unlike(dropout, nn.Identity, nn.Dropout, Dropout)
            yield _replaced(layer, attention, ffn)


def _thinned_layer(layer, x, pos, positions, kwargs):
    none = x.new_zeros(())  # in the place of the shortcut, which all tokens have

    def attend(rows):
        return layer.self_attn(rows, x, x, none, key_pos=pos, **kwargs)

    x = layer.norms[0](x + sbp(attend, x + pos, positions))
    return layer.norms[1](x + sbp(lambda rows: layer.ffn(rows, none), x, positions))


# Deformable attention.


@adapter(MultiScaleDeformableAttention)
class DeformableAttention(_Layer):
    """Stores what the kernel puts out; values, places and weights are computed again."""

    def lean_forward(self, *args, **kwargs) -> Tensor:
        a = self.given(args, kwargs)
        value = a.query if a.value is None else a.value
        tensors = DeformableTensors(a.query, a.query_pos, value, *_places(a), **_attention_weights(self))
        out = self.dropout(deformable_attention(_attention_settings(self, self.form), tensors))
        return out + (a.query if a.identity is None else a.identity)

    @classmethod
    def reasons(cls, module: nn.Module):
        yield None if module.batch_first else 'its tokens stand in front of its images (batch_first=False)'
        linears = [getattr(module, name) for name in _LINEARS]
        for linear in linears:
            yield _unlike(linear, nn.Linear, Linear)
        yield _replaced(module, *linears)


_LINEARS = dict(sampling_offsets='offset', attention_weights='attention', value_proj='value', output_proj='output')


def _attention_settings(module, form):
    sizes = module.num_heads, module.num_levels, module.num_points
    return DeformableSettings(*sizes, form, module.im2col_step)


def _places(given):
    """Where queries look, and at what, of a call's arguments."""
    return given.reference_points, given.key_padding_mask, given.spatial_shapes, given.level_start_index


def _attention_weights(module):
    layers = {name: getattr(module, own) for own, name in _LINEARS.items()}
    return {f'{name}_{kind}': getattr(layer, kind) for name, layer in layers.items() for kind in ('weight', 'bias')}


@adapter(DeformableDetrTransformerEncoderLayer)
class DeformableEncoderLayer(_DropsTokens):
    """The whole layer is one operation. Checkpointing by fairscale (``num_cp``) is off: it would cost time.

    With ``sbp`` attention and feed-forward network send gradients from kept tokens.
    """

    checkpointed = samples = hands_on = True
    stock = (DeformableDetrTransformerEncoderLayer, DetrTransformerEncoderLayer)

    def __call__(self, *args, **kwargs):
        wrapped = vars(self).get('forward')  # fairscale puts its own in the instance, which calls the class it found
        if wrapped is None or not self.training or self.form.implementation == 'reference':
            return super().__call__(*args, **kwargs)
        del self.forward
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.forward = wrapped

    def lean_forward(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> Tensor:
        attention, ffn, given = self.self_attn, self.ffn, SimpleNamespace(key_padding_mask=key_padding_mask, **kwargs)
        eps = tuple(norm.eps for norm in self.norms)
        settings = EncoderSettings(
            _attention_settings(attention, self.form),
            _ffn_settings(ffn, self.drawn_form()),
            _rate(attention.dropout),
            eps,
        )
        norms = {f'norm{i}_{k}': getattr(n, k) for i, n in enumerate(self.norms, 1) for k in ('weight', 'bias')}
        weights = _attention_weights(attention) | norms | _ffn_weights(ffn)
        positions = self.kept(query, given.spatial_shapes.tolist)
        tensors = EncoderTensors(query, query_pos, *_places(given), **weights, positions=positions)
        return deformable_encoder_layer(settings, tensors)

    @classmethod
    def reasons(cls, module: nn.Module):
        yield _unlike(module.self_attn, MultiScaleDeformableAttention)
        yield _unlike(module.ffn, FFN)
        yield from DeformableAttention.reasons(module.self_attn)
        yield from _ffn_reasons(module.ffn)
        yield _replaced(module.ffn)
        if not module.ffn.add_identity or kind_of(getattr(module.ffn, 'gamma2', nn.Identity())) is not nn.Identity:
            yield 'its feed-forward network has no shortcut, or a layer scale'
        yield None if isinstance(module.ffn.dropout_layer, nn.Identity) else 'its FFN has a dropout_layer'
        for norm in module.norms:
            yield _unlike(norm, nn.LayerNorm)
            yield None if norm.elementwise_affine and norm.bias is not None else 'its norms have no weights'
            yield _replaced(norm)
        wrapped = vars(module).get('forward')
        if wrapped is not None and not _by_fairscale(wrapped):
            yield 'its forward pass was replaced'


def _by_fairscale(forward):
    return getattr(getattr(forward, 'func', None), '__module__', '').startswith('fairscale.')
