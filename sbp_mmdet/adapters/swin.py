"""Swin Transformer of mmdet and of mmpretrain, whose submodules have the same names."""

import dataclasses
import functools

import torch
from torch import Tensor, nn

from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.common.stochastic_depth import factor_for
from ..ops.window_attention import WindowSettings, WindowTensors, window_attention
from ..presets import Settings
from .base import LeanBlock, LeanModule, adapter
from .bindings import Binding, NormLinearBinding, PatchNormBinding, mlp_of_ffn
from .convnext import LeanLayerNorm
from .parameters import CachedSettings, weights_and_biases

__all__ = ['LeanSwinBlock', 'WindowAttentionBinding']


@dataclasses.dataclass(frozen=True, eq=False)
class WindowAttentionBinding(Binding):
    """``x + drop(attn(norm(x)))`` in windows of a map, with Swin's position bias and exact gradients.

    Attributes:
        norm (nn.LayerNorm): Layer norm over the channels.
        attn (nn.Module): Shifted-window attention of mmdet or mmpretrain.
    """

    norm: nn.LayerNorm
    attn: nn.Module

    @property
    def drop(self):
        """Stochastic depth."""
        return self.attn.drop

    def __call__(self, form: Form, x: Tensor, size: tuple[int, int], factor: Tensor | float | None = None):
        """Run the operation on tokens (N, H * W, C) of a map of ``size`` (H, W)."""
        if form.implementation == 'reference':
            return self._reference(x, size, factor)
        layers, msa, shift, settings = self._structure
        if min(size) == self.attn.window_size and not getattr(self.attn, 'pad_small_map', True):
            shift = 0  # mmpretrain does not shift a map of one window
        settings = settings(form, shift, tuple(size), autocast_dtype(x) or x.dtype)
        *layers, proj_weight, proj_bias = weights_and_biases(layers)
        table, index = msa.relative_position_bias_table, msa.relative_position_index
        return window_attention(settings, WindowTensors(x, *layers, table, proj_weight, proj_bias, index, factor))

    @functools.cached_property
    def _structure(self):
        """Layers in the order of :class:`.WindowTensors`, the attention in a window, the shift, and cached settings."""
        attn, msa = self.attn, self.attn.w_msa
        fixed = msa.num_heads, attn.window_size, msa.scale, self.norm.eps
        settings = CachedSettings(functools.partial(_settings_of_attention, *fixed))
        return (self.norm, msa.qkv, msa.proj), msa, attn.shift_size, settings

    def _reference(self, x, size, factor):
        attn, drop = self.attn, self.drop
        if factor is None:
            return x + attn(self.norm(x), size)
        attn.drop = nn.Identity()  # the factor replaces it
        try:
            out = attn(self.norm(x), size)
        finally:
            attn.drop = drop
        return x + (out * factor_for(factor, 3)).to(out.dtype)

    def bypasses(self, form: Form):
        """See :meth:`Binding.bypasses`. The reference form calls all modules except stochastic depth."""
        yield self.drop, 'stochastic depth'
        if form.implementation == 'fused':
            yield self.norm, 'layer norm'
            yield self.attn, 'shifted-window attention'
            msa = getattr(self.attn, 'w_msa', None)
            yield msa, 'window attention'
            names = dict(qkv='linear', proj='linear with bias', softmax='softmax')
            names |= dict.fromkeys(('attn_drop', 'proj_drop'), 'dropout of rate 0')
            yield from ((getattr(msa, name), role) for name, role in names.items() if hasattr(msa, name))


def _settings_of_attention(heads, window, scale, eps, form, shift, size, dtype):
    """Return the settings of window attention; those after ``eps`` are read in each step."""
    return WindowSettings(form, heads, window, shift, size, scale, eps, dtype=dtype)


