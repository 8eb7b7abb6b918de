"""The parts of ``SBPViT``: patch embedding, block and the scales for a feature pyramid.

Names and shapes of the parameters are those of timm's ``VisionTransformer``. How the block differs from timm's: it
takes the kept positions, heads and images as arguments, so that checkpointing replays the same ones, and residual
connection, layer scale and stochastic depth are part of its two operations. There is no dropout.
"""

import dataclasses

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import ops
from ..masks import Positions
from ..ops.attention import AttentionSettings, AttentionTensors, attention
from ..ops.images import on_images
from ..settings import SBPSettings
from .convnext_layers import LayerNorm2d

__all__ = ['LayerScale', 'PatchEmbed', 'ViTBlock', 'scale_of']

EPS = 1e-6  # of all layer norms, as in timm's ViT, DeiT, MAE and DINOv2


class PatchEmbed(nn.Module):
    """Patches to tokens.

    Args:
        in_channels (int): Channels of the image.
        channels (int): C.
        patch_size (int): Side of a patch, in pixels.
    """

    def __init__(self, in_channels: int, channels: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, channels, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C', H, W) to (N, C, ceil(H / patch_size), ceil(W / patch_size)); the last patches are filled up with
        zeros."""
        right, below = -x.shape[3] % self.patch_size, -x.shape[2] % self.patch_size
        # Where there is nothing to fill up, padding would copy the image all the same, and store the copy.
        return self.proj(F.pad(x, (0, right, 0, below)) if right or below else x)


class LayerScale(nn.Module):
    """Layer scale's parameter; the block's operations multiply by it.

    Args:
        channels (int): C.
        value (float): To begin with.
    """

    def __init__(self, channels: int, value: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), value))


class _Holder(nn.Module):
    """Modules by name. They hold parameters for an operation of the block."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class ViTBlock(BaseModule):
    """Attention, then the MLP, each behind a layer norm and with a residual connection.

    Args:
        channels (int): C.
        num_heads (int): Attention heads.
        hidden (int): Width of the MLP.
        qkv_bias (bool): Whether queries, keys and values have a bias.
        layer_scale_init_value (float): Initial layer scale; 0 means none.
        drop_path_rate (float): Stochastic depth rate of each of the two.
        with_cp (bool): Checkpoint the block.
        sbp (SBPSettings | None): How both operations run in training; None: plain.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        hidden: int,
        *,
        qkv_bias: bool,
        layer_scale_init_value: float,
        drop_path_rate: float,
        with_cp: bool,
        sbp: SBPSettings | None,
    ):
        super().__init__()

        def scale():
            return LayerScale(channels, layer_scale_init_value) if layer_scale_init_value else nn.Identity()

        self.norm1 = nn.LayerNorm(channels, eps=EPS)
        self.attn = _Holder(qkv=nn.Linear(channels, 3 * channels, bias=qkv_bias), proj=nn.Linear(channels, channels))
        self.ls1 = scale()
        self.norm2 = nn.LayerNorm(channels, eps=EPS)
        self.mlp = _Holder(fc1=nn.Linear(channels, hidden), fc2=nn.Linear(hidden, channels))
        self.ls2 = scale()
        self.num_heads, self.rate, self.with_cp = num_heads, drop_path_rate, with_cp
        self._plain_mlp = ops.MLPSettings(EPS, implementation='reference')
        self._mlp = self._plain_mlp
        self._attention = None
        if sbp is not None:
            self._attention = _attention_settings(num_heads, sbp)
        if sbp is not None and sbp.implementation == 'fused':
            options = dict(recompute=bool(sbp.recompute), storage=sbp.storage, dropped=sbp.dropped, compile=sbp.compile)
            self._mlp = ops.MLPSettings(EPS, **options)

    @property
    def drop_path_rate(self) -> float:
        """Stochastic depth rate, 0 outside of training."""
        return self.rate if self.training else 0.0

    def forward(
        self,
        x: Tensor,
        positions: Positions | None = None,
        heads: Tensor | None = None,
        images: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        """Runs the block on tokens.

        Args:
            x (Tensor): Shape (N, L, C).
            positions (Positions | None): Tokens that send gradients through the block; None: all. Default: None.
            heads (Tensor | None): Attention heads that do so, in place of tokens, for ``attention='head'``. None: all.
                Default: None.
            images (tuple): For attention and MLP: bool, shape (N,), on the CPU, the images that stochastic depth leaves
                it to; the others are not computed. None: the block draws them, computes all and multiplies.

        Returns:
            Tensor: Shape (N, L, C).
        """
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, positions, heads, images, use_reentrant=False)
        return self._forward(x, positions, heads, images)

    def _forward(self, x, positions, heads, images):
        def attend(x, factor, positions):
            return self.attend(x, positions, heads, factor)

        def channel_mlp(x, factor, positions):
            return self.channel_mlp(x, positions, factor)

        x = self._on(images[0], attend, x, positions, (self.norm1, self.attn, self.ls1))
        return self._on(images[1], channel_mlp, x, positions, (self.norm2, self.mlp, self.ls2))

    def _on(self, images, branch, x, positions, modules):
        """The branch on the images that stochastic depth leaves it to."""
        if images is None:
            return branch(x, self._factor(x, drawn=True), positions)
        if positions is not None:
            positions = positions.of_images(images)
        parameters = [p for module in modules for p in module.parameters()]
        return on_images(lambda x: branch(x, self._factor(x, drawn=False), positions), x, images, parameters)

    def _factor(self, x, drawn):
        """Stochastic depth's factor of each image (N,), not rounded to half precision; None: nothing is dropped."""
        rate = self.drop_path_rate
        if not rate:
            return None
        factor = x.new_full((len(x),), 1 / (1 - rate), dtype=ops.accumulator(x))
        return factor * (torch.rand_like(factor) >= rate) if drawn else factor

    def attend(
        self, x: Tensor, positions: Positions | None = None, heads: Tensor | None = None, factor: Tensor | None = None
    ) -> Tensor:
        """The attention with its residual connection; arguments as of :meth:`forward`.

        Args:
            x, positions, heads: See there.
            factor (Tensor | None): Of the branch of each image, shape (N,). Default: None.

        Returns:
            Tensor: Shape (N, L, C).
        """
        norm, qkv, proj = self.norm1, self.attn.qkv, self.attn.proj
        gamma = getattr(self.ls1, 'gamma', None)
        weights = (norm.weight, norm.bias, qkv.weight, qkv.bias, proj.weight, proj.bias, gamma)
        if self._attention is None or not _active(self):
            return _plain_attention(self.num_heads, x, *weights, factor)
        thinned, exact = self._attention
        if thinned.mode == 'head':
            return attention(exact if heads is None else thinned, AttentionTensors(x, *weights, factor, heads=heads))
        settings = exact if positions is None else thinned
        return attention(settings, AttentionTensors(x, *weights, factor, positions))

    def channel_mlp(self, x: Tensor, positions: Positions | None = None, factor: Tensor | None = None) -> Tensor:
        """The MLP with its residual connection; arguments as of :meth:`attend`."""
        norm, fc1, fc2 = self.norm2, self.mlp.fc1, self.mlp.fc2
        weights = (norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, getattr(self.ls2, 'gamma', None))
        settings = self._mlp if _active(self) else self._plain_mlp
        return ops.channel_mlp(settings, ops.MLPTensors(x, x, *weights, factor, positions))


def _active(module):
    """Evaluation and passes without gradients stay plain."""
    return module.training and torch.is_grad_enabled()


def _attention_settings(num_heads, sbp):
    """Settings where something is dropped, and where nothing is.

    ``recompute='block'`` runs the attention again where this stores less: not where x-hat and output of some tokens
    are less than x-hat of all.
    """
    common = dict(num_heads=num_heads, mode=sbp.attention, storage=sbp.storage, eps=EPS, compile=sbp.compile)
    if sbp.implementation == 'reference':
        settings = AttentionSettings(**common, dropped=sbp.dropped, implementation='reference')
        return settings, settings
    least = 'attention' if sbp.recompute == 'block' else sbp.recompute
    exact = AttentionSettings(**common, recompute=least)
    dropped = 'zero' if sbp.dropped == 'zero' else 'pool'
    recompute = bool(sbp.recompute) if sbp.attention == 'qkv' else least
    return dataclasses.replace(exact, dropped=dropped, recompute=recompute), exact


def _plain_attention(num_heads, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, gamma, factor):
    y = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, EPS)
    y = F.linear(y, qkv_weight, qkv_bias).unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(*y.unbind(0)).transpose(1, 2).flatten(2)
    y = F.linear(y, proj_weight, proj_bias)
    y = y if gamma is None else y * gamma
    return x + (y if factor is None else y * factor[:, None, None].to(y.dtype))


def scale_of(index: int, channels: int, fused: bool, storage: str) -> tuple[nn.Module, int]:
    """From the map of tokens to one of four scales, as in ViTDet's simple feature pyramid.

    Args:
        index (int): 0 to 3, for strides of 1/4, 1/2, 1 and 2 patches.
        channels (int): C.
        fused (bool): See :class:`.convnext_layers.LayerNorm2d`.
        storage (str): Likewise.

    Returns:
        tuple[nn.Module, int]: The layers, and the number of channels that they put out.
    """
    if index == 0:
        layers = [
            nn.ConvTranspose2d(channels, channels // 2, 2, stride=2),
            LayerNorm2d(channels // 2, EPS, fused=fused, storage=storage),
            nn.GELU(),
            nn.ConvTranspose2d(channels // 2, channels // 4, 2, stride=2),
        ]
        return nn.Sequential(*layers), channels // 4
    if index == 1:
        return nn.Sequential(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)), channels // 2
    return (nn.Identity() if index == 2 else nn.MaxPool2d(2, ceil_mode=True)), channels
