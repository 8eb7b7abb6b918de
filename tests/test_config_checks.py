"""Mistakes in a config end in a line that names the value and the remedy, before anything is built."""

import re

import pytest
import torch
from helpers import CONFIGS  # puts tools/ on the path
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData

from sbp_mmdet.plan import command
from sbp_mmdet.plan.config_checks import check_config, count_data_classes, find_small_heads
from sbp_mmdet.plan.pipeline import CannotRun
from sbp_mmdet.plan.rehearse import refuse_more_classes
from sbp_mmdet.plan.variants import load_config

import hook_checks  # isort: skip
import preflight  # isort: skip

FRCNN = """
_base_ = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['sbp_mmdet'], allow_failed_imports=False)
"""
OURS = f"""
_base_ = {str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py')!r}
"""
IMPORTS = "imports=['sbp_mmdet', 'nothing_of_this_name'], allow_failed_imports=True"
MISTAKES = {
    'hooks that are no list': (FRCNN, "custom_hooks = dict(type='LeanHook')", 'custom_hooks=.*must be a list of dicts'),
    'a hook without type': (FRCNN, "custom_hooks = [dict(preset='exact')]", 'must be a dict with a type'),
    'an unknown key of a hook': (
        FRCNN,
        "custom_hooks = [dict(type='CheckpointModulesHook', module='neck')]",
        "CheckpointModulesHook has an unknown key 'module'; did you mean 'modules'",
    ),
    'a hook without modules': (
        FRCNN,
        "custom_hooks = [dict(type='CheckpointModulesHook')]",
        r"CheckpointModulesHook needs modules.*modules=\['neck'\]",
    ),
    'a misspelt hook': (FRCNN, "custom_hooks = [dict(type='LeanHok')]", "'LeanHok'; did you mean 'LeanHook'"),
    'a strategy by name': (FRCNN, "strategy = 'FSDPStrategy'", "strategy='FSDPStrategy' must be a dict"),
    'two hooks for all': (
        FRCNN,
        "custom_hooks = [dict(type='LeanHook'), dict(type='LeanHook', preset='int8')]",
        'two LeanHooks, and both change the whole model',
    ),
    'two hooks for one part': (
        FRCNN,
        "custom_hooks = [dict(type='LeanHook', modules=[part]) for part in ('backbone', 'backbone.layer2')]",
        'two LeanHooks, and both change backbone.layer2',
    ),
    'imports that are no dict': (FRCNN, "custom_imports = ['sbp_mmdet']", 'must be a dict with names, such as'),
    'an import that is no name': (
        FRCNN,
        'custom_imports = dict(imports=[3])',
        "'imports': .3.. must be a dict with names",
    ),
    'an import that raises': (
        FRCNN,
        "custom_imports = dict(imports=['raises_in_test'], allow_failed_imports=True)",
        'raises_in_test cannot be imported: ZeroDivisionError',
    ),
    "another arch's neck": (
        OURS,
        "model = dict(backbone=dict(arch='tiny'))",
        r'model.neck: in_channels=\[40, 80, 160, 320\], but SBPConvNeXt gives 4 maps of \[96, 192, 384, 768\] channels '
        r'.*set model.neck.in_channels=\[96, 192, 384, 768\], or another arch',
    ),
    'maps that the neck does not expect': (
        OURS,
        'model = dict(backbone=dict(out_indices=(1, 2, 3)))',
        r'gives 3 maps of \[80, 160, 320\] channels \(out_indices=\[1, 2, 3\]\)',
    ),
    'the last map only': (
        OURS,
        'model = dict(backbone=dict(out_indices=-1))',
        r'gives 1 map of \[320\] channels \(out_indices=\[3\]\); set model.backbone.out_indices=\[0, 1, 2, 3\]$',
    ),
    'maps that are averaged': (
        OURS,
        'model = dict(backbone=dict(gap_before_final_norm=True))',
        'gap_before_final_norm=True gives vectors of 40 .* but FPN needs .*set model.backbone.gap_before_final_norm',
    ),
    'an argument of another backbone': (
        OURS,
        'model = dict(backbone=dict(depth=50))',
        "model.backbone: .* no argument 'depth'; remove it",
    ),
    'a hook among those of the runner': (
        FRCNN,
        "default_hooks = dict(lean=dict(type='LeanHook'))",
        r'default_hooks: lean=LeanHook changes the model; move it to custom_hooks',
    ),
    'a hook beside sbp_cfg': (OURS, "custom_hooks = [dict(type='LeanHook')]", 'an sbp_cfg of its own.*sbp_cfg=None'),
}


