"""The parts of a Swin Transformer with SBP, to be mixed into the classes of mmdet's and mmpretrain's.

- The channel MLP of a block sends gradients from the kept positions, and so does the patch merging.
- The attention is exact. Fused, it stores its normalised input only (:mod:`sbp_mmdet.ops.windows`).
- Fused, the patch embedding and the output norms store what is normalised, in the precision of the matrix products.

Both toolboxes name the submodules alike: ``norm1``, ``attn.w_msa``, ``attn.drop``, ``norm2``, ``ffn.layers``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..settings import SBPSettings
from .thin import Thin

__all__ = ['ThinPatchEmbed', 'ThinPatchMerging', 'ThinSwinBlock', 'ThinTokenNorm', 'ffn_refusal', 'thin_ffn']


def ffn_refusal(ffn: nn.Module, settings: SBPSettings) -> str | None:
    """Why mmcv's FFN stays as it is; None: :func:`thin_ffn` can stand in for it."""
    layers = getattr(ffn, 'layers', ())
    if len(layers) != 3 or not ffn.add_identity:
        return 'its FFN does not consist of two linear layers and a residual connection'
    if any(m.p for m in ffn.modules() if isinstance(m, nn.Dropout)):
        return 'its FFN has dropout (drop_rate); set it to 0'
    if not isinstance(layers[0][1], nn.GELU):
        return f'its FFN has {type(layers[0][1]).__name__} for an activation, and GELU is needed'
    if (
        not isinstance(ffn.gamma2, nn.Identity)
        and not hasattr(ffn.gamma2, 'weight')
        and not hasattr(ffn.gamma2, 'scale')
    ):
        return f'its FFN scales by {type(ffn.gamma2).__name__}'
    return None


def thin_ffn(block: Thin, ffn: nn.Module, norm: nn.LayerNorm, x: Tensor, prefix: int = 0) -> Tensor:
    """``x + FFN(LN(x))`` with SBP, for mmcv's FFN.

    Args:
        block (Thin): Whose positions it has.
        ffn (nn.Module): mmcv's ``FFN``.
        norm (nn.LayerNorm): In front of it.
        x (Tensor): Tokens, shape (N, L, C).
        prefix (int): Tokens in front of those of the map, which are always kept. Default: 0.

    Returns:
        Tensor: Shape (N, L, C).
    """
    (first, act, _), second = ffn.layers[0], ffn.layers[1]
    gamma = getattr(ffn.gamma2, 'weight', getattr(ffn.gamma2, 'scale', None))
    settings = mlp_settings(block.sbp_settings, norm.eps, act)
    positions = block.positions()
    block.check_size(positions, x.shape[1] - prefix)
    if positions is not None:
        positions = ops.token_positions(positions, prefix)
    layers = (norm.weight, norm.bias, first.weight, first.bias, second.weight, second.bias)

    def run(x, factor):
        return ops.channel_mlp(settings, ops.MLPTensors(x, x, *layers, gamma, factor, positions))

    return block.on_branch(run, x, ffn.dropout_layer, [*norm.parameters(), *ffn.parameters()], promote=gamma)


def mlp_settings(settings: SBPSettings, eps: float, act: nn.GELU) -> ops.MLPSettings:
    """Of the channel MLP of a transformer's block."""
    if settings.implementation == 'reference':
        return ops.MLPSettings(eps, act.approximate, dropped=settings.dropped, implementation='reference')
    options = (bool(settings.recompute), settings.storage, settings.dropped)
    return ops.MLPSettings(eps, act.approximate, *options, compile=settings.compile)


