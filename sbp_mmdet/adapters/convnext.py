"""ConvNeXt, mmpretrain's and this package's, whose submodules have the same names."""

from torch import nn

from ..presets import Settings
from .base import Block, Lean, adapter
from .bindings import MLP, Norm, NormLinear, PatchNorm

__all__ = ['ConvNeXtBlock']


@adapter('mmpretrain.models.backbones.convnext.ConvNeXtBlock', 'sbp_mmdet.models.convnext.ConvNeXtBlock')
class ConvNeXtBlock(Block):
    """Depthwise convolution, then the channel MLP, which is thinned."""

    def parts(self):
        layers = (self.norm, self.pointwise_conv1, self.act, self.pointwise_conv2)
        return dict(mlp=MLP(*layers, self.gamma, self.drop_path, self.depthwise_conv, self.grn))

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        if module.grn is not None and settings.preset.thins:
            return "GRN normalises over all positions, so none can be dropped; take preset='exact' or 'int8'"
        return super().refusal(module, settings)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        stem, *layers = backbone.downsample_layers
        found = {(i, 'downsample'): (layer, _Downsample) for i, layer in enumerate(layers, 1)}
        found['stem',] = (stem, _Stem)
        if not backbone.gap_before_final_norm:
            found |= {(name,): (m, _Norm) for name, m in backbone.named_children() if name.startswith('norm')}
        return found


class _Downsample(Lean):
    def parts(self):
        return dict(patches=NormLinear(*self))


class _Stem(Lean):
    samples = False

    def parts(self):
        return dict(patches=PatchNorm(*self))


class _Norm(Lean):
    samples = False

    def parts(self):
        return dict(norm=Norm(self))