@pytest.mark.parametrize('verb', ['report', 'plan', 'rehearse', 'verify'])
@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake(name, verb, tmp_path, capsys, monkeypatch):
    base, line, message = MISTAKES[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / 'raises_in_test.py').write_text('1 / 0\n')
    path = tmp_path / 'mistaken.py'
    path.write_text(base + line)
    with pytest.raises(SystemExit) as stopped:
        command.main([verb, str(path), *(['--budget', '8GiB'] if verb == 'plan' else [])])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert 'mistaken.py' in said and re.search(message, said), said


@pytest.mark.parametrize('hooks', ["[dict(type='LeanHook')]", "[*_base_.custom_hooks, dict(type='LeanHook')]"])
def test_hooks_of_the_parent_that_are_dropped(hooks, tmp_path, capsys):
    path = tmp_path / 'child.py'
    path.write_text(
        "_base_ = 'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py'\n"
        f"custom_imports = dict(imports=['sbp_mmdet'])\ncustom_hooks = {hooks}\n"
    )
    command.main(['report', str(path)])
    command_said = capsys.readouterr().err
    config = preflight.load_config(str(path))
    hook_checks.check_hooks(config)
    for said in (command_said, capsys.readouterr().err):
        assert ("parent's EMAHook, PipelineSwitchHook; " in said) == ('_base_' not in hooks), said


def test_a_misspelt_option_is_named_with_a_remedy(capsys):
    for word, remedy in (
        (['--bach', '2'], '; did you mean --batch?'),
        (['--bach=2'], '; did you mean --batch?'),
        (['--xyz'], '; see sbp-mmdet plan --help'),
    ):
        with pytest.raises(SystemExit):
            command.main(['plan', 'config.py', *word])
        (said,) = capsys.readouterr().err.splitlines()
        assert said == f'sbp-mmdet: error: unrecognized arguments: {" ".join(word)}{remedy}'


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ("model = dict(type='A')", 'has no optim_wrapper; give'),
        ("optim_wrapper = dict(type='A')", 'has no model; give'),
        ('a = 1', 'has no model and no optim_wrapper; give'),
        (
            "default_scope = 'mmsegm'\nmodel = dict(type='EncoderDecoder')\noptim_wrapper = dict(optimizer={})",
            "model.type='EncoderDecoder': this is a config for mmsegm .default_scope='mmsegm'., which is not installed",
        ),
    ],
)
def test_configs_of_other_kinds(text, message, tmp_path, capsys):
    (tmp_path / 'other.py').write_text(text)
    with pytest.raises(SystemExit):
        command.main(['report', str(tmp_path / 'other.py')])
    assert re.search(message, capsys.readouterr().err)


def test_imports_that_may_fail(tmp_path):
    (tmp_path / 'a.py').write_text(FRCNN.replace("imports=['sbp_mmdet'], allow_failed_imports=False", IMPORTS))
    assert load_config(tmp_path / 'a.py').model.type == 'FasterRCNN'


def test_a_part_of_a_package_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        command.main(['report', 'nothing.at.all::a.py'])
    assert 'package nothing.at.all is not installed; install it' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('base', 'line', 'message'),
    [
        (
            FRCNN,
            "custom_imports = None\ncustom_hooks = [dict(type='LeanHook')]",
            r"uses LeanHook and does not import sbp_mmdet.*imports=\['sbp_mmdet'\]",
        ),
        (
            OURS,
            "custom_imports = dict(_delete_=True, imports=['mmdet.models'])",
            r"uses SBPConvNeXt and.*imports=\['mmdet.models', 'sbp_mmdet'\]",
        ),
        (FRCNN, "custom_hooks = [dict(type='LeanHook')]", None),
    ],
)
def test_a_missing_import_is_a_warning(base, line, message, tmp_path, capsys):
    (tmp_path / 'child.py').write_text(base + line)
    command.main(['report', str(tmp_path / 'child.py')])
    said = capsys.readouterr().err
    assert re.search(message, said) if message else 'warning' not in said


