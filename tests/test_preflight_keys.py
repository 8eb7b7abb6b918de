"""Mistakes in keys of a config, in overrides and in weights end in a line of the training script, too."""

import argparse
import copy
import errno
import io
import json
import os
import re
import sys
import tempfile
import urllib.error
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from helpers import TOOLS, make_project, run, run_forked
from mmdet.registry import TRANSFORMS
from mmengine.registry import init_default_scope

from sbp_mmdet.plan import command
from sbp_mmdet.plan.config_checks import add_config
from sbp_mmdet.plan.variants import load_config

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
        (["dict(type='LeanHook')"], 'custom_hooks: "dict.* must be a dict with a type'),
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
        ('model.neck.in_channels.0', 'model.neck.in_channels is a list, whose members are replaced together; override'),
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


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ("_base_ = 'child.py'\n", 'child.py inherits from itself; look at _base_'),
        ('raise SystemExit(3)\n', 'child.py: SystemExit: 3'),
    ],
)
def test_configs_that_cannot_be_read(text, message, project):
    child = project.with_name('child.py')
    child.write_text(text)
    assert mmdet_script.toolbox_of([str(child)]) == 'mmdet'
    with pytest.raises(PreflightError, match=message):
        preflight.load_config(str(child))
    with pytest.raises(ValueError, match=message):
        load_config(str(child))
    with pytest.raises(PreflightError, match='is a folder; give the path of a config file in it'):
        preflight.load_config(str(project.parent))


