"""``SBPConvNeXt``: ConvNeXt whose pointwise and downsampling layers send gradients from a subset of the positions."""

from collections.abc import Sequence

import torch
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..draws import Drawn, Draws, warn_where_frozen
from ..settings import SBPSettings
from .convnext_layers import ConvNeXtBlock, Downsample, Stem, build_norm, compile_bodies
from .weights import rename_weights

__all__ = ['ARCHS', 'SBPConvNeXt']

# arch: (depths, channels of the first stage; every stage doubles them)
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


# Default of the key `blocks` (appendix "Experimental Settings"): all of stages 1 and 2, the first 6 or 21 of stage 3.
PAPER_BLOCKS = {'tiny': (3, 3, 6, 0), 'base': (3, 3, 21, 0)}


@MODELS.register_module()
class SBPConvNeXt(BaseModule):
    """ConvNeXt for memory-efficient training by Stochastic Backpropagation (SBP).

    The forward pass is ConvNeXt's. In training, the pointwise and 2x2/2 downsampling layers of the leading stages send
    gradients from a kept subset of the spatial positions, drawn anew in each step and the same for all layers, or
    for those of a stage where dropped positions send something back. The depthwise convolutions and the last stage stay
    exact. Outside of training and without gradients, nothing is drawn.

    Arguments, parameter names and shapes are those of mmpretrain's ``ConvNeXt``; ``sbp_cfg`` is added. Weights load
    under other names too, see :mod:`.weights`.

    Args:
        arch (str | dict): One of 'atto', 'femto', 'pico', 'nano', 'tiny', 'small', 'base', 'large', 'xlarge', 'huge',
            or a dict with ``depths`` and ``channels``, one number per stage. Default: 'tiny'.
        in_channels (int): Channels of the image. Default: 3.
        stem_patch_size (int): Size and stride of the stem's patches, in pixels. Default: 4.
        norm_cfg (dict): See :func:`build_norm`. Default: ``dict(type='LN2d', eps=1e-6)``.
        act_cfg (dict): Activation. Default: ``dict(type='GELU')``.
        linear_pw_conv (bool): Hold the pointwise weights in linear layers instead of 1x1 convolutions. Default: True.
        use_grn (bool): Global response normalisation (ConvNeXt V2). With ``sbp_cfg`` for ``keep_ratio=1.0`` only, which
            is exact: GRN looks at all positions. Default: False.
        drop_path_rate (float): Stochastic depth rate of the last block, growing linearly from 0. Default: 0.0.
        layer_scale_init_value (float): Initial layer scale; 0 means no layer scale. Default: 1e-6.
        out_indices (Sequence[int] | int): Stages to put out, counted from 0 or from the end. Default: -1.
        frozen_stages (int): How many leading stages are frozen, stem included. Default: 0.
        gap_before_final_norm (bool): Average over all positions before each output norm and put out (N, C), for
            classification. Default: True.
        with_cp (bool): Checkpoint every block. Works together with SBP. Default: False.
        sbp_cfg (dict | None): See :class:`sbp_mmdet.settings.SBPSettings`; None is the plain backbone. Default: None.
        init_cfg (dict | list[dict] | None): mmengine's initialisation; None: truncated normal weights. Default: None.

    Raises:
        ValueError: For a value that cannot be honoured, naming it and the remedy.
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
        super().__init__(
            init_cfg=init_cfg
            or [
                dict(type='TruncNormal', layer=['Conv2d', 'Linear'], std=0.02, bias=0.0),
                dict(type='Constant', layer=['LayerNorm'], val=1.0, bias=0.0),
            ]
        )
        self.depths, self.channels = _parse_arch(arch)
        self.num_stages = len(self.depths)
        self.out_indices = _parse_out_indices(out_indices, self.num_stages)
        if not isinstance(frozen_stages, int) or not 0 <= frozen_stages <= self.num_stages:
            raise ValueError(f'frozen_stages={frozen_stages!r} must be a whole number from 0 to {self.num_stages}')
        self.frozen_stages = frozen_stages
        self.gap_before_final_norm = gap_before_final_norm
        self.sbp = None
        if sbp_cfg is not None:
            self.sbp = SBPSettings.parse(sbp_cfg, self.depths, PAPER_BLOCKS.get(str(arch)), absent=('attention',))
        if self.sbp and use_grn:
            _check_grn(self.sbp)

        norm_cfg = norm_cfg or dict(type='LN2d', eps=1e-6)
        fused = self.sbp is not None and self.sbp.implementation == 'fused'
        options = dict(norm_cfg=norm_cfg, fused=fused, storage=self.sbp.storage if fused else 'native')
        recompute = fused and self.sbp.recompute
        dropped = self.sbp.dropped if self.sbp else 'zero'
        self.downsample_layers = nn.ModuleList(
            [Stem(in_channels, self.channels[0], stem_patch_size, recompute=recompute, **options)]
        )
        self.downsample_layers.extend(
            Downsample(c_in, c_out, dropped=dropped, **options)
            for c_in, c_out in zip(self.channels[:-1], self.channels[1:], strict=True)
        )
        rates = torch.linspace(0, drop_path_rate, sum(self.depths), device='cpu').split(list(self.depths))
        self.stages = nn.ModuleList()
        for channels, stage_rates in zip(self.channels, rates, strict=True):
            stage = [
                ConvNeXtBlock(
                    channels,
                    act_cfg=act_cfg or dict(type='GELU'),
                    linear_pw_conv=linear_pw_conv,
                    use_grn=use_grn,
                    drop_path_rate=rate,
                    layer_scale_init_value=layer_scale_init_value,
                    with_cp=with_cp,
                    recompute=recompute,
                    dropped=dropped,
                    **options,
                )
                for rate in stage_rates.tolist()
            ]
            self.stages.append(nn.Sequential(*stage))
        for i in self.out_indices:
            self.add_module(
                f'norm{i}',
                build_norm(num_channels=self.channels[i], cfg=norm_cfg, fused=fused, storage=options['storage']),
            )

        if self.sbp and self.sbp.compile:
            compile_bodies(self)
        self.min_size = stem_patch_size * 2 ** (self.num_stages - 1)
        self._draws = Draws()
        self._freeze_stages()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Runs the backbone.

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
        # A checkpoint around the backbone first runs it without gradients. That run leaves out the same images.
        active = self.sbp and self.training and (torch.is_grad_enabled() or self.sbp.skip_dropped_images)
        positions, images, _ = self.draw(x) if active else Drawn({}, {})
        outs = []
        for i, (layer, stage) in enumerate(zip(self.downsample_layers, self.stages, strict=True)):
            x = layer(x, positions.get((i, 'downsample'))) if i else layer(x)
            for j, block in enumerate(stage):
                x = block(x, positions.get((i, j)), images.get((i, j)))
            if i in self.out_indices:
                norm = getattr(self, f'norm{i}')
                if self.gap_before_final_norm:
                    outs.append(norm(x.mean((-2, -1), keepdim=True)).flatten(1))
                else:
                    outs.append(norm(x))
        return tuple(outs)

    def keep_ratios(self) -> dict[tuple, float]:
        """The layers that SBP thins out, and how far.

        Returns:
            dict[tuple, float]: ``(stage, block)`` or ``(stage, 'downsample')`` (the layer that leads into the stage)
            to keep ratio; stages count from 0. Frozen stages and ratios of 1 do not appear.
        """
        if self.sbp is None:
            return {}
        return {key: r for key, r in self.sbp.layer_ratios().items() if key[0] >= self.frozen_stages}

    def stage_sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """(height, width) of each stage's feature map for an image of the given size in pixels."""
        patch = self.downsample_layers[0][0].stride[0]
        return [(height // patch // 2**i, width // patch // 2**i) for i in range(self.num_stages)]

    def draw(self, x: Tensor, again: bool = False) -> Drawn:
        """What is random in one training step: kept positions, and with ``skip_dropped_images`` stochastic depth.

        Args:
            x (Tensor): Images, shape (N, 3, H, W).
            again (bool): What the latest pass drew, to look at it afterwards; seed and iteration have to be those of
                the pass. False: a pass begins. Default: False.

        Returns:
            Drawn: Positions, none of them without gradients, and images.
        """
        rates = {}
        if self.sbp and self.sbp.skip_dropped_images:
            blocks = {(i, j): block for i, stage in enumerate(self.stages) for j, block in enumerate(stage)}
            rates = {key: block.drop_path_rate for key, block in blocks.items() if block.drop_path_rate}
        return self._draws.of(self, x, rates, again)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        rename_weights(self, state_dict, prefix, 'convnext')
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _freeze_stages(self):
        for i in range(self.frozen_stages):
            for module in (self.downsample_layers[i], self.stages[i]):
                module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> 'SBPConvNeXt':
        """As ``nn.Module.train``; frozen stages stay in evaluation mode."""
        super().train(mode)
        self._freeze_stages()
        if mode:
            warn_where_frozen(self)
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning-rate decay, as mmpretrain counts it.

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


def _check_grn(sbp):
    if any(ratio != 1 for ratio in sbp.keep_ratio):
        raise ValueError(
            'use_grn=True cannot be used with sbp_cfg that drops positions: GRN normalises over all of them; '
            'sbp_cfg=dict(keep_ratio=1.0, recompute=True) stores less and keeps the gradients exact'
        )
    if sbp.implementation == 'fused' and not sbp.recompute:
        raise ValueError(
            f"use_grn=True needs sbp_cfg with recompute=True or recompute='block', not {sbp.recompute!r}: the hidden "
            'layer of ConvNeXt V2 is always computed again'
        )


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