@pytest.mark.parametrize('uses', [True, False])
def test_modules_of_ones_own_may_import_the_package(uses, tmp_path, capsys, monkeypatch):
    """A module of the project counts as importing sbp_mmdet if it or one that it imports does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    own, used = f'own_{uses}_in_test', f'used_{uses}_in_test'
    (tmp_path / f'{own}.py').write_text(f'import math\nimport torch\nimport {used}\n')
    (tmp_path / f'{used}.py').write_text('from sbp_mmdet.adapters import adapter\n' if uses else 'VALUE = 1\n')
    (tmp_path / 'child.py').write_text(
        f"{FRCNN}\ncustom_imports = dict(imports=['{own}'])\ncustom_hooks = [dict(type='LeanHook')]\n"
    )
    command.main(['report', str(tmp_path / 'child.py')])
    assert ('does not import sbp_mmdet' in capsys.readouterr().err) != uses


def test_parts_that_do_not_meet_are_two_changes():
    config = Config(dict(model=dict(), custom_imports=dict(imports='sbp_mmdet')))
    config.custom_hooks = [
        dict(type='LeanHook', modules=['neck']),
        dict(type='LeanHook', modules=['neck2', 'backbone']),
    ]
    check_config(config)
    config.custom_hooks = [dict(type='LeanHook'), dict(type='LeanHook', preset='none')]
    check_config(config)


@pytest.mark.parametrize('verb', ['report', 'plan'])
def test_overrides_are_pairs(verb, capsys):
    for word in ('batch', '=3'):
        with pytest.raises(SystemExit):
            command.main([verb, 'config.py', '--cfg-options', word])
        assert f'{word!r} must be KEY=VALUE' in capsys.readouterr().err


def test_a_misspelt_override_is_refused_and_a_key_of_ones_own_is_not(tmp_path):
    (tmp_path / 'child.py').write_text("_base_ = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'")
    path = str(tmp_path / 'child.py')
    with pytest.raises(ValueError, match="optim_wraper.optimizer.lr: .* did you mean 'optim_wrapper'"):
        load_config(path, {'optim_wraper.optimizer.lr': 0.1})
    for key in (
        'resume',
        'compile',
        'activation_checkpointing',
        'tta_pipeline',
        'my_setting',
        'optim_wrapper.clip_grad.max_norm',
    ):
        load_config(path, {key: 1})


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(out_indices=(0, 7)), r'model.backbone: out_indices=\(0, 7\): there is no stage 7'),
        (dict(type='SBPSwinTransformer', depths=[2, 2], _delete_=True), 'model.backbone: IndexError'),
        (dict(act_cfg=dict(type='Foo')), "model.backbone.act_cfg.type='Foo' is not registered"),
        (dict(drop_path_rate='abc'), 'model.backbone: '),
    ],
    ids=str,
)
def test_a_backbone_that_cannot_be_built_is_a_line(options, said):
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    if options.pop('_delete_', False):
        config.model.backbone = options
    config.model.backbone.update(options)
    with pytest.raises(ValueError, match=said) as raised:
        check_config(config)
    assert len(str(raised.value).splitlines()) == 1


@MODELS.register_module(force=True)
class OwnActivation(torch.nn.GELU):
    """Activation of the user's own, in mmdet's registry."""


def test_backbones_and_necks_that_are_right_are_accepted():
    """A neck that takes the coarsest map first, and an activation of the user's own."""
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    config.model.backbone.update(out_indices=(1, 2, 3))
    config.model.neck = dict(type='YOLOV3Neck', num_scales=3, in_channels=[320, 160, 80], out_channels=[32, 16, 8])
    check_config(config)
    config.model.neck = dict(type='FPN', in_channels=[80, 160, 320], out_channels=8, num_outs=3)
    config.model.backbone.update(sbp_cfg=None, act_cfg=dict(type='OwnActivation'))
    with DefaultScope.overwrite_default_scope('mmengine'):  # as before anything is built
        check_config(config)


@MODELS.register_module(force=True)
class Classifier(torch.nn.Module):
    """Backbone of another package, which classifies unless it is told otherwise."""

    channels = (8,)

    def __init__(self, out_type='cls_token'):
        super().__init__()
        self.out_type, self.out_indices = out_type, [0]

    def forward(self, x):
        return [x.new_zeros(2, 8, 4, 4) if self.out_type == 'featmap' else x.new_zeros(2, 8)]