class ThinSwinBlock(Thin):
    """A block: window attention, then the channel MLP. With ``implementation='reference'`` the attention is plain."""

    rounds_up = True
    absent = ()

    def thin_forward(self, x, hw_shape):
        x = self._attention(x, hw_shape)
        return thin_ffn(self, self.ffn, self.norm2, x)

    def _attention(self, x, hw_shape):
        if self.sbp_settings.implementation == 'reference':
            return self._plain_attention(x, hw_shape)
        attn, msa = self.attn, self.attn.w_msa
        shift = attn.shift_size
        if min(hw_shape) == attn.window_size and not getattr(attn, 'pad_small_map', True):
            shift = 0  # mmpretrain does not shift a map of one window
        settings = ops.WindowSettings(
            msa.num_heads,
            attn.window_size,
            shift,
            tuple(hw_shape),
            msa.scale,
            self.norm1.eps,
            self.sbp_settings.storage,
            self.sbp_settings.compile,
        )
        parameters = (
            *(self.norm1.weight, self.norm1.bias, msa.qkv.weight, msa.qkv.bias, msa.relative_position_bias_table),
            *(msa.proj.weight, msa.proj.bias),
        )

        def run(x, factor):
            return ops.window_attention(
                settings, ops.WindowTensors(x, *parameters, msa.relative_position_index, factor)
            )

        parameters_of = [*self.norm1.parameters(), *attn.parameters()]
        return self.on_branch(run, x, attn.drop, parameters_of, ('attention',))

    def _plain_attention(self, x, hw_shape):
        drop = self.attn.drop

        def run(x, factor):
            self.attn.drop = nn.Identity()
            try:
                out = self.attn(self.norm1(x), hw_shape)
            finally:
                self.attn.drop = drop
            return x + (out if factor is None else out * factor.to(out.dtype)[:, None, None])

        return self.on_branch(run, x, drop, [*self.norm1.parameters(), *self.attn.parameters()], ('attention',))

    def drop_paths(self) -> dict[tuple, nn.Module]:
        """See :class:`.thin.Thin`."""
        return {('attention',): self.attn.drop, (): self.ffn.dropout_layer}

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """See :class:`.thin.Thin`."""
        msa = layer.attn.w_msa
        if not hasattr(msa, 'relative_position_bias_table') or not hasattr(msa, 'scale'):
            return f'its attention is a {type(msa).__name__}, and that of the first Swin is needed'
        for norm in (layer.norm1, layer.norm2):
            if not isinstance(norm, nn.LayerNorm):
                return f'its norm is a {type(norm).__name__}, and layer norm is needed'
        if msa.attn_drop.p or msa.proj_drop.p:
            return 'its attention has dropout (drop_rate, attn_drop_rate); set them to 0'
        return ffn_refusal(layer.ffn, settings)

    @classmethod
    def others(cls, backbone: nn.Module, settings: SBPSettings) -> dict[tuple, tuple[nn.Module, type[Thin]]]:
        """See :class:`.thin.Thin`."""
        found = {
            (i, 'downsample'): (stage.downsample, ThinPatchMerging)
            for i, stage in enumerate(backbone.stages[:-1], 1)
            if stage.downsample and isinstance(stage.downsample.norm, nn.LayerNorm)
        }
        if settings.implementation == 'reference':
            return found
        if isinstance(backbone.patch_embed.norm, nn.LayerNorm):
            found['patch_embed',] = (backbone.patch_embed, ThinPatchEmbed)
        norms = {name: m for name, m in backbone.named_children() if name.startswith('norm')}
        return found | {(n,): (m, ThinTokenNorm) for n, m in norms.items() if isinstance(m, nn.LayerNorm)}


class ThinPatchMerging(Thin):
    """Layer norm and linear layer on patches of 2x2 positions; a kept position is a kept patch (section 3.2.2)."""

    def thin_forward(self, x, input_size):
        height, width = input_size
        patches = x.transpose(1, 2).unflatten(2, (height, width))
        padding = getattr(self, 'adap_padding', getattr(self, 'adaptive_padding', None))
        patches = padding(patches) if padding else patches
        size = _windows_in(self.sampler, patches.shape[2:])
        patches = self.sampler(patches).transpose(1, 2)
        positions = self.positions()
        self.check_size(positions, patches.shape[1])
        own = self.sbp_settings
        choices = (own.storage, own.dropped, own.implementation)
        options = ops.NormLinearSettings(self.norm.eps, *choices, compile=own.compile)
        layers = (self.norm.weight, self.norm.bias, self.reduction.weight, self.reduction.bias)
        return ops.norm_linear(options, ops.NormLinearTensors(patches, *layers, positions)), size

    @classmethod
    def refusal(cls, layer: nn.Module, settings: SBPSettings) -> str | None:
        """See :class:`.thin.Thin`."""
        if getattr(layer, 'use_post_norm', False):
            return 'its norm stands behind the linear layer'
        return None


def _windows_in(unfold, size):
    """(height, width) of what ``nn.Unfold`` makes of a map."""

    def along(i, length):
        side = [n if isinstance(n, int) else n[i] for n in (unfold.kernel_size, unfold.stride)]
        more = [n if isinstance(n, int) else n[i] for n in (unfold.padding, unfold.dilation)]
        return (length + 2 * more[0] - more[1] * (side[0] - 1) - 1) // side[1] + 1

    return tuple(along(i, length) for i, length in enumerate(size))


class ThinPatchEmbed(Thin):
    """Patch convolution and norm; with ``recompute`` the convolution runs again and the image is all that is stored."""

    def thin_forward(self, x):
        padding = getattr(self, 'adap_padding', getattr(self, 'adaptive_padding', None))
        x = padding(x) if padding else x
        out, again = ops.convolve(self.projection, x.to(ops.autocast_dtype(x) or x.dtype))
        # Channels last: the norm's output is then tokens without another copy.
        out = out.contiguous(memory_format=torch.channels_last)
        own = self.sbp_settings
        settings = ops.NormSettings(self.norm.eps, own.storage, compile=own.compile)
        conv = again if own.recompute else None
        out = ops.layer_norm(settings, ops.NormTensors(out, self.norm.weight, self.norm.bias, conv))
        return out.flatten(2).transpose(1, 2), tuple(out.shape[2:])


class ThinTokenNorm(Thin):
    """Layer norm of tokens (N, L, C)."""

    def thin_forward(self, x):
        own = self.sbp_settings
        settings = ops.NormSettings(self.eps, own.storage, compile=own.compile)
        if x.dim() != 3 or self.weight is None or self.bias is None:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        column = x.transpose(1, 2).unsqueeze(3)  # a map of one column
        return ops.layer_norm(settings, ops.NormTensors(column, self.weight, self.bias)).squeeze(3).transpose(1, 2)
