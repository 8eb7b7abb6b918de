"""The lines that the planner prints turn a config of any style into the variant."""

import json
from pathlib import Path

import pytest
import yaml
from helpers import CONFIGS
from mmengine.config import Config

from sbp_mmdet.plan import snippet as module
from sbp_mmdet.plan.snippet import format_heading, snippet
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant

RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
DINO = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
STOCK_T = 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
OURS = str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py')
VARIANTS = ['none', 'with_cp', 'sbp+cp-heads+cp-neck', 'int8+adamw8bit', 'exact+amp+adamw8bit']
EMA = dict(type='EMAHook', momentum=0.1)
# All that lines may change, in one file: hooks before, between and behind.
OWN = f"""
model = dict(
    type='RetinaNet', backbone=dict(type='ResNet', depth=50, with_cp=True), neck=dict(type='FPN'),
    bbox_head=dict(type='RetinaHead', num_classes=3),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.1), clip_grad=dict(max_norm=1.0))
custom_hooks = [{EMA}, dict(type='LeanHook', preset='sbp'), dict(type='NumClassCheckHook')]
train_dataloader = dict(batch_size=2, num_workers=3)
"""


def _by_name(node):
    """Return a config with names in place of classes, and without scopes that mmengine adds."""
    if isinstance(node, dict):
        return {key: _by_name(value) for key, value in node.items() if key != '_scope_'}
    if isinstance(node, (list, tuple)):
        return [_by_name(value) for value in node]
    return getattr(node, '__name__', node)


def check(before, pasted, variant):
    """Assert that a config has become the variant and is otherwise unchanged."""
    wanted = with_variant(make_plain(before), variant)
    wanted.train_dataloader.batch_size = 7
    for key, value in wanted.items():
        found = pasted.get(key)
        if key == 'model':
            value, found = ({**one, 'backbone': {**one['backbone'], 'with_cp': False}} for one in (value, found))
            assert not found['backbone'].pop('sbp_cfg', None)
            value['backbone'].pop('sbp_cfg', None)
        if key != 'custom_imports':
            assert _by_name(found) == _by_name(value), key
    imports = (before.get('custom_imports') or {}).get('imports', [])
    assert variant == 'none' or pasted.custom_imports.imports == [*dict.fromkeys([*imports, 'sbp_mmdet'])]


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('style', ['its own', 'a child', 'half a child', 'json', 'yaml'])
def test_pasted_lines_are_the_variant(tmp_path, style, variant):
    (tmp_path / 'own.py').write_text(OWN)
    if style == 'a child':
        (tmp_path / 'file.py').write_text("_base_ = './own.py'\n")
    elif style == 'half a child':
        (tmp_path / 'file.py').write_text(
            "_base_ = './own.py'\nmodel = dict(bbox_head=dict(num_classes=5))\n"
            "optim_wrapper = dict(accumulative_counts=2)\ncustom_hooks = [dict(type='NumClassCheckHook')]\n"
        )
    else:
        (tmp_path / 'file.py').write_text(OWN)
    file, content = tmp_path / 'file.py', Config.fromfile(tmp_path / 'file.py').to_dict()
    if style in ('json', 'yaml'):
        file = tmp_path / f'file.{style}'
        file.write_text(json.dumps(content) if style == 'json' else yaml.safe_dump(json.loads(json.dumps(content))))
    config = load_config(file)
    lines = snippet(config, variant, 7)
    pasted = tmp_path / 'pasted.py'
    if format_heading(config) == 'Add to the config:':
        pasted.write_text(f'{file.read_text()}\n{lines}\n')
    else:
        pasted.write_text(f'{lines}\n')
    check(config, Config.fromfile(pasted, import_custom_modules=False), variant)


@pytest.mark.parametrize('path', [DINO, STOCK_T, RETINA])
def test_a_config_of_a_package_is_inherited(tmp_path, path):
    (tmp_path / 'pasted.py').write_text(snippet(config := load_config(path), 'exact', 7))
    pasted = Config.fromfile(tmp_path / 'pasted.py', import_custom_modules=False)
    if path == STOCK_T:  # it names mmpretrain, which is not here
        assert pasted.model.backbone.type == 'SBPConvNeXt' and pasted.model.backbone.arch == 'tiny'
        assert pasted.custom_imports.imports == ['sbp_mmdet']
    else:
        check(config, pasted, 'exact')
    assert format_heading(config) == 'Train with this config:'


