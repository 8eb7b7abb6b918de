"""The record of ConvNeXt: what tools and studies know of it."""

import torch
import torch.utils.checkpoint as cp
from torch import nn

from ..families import Family, Tap, Unit, register_family
from ..ops import autocast_dtype
from .convnext import SBPConvNeXt

__all__ = ['CONVNEXT']


def stage_shape(arch: str, stage: int, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Shape (N, C, H, W) of a stage's feature map; stages count from 0."""
    with torch.device('meta'):
        model = SBPConvNeXt(arch)
    return batch, model.channels[stage], *model.stage_sizes(height, width)[stage]


def build_unit(
    unit: str, arch: str, stage: int, shape: tuple[int, int, int, int], device: str, sbp_cfg: dict | None, with_cp: bool
) -> Unit:
    """The whole backbone, a stage's first block, or that block without its depthwise convolution ('mlp')."""
    options = dict(out_indices=[0, 1, 2, 3], gap_before_final_norm=False, layer_scale_init_value=1.0)
    model = SBPConvNeXt(arch, **options, sbp_cfg=sbp_cfg, with_cp=with_cp).to(device).train()
    if unit == 'backbone':
        return Unit(model, model, reads_image=True)
    block = model.stages[stage][0]
    stride = model.min_size // 2 ** (model.num_stages - 1 - stage)
    image = torch.empty(1, device=device).expand(1, 1, shape[2] * stride, shape[3] * stride)
    positions = model.draw(image).positions.get((stage, 0))
    if unit == 'block':
        return Unit(block, lambda x: block(x, positions), reads_image=False)

    def mlp(x):
        return block.mlp(x.to(autocast_dtype(x) or x.dtype), x, positions)

    del block.depthwise_conv
    return Unit(
        block, lambda x: cp.checkpoint(mlp, x, use_reentrant=False) if block.with_cp else mlp(x), reads_image=False
    )


def tap(backbone: nn.Module, layer: tuple) -> Tap:
    """The channel MLP's input, which the depthwise convolution puts out, or the downsampling layer's."""
    stage, block = layer
    if block == 'downsample':
        return Tap(f'downsample_layers.{stage}', backbone.downsample_layers[stage], at_output=False, patch=2)
    return Tap(f'stages.{stage}.{block}', backbone.stages[stage][block].depthwise_conv, at_output=True)


_BLOCK = r'stages\.(?P<stage>\d+)\.(?P<block>\d+)\.'

CONVNEXT = register_family(
    Family(
        name='ConvNeXt',
        backbone='SBPConvNeXt',
        stock=('ConvNeXt', 'mmpretrain.ConvNeXt', 'mmcls.ConvNeXt'),
        parts=(
            (r'downsample_layers\.0', 'stem'),
            (r'(?:downsample_layers|stages)\.(?P<from0>\d)', 'stage {}'),
            (r'norm(?P<from0>\d)', 'output norms'),
        ),
        layers={
            _BLOCK + 'depthwise_conv': 'depthwise',
            _BLOCK + 'pointwise_conv1': 'PW 1',
            _BLOCK + 'pointwise_conv2': 'PW 2',
        },
        archs=('tiny', 'base'),
        stage_shape=stage_shape,
        build_unit=build_unit,
        tap=tap,
        extremes=('disjoint blocks', 'disjoint pointwise layers'),
    )
)
