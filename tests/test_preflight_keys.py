"""Mistakes in keys of a config, in overrides and in weights end in a line of the training script, too."""

import copy
import io
import json
import re
import urllib.error
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import TOOLS, make_project, run, run_forked
from mmengine.registry import init_default_scope

import mmdet_script  # isort: skip  (helpers puts tools/ on the path)
import checkpoints  # isort: skip
import preflight  # isort: skip
from preflight import PreflightError

SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4))
LEAN = dict(type='LeanHook')


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('own'), train=4, val=2)


@pytest.fixture
def config(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    init_default_scope('mmdet')
    return copy.deepcopy(preflight.load_config(str(project)))


@pytest.mark.parametrize(
    ('hooks', 'message'),
    [
        (LEAN, 'custom_hooks=.* must be a list of dicts'),
        (['LeanHook'], "custom_hooks: 'LeanHook' must be a dict with a type"),
        ([dict(preset='exact')], 'must be a dict with a type'),
        ([LEAN, dict(LEAN, preset='int8')], 'two LeanHooks, and both change the whole model; .*modules='),
        ([LEAN, dict(LEAN, modules=['neck'])], 'two LeanHooks, and both change neck'),
        ([dict(LEAN, modules=['neck']), dict(LEAN, modules=['backbone'])], None),
        ([dict(LEAN, preset='exact', keep_ratio=0.5)], "LeanHook: preset='exact' drops no position"),
    ],
)
def test_hooks(hooks, message, config):
    config.model.backbone, config.model.neck.in_channels = SWIN, [8, 16, 32, 64]
    config.custom_hooks = hooks
    if message is None:
        return preflight.check_config(config, ('train',))
    with pytest.raises(PreflightError, match=message) as raised:
        preflight.check_config(config, ('train',))
    assert 'LeanHook: LeanHook' not in str(raised.value)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(out_indices=-1), r'SBPConvNeXt gives 1 map of .*set model.backbone.out_indices=\[0, 1, 2, 3\]$'),
        (dict(gap_before_final_norm=True), 'set model.backbone.gap_before_final_norm=False$'),
    ],
)
def test_what_the_backbone_gives_to_the_neck(options, message, config):
    preflight.check_backbone(config)
    config.model.backbone.update(options)
    with pytest.raises(PreflightError, match=message):
        preflight.check_backbone(config)


@pytest.mark.parametrize(
    ('key', 'message'),
    [
        ('custom_hooks.preset', 'custom_hooks is a list of 1; .*such as custom_hooks.0.preset'),
        ('custom_hooks.1.preset', 'custom_hooks is a list of 1; .*such as custom_hooks.0.preset'),
        ('train_cfg.max_epochs.no', 'train_cfg.max_epochs is .*override train_cfg.max_epochs itself'),
    ],
)
def test_overrides_that_do_not_fit(key, message, project):
    child = project.with_name('child.py')
    child.write_text(f"_base_ = '{project.name}'\ncustom_hooks = [dict(type='LeanHook')]\n")
    with pytest.raises(PreflightError, match=rf'--cfg-options {key}=int8: {message}'):
        preflight.load_config(str(child), {key: 'int8'})
    assert preflight.load_config(str(child), {'custom_hooks.0.preset': 'int8'}).custom_hooks[0].preset == 'int8'


@pytest.mark.parametrize(
    ('name', 'remedy'), [('spb_mmdet', "did you mean 'sbp_mmdet'"), ('my_hooks_in_test', 'PYTHONPATH=.')]
)
def test_a_module_that_cannot_be_imported(name, remedy, project):
    child = project.with_name('child.py')
    child.write_text(f"_base_ = '{project.name}'\ncustom_imports = dict(imports=['{name}'])\n")
    with pytest.raises(
        PreflightError, match=f"child.py: custom_imports: No module named '{name}'; .*{remedy}"
    ) as found:
        preflight.load_config(str(child))
    assert '\n' not in str(found.value)


def test_keys_of_dataloaders(config):
    config.train_dataloader.batchsize = 1
    with pytest.raises(PreflightError, match="train_dataloader.batchsize=1: .*did you mean 'batch_size'"):
        preflight.check_config(config, ('train',))


