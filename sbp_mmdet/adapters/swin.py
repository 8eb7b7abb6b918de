"""Swin Transformer, mmdet's and mmpretrain's, which name their submodules alike."""

import torch
from torch import Tensor, nn

from ..presets import Settings
from .base import Block, Lean, adapter
from .bindings import NormLinear, PatchNorm, Windows, ffn_part
from .convnext import _Norm

__all__ = ['SwinBlock']


@adapter('mmdet.models.backbones.swin.SwinBlock', 'mmpretrain.models.backbones.swin_transformer.SwinBlock')
class SwinBlock(Block):
    """Window attention, which is exact, then the channel MLP, which is thinned."""

    rounds_up = True

    def parts(self):
        return dict(attention=Windows(self.norm1, self.attn), mlp=ffn_part(self.norm2, self.ffn))

    def lean_forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        attention, mlp = self.parts().items()
        return self.run(*mlp, self.run(*attention, x, size=hw_shape))

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        found = {
            (i, 'downsample'): (stage.downsample, _PatchMerging)
            for i, stage in enumerate(backbone.stages[:-1], 1)
            if stage.downsample and stage.downsample.norm
        }
        if backbone.patch_embed.norm:
            found['patch_embed',] = (backbone.patch_embed, _PatchEmbed)
        return found | {(name,): (m, _Norm) for name, m in backbone.named_children() if name.startswith('norm')}


class _PatchMerging(Lean):
    """Layer norm and linear layer on patches of 2x2 positions; a kept position is a kept patch (section 3.2.2)."""

    def parts(self):
        return dict(patches=NormLinear(self.norm, self.reduction))

    def lean_forward(self, x: Tensor, input_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        patches = _padded(self, x.transpose(1, 2).unflatten(2, input_size))
        size = _windows_in(self.sampler, patches.shape[2:])
        return super().lean_forward(self.sampler(patches).transpose(1, 2)), size

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        if getattr(module, 'use_post_norm', False):
            return 'its norm stands behind the linear layer'
        return super().refusal(module, settings)


class _PatchEmbed(Lean):
    samples = False

    def parts(self):
        return dict(patches=PatchNorm(self.projection, self.norm, channels_last=True))

    def lean_forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        out = super().lean_forward(_padded(self, x))
        return out.flatten(2).transpose(1, 2), tuple(out.shape[2:])


def _padded(module, x):
    padding = getattr(module, 'adap_padding', getattr(module, 'adaptive_padding', None))
    return padding(x) if padding else x


def _windows_in(unfold: nn.Unfold, size: torch.Size) -> tuple[int, int]:
    """(height, width) of what ``nn.Unfold`` makes of a map."""

    def along(i, length):
        side = [n if isinstance(n, int) else n[i] for n in (unfold.kernel_size, unfold.stride)]
        more = [n if isinstance(n, int) else n[i] for n in (unfold.padding, unfold.dilation)]
        return (length + 2 * more[0] - more[1] * (side[0] - 1) - 1) // side[1] + 1

    return tuple(along(i, length) for i, length in enumerate(size))
