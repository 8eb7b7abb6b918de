"""ViTDet of mmdet's projects: its blocks, and the layer norm of maps in its neck and heads.

The classes are not part of the mmdet package, so they are given as strings and not imported.
"""

import dataclasses

from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.decomposed_attention import (
    DecomposedSettings,
    DecomposedTensors,
    decomposed_attention,
    into_windows,
    out_of_windows,
)
from .base import LeanBlock, LeanModule, adapter
from .bindings import Binding, ChannelMLPBinding, LayerNormBinding
from .roles import ROLES, add_to_role, check_number_as_scale

__all__ = ['DecomposedAttentionBinding', 'LeanLN2d', 'LeanViTDetBlock']

_PROJECT = 'projects.ViTDet.vitdet.vit'


def _check_scale(attention):
    if problem := check_number_as_scale(attention):
        return problem
    width = attention.qkv.in_features // attention.num_heads
    return None if attention.scale == width**-0.5 else f'its scale is {attention.scale}, not 1 / sqrt({width})'


ROLES['attention of a map'] = {f'{_PROJECT}.Attention': _check_scale}
ROLES['MLP of a map'] = {f'{_PROJECT}.Mlp': lambda mlp: None}
add_to_role('layer norm', f'{_PROJECT}.LN2d')


@dataclasses.dataclass(frozen=True, eq=False)
class DecomposedAttentionBinding(Binding):
    """``x + drop(attn(norm(x)))`` on a map or in its windows, with exact gradients.

    Attributes:
        norm (nn.LayerNorm): Layer norm over the channels.
        attn (nn.Module): Attention with decomposed relative positions.
        window (int): Side of the windows. If 0, attention is on the whole map.
        drop (nn.Module): Stochastic depth.
    """

    norm: nn.LayerNorm
    attn: nn.Module
    window: int
    drop: nn.Module

    def __call__(self, form: Form, x: Tensor, factor: Tensor | float | None = None):
        """Run the operation on a map (N, H, W, C)."""
        attn = self.attn
        settings = DecomposedSettings(form, attn.num_heads, self.window, self.norm.eps)
        layers = (p for m in (self.norm, attn.qkv, attn.proj) for p in (m.weight, m.bias))
        bias = (attn.rel_pos_h, attn.rel_pos_w) if attn.use_rel_pos else (None, None)
        return decomposed_attention(settings, DecomposedTensors(x, *layers, *bias, factor))

    def bypasses(self, form: Form):
        """See :meth:`.Binding.bypasses`."""
        yield from ((self.norm, 'affine layer norm'), (self.attn, 'attention of a map'))
        yield from ((self.attn.qkv, 'linear'), (self.attn.proj, 'linear with bias'), (self.drop, 'stochastic depth'))


@adapter(f'{_PROJECT}.Block')
class LeanViTDetBlock(LeanBlock):
    """ViTDet block: attention with exact gradients, then the channel MLP, which is thinned."""

    dims = 4
    stride = 16
    from_end = True
    absent = ('downsample', 'attention')
    separable = True
    has_reference = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        mlp = self.mlp
        holders = ((mlp, 'MLP of a map'), (mlp.drop1, 'dropout of rate 0'), (mlp.drop2, 'dropout of rate 0'))
        return dict(
            attn=DecomposedAttentionBinding(self.norm1, self.attn, self.window_size, self.drop_path),
            mlp=ChannelMLPBinding(self.norm2, mlp.fc1, mlp.act, mlp.fc2, drop=self.drop_path, holders=holders),
        )

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on a map (N, H, W, C)."""
        x = self.run('attn', x) if self.binding('attn') else self._attend(x)
        if not self.binding('mlp'):
            return x + self.drop_path(self.mlp(self.norm2(x)))
        return self.run('mlp', x.flatten(1, 2)).view(x.shape)

    def _attend(self, x):
        """Run the attention with the modules' own code."""
        y = self.norm1(x)
        y = self.attn(into_windows(y, self.window_size)) if self.window_size else self.attn(y)
        return x + self.drop_path(out_of_windows(y, x.shape) if self.window_size else y)

    @classmethod
    def thinned_blocks(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of thinned blocks, two thirds of all, as for other plain transformers (section 5.1)."""
        return (round(depths[0] * 2 / 3),)


@adapter(f'{_PROJECT}.LN2d')
class LeanLN2d(LeanModule):
    """Layer norm of a map (N, C, H, W), which saves x-hat alone."""

    dims = 4
    samples = has_reference = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(norm=LayerNormBinding(self))
