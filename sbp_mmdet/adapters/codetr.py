"""mmcv's ``BaseTransformerLayer`` with its order of operations, which Co-DETR and other older DETRs are built of."""

import inspect
from types import SimpleNamespace

from mmcv.cnn.bricks.transformer import BaseTransformerLayer
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

from ..presets import Settings
from ..surgery import stock_class
from .base import LeanModule, adapter
from .detr import (
    ARGUMENTS_OF_ATTENTION,
    EncoderLayerBinding,
    images_first,
    problem_of_encoder_ffn,
    supports_arguments,
)

__all__ = ['LeanTransformerLayer']

_ARGUMENTS = inspect.signature(BaseTransformerLayer.forward).parameters.keys()
_ENCODER = ('self_attn', 'norm', 'ffn', 'norm')


@adapter(BaseTransformerLayer)
class LeanTransformerLayer(LeanModule):
    """Encoder layer with deformable attention, as one operation. Other layers are changed submodule by submodule."""

    checkpointed = shares_maps = reorders_dropout = True
    has_reference = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(layer=EncoderLayerBinding(self.attentions[0], self.ffns[0], tuple(self.norms)))

    def accepts(self, query: Tensor, *args, **kwargs) -> bool:
        """See :meth:`.LeanModule.accepts`. The layer hands keywords that it does not name to the attention."""
        known = kwargs.keys() <= _ARGUMENTS | ARGUMENTS_OF_ATTENTION
        return known and supports_arguments(SimpleNamespace(**kwargs), query)

    def lean_forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_pos: Tensor | None = None,
        attn_masks: list[Tensor] | None = None,
        query_key_padding_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """Run the layer with the arguments of mmcv's ``BaseTransformerLayer``; self-attention ignores the others."""
        layer, given = self.binding('layer'), SimpleNamespace(key_padding_mask=query_key_padding_mask)
        given.reference_points, given.spatial_shapes = reference_points, spatial_shapes
        given.level_start_index = level_start_index
        forms = self.form, self.sampled_form()
        if layer.attention.batch_first:
            return layer(forms[0], query, query_pos, given, forms[1])
        tokens = images_first(query), images_first(query_pos)
        return layer(forms[0], *tokens, given, forms[1]).transpose(0, 1)

    @classmethod
    def applies_to(cls, module: nn.Module) -> bool:
        """See :meth:`.LeanModule.applies_to`."""
        attentions = [stock_class(type(attention)) for attention in module.attentions]
        if tuple(module.operation_order) != _ENCODER or attentions != [MultiScaleDeformableAttention]:
            return False
        # The operation draws dropout image by image. With batch_first=False, the plain layer draws in another order.
        draws = any(isinstance(inside, nn.Dropout) and inside.p for inside in module.modules())
        return module.attentions[0].batch_first or not draws

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        if module.pre_norm:
            return 'pre_norm is set, though no norm stands first in its operation_order'
        return problem_of_encoder_ffn(module.ffns[0])
