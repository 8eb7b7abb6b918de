"""Layers of transformer detectors: mmcv's deformable attention, and the encoder layers of mmdet.

DETR, Conditional DETR, DAB-DETR, Deformable DETR, DINO, DDQ, Grounding DINO, MaskFormer and Mask2Former are built of
these. With the preset ``sbp``, tokens of images are dropped in encoders. Queries of a decoder and tokens of a text are
never dropped.
"""

import dataclasses
import functools
from collections.abc import Callable
from numbers import Real
from types import SimpleNamespace

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.layers.transformer.dab_detr_layers import DABDetrTransformerEncoder
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoder
from torch import Tensor, nn

from ..ops.common.activations import Activation
from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.deformable_attention import DeformableSettings, DeformableTensors, deformable_attention
from ..ops.deformable_encoder_layer import EncoderSettings, EncoderTensors, deformable_encoder_layer
from ..ops.ffn import FFNSettings
from ..presets import Settings
from ..stochastic_backprop.algorithm1 import sbp
from ..stochastic_backprop.masks import Positions
from ..surgery import stock_class
from .attention import bind_arguments
from .base import LeanModule, adapter
from .bindings import Binding
from .conv_module import activation_of
from .ffn import modules_of_ffn, problem_of_ffn, rate_of
from .parameters import CachedSettings, weights_and_biases
from .predicate import unsupported

__all__ = [
    'ARGUMENTS_OF_ATTENTION',
    'EncoderLayerBinding',
    'LeanDeformableAttention',
    'LeanDeformableEncoderLayer',
    'LeanEncoder',
    'images_first',
    'problem_of_encoder_ffn',
    'supports_arguments',
]


# Encoders.


def _token_ratio(settings):
    """Return the keep ratio of tokens, or ``None`` if all are kept. A list of ratios is for blocks of a backbone."""
    preset, ratio = settings.preset, settings.keep_ratio
    paper = preset.thins and preset.form == Form()
    return ratio if paper and isinstance(ratio, Real) and ratio < 1 else None


def _draw_tokens(module, x: Tensor, sizes: Callable[[], list[tuple[int, int]]]) -> Positions | None:
    """Return the tokens that are kept in this pass, or ``None`` for all. Layers of the same maps keep the same tokens.

    Args:
        module (LeanModule): The changed module.
        x (Tensor): Tokens, for their device.
        sizes (Callable): Returns the sizes of the maps. It is called only if tokens are drawn, because reading them
            from a GPU waits for it.
    """
    draws = module._lean.draws
    trains = draws is not None and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    return draws.positions(sizes(), x.device) if trains else None


@adapter(DetrTransformerEncoder, DABDetrTransformerEncoder)
class LeanEncoder(LeanModule):
    """Encoder of DETR or DAB-DETR, whose layers are changed submodule by submodule.

    With ``sbp``, the attention (mode 'query': keys and values are exact) and the feed-forward networks backpropagate
    through kept tokens. The encoder does not know the size of the map, so the grid keeps every n-th token of the line.
    """

    thins_only = shares_modules = True
    samples = has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`. Norms, attention and FFN are called, the last two on some rows."""
        for layer in self.layers:
            yield layer, 'encoder layer'
            yield layer.self_attn, 'multi-head attention of mmcv'
            yield layer.ffn, 'FFN'
            yield from ((dropout, 'dropout') for dropout in (layer.self_attn.dropout_layer, layer.ffn.dropout_layer))

    def lean_forward(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> Tensor:
        """Run the encoder on tokens (N, L, C)."""
        positions = _draw_tokens(self, query, lambda: [(1, query.shape[1])])
        if positions is None:
            return super(LeanModule, self).forward(query, query_pos, key_padding_mask, **kwargs)
        kwargs['key_padding_mask'] = key_padding_mask
        for layer in self.layers:
            scaled = query_pos * self.query_scale(query) if isinstance(self, DABDetrTransformerEncoder) else query_pos
            query = _thinned_layer(layer, query, scaled, positions, kwargs)
        return query

    @classmethod
    def token_ratio(cls, settings: Settings) -> float | None:
        """See :meth:`.LeanModule.token_ratio`."""
        return _token_ratio(settings)

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`. The encoder of Deformable DETR derives from DETR's."""
        return stock_class(type(module)) in cls.stock

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        shortcuts = all(getattr(layer.ffn, 'add_identity', True) for layer in module.layers)
        return None if shortcuts else 'its feed-forward network has no shortcut'


