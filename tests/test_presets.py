"""PRESETS is the one table that planner, memory lab, block benchmark and studies read: nothing in it is forgotten."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch
from helpers import CONFIGS, ROOT, TOOLS

from sbp_mmdet.analysis.planner import candidates
from sbp_mmdet.analysis.variants import applicable, load_config, with_variant
from sbp_mmdet.families import FAMILIES
from sbp_mmdet.models.convnext import SBPConvNeXt
from sbp_mmdet.settings import GRADIENTS, PRESETS, Preset, SBPSettings, make_presets
from sbp_mmdet.study.settings import group

sys.path[:0] = [str(TOOLS), str(TOOLS / 'analysis_tools')]
import benchmark_block  # noqa: E402
import benchmark_memory  # noqa: E402

T = str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py')


@functools.cache
def config():
    return load_config(T)


@pytest.fixture(params=[*PRESETS, 'new'])
def preset(request, monkeypatch):
    """Each preset, and one that was added in one place."""
    if request.param == 'new':
        new = Preset('new', 'int8 with the paper', 'nearest', 0.8, dict(storage='int8'))
        monkeypatch.setitem(PRESETS, 'new', new)
    return PRESETS[request.param]


def test_the_backbone_takes_it(preset):
    with torch.device('meta'):
        SBPConvNeXt('atto', **preset.arguments(keep_ratio=0.25))


def test_the_planner_offers_it_or_a_better_one(preset):
    names = {variant.split('+')[0] for variant in candidates(config(), preset.gradients)}
    assert (preset.better or preset.name) in names


def test_tools_measure_it_unless_told_otherwise(preset, monkeypatch, tmp_path):
    variants = benchmark_memory.case_parser('').parse_args([T]).variants
    assert preset.name in applicable(config(), variants)[0]
    seen = []
    monkeypatch.setattr(benchmark_block, 'build_unit', lambda family, unit, arch, name, *_, **__: seen.append(name))
    monkeypatch.setattr(benchmark_block, 'measure', lambda units, *_, **__: [('none', {})])
    monkeypatch.setattr(benchmark_block, 'print_table', lambda results: None)
    for unit in preset.units:
        seen.clear()
        stage = [] if unit == 'backbone' else ['--stage', '1']
        monkeypatch.setattr(sys, 'argv', ['tool', '--arch', 'atto', *stage, '--unit', unit, '--device', 'cpu'])
        benchmark_block.main()
        assert preset.name in seen


def test_the_study_compares_it(preset):
    """Presets with the paper's gradients, or the exact ones, all send the same."""
    settings = group('options', config())
    assert preset.name in settings or preset.gradients in ('paper', 'exact')


def test_the_smallest_of_a_kind_comes_last():
    for kind in GRADIENTS:
        *_, smallest = (preset for preset in PRESETS.values() if preset.gradients == kind)
        assert candidates(config(), kind)[-1].split('+')[0] == smallest.name


def test_a_preset_sets_every_key_that_is_not_about_positions():
    """A key that nobody thought of does not leak from the config into a preset."""
    own = dict(keep_ratio=0.25, sampler='objects', object_share=0.5, blocks=[3, 3, 6, 0], downsample=False)
    own.update(attention='query')
    others = {}
    for field in dataclasses.fields(SBPSettings):
        if not field.metadata['selects']:
            others[field.name] = next(value for value in field.metadata['choices'] if value != field.default)
    assert own.keys() | others.keys() == {field.name for field in dataclasses.fields(SBPSettings)}
    changed = load_config(T)
    changed.model.backbone.sbp_cfg = {**own, **others}
    found = dict(with_variant(changed, 'fused').model.backbone.sbp_cfg)
    assert SBPSettings.parse(found, (3, 3, 9, 3)) == SBPSettings.parse(own, (3, 3, 9, 3))


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (dict(gradients='good'), "preset 'x': gradients='good' is unknown; use one of"),
        (dict(units=()), r"preset 'x': units=\(\) must be some of"),
        (dict(units=('head',)), 'must be some of'),
        (dict(better='y'), "better='y' must be one with the same gradients"),
        (dict(better='none'), "better='none' must be one with the same gradients"),
        (dict(name='none'), 'different names'),
    ],
    ids=str,
)
def test_presets_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        new = Preset(**{**dict(name='x', meaning='', gradients='paper', time=1.0, sbp_cfg={}), **values})
        make_presets(PRESETS['none'], new)


def test_families_know_no_other_presets():
    for family in FAMILIES.values():
        assert set(family.presets or PRESETS) <= set(PRESETS)


def test_the_page_names_every_key():
    page = Path(ROOT / 'docs/sbp_cfg.md')
    if not page.exists():
        pytest.skip('the page is not written yet')
    text = page.read_text()
    assert [field.name for field in dataclasses.fields(SBPSettings) if f'`{field.name}`' not in text] == []