def test_places_to_write_to(config, tmp_path):
    (tmp_path / 'file').touch()
    preflight.check_arguments(config, Namespace(work_dir=str(tmp_path / 'new/er'), out='a.pkl'))
    for name in ('file', 'file/in'):
        with pytest.raises(
            PreflightError, match='work directory .*file is a file; give another folder with --work-dir'
        ):
            preflight.check_arguments(config, Namespace(work_dir=str(tmp_path / name)))
    with pytest.raises(PreflightError, match='--out a.json: .*ends in .pkl'):
        preflight.check_arguments(config, Namespace(out='a.json'))
    preflight.check_arguments(config, Namespace(out='a.json', out_item='metrics'))  # of mmpretrain


def test_annotation_files_are_checked_for_what_training_reads(config, tmp_path, capsys):
    dataset = config.train_dataloader.dataset
    path = Path(dataset.get('data_root', ''), dataset.ann_file).resolve()
    content = json.loads(path.read_text())
    content['annotations'] = []
    config.train_dataloader.dataset.ann_file = str(tmp_path / 'empty.json')
    (tmp_path / 'empty.json').write_text(json.dumps(content))
    with pytest.raises(
        PreflightError, match='train_dataloader.dataset.ann_file: filter_cfg.filter_empty_gt removes all'
    ):
        preflight.check_config(config, ('train',))
    dataset.ann_file = str(path)
    dataset.metainfo.classes = (*dataset.metainfo.classes, 'hazlenut')
    preflight.check_config(config, ('train',))
    assert 'classes that are no category of' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('model.neck.sbp_cfg.keep_ratio=0.5', "model.neck: FPN has no argument 'sbp_cfg'; .*LeanHook"),
        (
            'train_cfg.max_epoch=1',
            r"train_cfg: \w+ has no argument 'max_epoch'; did you mean 'max_epochs'",
        ),
        ('default_hooks.timer.type=IterTimeHook', "default_hooks.timer.type='IterTimeHook' is not registered; did you"),
    ],
)
def test_what_mmdet_finds_is_a_line_as_well(option, message, project):
    done = run_forked(TOOLS / 'train.py', project.name, '--cfg-options', option, cwd=project.parent)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('error: ')]
    assert done.returncode == 1 and 'Traceback' not in done.stdout
    assert re.search(message, line), line


def test_weights_of_torchvision(config, monkeypatch):
    monkeypatch.setattr(checkpoints.importlib.util, 'find_spec', lambda name: None)
    config.model.backbone.init_cfg = dict(type='Pretrained', checkpoint='torchvision://resnet50')
    with pytest.raises(PreflightError, match='needs torchvision.*--cfg-options model.backbone.init_cfg=None'):
        checkpoints.check_initial_weights(config)


@pytest.mark.parametrize(
    ('error', 'refused'),
    [
        (urllib.error.URLError('Name or service not known'), True),
        (TimeoutError('timed out'), False),  # a download may wait longer
        (urllib.error.URLError(TimeoutError('timed out')), False),
        (urllib.error.HTTPError('', 403, 'no HEAD', {}, io.BytesIO()), False),
    ],
)
def test_weights_that_cannot_be_downloaded(error, refused, config, tmp_path, monkeypatch):
    def fail(request, timeout):
        raise error

    monkeypatch.setattr(checkpoints.urllib.request, 'urlopen', fail)
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    config.model.backbone.init_cfg = dict(type='Pretrained', checkpoint='https://nowhere.example/a/weights.pth?x=1')
    if not refused:
        return checkpoints.check_initial_weights(config)
    with pytest.raises(PreflightError, match=r'weights.pth\S+ cannot be downloaded .*init_cfg=None'):
        checkpoints.check_initial_weights(config)
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'checkpoints/weights.pth').touch()
    checkpoints.check_initial_weights(config)


def test_other_errors_keep_their_traceback(config):
    assert mmdet_script._describe_mistake(config, TypeError('of the training itself')) is None


def test_more_classes_than_the_data_have(config, capsys):
    config.model.roi_head.bbox_head.num_classes = 80
    preflight.check_config(config, ('train',))
    said = capsys.readouterr().err
    assert re.match(r'warning: .*bbox_head: num_classes=80, but metainfo .* names 4 classes: .*num_classes=4', said)


def test_a_warning_is_repeated_after_a_traceback(project):
    options = ('model.roi_head.mask_head.num_classes=80', 'train_dataloader.num_workers=-1')
    done = run('python', TOOLS / 'train.py', project.name, '--cfg-options', *options, cwd=project.parent, check=False)
    before, _, after = done.stderr.rpartition('Traceback')
    assert done.returncode == 1
    assert [text.count('mask_head: num_classes=80') for text in (before, after)] == [1, 1], done.stderr