def _thinned_layer(layer, x, pos, positions, kwargs):
    """Run an encoder layer by Algorithm 1, with attention and FFN as f. Norms and shortcuts run on all tokens."""
    none = x.new_zeros(())  # replaces the shortcut inside of f; all tokens get theirs outside

    def attend(rows):
        return layer.self_attn(rows, x, x, none, key_pos=pos, **kwargs)

    x = layer.norms[0](x + sbp(attend, x + pos, positions))
    return layer.norms[1](x + sbp(lambda rows: layer.ffn(rows, none), x, positions))


# Deformable attention.

# Keyword arguments that an encoder passes to its layers. The attention does not use the last one.
ARGUMENTS_OF_ATTENTION = {'reference_points', 'spatial_shapes', 'level_start_index', 'valid_ratios'}
_LINEARS = 'sampling_offsets', 'attention_weights', 'value_proj', 'output_proj'


@adapter(MultiScaleDeformableAttention)
class LeanDeformableAttention(LeanModule):
    """Deformable attention that saves the sampling kernel's output and recomputes values, locations and weights."""

    samples = has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield from ((linear, 'linear with bias') for linear in _linears_of(self))

    def lean_forward(self, *args, **kwargs) -> Tensor:
        """Run the layer; the arguments are those of mmcv's ``MultiScaleDeformableAttention``."""
        a = bind_arguments(MultiScaleDeformableAttention.forward, self, args, kwargs)
        if not supports_arguments(a, a.query):
            self._lean.bound.bypassed.warn_of_input(self._lean.name or type(self).__name__)
            return super(LeanModule, self).forward(*args, **kwargs)
        tokens = (a.query, a.query_pos, a.query if a.value is None else a.value)
        if not self.batch_first:
            tokens = map(images_first, tokens)
        tensors = DeformableTensors(*tokens, *_sampling_arguments(a), *weights_and_biases(_linears_of(self)))
        sizes = self.num_heads, self.num_levels, self.num_points
        out = deformable_attention(DeformableSettings(*sizes, self.form, self.im2col_step), tensors)
        out = out if self.batch_first else out.transpose(0, 1)
        return self.dropout(out) + (a.query if a.identity is None else a.identity)


def images_first(x: Tensor | None) -> Tensor | None:
    """Return tokens (L, N, C) as (N, L, C), a view; ``None`` remains ``None``."""
    return None if x is None else x.transpose(0, 1)


def _linears_of(attention):
    """Return the linear layers of deformable attention in the order of :class:`.DeformableTensors`."""
    return [getattr(attention, name) for name in _LINEARS]


def supports_arguments(given: SimpleNamespace, query: Tensor) -> bool:
    """Return whether the operation supports the arguments of a call of deformable attention.

    It needs reference points or boxes, the sizes of the maps, and tokens of shape (N, L, C) or (L, N, C).

    Args:
        given (SimpleNamespace): Arguments of the attention, by name.
        query (Tensor): Tokens.
    """
    points = getattr(given, 'reference_points', None)
    if points is None or points.shape[-1] not in (2, 4) or query.dim() != 3:
        return False
    return getattr(given, 'spatial_shapes', None) is not None and getattr(given, 'level_start_index', None) is not None


def _sampling_arguments(given):
    """Return the arguments that :class:`.DeformableTensors` has between ``value`` and the layers."""
    return given.reference_points, given.key_padding_mask, given.spatial_shapes, given.level_start_index


