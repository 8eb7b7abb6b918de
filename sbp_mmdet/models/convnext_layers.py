"""The parts of ``SBPConvNeXt``: norm, block and downsampling layer.

Names and shapes of the parameters are those of mmpretrain's ``ConvNeXt``. How the block differs from mmpretrain's:

- it takes the kept positions, and the images that run it, as arguments, so that checkpointing replays the same ones;
- the channel MLP runs on tokens (..., C), whether its weights are those of linear layers or of 1x1 convolutions;
- residual connection and stochastic depth are part of the fused operation.
"""

import dataclasses

import torch
import torch.utils.checkpoint as cp
from mmcv.cnn.bricks import DropPath
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import ops
from ..masks import Positions
from ..ops.images import on_images

__all__ = ['ConvNeXtBlock', 'Downsample', 'GRN', 'LayerNorm2d', 'Stem', 'build_norm', 'compile_bodies']


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a feature map.

    Args:
        num_channels (int): C.
        eps (float): Added to the variance. Default: 1e-5.
        elementwise_affine (bool): With weight and bias. Default: True.
        fused (bool): Use :func:`sbp_mmdet.ops.layer_norm` in training. Default: False.
        storage (str): How the fused norm stores the normalised input, 'native' or 'int8'. Default: 'native'.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        fused: bool = False,
        storage: str = 'native',
    ):
        super().__init__(num_channels, eps=eps, elementwise_affine=elementwise_affine)
        self.plain = ops.NormSettings(eps, implementation='reference')
        self.settings = ops.NormSettings(eps, storage) if fused else self.plain

    def forward(self, x: Tensor, conv: ops.Conv | None = None) -> Tensor:
        """Normalises (N, C, H, W) over C.

        Args:
            x (Tensor): Shape (N, C, H, W).
            conv (Conv | None): The convolution that made ``x``, for the fused norm to run it again in the backward pass
                instead of storing what it made. Default: None.
        """
        return ops.layer_norm(_settings(self), ops.NormTensors(x, self.weight, self.bias, conv))

    def tokens(self, x: Tensor) -> Tensor:
        """Normalises (..., C) over C."""
        return super().forward(x)


def compile_bodies(model: nn.Module) -> None:
    """Compiles the bodies of the operations of all layers that this module has, see :mod:`sbp_mmdet.ops.compiled`.

    Args:
        model (nn.Module): Holds the layers.
    """
    for module in model.modules():
        if hasattr(module, 'settings'):
            module.settings = dataclasses.replace(module.settings, compile=True)


class Stem(nn.Sequential):
    """Patch convolution, then layer norm.

    Args:
        in_channels (int): Channels of the image.
        out_channels (int): C.
        patch_size (int): Kernel size and stride, in pixels.
        norm_cfg (dict): Of :func:`build_norm`.
        fused (bool): Use :func:`sbp_mmdet.ops.layer_norm` in training.
        recompute (bool | str): Run the convolution again in the backward pass. It is cheap: any level of ``recompute``.
        storage (str): How the norm stores its input, 'native' or 'int8'; the image stays as it is. Default: 'native'.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        patch_size: int,
        *,
        norm_cfg: dict,
        fused: bool,
        recompute: bool | str,
        storage: str = 'native',
    ):
        conv = nn.Conv2d(in_channels, out_channels, patch_size, stride=patch_size)
        super().__init__(conv, build_norm(norm_cfg, out_channels, fused, storage))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, C', H, W) to (N, C, H // patch_size, W // patch_size)."""
        conv, norm = self
        out, again = ops.convolve(conv, x.to(ops.autocast_dtype(x) or x.dtype))
        return norm(out, again if self.recompute else None)


