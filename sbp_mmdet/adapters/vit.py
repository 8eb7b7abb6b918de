"""Plain vision transformers: mmpretrain's and this package's."""

from torch import nn

from ..presets import Settings
from .base import Block, adapter
from .bindings import MLP, Attention, ffn_part
from .convnext import _Norm

__all__ = ['TransformerEncoderLayer', 'ViTBlock']


class _ViT(Block):
    stride = 16
    rounds_up = True
    from_end = True
    class_tokens = True
    absent = ('downsample',)

    @classmethod
    def thinned_blocks(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        """Two thirds: the last 8 of 12 (section 5.1)."""
        return (round(depths[0] * 2 / 3),)


@adapter('sbp_mmdet.models.vit.ViTBlock')
class ViTBlock(_ViT):
    """Attention, then the channel MLP."""

    def parts(self):
        first, second = (getattr(scale, 'gamma', None) for scale in (self.ls1, self.ls2))
        mlp = (self.norm2, self.mlp.fc1, self.act, self.mlp.fc2)
        return dict(
            attn=Attention(self.norm1, self.attn.qkv, self.attn.proj, self.num_heads, first, self.drop_path1),
            mlp=MLP(*mlp, second, self.drop_path2),
        )

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        norms = {name: m for name, m in backbone.named_modules() if isinstance(m, nn.LayerNorm)}
        maps = {n: m for n, m in norms.items() if n == 'norm' or n.startswith('scale')}
        return {(name,): (m, _Norm) for name, m in maps.items()} if backbone.out_type == 'featmap' else {}


@adapter('mmpretrain.models.backbones.vision_transformer.TransformerEncoderLayer')
class TransformerEncoderLayer(_ViT):
    """mmpretrain's block."""

    def parts(self):
        attn = self.attn
        gamma = getattr(attn.gamma1, 'weight', None)
        return dict(
            attn=Attention(self.ln1, attn.qkv, attn.proj, attn.num_heads, gamma, attn.out_drop),
            mlp=ffn_part(self.ln2, self.ffn),
        )

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        attn = module.attn
        if attn.attn_drop or attn.proj_drop.p:
            return 'its attention has dropout; set drop_rate and attn_drop_rate to 0'
        if attn.v_shortcut or attn.proj.bias is None or attn.input_dims != attn.embed_dims:
            return 'its attention has a shortcut, widths or a projection of its own kind'
        if hasattr(attn.scaled_dot_product_attention, 'keywords'):
            return 'its attention has a qk_scale of its own'
        return super().refusal(module, settings)
