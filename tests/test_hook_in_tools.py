"""A config with ``SBPHook`` in tools: variants and settings are what they are of the config without the hook."""

import copy
import json
import sys

import pytest
import torch
from helpers import TOOLS, make_project
from mmengine.config import Config, ConfigDict

from sbp_mmdet.analysis.detector import build_detector, measure_detector, own_crops
from sbp_mmdet.analysis.planner import candidates, cfg_options, snippet
from sbp_mmdet.analysis.variants import applicable, load_config, with_variant, without_hook
from sbp_mmdet.study import settings as study_settings
from sbp_mmdet.study.experiments import Experiment, configs_of
from sbp_mmdet.study.gradient_norms import norms_over_training
from sbp_mmdet.study.subject import train_batches

sys.path[:0] = [str(TOOLS)]
import plan_memory  # noqa: E402

SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), drop_path_rate=0.0)
HOOK = dict(type='SBPHook', keep_ratio=0.25, recompute=True, priority='LOW')
OTHER = dict(type='TargetsInChunksHook')
LAYERS = [(0, 0), (1, 'downsample'), (1, 0), (2, 'downsample'), (2, 0), (2, 1)]
CASE = dict(batch=1, height=96, width=100, boxes=4)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """A detector with stock Swin and eight small images, without the hook and with it."""
    folder = tmp_path_factory.mktemp('project')
    config = load_config(str(make_project(folder)), {'train_dataloader.dataset.data_root': f'{folder}/data/shapes/'})
    config.model.backbone = ConfigDict(SWIN)
    config.custom_hooks = [OTHER]
    return config, with_hook(config)


def with_hook(config, **keys):
    config = copy.deepcopy(config)
    config.custom_hooks = [dict(HOOK, **keys), *config.custom_hooks]
    return config


def saved(config):
    return measure_detector(config, **CASE)['saved']


def test_variants(pair):
    plain, hooked = pair
    assert saved(with_variant(hooked, 'none')) == saved(with_variant(plain, 'none')) == saved(plain)
    assert saved(with_variant(hooked, 'recompute')) == saved(hooked)  # which has the keys of this preset
    assert saved(hooked)['stage 1'] < 0.5 * saved(plain)['stage 1']
    assert saved(with_variant(hooked, 'exact')) == saved(with_variant(plain, 'exact'))
    assert hooked.custom_hooks[0] == HOOK and without_hook(plain) is plain


@pytest.mark.parametrize('variant', ['none', 'recompute', 'exact+cp-rpn'])
def test_what_the_planner_prints_trains(pair, variant, tmp_path):
    _, hooked = pair
    (tmp_path / 'parent.json').write_text(json.dumps(hooked.to_dict()))
    (tmp_path / 'child.py').write_text(f"_base_ = './parent.json'\n{snippet(hooked, variant)}\n")
    pasted = Config.fromfile(tmp_path / 'child.py')
    assert saved(pasted) == saved(with_variant(hooked, variant))
    assert OTHER in pasted.custom_hooks and cfg_options(hooked, variant) is None


def test_the_planner_goes_through(pair, monkeypatch, capsys, tmp_path):
    plain, hooked = pair
    assert candidates(hooked) == candidates(plain) and candidates(hooked, 'exact') == candidates(plain, 'exact')
    hooked.dump(tmp_path / 'hooked.py')
    monkeypatch.setattr(sys, 'argv', ['', f'{tmp_path}/hooked.py', '--budget', '8GiB', '--size', '96x100'])
    plan_memory.main()
    printed = capsys.readouterr().out
    assert 'The fastest that fits: fused\n' in printed and 'The fastest that fits: none\n' in printed


def test_blocks_are_those_of_the_hook():
    """The paper's, which the backbone would take, are others; a list of ratios counts on them."""
    config = load_config('mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py')
    config.custom_hooks = [dict(type='SBPHook', keep_ratio=[0.5] * 15)]
    assert with_variant(config, 'fused').model.backbone.sbp_cfg == dict(keep_ratio=[0.5] * 15, blocks=[3, 3, 9, 0])
    config.custom_hooks = [dict(type='SBPHook', blocks=[3, 0, 0, 0])]
    assert with_variant(config, 'fused').model.backbone.sbp_cfg.blocks == [3, 0, 0, 0]


def test_backbones_that_cannot_be_changed_are_named(pair, monkeypatch, capsys, tmp_path):
    _, hooked = copy.deepcopy(pair)
    hooked.model.backbone = ConfigDict(type='mmpretrain.VisionTransformer')
    with pytest.raises(ValueError, match='SBPHook.*mmpretrain.VisionTransformer.*leave SBPHook out'):
        applicable(hooked, ['none'])
    hooked.dump(tmp_path / 'vit.py')
    monkeypatch.setattr(sys, 'argv', ['', f'{tmp_path}/vit.py', '--budget', '8GiB'])
    with pytest.raises(SystemExit):
        plan_memory.main()
    assert 'leave SBPHook out' in capsys.readouterr().err
    hooked.model.backbone = ConfigDict(SWIN, type='SBPSwinTransformer', sbp_cfg=dict())
    with pytest.raises(ValueError, match='SBPSwinTransformer has sbp_cfg of its own'):
        with_variant(hooked, 'none')


def test_trainings(pair, tmp_path):
    pair[1].dump(tmp_path / 'hooked.py')
    options = dict(folder=tmp_path, configs=dict(own='hooked.py'), settings=dict(plain=None, half=dict(keep_ratio=0.5)))
    experiment = Experiment('e', config='hooked.py', **options)
    configs = configs_of(experiment, experiment.labels)
    assert configs['own'].custom_hooks[0].type == 'SBPHook' and configs['own'].model.backbone.type == SWIN['type']
    for label in ('plain', 'half'):
        assert configs[label].custom_hooks == [OTHER]
        with own_crops():
            model, _ = build_detector(configs[label], 'cpu')
        assert model.backbone.keep_ratios() == ({} if label == 'plain' else dict.fromkeys(LAYERS, 0.5))


def test_groups_are_on_top_of_the_hooks_keys(pair):
    settings = study_settings.group('ratios', pair[1])
    assert settings['0.5'] == dict(recompute=True, blocks=[1, 1, 2, 0], keep_ratio=0.5)


def test_gradients(pair):
    """Norms without SBP are those of the config without hooks, whatever hooks make the gradients inexact."""
    plain, hooked = pair
    batches = list(train_batches(plain, 1))
    found = []
    for config in (plain, hooked):
        config = copy.deepcopy(config)
        if config.custom_hooks[0] == HOOK:
            config.custom_hooks.append(dict(type='SBPModulesHook', modules=['rpn_head']))
        with own_crops():
            found.append(norms_over_training(config, {'none': (None, None), 'half': (dict(), None)}, batches, 1))
    torch.testing.assert_close(found[0], found[1])
    assert found[0]['none']['norms']['stage 1'] != found[0]['half']['norms']['stage 1']
