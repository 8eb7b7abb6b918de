"""Fusion of image and text in Grounding DINO.

Its other layers are those of DINO (:mod:`.detr`). The text encoder, BERT of transformers, keeps its own code.
"""

from mmdet.models.utils.vlfuse_helper import MAX_CLAMP_VALUE, BiMultiHeadAttention, SingleScaleBiAttentionBlock
from torch import Tensor

from ..ops.bi_attention import LIMIT, BiAttentionSettings, BiAttentionTensors, bi_attention
from .base import LeanModule, adapter
from .roles import ROLES, check_number_as_scale

__all__ = ['LeanFusion']


def _check_scores(attention):
    clamps = attention.clamp_min_for_underflow and attention.clamp_max_for_overflow and MAX_CLAMP_VALUE == LIMIT
    if attention.stable_softmax_2d or not clamps:
        return 'it does not clamp scores as the operation does (clamp_min_for_underflow, clamp_max_for_overflow)'
    if problem := check_number_as_scale(attention):
        return problem
    if attention.scale != attention.head_dim**-0.5 or attention.head_dim * attention.num_heads != attention.embed_dim:
        return f'its scale is {attention.scale}, and not the reciprocal root of the width of a head'
    return None if attention.v_dim == attention.l_dim else 'its images and texts have tokens of different widths'


ROLES['attention between image and text'] = {BiMultiHeadAttention: _check_scores}
_LAYERS = dict(
    query='v_proj',
    key='l_proj',
    value_v='values_v_proj',
    value_l='values_l_proj',
    out_v='out_v_proj',
    out_l='out_l_proj',
)


@adapter(SingleScaleBiAttentionBlock)
class LeanFusion(LeanModule):
    """Fusion block of Grounding DINO: norms, attention in both directions and shortcuts as one operation."""

    checkpointed = reorders_dropout = True
    samples = has_reference = False

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`."""
        yield from ((norm, 'affine layer norm') for norm in (self.layer_norm_v, self.layer_norm_l))
        yield self.attn, 'attention between image and text'
        yield self.drop_path, 'identity'
        yield from ((getattr(self.attn, name, None), 'linear with bias') for name in _LAYERS.values())

    def accepts(
        self,
        visual_feature: Tensor,
        lang_feature: Tensor,
        attention_mask_v: Tensor | None = None,
        attention_mask_l: Tensor | None = None,
    ) -> bool:
        """See :meth:`.LeanModule.accepts`. A mask of numbers may need a gradient, which the operation lacks."""
        pairs = (visual_feature, attention_mask_v), (lang_feature, attention_mask_l)
        if not all(x.dim() == 3 and (mask is None or mask.shape == x.shape[:2]) for x, mask in pairs):
            return False
        numbers = attention_mask_l is not None and attention_mask_l.is_floating_point()
        return len(visual_feature) == len(lang_feature) and not numbers

    def lean_forward(
        self,
        visual_feature: Tensor,
        lang_feature: Tensor,
        attention_mask_v: Tensor | None = None,
        attention_mask_l: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the block on tokens of images (N, V, C) and of texts (N, T, C)."""
        bias = attention_mask_l
        if bias is not None:  # as in the module's own code: for a mask of bools, the result is 1 everywhere
            bias = bias.masked_fill(bias == 0, -9e15)
        modules = dict(norm_v=self.layer_norm_v, norm_l=self.layer_norm_l)
        modules |= {name: getattr(self.attn, own) for name, own in _LAYERS.items()}
        weights = {f'{name}_{kind}': getattr(m, kind) for name, m in modules.items() for kind in ('weight', 'bias')}
        weights |= dict(gamma_v=self.gamma_v, gamma_l=self.gamma_l)
        rate = self.attn.dropout if self.attn.training else 0.0
        settings = BiAttentionSettings(self.attn.num_heads, rate, (self.layer_norm_v.eps, self.layer_norm_l.eps))
        tensors = BiAttentionTensors(visual_feature, lang_feature, attention_mask_v, bias, **weights)
        return bi_attention(settings, tensors)
