"""Plain vision transformers of mmpretrain and of this package."""

from torch import Tensor, nn

from ..presets import Settings
from .base import LeanBlock, adapter
from .bindings import ChannelMLPBinding, SelfAttentionBinding, UnsupportedBinding, mlp_of_ffn
from .convnext import LeanLayerNorm

__all__ = ['LeanTransformerEncoderLayer', 'LeanViTBlock']


@adapter('sbp_mmdet.models.vit.ViTBlock')
class LeanViTBlock(LeanBlock):
    """ViT block of this package: attention, then the channel MLP; both are thinned."""

    dims = 3
    stride = 16
    rounds_up = True
    from_end = True
    class_tokens = True
    absent = ('downsample',)
    separable = True
    is_sequence = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        attn, mlp = self.attn, self.mlp
        first = ((attn, 'holder'), (self.ls1, 'layer scale'))
        second = ((mlp, 'holder'), (self.ls2, 'layer scale'))
        heads = (self.num_heads, self.ls1, self.drop_path1)
        return dict(
            attn=SelfAttentionBinding(self.norm1, attn.qkv, attn.proj, *heads, first),
            mlp=ChannelMLPBinding(self.norm2, mlp.fc1, self.act, mlp.fc2, self.ls2, self.drop_path2, holders=second),
        )

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on tokens (N, L, C)."""
        x = self.run('attn', x) if self.binding('attn') else self.attend(x)
        return self.run('mlp', x) if self.binding('mlp') else self.feed(x)

    @classmethod
    def thinned_blocks(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of thinned blocks, two thirds of all: the last 8 of 12 (section 5.1)."""
        return (round(depths[0] * 2 / 3),)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        """See :meth:`.LeanBlock.others`."""
        if getattr(backbone, 'out_type', None) != 'featmap':
            return {}
        norms = {name: m for name, m in backbone.named_modules() if isinstance(m, nn.LayerNorm)}
        return {(n,): (m, LeanLayerNorm) for n, m in norms.items() if n == 'norm' or n.startswith('scale')}


@adapter('mmpretrain.models.backbones.vision_transformer.TransformerEncoderLayer')
class LeanTransformerEncoderLayer(LeanViTBlock):
    """ViT block of mmpretrain."""

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(attn=_attention_of(self), mlp=mlp_of_ffn(self.ln2, self.ffn))

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on tokens (N, L, C)."""
        x = self.run('attn', x) if self.binding('attn') else x + self.attn(self.ln1(x))
        return self.run('mlp', x) if self.binding('mlp') else self.ffn(self.ln2(x), identity=x)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        """See :meth:`.LeanBlock.others`."""
        return {}


def _attention_of(block):
    attn = block.attn
    if reason := _problem_of_attention(attn):
        return UnsupportedBinding(attn, reason)
    holders = ((attn, 'attention'), (attn.gamma1, 'layer scale'), (attn.proj_drop, 'dropout of rate 0'))
    return SelfAttentionBinding(block.ln1, attn.qkv, attn.proj, attn.num_heads, attn.gamma1, attn.out_drop, holders)


def _problem_of_attention(attn):
    """Return why mmpretrain's attention is unsupported, or ``None``."""
    if getattr(attn, 'attn_drop', None):
        return 'its attention has dropout; set attn_drop_rate to 0'
    known = ('v_shortcut', 'input_dims', 'embed_dims', 'gamma1', 'out_drop', 'proj_drop', 'qkv', 'proj')
    if not all(hasattr(attn, name) for name in known):
        return f'its attention is a {type(attn).__name__}, which is not supported'
    if attn.v_shortcut or attn.input_dims != attn.embed_dims:
        return 'its attention has a shortcut or widths of its own'
    if hasattr(attn.scaled_dot_product_attention, 'keywords'):
        return 'its attention has a qk_scale of its own'
    return None
