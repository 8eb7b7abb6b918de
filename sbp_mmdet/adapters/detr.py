"""Layers of transformer detectors: mmcv's deformable attention, and the encoder layers of mmdet.

DETR, Conditional DETR, DAB-DETR, Deformable DETR, DINO, DDQ, Grounding DINO, MaskFormer and Mask2Former are built of
these. With the preset ``sbp``, tokens of images are dropped in encoders. Queries of a decoder and tokens of a text are
never dropped.
"""

from collections.abc import Callable, Iterable
from numbers import Real
from types import SimpleNamespace

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.layers.transformer.dab_detr_layers import DABDetrTransformerEncoder
from mmdet.models.layers.transformer.deformable_detr_layers import DeformableDetrTransformerEncoderLayer
from mmdet.models.layers.transformer.detr_layers import DetrTransformerEncoder
from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.deformable_attention import DeformableSettings, DeformableTensors, deformable_attention
from ..ops.deformable_encoder_layer import EncoderSettings, EncoderTensors, deformable_encoder_layer
from ..presets import Settings
from ..stochastic_backprop.algorithm1 import sbp
from ..stochastic_backprop.masks import Positions
from ..surgery import stock_class
from .attention import bind_arguments
from .base import LeanModule, adapter
from .ffn import ffn_settings, ffn_weights, modules_of_ffn, problem_of_ffn, rate_of
from .predicate import unsupported

