"""Parts of a forward pass: the modules of an operation, by name, and how they go into it."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..ops.attention import AttentionSettings, AttentionTensors, attention
from ..ops.channel_mlp import MLPSettings, MLPTensors, channel_mlp
from ..ops.channel_mlp_grn import GRNSettings, GRNTensors, grn_mlp
from ..ops.common.autograd_function import Form
from ..ops.common.precision import autocast_dtype
from ..ops.common.rerun_conv import convolve
from ..ops.downsample import NormLinearSettings, NormLinearTensors, norm_linear
from ..ops.layer_norm import NormSettings, NormTensors, layer_norm
from ..ops.window_attention import WindowSettings, WindowTensors, window_attention
from ..stochastic_backprop.masks import Positions

__all__ = ['Attention', 'MLP', 'Norm', 'NormLinear', 'Part', 'PatchNorm', 'Unknown', 'Windows', 'ffn_part']


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Base of parts. Call one with a form, the input and what else the operation takes."""

    drop = None  # stochastic depth
    gamma = None  # layer scale
    thinned = False  # sends gradients from kept positions
    by_heads = False  # may drop attention heads

    def __call__(self, form: Form, x: Tensor, **options) -> Tensor:
        raise NotImplementedError

    def refusal(self, form: Form) -> str | None:
        """Why the operation cannot stand in for these modules; None: it can."""
        return None

    def length(self, x: Tensor) -> int:
        """Positions of the output for a map (N, C, H, W) or tokens (N, L, C)."""
        return x.shape[1] if x.dim() == 3 else x.shape[2] * x.shape[3]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all modules."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, nn.Parameter):
                yield value
            elif isinstance(value, nn.Module):
                yield from value.parameters()


@dataclasses.dataclass(frozen=True, eq=False)
class MLP(Part):
    """``x + drop(gamma * down(act(grn(up(norm(conv(x)))))))``: the channel MLP with its residual connection.

    Attributes:
        norm (nn.LayerNorm): Over the channels.
        up, down (nn.Linear | nn.Conv2d): Linear layers, or 1x1 convolutions.
        act (nn.Module): Activation; GELU, unless the form is the reference.
        gamma (Tensor | None): Layer scale. Default: None.
        drop (nn.Module | None): Stochastic depth. Default: None.
        conv (nn.Conv2d | None): Convolution in front of the norm. Default: None.
        grn (nn.Module | None): Global response normalisation of ConvNeXt V2. Default: None.
    """

    norm: nn.LayerNorm
    up: nn.Module
    act: nn.Module
    down: nn.Module
    gamma: Tensor | None = None
    drop: nn.Module | None = None
    conv: nn.Conv2d | None = None
    grn: nn.Module | None = None
    thinned = True

    def __call__(self, form: Form, x: Tensor, positions: Positions | None = None, factor: Tensor | None = None):
        shortcut, conv = x, None
        if self.conv is not None:
            # Cast here, and not by autocast inside the convolution, so that what the convolution saves can be shared.
            x, conv = convolve(self.conv, x.to(autocast_dtype(x) or x.dtype), form.storage)
            # x-hat of some positions is less than the time that the convolution takes to run again.
            conv = conv if positions is None else None
        norm, first, second = (
            (m.weight if m is self.norm else m.weight.flatten(1), m.bias) for m in (self.norm, self.up, self.down)
        )
        eps, approximate = self.norm.eps, getattr(self.act, 'approximate', 'none')
        if self.grn is not None:
            grn = (self.grn.gamma, self.grn.beta)
            tensors = GRNTensors(x, shortcut, *norm, *first, *grn, *second, self.gamma, factor, conv)
            return grn_mlp(GRNSettings(form, eps, self.grn.eps, approximate), tensors)
        activation = self.act if form.implementation == 'reference' else None
        settings = MLPSettings(form, eps, approximate, activation)
        tensors = MLPTensors(x, shortcut, *norm, *first, *second, self.gamma, factor, positions, conv)
        return channel_mlp(settings, tensors)

    def refusal(self, form: Form) -> str | None:
        if not isinstance(self.norm, nn.LayerNorm):
            return f'its norm is a {type(self.norm).__name__}, and layer norm is needed'
        if self.grn is not None and form.implementation == 'reference':
            return 'the reference form has no GRN'
        if form.implementation == 'fused' and not isinstance(self.act, nn.GELU):
            return f'its activation is {type(self.act).__name__}, and GELU is needed'
        return None


