"""What is mixed into the blocks of mmpretrain's ConvNeXt and VisionTransformer, and what stands beside them.

mmpretrain is not needed to import this module: the classes are found by their names, see :mod:`sbp_mmdet.apply`.
"""

from torch import nn

from .. import ops
from ..settings import SBPSettings
from .swin_layers import ffn_refusal, thin_ffn
from .thin import Thin

__all__ = ['ThinConvNeXtBlock', 'ThinConvNeXtDownsample', 'ThinMapNorm', 'ThinViTBlock']


class ThinConvNeXtBlock(Thin):
    """mmpretrain's ``ConvNeXtBlock``, whose submodules have the names of :class:`.convnext_layers.ConvNeXtBlock`'s."""

    absent = ()

    def thin_forward(self, x):
        own, settings = self.sbp_settings, _mlp_settings(self)
        fused = own.implementation == 'fused'
        positions = self.positions()
        self.check_size(positions, x.shape[2] * x.shape[3])
        norm = (self.norm.weight, self.norm.bias)
        first = (self.pointwise_conv1.weight.flatten(1), self.pointwise_conv1.bias)
        second = (self.pointwise_conv2.weight.flatten(1), self.pointwise_conv2.bias)

        def run(x, factor):
            cast = x.to(ops.autocast_dtype(x) or x.dtype)
            inner, conv = ops.convolve(self.depthwise_conv, cast, own.storage if fused else 'native')
            conv = conv if own.recompute == 'block' else None
            if self.grn is not None:
                layers = (*norm, *first, self.grn.gamma, self.grn.beta, *second)
                eps = (self.norm.eps, self.grn.eps)
                options = ops.GRNSettings(*eps, self.act.approximate, own.storage, compile=own.compile)
                return ops.grn_mlp(options, ops.GRNTensors(inner, x, *layers, self.gamma, factor, conv))
            tensors = ops.MLPTensors(inner, x, *norm, *first, *second, self.gamma, factor, positions, conv)
            return ops.channel_mlp(settings, tensors)

        return self.on_branch(run, x, self.drop_path, list(self.parameters()), promote=self.gamma)

    def drop_paths(self) -> dict[tuple, nn.Module]:
        """See :class:`.thin.Thin`."""
        return {(): self.drop_path}

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """See :class:`.thin.Thin`."""
        if layer.grn is not None and any(ratio != 1 for ratio in settings.keep_ratio):
            return 'GRN normalises over all positions, so none can be dropped; use keep_ratio=1.0, recompute=True'
        if layer.grn is not None and (settings.implementation != 'fused' or not settings.recompute):
            return 'GRN needs the fused form and recompute=True'
        if settings.implementation == 'fused' and not isinstance(layer.act, nn.GELU):
            return f"its activation is {type(layer.act).__name__}; GELU or implementation='reference' is needed"
        return None

    @classmethod
    def others(cls, backbone: nn.Module, settings: SBPSettings) -> dict[tuple, tuple[nn.Module, type[Thin]]]:
        """See :class:`.thin.Thin`."""
        layers = list(backbone.downsample_layers)[1:]
        found = {(i, 'downsample'): (layer, ThinConvNeXtDownsample) for i, layer in enumerate(layers, 1)}
        if settings.implementation == 'reference' or backbone.gap_before_final_norm:
            return found
        norms = [(name, m) for name, m in backbone.named_children() if name.startswith('norm')]
        return found | {(n,): (m, ThinMapNorm) for n, m in norms if isinstance(m, nn.LayerNorm)}


def _mlp_settings(block):
    settings = block.sbp_settings
    if settings.implementation == 'reference':
        options = dict(dropped=settings.dropped, implementation='reference', activation=block.act)
        return ops.MLPSettings(block.norm.eps, **options)
    options = (bool(settings.recompute), settings.storage, settings.dropped)
    return ops.MLPSettings(block.norm.eps, block.act.approximate, *options, compile=settings.compile)


class ThinConvNeXtDownsample(Thin):
    """Layer norm and 2x2/2 convolution, one behind the other in an ``nn.Sequential``."""

    def thin_forward(self, x):
        norm, conv = self
        positions = self.positions()
        self.check_size(positions, (x.shape[2] // 2) * (x.shape[3] // 2))
        own = self.sbp_settings
        options = (own.storage, own.dropped, own.implementation)
        settings = ops.NormLinearSettings(norm.eps, *options, compile=own.compile)
        tensors = ops.NormLinearTensors(x, norm.weight, norm.bias, conv.weight, conv.bias, positions)
        return ops.norm_linear(settings, tensors)

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """See :class:`.thin.Thin`."""
        conv = layer[-1]
        if len(layer) != 2 or (conv.kernel_size, conv.stride, conv.padding) != ((2, 2), (2, 2), (0, 0)):
            return 'it is no 2x2 convolution of stride 2 behind a norm'
        return None


class ThinMapNorm(Thin):
    """Layer norm over the channels of a map (N, C, H, W)."""

    def thin_forward(self, x, *args, **kwargs):
        own = self.sbp_settings
        settings = ops.NormSettings(self.eps, own.storage, compile=own.compile)
        return ops.layer_norm(settings, ops.NormTensors(x, self.weight, self.bias))


class ThinViTBlock(Thin):
    """mmpretrain's ``TransformerEncoderLayer``: the attention is exact and lean, the channel MLP has SBP."""

    stride = 16
    rounds_up = True
    last = True
    absent = ()

    def thin_forward(self, x):
        return thin_ffn(self, self.ffn, self.ln2, self._attention(x), self._prefix(x))

    def _prefix(self, x):
        """How many class tokens stand in front of the map's."""
        positions = self.positions()
        return 0 if positions is None else x.shape[1] - positions.keep.shape[-1] - positions.drop.shape[-1]

    def _attention(self, x):
        attn, gamma = self.attn, getattr(self.attn.gamma1, 'weight', None)
        own = self.sbp_settings
        fused = own.implementation == 'fused'
        settings = ops.AttentionSettings(
            attn.num_heads,
            recompute=fused,
            storage=own.storage,
            implementation=own.implementation,
            eps=self.ln1.eps,
            compile=own.compile,
        )
        layers = (self.ln1.weight, self.ln1.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias)

        def run(x, factor):
            return ops.attention(settings, ops.AttentionTensors(x, *layers, gamma, factor))

        parameters = [*self.ln1.parameters(), *attn.parameters()]
        return self.on_branch(run, x, attn.out_drop, parameters, ('attention',), gamma)

    def drop_paths(self) -> dict[tuple, nn.Module]:
        """See :class:`.thin.Thin`."""
        return {('attention',): self.attn.out_drop, (): self.ffn.dropout_layer}

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """See :class:`.thin.Thin`."""
        attn = layer.attn
        for norm in (layer.ln1, layer.ln2):
            if not isinstance(norm, nn.LayerNorm):
                return f'its norm is a {type(norm).__name__}, and layer norm is needed'
        if attn.attn_drop or attn.proj_drop.p:
            return 'its attention has dropout; set drop_rate and attn_drop_rate to 0'
        if attn.v_shortcut or attn.proj.bias is None or attn.input_dims != attn.embed_dims:
            return 'its attention has a shortcut, widths or a projection of its own kind'
        if hasattr(attn.scaled_dot_product_attention, 'keywords'):
            return 'its attention has a qk_scale of its own'
        return ffn_refusal(layer.ffn, settings)
