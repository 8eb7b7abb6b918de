"""ConvNeXt of mmpretrain and of this package, whose submodules have the same names."""

from mmengine.model import Sequential
from torch import Tensor, nn

from ..presets import Settings
from ..surgery import stock_class
from .base import LeanBlock, LeanModule, adapter
from .bindings import ChannelMLPBinding, LayerNormBinding, NormLinearBinding, PatchNormBinding

__all__ = ['LeanConvNeXtBlock', 'LeanLayerNorm']


@adapter('mmpretrain.models.backbones.convnext.ConvNeXtBlock', 'sbp_mmdet.models.convnext.ConvNeXtBlock')
class LeanConvNeXtBlock(LeanBlock):
    """ConvNeXt block: depthwise convolution, then the channel MLP, which is thinned."""

    dims = 4

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        layers = (self.norm, self.pointwise_conv1, self.act, self.pointwise_conv2)
        others = dict(scaled_by=self, drop=self.drop_path, conv=self.depthwise_conv, grn=self.grn)
        return dict(mlp=ChannelMLPBinding(*layers, **others))

    def lean_forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        return self.run('mlp', x)

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        if module.grn is not None and settings.preset.thins:
            return "GRN normalises over all positions, so none can be dropped; write preset='exact' or preset='int8'"
        return None

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        """See :meth:`.LeanBlock.others`."""
        if not getattr(backbone, 'downsample_layers', None):  # a user's own backbone of stock blocks
            return {}
        stem, *layers = backbone.downsample_layers
        others = {(i, 'downsample'): (layer, _LeanDownsample) for i, layer in enumerate(layers, 1)}
        others['stem',] = (stem, _LeanStem)
        if not getattr(backbone, 'gap_before_final_norm', True):
            others |= {(name,): (m, LeanLayerNorm) for name, m in backbone.named_children() if name.startswith('norm')}
        return others


class _LeanDownsample(LeanModule):
    """Downsampling layer: layer norm and 2x2 convolution of stride 2. A kept position is a kept patch."""

    dims = 4
    stock = (nn.Sequential, Sequential)

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(patches=NormLinearBinding(*self))

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return None if len(module) == 2 else f'it has {len(module)} layers instead of a norm and a convolution'


class _LeanStem(_LeanDownsample):
    """Stem: patch embedding and layer norm."""

    samples = False

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(patches=PatchNormBinding(*self))


class LeanLayerNorm(LeanModule):
    """Layer norm of an output map or of tokens."""

    samples = False
    separable = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(norm=LayerNormBinding(self))

    @property
    def dims(self) -> int:
        """Number of dimensions of a map (N, C, H, W) in a norm of maps, otherwise of tokens (N, L, C)."""
        return 4 if stock_class(type(self)).__name__ == 'LayerNorm2d' else 3

    def accepts(self, *args, **kwargs) -> bool:
        """See :meth:`.LeanModule.accepts`."""
        return len(args) == 1 and not kwargs and super().accepts(*args)