__all__ = [
    'ARGUMENTS_OF_ATTENTION',
    'LeanDeformableAttention',
    'LeanDeformableEncoderLayer',
    'LeanEncoder',
    'are_known_places',
    'attention_settings',
    'attention_weights',
    'images_first',
    'modules_of_encoder_layer',
    'problem_of_encoder_ffn',
    'run_encoder_layer',
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
    """Run an encoder layer by Algorithm 1: attention and FFN are its f, norms and shortcuts run on all tokens."""
    none = x.new_zeros(())  # replaces the shortcut inside of f; all tokens get theirs outside

    def attend(rows):
        return layer.self_attn(rows, x, x, none, key_pos=pos, **kwargs)

    x = layer.norms[0](x + sbp(attend, x + pos, positions))
    return layer.norms[1](x + sbp(lambda rows: layer.ffn(rows, none), x, positions))


# Deformable attention.

# Those that an encoder hands to its layers. The attention does not use the last one.
ARGUMENTS_OF_ATTENTION = {'reference_points', 'spatial_shapes', 'level_start_index', 'valid_ratios'}
_LINEARS = dict(sampling_offsets='offset', attention_weights='attention', value_proj='value', output_proj='output')


@adapter(MultiScaleDeformableAttention)
class LeanDeformableAttention(LeanModule):
    """Deformable attention that saves the sampling kernel's output and recomputes values, places and weights."""

    samples = has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield from _linears(self)

    def lean_forward(self, *args, **kwargs) -> Tensor:
        """Run the layer; the arguments are those of mmcv's ``MultiScaleDeformableAttention``."""
        a = bind_arguments(MultiScaleDeformableAttention.forward, self, args, kwargs)
        if not are_known_places(a, a.query):
            self._lean.bound.bypassed.warn_of_input(self._lean.name or type(self).__name__)
            return super(LeanModule, self).forward(*args, **kwargs)
        tokens = (a.query, a.query_pos, a.query if a.value is None else a.value)
        if not self.batch_first:
            tokens = map(images_first, tokens)
        tensors = DeformableTensors(*tokens, *_unpack_places(a), **attention_weights(self))
        out = deformable_attention(attention_settings(self, self.form), tensors)
        out = out if self.batch_first else out.transpose(0, 1)
        return self.dropout(out) + (a.query if a.identity is None else a.identity)


def images_first(x: Tensor | None) -> Tensor | None:
    """Return tokens (L, N, C) as (N, L, C), a view; ``None`` remains ``None``."""
    return None if x is None else x.transpose(0, 1)


def _linears(attention):
    """Yield the linear layers of deformable attention, with their role."""
    yield from ((getattr(attention, name), 'linear with bias') for name in _LINEARS)


def attention_settings(module: nn.Module, form: Form) -> DeformableSettings:
    """Return the settings of deformable attention.

    Args:
        module (nn.Module): The attention.
        form (Form): Form of the operation.
    """
    sizes = module.num_heads, module.num_levels, module.num_points
    return DeformableSettings(*sizes, form, module.im2col_step)


def are_known_places(given: SimpleNamespace, query: Tensor) -> bool:
    """Return whether deformable attention can be computed from the arguments of a call.

    Args:
        given (SimpleNamespace): Arguments of the attention, by name.
        query (Tensor): Tokens.
    """
    points, *others = (
        getattr(given, name, None) for name in ('reference_points', 'spatial_shapes', 'level_start_index')
    )
    there = points is not None and all(value is not None for value in others)
    return there and query.dim() == 3 and points.shape[-1] in (2, 4)


def _unpack_places(given):
    """Return reference points, padding mask, sizes and start indices of the levels, from the arguments of a call."""
    return given.reference_points, given.key_padding_mask, given.spatial_shapes, given.level_start_index


def attention_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of deformable attention by the field names of :class:`.DeformableTensors`.

    Args:
        module (nn.Module): The attention, mmcv's ``MultiScaleDeformableAttention``.

    Returns:
        dict[str, Tensor]: Weight and bias of the four linear layers.
    """
    layers = {name: getattr(module, own) for own, name in _LINEARS.items()}
    return {f'{name}_{kind}': getattr(layer, kind) for name, layer in layers.items() for kind in ('weight', 'bias')}


def run_encoder_layer(
    layer: LeanModule,
    attention: nn.Module,
    ffn: nn.Module,
    query: Tensor,
    query_pos: Tensor | None,
    given: SimpleNamespace,
    positions: Positions | None = None,
) -> Tensor:
    """Run attention, norm, feed-forward network and norm as one operation.

    Args:
        layer (LeanModule): The changed layer, with two ``norms``.
        attention (nn.Module): Deformable attention of the layer.
        ffn (nn.Module): Feed-forward network of the layer.
        query (Tensor): Tokens, shape (N, L, C).
        query_pos (Tensor | None): Position embedding of the tokens.
        given (SimpleNamespace): Further arguments of the attention, by name.
        positions (Positions | None): Kept tokens. If ``None``, all are kept. Default: None.

    Returns:
        Tensor: Shape (N, L, C).
    """
    eps = tuple(norm.eps for norm in layer.norms)
    ffn_form = ffn_settings(ffn, layer.sampled_form())
    settings = EncoderSettings(attention_settings(attention, layer.form), ffn_form, rate_of(attention.dropout), eps)
    norms = {f'norm{i}_{k}': getattr(n, k) for i, n in enumerate(layer.norms, 1) for k in ('weight', 'bias')}
    weights = attention_weights(attention) | norms | ffn_weights(ffn)
    tensors = EncoderTensors(query, query_pos, *_unpack_places(given), **weights, positions=positions)
    return deformable_encoder_layer(settings, tensors)


def modules_of_encoder_layer(attention: nn.Module, ffn: nn.Module, norms: Iterable[nn.Module]):
    """Yield the modules that :func:`run_encoder_layer` bypasses, with their roles.

    Args:
        attention (nn.Module): The deformable attention.
        ffn (nn.Module): The feed-forward network.
        norms (Iterable[nn.Module]): The two norms.
    """
    yield attention, 'deformable attention'
    yield ffn, 'FFN'
    if unsupported(attention, 'deformable attention') or unsupported(ffn, 'FFN'):
        return
    yield from _linears(attention)
    yield attention.dropout, 'dropout'
    yield from modules_of_ffn(ffn)
    yield ffn.dropout_layer, 'identity'
    if hasattr(ffn, 'gamma2'):
        yield ffn.gamma2, 'identity'
    yield from ((norm, 'affine layer norm') for norm in norms)


def problem_of_encoder_ffn(ffn: nn.Module) -> str | None:
    """Return why :func:`run_encoder_layer` does not support a feed-forward network, or ``None``.

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

    checkpointed = hands_on = draws_otherwise = True
    has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        return modules_of_encoder_layer(self.self_attn, self.ffn, self.norms)

    def accepts(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> bool:
        """See :meth:`.LeanModule.accepts`. The layer hands its keywords to the attention."""
        return kwargs.keys() <= ARGUMENTS_OF_ATTENTION and are_known_places(SimpleNamespace(**kwargs), query)

    def lean_forward(self, query: Tensor, query_pos: Tensor, key_padding_mask: Tensor | None, **kwargs) -> Tensor:
        """Run the layer on tokens (N, L, C)."""
        given = SimpleNamespace(key_padding_mask=key_padding_mask, **kwargs)
        positions = _draw_tokens(self, query, given.spatial_shapes.tolist)
        return run_encoder_layer(self, self.self_attn, self.ffn, query, query_pos, given, positions)

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
