"""``SBPConvNeXt``: ConvNeXt whose pointwise and downsampling layers backpropagate through a subset of the positions."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn.bricks import DropPath
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn

from .layers import GRN, LayerNorm2d
from .lean_backbone import TRUNCATED_NORMAL, LeanBackbone
from .weights import rename_weights

__all__ = ['ARCHS', 'ConvNeXtBlock', 'SBPConvNeXt']

# arch -> (depths, channels of the first stage; each stage doubles them)
ARCHS = {
    'atto': ((2, 2, 6, 2), 40),
    'femto': ((2, 2, 6, 2), 48),
    'pico': ((2, 2, 6, 2), 64),
    'nano': ((2, 2, 8, 2), 80),
    'tiny': ((3, 3, 9, 3), 96),
    'small': ((3, 3, 27, 3), 96),
    'base': ((3, 3, 27, 3), 128),
    'large': ((3, 3, 27, 3), 192),
    'xlarge': ((3, 3, 27, 3), 256),
    'huge': ((3, 3, 27, 3), 352),
}


class ConvNeXtBlock(BaseModule):
    """Depthwise 7x7 convolution, then the channel MLP: LN, pointwise, GELU, pointwise, layer scale.

    Args:
        channels (int): Number of channels C.
        norm_cfg (dict): Norm, see :func:`build_norm`.
        act_cfg (dict): Activation between the pointwise layers.
        linear_pw_conv (bool): Whether pointwise layers are linear layers. If ``False``, they are 1x1 convolutions.
        use_grn (bool): Whether global response normalisation follows the activation.
        drop_path_rate (float): Stochastic depth rate.
        layer_scale_init_value (float): Initial layer scale. If 0, there is none.
        with_cp (bool): Whether the block is checkpointed.
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

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on (N, C, H, W)."""
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x):
        y = self.norm.tokens(self.depthwise_conv(x).flatten(2).transpose(1, 2))
        y = self.act(F.linear(y, self.pointwise_conv1.weight.flatten(1), self.pointwise_conv1.bias))
        y = y if self.grn is None else self.grn(y)
        y = F.linear(y, self.pointwise_conv2.weight.flatten(1), self.pointwise_conv2.bias)
        y = y if self.gamma is None else y * self.gamma
        return x + self.drop_path(y.transpose(1, 2).unflatten(2, x.shape[2:]))


def build_norm(cfg: dict, num_channels: int) -> LayerNorm2d:
    """Build the layer norm of a ``norm_cfg``.

    Args:
        cfg (dict): ``type``, 'LN2d' (as in mmpretrain) or 'LN'; optionally ``eps``, ``elementwise_affine`` and
            ``requires_grad``.
        num_channels (int): Number of channels C.

    Returns:
        LayerNorm2d: The norm.

    Raises:
        ValueError: If ``type`` is any other norm.
    """
    cfg = dict(cfg)
    kind, requires_grad = cfg.pop('type', None), cfg.pop('requires_grad', True)
    if kind not in ('LN2d', 'LN'):
        raise ValueError(f"norm_cfg type={kind!r} is unsupported: ConvNeXt normalises each position; write 'LN2d'")
    return LayerNorm2d(num_channels, **cfg).requires_grad_(requires_grad)


@MODELS.register_module()
class SBPConvNeXt(LeanBackbone, BaseModule):
    """ConvNeXt for memory-efficient training by Stochastic Backpropagation (SBP).

    The forward pass is ConvNeXt's. Without ``sbp_cfg`` it is a plain network. With ``sbp_cfg``, its layers train lean:
    with ``preset='exact'`` they save less memory, and with ``preset='sbp'`` the pointwise and 2x2 downsampling layers
    of the leading stages backpropagate through a kept subset of the spatial positions, which is redrawn at every step
    and the same for all layers. The depthwise convolutions and the last stage are exact.

    Arguments, parameter names and shapes are those of mmpretrain's ``ConvNeXt``, with ``sbp_cfg`` in addition. Weights
    with names of other sources are loaded, too, see :mod:`.weights`.

    Args:
        arch (str | dict): One of 'atto', 'femto', 'pico', 'nano', 'tiny', 'small', 'base', 'large', 'xlarge', 'huge',
            or a dict with ``depths`` and ``channels``, one number per stage. Default: 'tiny'.
        in_channels (int): Number of channels of the images. Default: 3.
        stem_patch_size (int): Size and stride of the stem's patches, in pixels. Default: 4.
        norm_cfg (dict): See :func:`build_norm`. Default: ``dict(type='LN2d', eps=1e-6)``.
        act_cfg (dict): Activation. Default: ``dict(type='GELU')``.
        linear_pw_conv (bool): Whether pointwise layers are linear layers. If ``False``, they are 1x1 convolutions.
            Default: True.
        use_grn (bool): Whether blocks have global response normalisation (ConvNeXt V2). It reads all positions, so none
            can be dropped. Default: False.
        drop_path_rate (float): Stochastic depth rate of the last block, growing linearly from 0. Default: 0.0.
        layer_scale_init_value (float): Initial layer scale. If 0, there is none. Default: 1e-6.
        out_indices (Sequence[int] | int): Stages whose outputs are returned, counted from 0 or from the end. Default:
            -1.
        frozen_stages (int): Number of leading stages that are frozen, with the stem. Default: 0.
        gap_before_final_norm (bool): Whether to average over all positions before each output norm and return (N, C),
            for classification. Default: True.
        with_cp (bool): Whether every block is checkpointed; ignored for blocks that ``sbp_cfg`` changes. Default:
            False.
        sbp_cfg (dict | None): ``preset`` and keys of :class:`sbp_mmdet.presets.Settings`. If ``None``, the backbone is
            plain. Default: None.
        init_cfg (dict | list[dict] | None): mmengine's initialisation. If ``None``, weights are drawn from a truncated
            normal distribution. Default: None.

    Raises:
        ValueError: If a value cannot be honoured. The message has the value and the remedy.

    Example:
        ``backbone=dict(type='SBPConvNeXt', arch='tiny', sbp_cfg=dict(preset='exact'))``
    """

    def __init__(
        self,
        arch: str | dict = 'tiny',
        in_channels: int = 3,
        stem_patch_size: int = 4,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        linear_pw_conv: bool = True,
        use_grn: bool = False,
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        out_indices: Sequence[int] | int = -1,
        frozen_stages: int = 0,
        gap_before_final_norm: bool = True,
        with_cp: bool = False,
        sbp_cfg: dict | None = None,
        init_cfg: dict | list | None = None,
    ):
        super().__init__(init_cfg=init_cfg or [*TRUNCATED_NORMAL])
        self.depths, self.channels = _parse_arch(arch)
        self.num_stages = len(self.depths)
        self.out_indices = _parse_out_indices(out_indices, self.num_stages)
        if not isinstance(frozen_stages, int) or not 0 <= frozen_stages <= self.num_stages:
            raise ValueError(f'frozen_stages={frozen_stages!r} must be a whole number from 0 to {self.num_stages}')
        self.frozen_stages = frozen_stages
        self.gap_before_final_norm = gap_before_final_norm

        norm_cfg = norm_cfg or dict(type='LN2d', eps=1e-6)
        stem = nn.Conv2d(in_channels, self.channels[0], stem_patch_size, stride=stem_patch_size)
        self.downsample_layers = nn.ModuleList([nn.Sequential(stem, build_norm(norm_cfg, self.channels[0]))])
        self.downsample_layers.extend(
            nn.Sequential(build_norm(norm_cfg, c_in), nn.Conv2d(c_in, c_out, 2, stride=2))
            for c_in, c_out in zip(self.channels[:-1], self.channels[1:], strict=True)
        )
        rates = torch.linspace(0, drop_path_rate, sum(self.depths), device='cpu').split(list(self.depths))
        options = dict(act_cfg=act_cfg or dict(type='GELU'), linear_pw_conv=linear_pw_conv, use_grn=use_grn)
        options.update(norm_cfg=norm_cfg, layer_scale_init_value=layer_scale_init_value, with_cp=with_cp)
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(channels, drop_path_rate=rate, **options) for rate in stage_rates.tolist()))
            for channels, stage_rates in zip(self.channels, rates, strict=True)
        )
        for i in self.out_indices:
            self.add_module(f'norm{i}', build_norm(norm_cfg, self.channels[i]))
        self.min_size = stem_patch_size * 2 ** (self.num_stages - 1)
        self._freeze_stages()
        self.train_lean(sbp_cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Run the backbone.

        Args:
            x (Tensor): Images, shape (N, 3, H, W).

        Returns:
            tuple[Tensor, ...]: For each of ``out_indices`` a feature map (N, C, H / stride, W / stride), or (N, C)
            with ``gap_before_final_norm``.

        Raises:
            ValueError: If an image is smaller than the total stride.
        """
        if min(x.shape[-2:]) < self.min_size:
            raise ValueError(
                f'images of {x.shape[-2]} x {x.shape[-1]} pixels are smaller than the total stride {self.min_size} '
                'of the backbone; resize or pad them'
            )
        outs = []
        for i, (layer, stage) in enumerate(zip(self.downsample_layers, self.stages, strict=True)):
            x = stage(layer(x))
            if i in self.out_indices:
                norm = getattr(self, f'norm{i}')
                if self.gap_before_final_norm:
                    outs.append(norm(x.mean((-2, -1), keepdim=True)).flatten(1))
                else:
                    outs.append(norm(x))
        return tuple(outs)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        rename_weights(self, state_dict, prefix, 'convnext')
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _freeze_stages(self):
        for i in range(self.frozen_stages):
            for module in (self.downsample_layers[i], self.stages[i]):
                module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> 'SBPConvNeXt':
        """Set training or evaluation mode; frozen stages stay in evaluation mode."""
        super().train(mode)
        self._freeze_stages()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter for layer-wise learning-rate decay, as mmpretrain counts it.

        Args:
            param_name (str): Name of the parameter.
            prefix (str): Prefix of the backbone's parameters. Default: ''.

        Returns:
            tuple[int, int]: The layer's depth and the number of layers.
        """
        last = 12 if self.depths[-2] > 9 else 6
        kind, *rest = param_name.removeprefix(prefix).split('.')
        if not param_name.startswith(prefix) or kind not in ('downsample_layers', 'stages'):
            return last + 1, last + 2
        stage = int(rest[0])
        if stage == 3:
            depth = last
        elif kind == 'stages':
            depth = stage + 1 if stage < 2 else 3 + int(rest[1]) // 3
        else:
            depth = stage + 1 if stage else 0
        return depth, last + 2


def _parse_arch(arch):
    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(f'arch={arch!r} is unknown; choose one of {list(ARCHS)} or give depths and channels')
        depths, channels = ARCHS[arch]
        return depths, tuple(channels * 2**i for i in range(len(depths)))
    if (
        not isinstance(arch, dict)
        or not {'depths', 'channels'} <= set(arch)
        or len(arch['depths']) != len(arch['channels'])
    ):
        raise ValueError(f'arch={arch!r} must have "depths" and "channels" with one number per stage each')
    return tuple(arch['depths']), tuple(arch['channels'])


def _parse_out_indices(out_indices, num_stages):
    indices = [out_indices] if isinstance(out_indices, int) else out_indices
    if isinstance(indices, str) or not isinstance(indices, Sequence) or not indices:
        raise ValueError(f'out_indices={out_indices!r} must be the number of a stage, or a list of them')
    for i in indices:
        if not isinstance(i, int) or not -num_stages <= i < num_stages:
            raise ValueError(
                f'out_indices={out_indices!r}: there is no stage {i}; stages count from 0 to {num_stages - 1}'
            )
    return [i % num_stages for i in indices]