@adapter('mmdet.models.backbones.swin.SwinBlock', 'mmpretrain.models.backbones.swin_transformer.SwinBlock')
class LeanSwinBlock(LeanBlock):
    """Swin block: window attention with exact gradients, then the channel MLP, which is thinned."""

    dims = 3
    rounds_up = True
    separable = True
    is_sequence = True

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(attention=WindowAttentionBinding(self.norm1, self.attn), mlp=mlp_of_ffn(self.norm2, self.ffn))

    def lean_forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Run the block on tokens (N, H * W, C) of a map of ``hw_shape`` (H, W)."""
        if self.binding('attention'):
            x = self.run('attention', x, size=hw_shape)
        else:
            x = x + self.attn(self.norm1(x), hw_shape)
        return self.run('mlp', x) if self.binding('mlp') else self.ffn(self.norm2(x), identity=x)

    @classmethod
    def others(cls, backbone: nn.Module, settings: Settings) -> dict:
        """See :meth:`.LeanBlock.others`."""
        stages, embed = getattr(backbone, 'stages', None) or (), getattr(backbone, 'patch_embed', None)
        halved = [getattr(stage, 'downsample', None) for stage in [*stages][:-1]]
        others = {
            (i, 'downsample'): (merging, _LeanPatchMerging)
            for i, merging in enumerate(halved, 1)
            if getattr(merging, 'norm', None)
        }
        if getattr(embed, 'norm', None):
            others['patch_embed',] = (embed, _LeanPatchEmbed)
        norms = {(name,): m for name, m in backbone.named_children() if name.startswith('norm')}
        return others | {key: (norm, LeanLayerNorm) for key, norm in norms.items()}


def _find_stock(name):
    modules = ('mmdet.models.layers.transformer.utils', 'mmcv.cnn.bricks.transformer', 'mmpretrain.models.utils.embed')
    return tuple(f'{module}.{name}' for module in modules)


class _LeanPatchMerging(LeanModule):
    """Patch merging: layer norm and linear layer on 2x2 patches. A kept position is a kept patch (section 3.2.2)."""

    dims = 3
    stock = _find_stock('PatchMerging')

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(patches=NormLinearBinding(self.norm, self.reduction))

    def bypasses(self):
        """See :meth:`.LeanModule.bypasses`. The sampler is called, but the output's size follows from its settings."""
        yield self.sampler, 'patches'

    def lean_forward(self, x: Tensor, input_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Return tokens (N, L / 4, 2 C) and their map's size, given tokens (N, L, C) of a map of ``input_size``."""
        patches = _padded(self, x.transpose(1, 2).unflatten(2, input_size))
        size = _windows_in(self.sampler, patches.shape[2:])
        return self.run('patches', self.sampler(patches).transpose(1, 2)), size

    @classmethod
    def refusal(cls, module: nn.Module, settings: Settings) -> str | None:
        """See :meth:`.LeanModule.refusal`."""
        return 'its norm follows the linear layer' if getattr(module, 'use_post_norm', False) else None


class _LeanPatchEmbed(LeanModule):
    """Patch embedding: convolution and layer norm."""

    dims = 4
    samples = False
    stock = _find_stock('PatchEmbed')

    def bindings(self):
        """See :meth:`.LeanModule.bindings`."""
        return dict(patches=PatchNormBinding(self.projection, self.norm, channels_last=True))

    def lean_forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return tokens (N, L, C) and the size of their map, given images (N, 3, H, W)."""
        out = self.run('patches', _padded(self, x))
        return out.flatten(2).transpose(1, 2), tuple(out.shape[2:])


def _padded(module, x):
    padding = getattr(module, 'adap_padding', getattr(module, 'adaptive_padding', None))
    return padding(x) if padding else x


def _windows_in(unfold: nn.Unfold, size: torch.Size) -> tuple[int, int]:
    """Return the (height, width) of the map of patches that ``nn.Unfold`` makes of a map of ``size``."""

    def along(i, length):
        side = [n if isinstance(n, int) else n[i] for n in (unfold.kernel_size, unfold.stride)]
        more = [n if isinstance(n, int) else n[i] for n in (unfold.padding, unfold.dilation)]
        return (length + 2 * more[0] - more[1] * (side[0] - 1) - 1) // side[1] + 1

    return tuple(along(i, length) for i, length in enumerate(size))
