"""The record of ViT: what tools and studies know of it."""

import torch
import torch.utils.checkpoint as cp

from ..families import Family, Unit, register_family
from ..ops.rows import in_shape, tokens_of
from .vit import SBPViT

__all__ = ['VIT']


def stage_shape(arch: str, stage: int, batch: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Shape (N, C, H, W) of the grid of patches; there is one stage, 0."""
    with torch.device('meta'):
        model = SBPViT(arch)
    return batch, model.channels, *model.stage_sizes(height, width)[stage]


def build_unit(
    unit: str, arch: str, stage: int, shape: tuple[int, int, int, int], device: str, sbp_cfg: dict | None, with_cp: bool
) -> Unit:
    """The whole backbone, its last block, which SBP thins out, or the MLP of that; both without a class token."""
    model = SBPViT(arch, with_cls_token=unit == 'backbone', sbp_cfg=sbp_cfg, with_cp=with_cp).to(device).train()
    if unit == 'backbone':
        return Unit(model, model, reads_image=True)
    block, key = model.blocks[-1], (stage, model.depths[stage] - 1)
    sides = (side * model.patch_size for side in shape[2:])
    drawn = model.draw(torch.empty(1, device=device).expand(1, 1, *sides))
    positions, heads = drawn.positions.get(key), drawn.heads.get(key)
    if unit == 'block':
        return Unit(block, lambda x: in_shape(block(tokens_of(x), positions, heads), x.shape), reads_image=False)

    def mlp(x):
        return in_shape(block.channel_mlp(tokens_of(x), positions), x.shape)

    del block.attn, block.norm1, block.ls1
    return Unit(
        block, lambda x: cp.checkpoint(mlp, x, use_reentrant=False) if block.with_cp else mlp(x), reads_image=False
    )


_BLOCK = r'blocks\.(?P<block>\d+)\.'

VIT = register_family(
    Family(
        name='ViT',
        backbone='SBPViT',
        stock=(),
        parts=(
            (r'patch_embed|pos_embed|cls_token|reg_token', 'stem'),
            (r'blocks', 'stage 1'),
            (r'norm|scale\d', 'output norms'),
        ),
        layers={_BLOCK + r'attn\.qkv': 'QKV', _BLOCK + r'attn\.proj': 'projection', _BLOCK + r'mlp\.fc1': 'MLP 1'},
        archs=('tiny', 'base'),
        stages=1,
        stage_shape=stage_shape,
        build_unit=build_unit,
        # By the matrix products of B at 1024 x 1024, a third of the blocks exact. What runs again of an exact block are
        # Q, K, V and the hidden layer (exact), and the attention (exact-block). The latter stores two maps of x-hat in
        # half precision, as much as the one in full precision of checkpointing.
        times={
            'reference': 0.71,
            'fused': 0.71,
            'recompute': 0.77,
            'block': 0.82,
            'exact': 1.1,
            'exact-block': 1.24,
            'nearest': 0.81,
            'pool': 0.77,
            'int8': 1.15,
            'int8-block': 1.29,
            'nearest-int8': 0.86,
        },
        extremes=('disjoint blocks',),
    )
)