def test_backbones_of_other_packages_give_maps_too():
    config = Config(dict(model=dict(backbone=dict(type='Classifier'), neck=dict(type='FPN', in_channels=[8]))))
    with pytest.raises(
        ValueError, match="Classifier with out_type='cls_token' .*set model.backbone.out_type='featmap'"
    ):
        check_config(config)
    config.model.backbone.out_type = 'featmap'
    check_config(config)
    config.model.update(backbone=dict(type='Classifier'), neck=dict(type='mmpretrain.GlobalAveragePooling'))
    check_config(config)  # a classifier


def test_mmpretrains_convnext_is_checked_without_mmpretrain():
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    del config.model.backbone['sbp_cfg']
    config.model.backbone.update(type='mmpretrain.ConvNeXt', gap_before_final_norm=True)
    with pytest.raises(ValueError, match='mmpretrain.ConvNeXt with gap_before_final_norm=True'):
        check_config(config)


class Data:
    """A data set with three classes."""

    cat2label = {3: 0, 7: 1, 8: 2}


class Repeated:
    dataset = Data()


class Joined:
    datasets = [Repeated(), Data()]


@pytest.mark.parametrize('dataset', [Data(), Repeated(), Joined()])
def test_classes_of_the_data_are_those_of_the_heads(dataset):
    heads = [dict(num_classes=3), dict(num_classes=2)]
    for model in (dict(bbox_head=dict(num_classes=3)), dict(roi_head=dict(bbox_head=heads[0])), dict()):
        refuse_more_classes(Config(dict(model=model)), dataset)
    for model in (
        dict(bbox_head=heads[1]),
        dict(roi_head=dict(bbox_head=heads)),
        dict(roi_head=dict(mask_head=heads[1])),
    ):
        with pytest.raises(CannotRun, match='num_classes=2, but the training data have 3 classes'):
            refuse_more_classes(Config(dict(model=model)), dataset)


class Mapped(Data):
    """A data set whose pipeline gives every box the first label, or one of all."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        sample = DetDataSample(gt_instances=InstanceData(labels=torch.tensor([self.labels[i]])))
        return dict(inputs=torch.zeros(3, 4, 4), data_samples=sample)


def test_labels_are_those_that_the_pipeline_gives():
    config = Config(dict(model=dict(bbox_head=dict(num_classes=1))))
    refuse_more_classes(config, Mapped([0, 0]))
    with pytest.raises(CannotRun, match='num_classes=1, but the training data have 3 classes'):
        refuse_more_classes(config, Mapped([0, 2]))


def test_heads_that_do_not_tell_classes_apart_may_have_one():
    heads = [dict(type='FCNMaskHead', num_classes=1, class_agnostic=agnostic) for agnostic in (True, False)]
    found = [find_small_heads(Config(dict(model=dict(roi_head=dict(mask_head=head)))), 3) for head in heads]
    assert found == [{}, {'roi_head.mask_head': 1}]
    assert find_small_heads(Config(dict(model=dict(bbox_head=['a head that is no dict']))), 3) == {}


def test_classes_that_a_config_names():
    """Those of metainfo come first; then those of the class; a wrapper has the most of its parts."""
    coco, two = dict(type='CocoDataset'), dict(type='CocoDataset', metainfo=dict(classes=('cup', 'plate')))
    panoptic = dict(type='CocoPanopticDataset')
    joined = dict(type='ConcatDataset', datasets=[two, dict(two, metainfo=dict(classes=('cup',)))])
    cases = [(coco, 80), (two, 2), (panoptic, 80), (dict(panoptic, metainfo=two['metainfo']), 2), (joined, 2)]
    cases += [(dict(type='RepeatDataset', times=2, dataset=two), 2), (None, 0), (dict(type='Unknown'), 0)]
    cases += [(dict(coco, metainfo=dict(classes='classes.txt')), 0)]
    cases += [(dict(coco, metainfo=dict(palette=[(0, 0, 0)])), 80)]
    cases += [(dict(coco, metainfo=dict(classes=4)), 0), (dict(coco, metainfo='classes.py'), 80)]
    assert [count_data_classes(dataset) for dataset, _ in cases] == [number for _, number in cases]
