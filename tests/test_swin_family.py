"""The record of Swin: what benchmarks run, and to which parts and layers its parameters belong."""

import pytest
import torch
from mmdet.models.backbones import SwinTransformer

from sbp_mmdet.analysis.benchmark import build_unit, measure
from sbp_mmdet.analysis.parts import part_of
from sbp_mmdet.families import family_of, layer_of, presets_of
from sbp_mmdet.models.swin_family import SWIN

HEIGHT, WIDTH = 70, 90  # odd maps


@pytest.mark.parametrize('unit', ['mlp', 'block', 'backbone'])
def test_units(unit):
    shape = (2, 3, HEIGHT, WIDTH) if unit == 'backbone' else SWIN.stage_shape('tiny', 0, 2, HEIGHT, WIDTH)
    names = ['none', 'with_cp', 'reference', 'recompute', 'exact', 'int8']
    units = {name: build_unit(SWIN, unit, 'tiny', name, 0, shape, 'cpu') for name in names}
    found = measure(units, shape, device='cpu', dtype=torch.bfloat16, rounds=0)
    stored = {name: row['saved_bytes'] for name, row in found if name != 'progress'}
    assert stored['int8'] < stored['exact'] < 0.5 * stored['none']
    assert stored['recompute'] < stored['exact'] and stored['reference'] < stored['none']


def test_sizes_are_those_of_the_maps():
    assert SWIN.stage_shape('tiny', 0, 2, HEIGHT, WIDTH) == (2, 96, 18, 23)
    assert SWIN.stage_shape('base', 3, 1, HEIGHT, WIDTH) == (1, 1024, 3, 3)


def test_names():
    assert family_of(dict(type='SwinTransformer')) is family_of(dict(type='mmdet.SwinTransformer')) is SWIN
    small = SwinTransformer(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
    assert family_of(small) is SWIN and family_of(dict(type='mmpretrain.SwinTransformer')) is None
    parts = {part_of(f'backbone.{name}', SWIN) for name, _ in small.named_parameters()}
    assert parts == {'stem', 'output norms', *(f'stage {i}' for i in range(1, 5))}
    assert layer_of('stages.2.blocks.5.attn.w_msa.qkv') == (2, 5, 'QKV')
    assert layer_of('stages.0.blocks.1.ffn.layers.0.0') == (0, 1, 'FFN 1')
    assert 'block' not in [preset.name for preset in presets_of(SWIN)]