@pytest.mark.parametrize(
    ('words', 'wrong'),
    [
        (['--cfg-options', 'a=1', 'model.backbone'], "'model.backbone' must be KEY=VALUE"),
        (['--cfg-opt=model'], "'model' must be KEY=VALUE"),
        (['--cfg-options', 'a=(0,1', '--resume'], r"'a=\(0,1' has a bracket without its counterpart"),
        (['--cfg-options', 'a=0,[1'], r"'a=0,\[1' has a bracket without its counterpart"),
        (['--cfg-options', 'a=[dict(b=1,c=2)]'], r"'a=\[dict\(b=1,c=2\)\]' contains a dict; override one of its keys"),
        (['--cfg-options', "a=dict(type='B')"], '.*contains a dict; override one of its keys'),
        (['--cfg-options', "a=[0, {'b': 1}]"], '.*contains a dict; override one of its keys'),
        (['--cfg-options', 'a=["dict(b=1)"]'], '.*contains a dict; override one of its keys'),
        (['--cfg-options', 'a=0', 'b=[f(1,2)]'], r"'b=\[f\(1,2\)\]' has text in front of a bracket"),
        (['--cfg-options', 'a=0,f(1,2)'], r"'a=0,f\(1,2\)' has text in front of a bracket"),
    ],
)
def test_overrides_that_cannot_be_parsed(words, wrong, project, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['train.py', str(project), *words])
    with pytest.raises(SystemExit, match=f'^error: --cfg-options: {wrong}'):
        mmdet_script.run('train.py', ('train',))
    with pytest.raises(SystemExit):
        command.main(['plan', str(project), '--budget', '8GiB', *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f'argument --cfg-options: {wrong}', line)


@pytest.mark.parametrize(
    'value',
    [
        *('dictionary', 'weights(1).pth', 'weights(1.pth', 'f(1)', '', 'x{0}'),
        *('[(1,2),[a,b]]', '"(1, 2)"', "['(1,2)']"),
    ],
)
def test_overrides_that_can_be_parsed(value, project, monkeypatch):
    # The config does not exist, which is what the script names next.
    words = [str(project.parent / 'missing.py'), '--cfg-options', f'a={value}']
    monkeypatch.setattr(sys, 'argv', ['train.py', *words])
    with pytest.raises(SystemExit, match='missing.py'):
        mmdet_script.run('train.py', ('train',))
    parser = argparse.ArgumentParser()
    add_config(parser)
    (parsed,) = parser.parse_args([str(project), '--cfg-options', f'a={value}']).cfg_options.values()
    lists = {'[(1,2),[a,b]]': [(1, 2), ['a', 'b']], '"(1, 2)"': (1, 2), "['(1,2)']": [(1, 2)]}
    assert parsed == lists.get(value, value)


def test_keys_of_dataloaders(config):
    config.train_dataloader.batchsize = 1
    with pytest.raises(PreflightError, match="train_dataloader.batchsize=1: .*did you mean 'batch_size'"):
        preflight.check_config(config, ('train',))


@pytest.mark.parametrize('several', [lambda loader: dict(a=loader), lambda loader: [loader]], ids=['dict', 'list'])
def test_several_dataloaders_of_a_loop_of_ones_own(several, config):
    """Each is checked as a single one is; of several, heads may be for the classes of another."""
    config.model.roi_head.bbox_head.num_classes = 1
    before = config.train_dataloader
    with pytest.raises(PreflightError, match='num_classes=1'):
        preflight.check_config(config, ('train',))
    name = 'a' if isinstance(several(before), dict) else '0'
    for split in ('train', 'val'):
        loader = config[f'{split}_dataloader'].to_dict()
        both = several(loader)
        both.update(b=loader) if isinstance(both, dict) else both.append(loader)
        config[f'{split}_dataloader'] = both
    config.val_evaluator = [[config.val_evaluator], [config.val_evaluator]]
    preflight.check_config(config, ('train', 'val'))
    config.train_dataloader[int(name) if name.isdigit() else name].dataset.ann_file = 'none.json'
    with pytest.raises(PreflightError, match=f'train_dataloader.{name}.dataset.ann_file.*none.json'):
        preflight.check_config(config, ('train', 'val'))


def refuse_to_write(dir):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_copy_of_the_config_that_would_replace_it(config, project):
    for name in ('', '.', str(project.parent)):
        with pytest.raises(PreflightError, match=f'work directory .*: mmengine would overwrite .*{project.name} with'):
            preflight.check_arguments(config, Namespace(work_dir=name))
    copy = project.parent / 'run' / project.name
    copy.parent.mkdir()
    copy.write_text(config.pretty_text)
    preflight.check_arguments(config, Namespace(work_dir=str(copy.parent)))
    preflight.check_arguments(preflight.load_config(str(copy)), Namespace(work_dir=str(copy.parent)))


def test_a_folder_is_no_checkpoint(config, tmp_path):
    with pytest.raises(PreflightError, match=f'checkpoint: {tmp_path} is a folder; name a checkpoint in it'):
        checkpoints.check_checkpoint(str(tmp_path), 'checkpoint', config)
    config.strategy = dict(type='DeepSpeedStrategy')
    checkpoints.check_checkpoint(str(tmp_path), 'load_from', config, whole_run=True)


def test_places_to_write_to(config, tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    preflight.check_arguments(config, Namespace(work_dir=str(tmp_path / 'new/er'), out='a.pkl'))
    for name in ('file', 'file/in'):
        with pytest.raises(
            PreflightError, match='work directory .*file is a file; give another folder with --work-dir'
        ):
            preflight.check_arguments(config, Namespace(work_dir=str(tmp_path / name)))
    for name in ('/proc/new', '/proc/new/er'):  # root may write there, as far as permissions tell
        with pytest.raises(PreflightError, match=f'work directory {name}: /proc cannot be written to .*--work-dir'):
            preflight.check_arguments(config, Namespace(work_dir=name))
    monkeypatch.setattr(tempfile, 'mkdtemp', refuse_to_write)
    with pytest.raises(PreflightError, match='work directory work_dirs/tiny: .* cannot be written to .Read-only'):
        preflight.check_arguments(config, Namespace(work_dir=None))
    monkeypatch.undo()
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


@pytest.mark.parametrize('split', ['train', 'val'])
def test_a_folder_of_images_that_is_not_there(split, config):
    """Images that code of the user's own reads may be anywhere."""
    dataset = config[f'{split}_dataloader'].dataset
    dataset.data_prefix = dict(img='nowhere')
    said = (
        rf"{split}_dataloader.dataset.data_prefix.img='nowhere': none of the \d+ images of .* is in data/shapes/nowhere"
    )
    with pytest.raises(PreflightError, match=said):
        preflight.check_config(config, ('train', 'val'))
    dataset.pipeline[0].backend_args = dict(backend='petrel')
    preflight.check_config(config, ('train', 'val'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRANSFORMS._module_dict, 'LoadOwn', type('LoadOwn', (), {}))
        dataset.pipeline[0] = dict(type='LoadOwn')
        preflight.check_config(config, ('train', 'val'))


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('model.neck.sbp_cfg.keep_ratio=0.5', "model.neck: FPN has no argument 'sbp_cfg'; .*LeanHook"),
        (
            'train_cfg.max_epoch=1',
            r"train_cfg: \w+ has no argument 'max_epoch'; did you mean 'max_epochs'",
        ),
        ('default_hooks.timer.type=IterTimeHook', "default_hooks.timer.type='IterTimeHook' is not registered; did you"),
        (
            'train_dataloader.batch_size=9 train_dataloader.batch_sampler.drop_last=True',
            'drop_last=True leaves no batch',
        ),
    ],
)
def test_what_mmdet_finds_is_a_line_as_well(option, message, project):
    done = run_forked(TOOLS / 'train.py', project.name, '--cfg-options', *option.split(), cwd=project.parent)
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
    error = FileNotFoundError(2, 'No such file or directory', 'of a hook.txt')
    assert mmdet_script._describe_mistake(config, error) is None


def test_more_classes_than_the_data_have(config, capsys):
    config.model.roi_head.bbox_head.num_classes = 80
    preflight.check_config(config, ('train',))
    said = capsys.readouterr().err
    assert re.match(r'warning: .*bbox_head: num_classes=80, but metainfo .* names 4 classes: .*num_classes=4', said)


def test_a_warning_is_repeated_after_a_traceback(project):
    options = ('model.roi_head.mask_head.num_classes=80', 'train_dataloader.prefetch_factor=2')
    done = run('python', TOOLS / 'train.py', project.name, '--cfg-options', *options, cwd=project.parent, check=False)
    before, _, after = done.stderr.rpartition('Traceback')
    assert done.returncode == 1
    assert [text.count('mask_head: num_classes=80') for text in (before, after)] == [1, 1], done.stderr


# A training with a limit on the size of files, which is to it what a full disk is.
FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
runpy.run_path({script!r}, run_name='__main__')
"""
# A training in whose second step the user presses Ctrl-C.
INTERRUPTED = """
import runpy, sys
from mmengine.runner import EpochBasedTrainLoop as Loop
step = Loop.run_iter
def run_iter(self, number, batch):
    if self._iter == 1:
        raise KeyboardInterrupt
    step(self, number, batch)
Loop.run_iter = run_iter
runpy.run_path({script!r}, run_name='__main__')
"""
# The user presses Ctrl-C while the config is read.
INTERRUPTED_EARLY = """
import runpy, sys
from mmengine.config import Config
def fromfile(*args, **keys):
    raise KeyboardInterrupt
Config.fromfile = fromfile
runpy.run_path({script!r}, run_name='__main__')
"""


@pytest.mark.parametrize(
    ('program', 'code', 'said'),
    [
        (FULL_DISK, 1, 'error: .*epoch_1.pth cannot be written: File too large; make room there, and go on with --res'),
        (INTERRUPTED, 130, 'interrupted; --resume goes on from the last checkpoint'),
        (INTERRUPTED_EARLY, 130, 'interrupted$'),
    ],
    ids=['full disk', 'interrupted', 'interrupted early'],
)
def test_a_training_that_cannot_go_on(program, code, said, project, tmp_path):
    script = tmp_path / 'run.py'
    script.write_text(program.format(script=str(TOOLS / 'train.py')))
    words = project.name, '--work-dir', tmp_path / 'run'
    done = run_forked(script, *words, cwd=project.parent, PYTHONPATH=TOOLS)
    assert re.match(said, done.stdout.splitlines()[-1]) and 'Traceback' not in done.stdout
    assert done.returncode == code and not [*(tmp_path / 'run').glob('*.pth*')]