def test_where_mmpretrain_is_installed_nothing_is_put_in_its_place(monkeypatch):
    monkeypatch.setattr(module, 'needs_mmpretrain', lambda config: False)
    assert 'SBPConvNeXt' not in (lines := snippet(load_config(STOCK_T), 'exact')) and "'mmpretrain.models'" in lines


def test_lines_are_short(tmp_path):
    (tmp_path / 'child.py').write_text(f"_base_ = '{RETINA}'\n")
    assert snippet(load_config(tmp_path / 'child.py'), 'exact') == (
        "custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)\n"
        "custom_hooks = [dict(type='LeanHook', preset='exact')]"
    )
    (tmp_path / 'grandchild.py').write_text("_base_ = './own.py'\n")
    (tmp_path / 'own.py').write_text(f'custom_hooks = [{EMA}]\n{OWN.split("custom_hooks")[0]}')
    lines = snippet(load_config(tmp_path / 'grandchild.py'), 'int8').splitlines()
    assert lines[1:] == [
        "custom_hooks = [*_base_.custom_hooks, dict(type='LeanHook', preset='int8')]",
        'model = dict(backbone=dict(with_cp=False))',
    ]


@pytest.mark.parametrize('variant', ['exact', 'none', module.OWN])
def test_trials_of_cudnn_are_turned_off(tmp_path, variant):
    file = tmp_path / 'own.py'
    file.write_text(f'{OWN}env_cfg = dict(cudnn_benchmark=True, dist_cfg=dict(backend="nccl"))\n')
    config = load_config(file)
    (tmp_path / 'pasted.py').write_text(f'{file.read_text()}{snippet(config, variant)}\n')
    pasted = Config.fromfile(tmp_path / 'pasted.py', import_custom_modules=False)
    assert pasted.env_cfg == dict(cudnn_benchmark=False, dist_cfg=dict(backend='nccl'))
    assert (pasted.custom_hooks == config.custom_hooks) == (variant == module.OWN)


def test_a_config_is_read_in_the_encoding_that_mmengine_reads(tmp_path, monkeypatch):
    """Python's default is that of the locale, such as Latin-1 or ASCII."""
    (tmp_path / 'child.py').write_text(f'# 网络 é\n{OWN}', encoding='utf-8')
    config, read = load_config(tmp_path / 'child.py'), Path.read_text
    monkeypatch.setattr(Path, 'read_text', lambda path, encoding='ascii', errors=None: read(path, encoding, errors))
    assert "preset='exact'" in snippet(config, 'exact')


def test_names_of_functions_and_comprehensions_are_not_the_configs(tmp_path):
    (tmp_path / 'own.py').write_text(f'custom_hooks = [{EMA}]\n{OWN.split("custom_hooks")[0]}')
    text = "_base_ = './own.py'\nnumber = len([custom_hooks for custom_hooks in 'ab'])\n"
    (tmp_path / 'child.py').write_text(text)
    lines = snippet(load_config(tmp_path / 'child.py'), 'exact')
    (tmp_path / 'pasted.py').write_text(f'{text}{lines}\n')
    found = Config.fromfile(tmp_path / 'pasted.py', import_custom_modules=False).custom_hooks
    assert found == [EMA, dict(type='LeanHook', preset='exact')]


LAZY = """
from mmengine.config import read_base
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapper
from torch.optim import AdamW
from mmdet.models import FPN, ResNet, RetinaHead, RetinaNet
with read_base():
    from .base import *
model.update(
    type=RetinaNet, backbone=dict(type=ResNet, depth=50, with_cp=True), neck=dict(type=FPN),
    bbox_head=dict(type=RetinaHead, num_classes=3),
)
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=0.1))
custom_hooks = [dict(type=EMAHook, momentum=0.1)]
"""


@pytest.mark.parametrize('variant', ['none', 'with_cp', 'int8+cp-neck', 'exact+adamw8bit'])
def test_configs_that_import_what_they_inherit(tmp_path, variant):
    (tmp_path / 'base.py').write_text('model = dict()\ntrain_dataloader = dict(batch_size=2)\n')
    (tmp_path / 'file.py').write_text(LAZY)
    config = load_config(tmp_path / 'file.py')
    (tmp_path / 'pasted.py').write_text(f'{LAZY}{snippet(config, variant, 7)}\n')
    pasted = Config.fromfile(tmp_path / 'pasted.py')
    wanted = with_variant(make_plain(config), variant)
    assert _by_name(pasted.custom_hooks) == _by_name(wanted.custom_hooks)
    assert _by_name(pasted.optim_wrapper) == _by_name(wanted.optim_wrapper)
    assert not pasted.model.backbone.with_cp and pasted.train_dataloader.batch_size == 7
