"""The package's backbones and stock backbones thin the layers that the paper names."""

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import SwinTransformer
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT, apply_lean
from sbp_mmdet.apply import keep_ratios

# mmpretrain is rarely installed: these stand-ins have the names of its classes and the submodules that adapters read.


def linears(*widths):
    return (nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise_conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pointwise_conv1, self.pointwise_conv2 = linears(width, 4 * width, width)
        self.act, self.grn, self.drop_path = nn.GELU(), None, nn.Identity()
        self.gamma, self.with_cp = nn.Parameter(torch.ones(width)), False


class LayerNorm2d(nn.LayerNorm):
    pass


class ConvNeXt(nn.Module):
    def __init__(self, arch):
        super().__init__()
        self.depths = dict(tiny=(3, 3, 9, 3), small=(3, 3, 27, 3), base=(3, 3, 27, 3))[arch]
        widths = [(128 if arch == 'base' else 96) * 2**i for i in range(4)]
        self.gap_before_final_norm = False
        self.downsample_layers = nn.ModuleList([nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0]))])
        self.stages = nn.ModuleList()
        for i, (depth, width) in enumerate(zip(self.depths, widths, strict=True)):
            self.stages.append(nn.Sequential(*(ConvNeXtBlock(width) for _ in range(depth))))
            self.add_module(f'norm{i}', LayerNorm2d(width))
            if i:
                before = widths[i - 1]
                self.downsample_layers.append(nn.Sequential(LayerNorm2d(before), nn.Conv2d(before, width, 2, 2)))


class Attention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads, self.embed_dims, self.input_dims, self.attn_drop = num_heads, width, width, 0.0
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.proj_drop, self.out_drop, self.gamma1, self.v_shortcut = (
            nn.Dropout(0.0),
            nn.Identity(),
            nn.Identity(),
            False,
        )
        self.scaled_dot_product_attention = nn.functional.scaled_dot_product_attention


class TransformerEncoderLayer(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.ffn = Attention(width, num_heads), FFN(width, 4 * width, act_cfg=dict(type='GELU'))


class VisionTransformer(nn.Module):
    def __init__(self, arch):
        super().__init__()
        depth, width, heads = dict(small=(12, 384, 6), base=(12, 768, 12), large=(24, 1024, 16))[arch]
        self.patch_embed = nn.Module()
        self.patch_embed.projection = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList(TransformerEncoderLayer(width, heads) for _ in range(depth))


define_in_module('mmpretrain.models.backbones.convnext', ConvNeXtBlock, ConvNeXt)
define_in_module('mmpretrain.models.utils.norm', LayerNorm2d)
define_in_module('mmpretrain.models.utils.attention', Attention, name='MultiheadAttention')
define_in_module('mmpretrain.models.backbones.vision_transformer', TransformerEncoderLayer, VisionTransformer)

SWIN = {
    'tiny': {},
    'small': dict(depths=(2, 2, 18, 2)),
    'base': dict(depths=(2, 2, 18, 2), embed_dims=128, num_heads=(4, 8, 16, 32)),
}


def swin(arch):
    return SwinTransformer(**SWIN[arch])


def sbp_swin(arch, **options):
    return SBPSwinTransformer(**SWIN[arch], **options)


# Stock model, backbone of this package, architecture, and the number of thinned blocks of each stage.
WAYS = [
    (ConvNeXt, SBPConvNeXt, 'tiny', [3, 3, 6, 0]),
    (ConvNeXt, SBPConvNeXt, 'small', [3, 3, 21, 0]),
    (ConvNeXt, SBPConvNeXt, 'base', [3, 3, 21, 0]),
    (swin, sbp_swin, 'tiny', [2, 2, 6, 0]),
    (swin, sbp_swin, 'small', [2, 2, 18, 0]),
    (swin, sbp_swin, 'base', [2, 2, 18, 0]),
    (VisionTransformer, SBPViT, 'small', [8]),
    (VisionTransformer, SBPViT, 'base', [8]),
    (VisionTransformer, SBPViT, 'large', [16]),
]


@pytest.fixture
def skip_weights(monkeypatch):
    """Skip the initialisation of weights, so that networks of full size are built quickly."""
    for name in ('kaiming_uniform_', 'trunc_normal_', 'uniform_'):
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)


KEYS = [
    ('sbp', {}),
    ('reference', {}),
    ('sbp', dict(keep_ratio=0.25)),
    ('sbp', dict(downsample=False)),
    ('exact', {}),
    ('int8', {}),
]
# Which blocks are thinned depends on the number of blocks; what keys do with them does not, so the smallest has all.
SMALLEST = {plain: arch for plain, _, arch, _ in reversed(WAYS)}
CASES = [(way, *keys) for way in WAYS for keys in KEYS[: None if way[2] == SMALLEST[way[0]] else 2]]


@pytest.mark.parametrize(
    ('way', 'preset', 'keys'),
    CASES,
    ids=lambda value: f'{value[0].__name__} {value[2]}' if isinstance(value, tuple) else str(value),
)
def test_class_and_hook_thin_the_same(way, preset, keys, skip_weights):
    plain, ours, arch, blocks = way
    if keys.get('downsample') is False and len(blocks) == 1:
        pytest.skip('a ViT has no downsampling layer')
    hooked, own = plain(arch), ours(arch, sbp_cfg=dict(preset=preset, **keys))
    hooked.train(), own.train()
    apply_lean(hooked, preset=preset, **keys)
    expected = {}
    if preset not in ('exact', 'int8'):
        first = (12 if arch != 'large' else 24) - blocks[0] if len(blocks) == 1 else 0  # the last blocks of a ViT
        expected = {(i, first + j): 0.5 for i, number in enumerate(blocks) for j in range(number)}
        if len(blocks) == 4 and keys.get('downsample', True):
            expected |= {(1, 'downsample'): 0.5, (2, 'downsample'): 0.5}
    expected = dict.fromkeys(expected, keys.get('keep_ratio', 0.5))
    assert keep_ratios(hooked) == expected
    assert own.keep_ratios() == expected