def _settings_of_layer(
    sizes: tuple[int, int, int],
    im2col_step: int,
    activation: Activation,
    eps: tuple[float, float],
    form: Form,
    form_of_ffn: Form,
    dtype: torch.dtype,
    dropout: float,
    *rates: float,
) -> EncoderSettings:
    """Build the settings of an encoder layer. The arguments after ``eps`` are read in every step."""
    attention = DeformableSettings(*sizes, form, im2col_step, dtype)
    ffn = FFNSettings(activation, rates, dtype=dtype, form=form_of_ffn)
    return EncoderSettings(attention, ffn, dropout, eps)


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderLayerBinding(Binding):
    """Attention, norm, feed-forward network and norm of an encoder layer as one operation.

    Attributes:
        attention (nn.Module): Deformable attention.
        ffn (nn.Module): Feed-forward network.
        norms (tuple[nn.Module, nn.Module]): The norms that follow them.
    """

    attention: nn.Module
    ffn: nn.Module
    norms: tuple[nn.Module, nn.Module]
    one_precision = False

    def __call__(
        self,
        form: Form,
        x: Tensor,
        query_pos: Tensor | None,
        given: SimpleNamespace,
        form_of_ffn: Form,
        positions: Positions | None = None,
    ):
        """Run the layer on tokens (N, L, C).

        Args:
            form (Form): Form of the operation.
            x (Tensor): Tokens.
            query_pos (Tensor | None): Position embedding of the tokens.
            given (SimpleNamespace): Further arguments of the attention, by name.
            form_of_ffn (Form): Form of the feed-forward network.
            positions (Positions | None): Kept tokens. If ``None``, all are kept. Default: None.
        """
        layers, dropouts, settings = self._structure
        rates = [rate_of(dropout) for dropout in dropouts]
        settings = settings(form, form_of_ffn, autocast_dtype(x) or x.dtype, *rates)
        tensors = EncoderTensors(x, query_pos, *_sampling_arguments(given), *weights_and_biases(layers), positions)
        return deformable_encoder_layer(settings, tensors)

    @functools.cached_property
    def _structure(self):
        """Layers in the order of :class:`.EncoderTensors`, the dropout layers, and cached settings."""
        attention, (first, second) = self.attention, self.norms
        (up, act, dropout1), down, dropout2 = self.ffn.layers
        sizes = attention.num_heads, attention.num_levels, attention.num_points
        fixed = sizes, attention.im2col_step, activation_of(act), (first.eps, second.eps)
        layers = [*_linears_of(attention), first, up, down, second]
        settings = CachedSettings(functools.partial(_settings_of_layer, *fixed))
        return layers, (attention.dropout, dropout1, dropout2), settings

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        attention, ffn = self.attention, self.ffn
        yield attention, 'deformable attention'
        yield ffn, 'FFN'
        if unsupported(attention, 'deformable attention') or unsupported(ffn, 'FFN'):
            return
        yield from ((linear, 'linear with bias') for linear in _linears_of(attention))
        yield attention.dropout, 'dropout'
        yield from modules_of_ffn(ffn)
        yield ffn.dropout_layer, 'identity'
        if hasattr(ffn, 'gamma2'):
            yield ffn.gamma2, 'identity'
        yield from ((norm, 'affine layer norm') for norm in self.norms)


def problem_of_encoder_ffn(ffn: nn.Module) -> str | None:
    """Return why :class:`EncoderLayerBinding` does not support a feed-forward network, or ``None``.

    Args:
        ffn (nn.Module): The feed-forward network.
    """
    if isinstance(ffn, FFN) and (problems := problem_of_ffn(ffn)):
        return problems[0][1]
    return None if getattr(ffn, 'add_identity', True) else 'its feed-forward network has no shortcut'


@adapter(DeformableDetrTransformerEncoderLayer)
class LeanDeformableEncoderLayer(LeanModule):
    """Encoder layer of Deformable DETR as one operation. fairscale's checkpointing of it (``num_cp``) is switched off.

    With ``sbp``, attention and feed-forward network backpropagate through kept tokens.
    """

    checkpointed = shares_maps = reorders_dropout = True
    has_reference = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(layer=EncoderLayerBinding(self.self_attn, self.ffn, tuple(self.norms)))

    def accepts(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> bool:
        """See :meth:`.LeanModule.accepts`. The layer passes its keyword arguments to the attention."""
        return kwargs.keys() <= ARGUMENTS_OF_ATTENTION and supports_arguments(SimpleNamespace(**kwargs), query)

    def lean_forward(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> Tensor:
        """Run the layer on tokens (N, L, C)."""
        given = SimpleNamespace(key_padding_mask=key_padding_mask, **kwargs)
        positions = _draw_tokens(self, query, given.spatial_shapes.tolist)
        return self.binding('layer')(self.form, query, query_pos, given, self.sampled_form(), positions)

    @classmethod
    def token_ratio(cls, settings: Settings) -> float | None:
        """See :meth:`.LeanModule.token_ratio`."""
        return _token_ratio(settings)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        if not getattr(module.self_attn, 'batch_first', True):
            return 'its tokens stand in front of its images (batch_first=False)'
        return problem_of_encoder_ffn(module.ffn)
