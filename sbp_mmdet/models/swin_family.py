"""The record of Swin Transformer: what tools and studies know of it."""

import torch
import torch.utils.checkpoint as cp

from ..families import Family, Unit, register_family
from .swin import SBPSwinTransformer
from .swin_layers import thin_ffn

__all__ = ['SWIN']

# arch: arguments in place of the defaults, which are Swin-T's
ARCHS = {
    'tiny': {},
    'small': dict(depths=(2, 2, 18, 2)),
    'base': dict(depths=(2, 2, 18, 2), embed_dims=128, num_heads=(4, 8, 16, 32)),
}


def _options(arch):
    if arch not in ARCHS:
        raise ValueError(f'arch={arch!r} is unknown; choose one of {list(ARCHS)}')
    return ARCHS[arch]


def stage_shape(arch: str, stage: int, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Shape (N, C, H, W) of a stage's feature map; stages count from 0."""
    height, width = (-(-n // (4 * 2**stage)) for n in (height, width))  # rounding up once is rounding up each time
    return batch, _options(arch).get('embed_dims', 96) * 2**stage, height, width


def build_unit(
    unit: str, arch: str, stage: int, shape: tuple[int, int, int, int], device: str, sbp_cfg: dict | None, with_cp: bool
) -> Unit:
    """The whole backbone, a stage's first block, or that block without its attention ('mlp')."""
    model = SBPSwinTransformer(**_options(arch), sbp_cfg=sbp_cfg, with_cp=with_cp).to(device).train()
    if unit == 'backbone':
        return Unit(model, lambda x: tuple(model(x)), reads_image=True)  # mmdet's gives a list
    block, size = model.stages[stage].blocks[0], shape[2:]
    stride = model.patch_embed.projection.stride[0] * 2**stage
    model.draw(torch.empty(1, device=device).expand(1, 1, size[0] * stride, size[1] * stride))
    if unit == 'block':
        return Unit(block, lambda x: block(x.flatten(2).transpose(1, 2), size), reads_image=False)

    def mlp(x):
        x = x.flatten(2).transpose(1, 2)
        return thin_ffn(block, block.ffn, block.norm2, x) if model.sbp else block.ffn(block.norm2(x), identity=x)

    del block.attn, block.norm1
    return Unit(block, lambda x: cp.checkpoint(mlp, x, use_reentrant=False) if with_cp else mlp(x), reads_image=False)


_BLOCK = r'stages\.(?P<stage>\d+)\.blocks\.(?P<block>\d+)\.'

SWIN = register_family(
    Family(
        name='Swin',
        backbone='SBPSwinTransformer',
        stock=('SwinTransformer', 'mmdet.SwinTransformer'),
        parts=(
            (r'patch_embed|absolute_pos_embed', 'stem'),
            (r'stages\.(?P<from0>\d)', 'stage {}'),
            (r'norm(?P<from0>\d)', 'output norms'),
        ),
        layers={
            _BLOCK + r'attn\.w_msa\.qkv': 'QKV',
            _BLOCK + r'ffn\.layers\.0\.0': 'FFN 1',
            _BLOCK + r'ffn\.layers\.1': 'FFN 2',
        },
        archs=('tiny',),
        stage_shape=stage_shape,
        build_unit=build_unit,
        # The attention runs again under every preset; there is no convolution to run again.
        presets=(
            'none',
            'with_cp',
            'reference',
            'fused',
            'recompute',
            'exact',
            'nearest',
            'pool',
            'int8',
            'nearest-int8',
        ),
    )
)