class GRN(nn.Module):
    """Global response normalisation of ConvNeXt V2 on (N, L, C) or (N, H, W, C).

    Args:
        num_channels (int): C.
        eps (float): Added to the mean response. Default: 1e-6.
    """

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.gamma = nn.Parameter(torch.zeros(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scales each channel by its norm over all positions, relative to the other channels."""
        response = x.norm(p=2, dim=tuple(range(1, x.dim() - 1)), keepdim=True)
        response = response / (response.mean(dim=-1, keepdim=True) + self.eps)
        return x + self.gamma * (x * response) + self.beta


class ConvNeXtBlock(BaseModule):
    """Depthwise 7x7 convolution, then the channel MLP: LN, pointwise, GELU, pointwise, layer scale.

    Args:
        channels (int): C.
        norm_cfg (dict): Of :func:`build_norm`.
        act_cfg (dict): Activation between the pointwise layers.
        linear_pw_conv (bool): Linear layers, or 1x1 convolutions, hold the pointwise weights.
        use_grn (bool): Global response normalisation after the activation.
        drop_path_rate (float): Stochastic depth rate.
        layer_scale_init_value (float): Initial layer scale; 0 means none.
        with_cp (bool): Checkpoint the block.
        fused (bool): Use :func:`sbp_mmdet.ops.channel_mlp` in training.
        recompute (bool | str): True computes the hidden layer again in the backward pass, 'block' the depthwise
            convolution and the norm as well.
        storage (str): How the inputs of the convolution and of the channel MLP are stored, 'native' or 'int8'.
            Default: 'native'.
        dropped (str): What dropped positions send, see :class:`sbp_mmdet.ops.MLPSettings`. Default: 'zero'.
    """

    def __init__(
        self,
        channels: int,
        *,
        norm_cfg: dict,
        act_cfg: dict,
        linear_pw_conv: bool,
        use_grn: bool,
        drop_path_rate: float,
        layer_scale_init_value: float,
        with_cp: bool,
        fused: bool,
        recompute: bool | str,
        storage: str = 'native',
        dropped: str = 'zero',
    ):
        super().__init__()
        pointwise = nn.Linear if linear_pw_conv else lambda c_in, c_out: nn.Conv2d(c_in, c_out, 1)
        self.depthwise_conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = build_norm(norm_cfg, channels)
        self.pointwise_conv1 = pointwise(channels, 4 * channels)
        self.act = MODELS.build(act_cfg)
        self.grn = GRN(4 * channels) if use_grn else None
        self.pointwise_conv2 = pointwise(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), layer_scale_init_value)) if layer_scale_init_value else None
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else nn.Identity()
        self.with_cp = with_cp
        self.recompute = recompute
        self.plain = ops.MLPSettings(self.norm.eps, implementation='reference', activation=self.activate)
        if fused and not isinstance(self.act, nn.GELU):
            raise ValueError(
                f"act_cfg={act_cfg!r}: implementation='fused' knows the derivative of GELU only; "
                "use type='GELU' or sbp_cfg=dict(implementation='reference')"
            )
        if fused and use_grn:
            self.settings = ops.GRNSettings(self.norm.eps, self.grn.eps, self.act.approximate, storage)
        elif fused:
            self.settings = ops.MLPSettings(self.norm.eps, self.act.approximate, bool(recompute), storage, dropped)
        else:
            self.settings = dataclasses.replace(self.plain, dropped=dropped)

    @property
    def drop_path_rate(self) -> float:
        """Stochastic depth rate, 0 outside of training."""
        return self.drop_path.drop_prob if self.training and isinstance(self.drop_path, DropPath) else 0.0

    def forward(self, x: Tensor, positions: Positions | None = None, images: Tensor | None = None) -> Tensor:
        """Runs the block on (N, C, H, W).

        Args:
            x (Tensor): Shape (N, C, H, W).
            positions (Positions | None): Positions whose channel MLP sends gradients; None: all. They are an argument
                and not drawn in here because checkpointing runs the block twice. Default: None.
            images (Tensor | None): bool, shape (N,), on the CPU: images that stochastic depth leaves the block to; the
                others are not computed. None: the block draws them, computes all and multiplies. Default: None.
        """
        if images is None:
            return self._checkpointed(x, positions, False)
        return on_images(lambda x: self._checkpointed(x, positions, True), x, images, self.parameters())

    def _checkpointed(self, x, positions, left_out):
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, positions, left_out, use_reentrant=False)
        return self._forward(x, positions, left_out)

    def _forward(self, x, positions, left_out):
        factor = self.stochastic_depth(x, left_out)
        # Cast here, and not by autocast inside the convolution, so that what the convolution saves can be shared.
        x_cast = x.to(ops.autocast_dtype(x) or x.dtype)
        inner, conv = ops.convolve(self.depthwise_conv, x_cast, _settings(self).storage)
        return self.mlp(inner, x, positions, factor, conv if self.recompute == 'block' else None)

    def mlp(
        self,
        x: Tensor,
        shortcut: Tensor,
        positions: Positions | None = None,
        factor: Tensor | None = None,
        conv: ops.Conv | None = None,
    ) -> Tensor:
        """The block from its norm on, residual connection included.

        Args:
            x (Tensor): Output of the depthwise convolution, shape (N, C, H, W).
            shortcut (Tensor): Input of the block, shape (N, C, H, W).
            positions (Positions | None): See :meth:`forward`. Default: None.
            factor (Tensor | None): Of the branch of each image, see :meth:`stochastic_depth`. Default: None.
            conv (Conv | None): How to compute ``x`` again. Default: None.

        Returns:
            Tensor: Shape (N, C, H, W).
        """
        norm = (self.norm.weight, self.norm.bias)
        first = (self.pointwise_conv1.weight.flatten(1), self.pointwise_conv1.bias)
        second = (self.pointwise_conv2.weight.flatten(1), self.pointwise_conv2.bias)
        settings = _settings(self)
        if isinstance(settings, ops.GRNSettings):
            grn = (self.grn.gamma, self.grn.beta)
            tensors = ops.GRNTensors(x, shortcut, *norm, *first, *grn, *second, self.gamma, factor, conv)
            return ops.grn_mlp(settings, tensors)
        tensors = ops.MLPTensors(x, shortcut, *norm, *first, *second, self.gamma, factor, positions, conv)
        return ops.channel_mlp(settings, tensors)

    def activate(self, x: Tensor) -> Tensor:
        """What lies between the pointwise layers, on (N, L, 4 * C)."""
        x = self.act(x)
        return x if self.grn is None else self.grn(x)

    def stochastic_depth(self, x: Tensor, left_out: bool) -> Tensor | None:
        """The factor of the branch for each image.

        Args:
            x (Tensor): Input of the block, shape (N, C, H, W).
            left_out (bool): Dropped images are not in ``x``. False: the factor is drawn, and theirs is 0.

        Returns:
            Tensor | None: Shape (N,), not rounded to half precision; None where nothing is dropped.
        """
        rate = self.drop_path_rate
        if not rate:
            return None
        if left_out:
            return x.new_full((len(x),), 1 / (1 - rate), dtype=ops.accumulator(x))
        # The random numbers that drop_path draws for the plain branch, in its precision; the factor that follows
        # from them is not rounded.
        dtype = ops.autocast_dtype(x) or x.dtype
        if self.gamma is not None:
            dtype = torch.promote_types(dtype, self.gamma.dtype)
        kept = self.drop_path(x.new_ones(len(x), 1, 1, 1, dtype=dtype)).flatten() != 0
        return kept.to(ops.accumulator(x)) / (1 - rate)


class Downsample(nn.Sequential):
    """Layer norm, then a 2x2/2 convolution: patches do not overlap, so each output position is independent
    (section 3.2.2, the case s >= k).

    Args:
        in_channels (int): C.
        out_channels (int): C'.
        norm_cfg (dict): Of :func:`build_norm`.
        fused (bool): Use :func:`sbp_mmdet.ops.norm_linear` in training.
        storage (str): How its input is stored, 'native' or 'int8'. Default: 'native'.
        dropped (str): What dropped positions send, see :class:`sbp_mmdet.ops.MLPSettings`. Default: 'zero'.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        norm_cfg: dict,
        fused: bool,
        storage: str = 'native',
        dropped: str = 'zero',
    ):
        super().__init__(build_norm(norm_cfg, in_channels), nn.Conv2d(in_channels, out_channels, 2, stride=2))
        self.plain = ops.NormLinearSettings(self[0].eps, implementation='reference')
        if fused:
            self.settings = ops.NormLinearSettings(self[0].eps, storage, dropped)
        else:
            self.settings = dataclasses.replace(self.plain, dropped=dropped)

    def forward(self, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Maps (N, C, H, W) to (N, C', H // 2, W // 2).

        Args:
            x (Tensor): Shape (N, C, H, W).
            positions (Positions | None): Output positions that send gradients; None: all. Default: None.
        """
        norm, conv = self
        tensors = ops.NormLinearTensors(x, norm.weight, norm.bias, conv.weight, conv.bias, positions)
        return ops.norm_linear(_settings(self), tensors)


def build_norm(cfg: dict, num_channels: int, fused: bool = False, storage: str = 'native') -> LayerNorm2d:
    """Builds the layer norm that ``norm_cfg`` names.

    Args:
        cfg (dict): ``type`` 'LN2d' (as in mmpretrain) or 'LN'; optional ``eps``, ``elementwise_affine``,
            ``requires_grad``.
        num_channels (int): C.
        fused (bool): See :class:`LayerNorm2d`. Default: False.
        storage (str): See :class:`LayerNorm2d`. Default: 'native'.

    Raises:
        ValueError: For any other norm.
    """
    cfg = dict(cfg)
    kind, requires_grad = cfg.pop('type', None), cfg.pop('requires_grad', True)
    if kind not in ('LN2d', 'LN'):
        raise ValueError(f"norm_cfg type={kind!r} is not supported; ConvNeXt normalises each position: use 'LN2d'")
    return LayerNorm2d(num_channels, fused=fused, storage=storage, **cfg).requires_grad_(requires_grad)


def _settings(module):
    """Those of the module's operation: evaluation and passes without gradients stay plain."""
    return module.settings if module.training and torch.is_grad_enabled() else module.plain