def ffn_part(norm: nn.Module, ffn: nn.Module) -> Part:
    """The channel MLP of a pre-norm block with mmcv's or mmpretrain's ``FFN``.

    Args:
        norm (nn.Module): In front of it.
        ffn (nn.Module): The ``FFN``.
    """
    layers = getattr(ffn, 'layers', ())
    if len(layers) != 3 or not ffn.add_identity:
        return Unknown('its FFN does not consist of two linear layers and a residual connection')
    if any(m.p for m in ffn.modules() if isinstance(m, nn.Dropout)):
        return Unknown('its FFN has dropout (drop_rate); set it to 0')
    gamma = getattr(ffn.gamma2, 'weight', getattr(ffn.gamma2, 'scale', None))
    if gamma is None and not isinstance(ffn.gamma2, nn.Identity):
        return Unknown(f'its FFN scales by {type(ffn.gamma2).__name__}')
    return MLP(norm, layers[0][0], layers[0][1], layers[1], gamma, ffn.dropout_layer)


@dataclasses.dataclass(frozen=True, eq=False)
class Unknown(Part):
    """What no operation stands in for.

    Attributes:
        reason (str): Why.
    """

    reason: str

    def refusal(self, form: Form) -> str | None:
        return self.reason


@dataclasses.dataclass(frozen=True, eq=False)
class Attention(Part):
    """``x + drop(gamma * proj(attention(qkv(norm(x)))))`` on all tokens.

    Attributes:
        norm (nn.LayerNorm): Over the channels.
        qkv, proj (nn.Linear): Linear layers.
        num_heads (int): Heads.
        gamma (Tensor | None): Layer scale. Default: None.
        drop (nn.Module | None): Stochastic depth. Default: None.
    """

    norm: nn.LayerNorm
    qkv: nn.Linear
    proj: nn.Linear
    num_heads: int
    gamma: Tensor | None = None
    drop: nn.Module | None = None
    thinned = True
    by_heads = True

    def __call__(
        self,
        form: Form,
        x: Tensor,
        positions: Positions | None = None,
        factor: Tensor | None = None,
        mode: str = 'qkv',
        heads: Tensor | None = None,
    ):
        layers = (m for module in (self.norm, self.qkv, self.proj) for m in (module.weight, module.bias))
        settings = AttentionSettings(form, self.num_heads, mode, self.norm.eps)
        return attention(settings, AttentionTensors(x, *layers, self.gamma, factor, positions, heads))

    def refusal(self, form: Form) -> str | None:
        if not isinstance(self.norm, nn.LayerNorm):
            return f'its norm is a {type(self.norm).__name__}, and layer norm is needed'
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Windows(Part):
    """``x + drop(attn(norm(x)))`` in windows of a map, with Swin's position bias; exact.

    Attributes:
        norm (nn.LayerNorm): Over the channels.
        attn (nn.Module): mmdet's or mmpretrain's shifted-window attention.
    """

    norm: nn.LayerNorm
    attn: nn.Module

    @property
    def drop(self):
        return self.attn.drop

    def __call__(self, form: Form, x: Tensor, size: tuple[int, int], factor: Tensor | None = None):
        if form.implementation == 'reference':
            return self._reference(x, size, factor)
        attn, msa = self.attn, self.attn.w_msa
        shift = attn.shift_size
        if min(size) == attn.window_size and not getattr(attn, 'pad_small_map', True):
            shift = 0  # mmpretrain does not shift a map of one window
        settings = WindowSettings(form, msa.num_heads, attn.window_size, shift, tuple(size), msa.scale, self.norm.eps)
        layers = (self.norm.weight, self.norm.bias, msa.qkv.weight, msa.qkv.bias, msa.relative_position_bias_table)
        tensors = WindowTensors(x, *layers, msa.proj.weight, msa.proj.bias, msa.relative_position_index, factor)
        return window_attention(settings, tensors)

    def _reference(self, x, size, factor):
        attn, drop = self.attn, self.drop
        attn.drop = nn.Identity()  # the factor stands for it
        try:
            out = attn(self.norm(x), size)
        finally:
            attn.drop = drop
        return x + (out if factor is None else out * factor.to(out.dtype)[:, None, None])

    def refusal(self, form: Form) -> str | None:
        msa = self.attn.w_msa
        if not hasattr(msa, 'relative_position_bias_table') or not hasattr(msa, 'scale'):
            return f'its attention is a {type(msa).__name__}, and that of the first Swin is needed'
        if not isinstance(self.norm, nn.LayerNorm):
            return f'its norm is a {type(self.norm).__name__}, and layer norm is needed'
        if msa.attn_drop.p or msa.proj_drop.p:
            return 'its attention has dropout (drop_rate, attn_drop_rate); set them to 0'
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class NormLinear(Part):
    """``linear(norm(x))`` on tokens, or on the 2x2 patches of a map (section 3.2.2, the case s >= k).

    Attributes:
        norm (nn.LayerNorm): Over the channels.
        linear (nn.Linear | nn.Conv2d): Linear layer, or 2x2 convolution of stride 2.
    """

    norm: nn.LayerNorm
    linear: nn.Module
    thinned = True

    def __call__(self, form: Form, x: Tensor, positions: Positions | None = None):
        layers = (self.norm.weight, self.norm.bias, self.linear.weight, self.linear.bias)
        settings = NormLinearSettings(form, self.norm.eps)
        return norm_linear(settings, NormLinearTensors(x, *layers, positions))

    def length(self, x: Tensor) -> int:
        return x.shape[1] if x.dim() == 3 else (x.shape[2] // 2) * (x.shape[3] // 2)

    def refusal(self, form: Form) -> str | None:
        if not isinstance(self.norm, nn.LayerNorm):
            return f'its norm is a {type(self.norm).__name__}, and layer norm is needed'
        conv = self.linear
        if isinstance(conv, nn.Conv2d) and (conv.kernel_size, conv.stride, conv.padding) != ((2, 2), (2, 2), (0, 0)):
            return 'it is no 2x2 convolution of stride 2 behind a norm'
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Norm(Part):
    """Layer norm over the channels of a map (N, C, H, W) or of tokens (N, L, C)."""

    norm: nn.LayerNorm

    def __call__(self, form: Form, x: Tensor):
        settings = NormSettings(form, self.norm.eps)
        tokens = x.dim() == 3
        x = x.transpose(1, 2).unsqueeze(3) if tokens else x  # a map of one column
        out = layer_norm(settings, NormTensors(x, self.norm.weight, self.norm.bias))
        return out.squeeze(3).transpose(1, 2) if tokens else out

    def refusal(self, form: Form) -> str | None:
        return None if isinstance(self.norm, nn.LayerNorm) else f'it is a {type(self.norm).__name__}'


@dataclasses.dataclass(frozen=True, eq=False)
class PatchNorm(Part):
    """``norm(conv(x))`` for the patches of an image: the convolution runs again, and the image is all that is stored.

    Attributes:
        conv (nn.Conv2d): The patch embedding.
        norm (nn.LayerNorm): Over the channels.
        channels_last (bool): Lay out the map so that its tokens need no copy. Default: False.
    """

    conv: nn.Conv2d
    norm: nn.LayerNorm
    channels_last: bool = False

    def __call__(self, form: Form, x: Tensor):
        out, again = convolve(self.conv, x.to(autocast_dtype(x) or x.dtype))
        if self.channels_last:
            out = out.contiguous(memory_format=torch.channels_last)
        settings = NormSettings(form, self.norm.eps)
        return layer_norm(settings, NormTensors(out, self.norm.weight, self.norm.bias, again))

    def refusal(self, form: Form) -> str | None:
        return None if isinstance(self.norm, nn.LayerNorm) else f'its norm is a {type(self.norm).__name__}'
