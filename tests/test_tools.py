"""Bad input on the command line ends in one clear message."""

import copy
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import mmengine
import pytest
from helpers import TOOLS, make_project, run, run_forked
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope

import mmdet_script  # isort: skip  (helpers puts tools/ on the path)
import preflight  # isort: skip
from preflight import PreflightError

ANNOTATIONS = 'data/shapes/annotations/instances_train.json'


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    """Return the config of a project in a folder with a blank in its name."""
    folder = tmp_path_factory.mktemp('own') / 'my project'
    return make_project(folder, train=4, val=2)


@pytest.fixture(scope='module')
def loaded(project):
    return preflight.load_config(str(project))


@pytest.fixture
def config(project, loaded, monkeypatch):
    monkeypatch.chdir(project.parent)
    init_default_scope('mmdet')
    return copy.deepcopy(loaded)


# --- bad input ---------------------------------------------------------------------------------------------------


def test_good_config_passes(config):
    preflight.check_config(config, ('train', 'val', 'test'))


def test_missing_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PreflightError, match=r'config file no/such.py does not exist .*check the path'):
        preflight.load_config('no/such.py')


def test_config_of_a_package_that_is_missing(tmp_path):
    (tmp_path / 'child.py').write_text("_base_ = 'mmrazor::no/such.py'")
    with pytest.raises(PreflightError, match='child.py: ModuleNotFoundError: mmrazor is not installed'):
        preflight.load_config(str(tmp_path / 'child.py'))


def test_a_misspelt_override_is_refused(project):
    with pytest.raises(PreflightError, match="train_cgf.max_epochs: .* did you mean 'train_cfg'"):
        preflight.load_config(str(project), {'train_cgf.max_epochs': 1})
    assert preflight.load_config(str(project), {'train_cfg.max_epochs': 1, 'my_setting': 2}).my_setting == 2


def test_script_says_what_is_wrong_and_stops(project):
    """The command line prints only one line."""
    option = 'train_dataloader.dataset.ann_file=no.json'
    done = run_forked(TOOLS / 'train.py', 'tiny.py', '--cfg-options', option, cwd=project.parent)
    assert done.returncode == 1
    assert 'error: train_dataloader.dataset.ann_file: data/shapes/no.json does not exist' in done.stdout
    assert 'Traceback' not in done.stdout and not (project.parent / 'work_dirs').exists()


def test_arguments_that_the_config_or_the_machine_cannot_follow(config):
    args = Namespace(auto_scale_lr=True, amp=False)
    preflight.check_arguments(config, args)
    preflight.check_arguments(config, Namespace(checkpoint='a.pth'))  # of test.py
    with pytest.raises(PreflightError, match='--amp: .* needs a GPU.* leave --amp out'):
        preflight.check_arguments(config, Namespace(amp=True))
    del config.auto_scale_lr.base_batch_size
    with pytest.raises(PreflightError, match=r'--auto-scale-lr: .*base_batch_size=16'):
        preflight.check_arguments(config, args)


def test_script_takes_what_the_checks_decided_and_leaves_the_command_line(project, monkeypatch, tmp_path, capsys):
    """The replacement of mmdet's script has its own parser, and its main function parses the command line again."""
    script = tmp_path / 'train.py'
    script.write_text(
        'import argparse, mmengine\n'
        'def parse_args():\n'
        '    parser = argparse.ArgumentParser()\n'
        '    for name in ("--work-dir", "--resume", "--launcher"):\n'
        '        parser.add_argument(name, default="none" if name == "--launcher" else None)\n'
        '    parser.add_argument("config"), parser.add_argument("--amp", action="store_true")\n'
        '    parser.add_argument("--cfg-options", nargs="+", action=mmengine.config.DictAction)\n'
        '    return parser.parse_args()\n'
        'def main():\n'
        '    seen.append(parse_args())\n'
        'seen = mmengine.seen = []\n'
        'print("could not import something optional")\n'
    )
    monkeypatch.chdir(project.parent)
    monkeypatch.setattr(mmdet_script, 'find_script', lambda *names: script)
    words = ['train.py', 'tiny.py', '--cfg-options', 'train_cfg.max_epochs=1']
    monkeypatch.setattr('sys.argv', [*words])
    mmdet_script.run('train.py', ('train', 'val'))
    (args,) = mmengine.seen
    assert 'optional' not in capsys.readouterr().out
    assert sys.argv == words and args.config == 'tiny.py' and args.resume is None
    assert args.cfg_options['train_cfg.max_epochs'] == 1
    assert args.cfg_options['default_hooks.checkpoint.backend_args.backend'] == 'atomic'


def test_config_without_custom_imports(project):
    """The test needs a process of its own, because SBPConvNeXt is already registered in this one."""
    text = project.read_text()
    bare = project.with_name('bare.py')
    bare.write_text(text + "\ncustom_imports = dict(imports=['mmdet.models'], allow_failed_imports=False)\n")
    done = run('python', TOOLS / 'test.py', 'bare.py', 'none.pth', cwd=project.parent, check=False)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'uses SBPConvNeXt but does not import it' in done.stderr
    assert "custom_imports = dict(imports=['mmdet.models', 'sbp_mmdet'], allow_failed_imports=False)" in done.stderr


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'sbp_cfg.keep_ratio': 1.5}, r'keep_ratio=1.5 must be a number in \(0, 1\]'),
        ({'sbp_cfg.keep_rato': 0.5}, "unknown key 'keep_rato'; did you mean 'keep_ratio'"),
        ({'depth': 50}, "has no argument 'depth'; .*_delete_=True"),
    ],
)
def test_bad_arguments_of_the_backbone(config, options, message):
    config.merge_from_dict({f'model.backbone.{key}': value for key, value in options.items()})
    with pytest.raises(PreflightError, match=f'{config.filename}, model.backbone: .*{message}'):
        preflight.check_backbone(config)


def test_neck_of_another_arch(config):
    config.merge_from_dict({'model.backbone.arch': 'tiny'})
    widths = r'\[96, 192, 384, 768\]'
    with pytest.raises(PreflightError, match=f'model.neck: in_channels=.*4 maps of {widths} .*in_channels={widths}'):
        preflight.check_backbone(config)
    config.model.neck.in_channels = [96, 192, 384, 768]
    preflight.check_backbone(config)
    config.model.backbone.out_indices = [1, 2, 3]
    with pytest.raises(PreflightError, match=r'3 maps of \[192, 384, 768\]'):
        preflight.check_backbone(config)


def test_hooks_without_custom_imports(project):
    bare = project.with_name('bare_hook.py')
    hook = "custom_hooks = [dict(type='TargetsInChunksHook')]"
    stock = "model = dict(backbone=dict(_delete_=True, type='SwinTransformer', embed_dims=8))"
    imports = "custom_imports = dict(imports=['mmdet.models'], allow_failed_imports=False)"
    bare.write_text(f'_base_ = "{project.name}"\n{hook}\n{stock}\n{imports}\n')
    done = run('python', TOOLS / 'test.py', bare.name, 'none.pth', cwd=project.parent, check=False)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'custom_hooks has TargetsInChunksHook, but its custom_imports is' in done.stderr
    assert "write in the config: custom_imports = dict(imports=['mmdet.models', 'sbp_mmdet']" in done.stderr


SWIN = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4))


@pytest.mark.parametrize(
    ('backbone', 'hook', 'message'),
    [
        (SWIN, dict(type='LeanHook', preset='exact', priority='LOW'), None),
        (SWIN, dict(type='LeanHook', preset='sbp', keep_ration=0.5), "LeanHook: .*did you mean 'keep_ratio'"),
        (
            dict(type='ResNet', depth=18),
            dict(type='LeanHook', preset='sbp'),
            "LeanHook: preset='sbp' drops positions",
        ),
        (dict(SWIN, embed_dim=8), dict(type='LeanHook'), None),  # found when mmdet builds it
        (None, dict(type='LeanHook'), 'LeanHook: .* has an sbp_cfg of its own'),
    ],
    ids=str,
)
def test_hooks_that_the_backbone_refuses(config, backbone, hook, message):
    config.custom_hooks = [hook, dict(type='NobodysHook')]
    if backbone:
        config.model.backbone = backbone
    if message is None:
        return preflight.check_config(config, ('train',))
    with pytest.raises(PreflightError, match=f'{config.filename}, custom_hooks, {message}'):
        preflight.check_config(config, ('train',))


def test_a_misspelt_hook(config):
    config.custom_hooks = [dict(type='LeanHok', preset='exact')]
    with pytest.raises(PreflightError, match="custom_hooks has 'LeanHok'; did you mean 'LeanHook'"):
        preflight.check_config(config, ('train',))


def test_a_config_that_imports_the_package_and_does_not_use_it(config, capsys):
    preflight.check_config(config, ('train',))
    assert 'training is plain' not in capsys.readouterr().err
    config.model.backbone, config.model.neck.in_channels = SWIN, [8, 16, 32, 64]
    config.custom_hook = [dict(type='LeanHook')]
    preflight.check_config(config, ('train',))
    assert "training is plain; 'custom_hook' is no key of mmengine" in capsys.readouterr().err
    config.custom_hooks = config.pop('custom_hook')
    preflight.check_config(config, ('train',))
    assert 'training is plain' not in capsys.readouterr().err


def test_a_config_of_a_package_is_no_file():
    with pytest.raises(PreflightError, match="takes a file; write one that inherits from it: _base_ = 'mmdet::a/b.py'"):
        preflight.load_config('mmdet::a/b.py')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'type': 'AmpOptimWrapper'}, 'needs a GPU, and none is there; on a CPU add .*wrapper.type=OptimWrapper'),
        ({'optimizer.type': 'Adam9bit'}, "no optimizer is registered as 'Adam9bit'; name its module"),
        ({'optimizer.type': 'Adam8bits'}, "'Adam8bits': pip install bitsandbytes"),
    ],
)
def test_optimizers_that_are_not_there(config, options, message, monkeypatch):
    monkeypatch.setattr(preflight, 'get_device', lambda: 'cpu')
    config.merge_from_dict({f'optim_wrapper.{key}': value for key, value in options.items()})
    with pytest.raises(PreflightError, match=message):
        preflight.check_config(config, ('train',))
    preflight.check_config(config, ('test',))  # which needs no optimizer


def test_images_smaller_than_the_stride(config):
    config.model.data_preprocessor.pad_size_divisor = 1
    preflight.check_backbone(config)
    resize = next(step for step in config.train_dataloader.dataset.pipeline if 'Resize' in step.type)
    resize.scale = (16, 24)
    with pytest.raises(PreflightError, match='train_dataloader: .*Resize makes images of at most 24 .*stride 32'):
        preflight.check_backbone(config)
    config.model.data_preprocessor.pad_size_divisor = 32
    preflight.check_backbone(config)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        ('{"images": [', 'it is not valid JSON'),
        ('', 'it is not valid JSON'),
        ('[1, 2]', 'it holds a list, not an object'),
        ('{"images": [], "categories": []}', 'it lacks annotations'),
        ('{"shapes": [], "imagePath": "a.jpg"}', 'it lacks images, annotations, categories'),
        ('{"images": [], "annotations": [], "categories": [1]}', 'not a COCO-format annotation file'),
    ],
)
def test_file_that_is_not_coco(config, tmp_path, content, message):
    path = tmp_path / 'bad.json'
    path.write_text(content)
    config.train_dataloader.dataset.ann_file = str(path)
    with pytest.raises(PreflightError, match=f'train_dataloader.dataset.ann_file: {path} .*{message}'):
        preflight.check_config(config, ('train', 'val'))
    preflight.check_config(config, ('test',))  # does not read the training set


def test_a_picture_is_not_an_annotation_file(config):
    config.val_evaluator.ann_file = 'data/shapes/images/val/000000.jpg'
    with pytest.raises(PreflightError, match='val_evaluator.ann_file: .*000000.jpg is not a COCO-format'):
        preflight.check_config(config, ('train', 'val'))


def test_test_set_without_annotations_is_fine(config, tmp_path):
    content = json.loads(Path(ANNOTATIONS).read_text())
    del content['annotations']
    path = tmp_path / 'image_info_test.json'
    path.write_text(json.dumps(content))
    config.test_dataloader.dataset.ann_file = config.test_evaluator.ann_file = str(path)
    preflight.check_config(config, ('test',))


def test_classes_that_the_file_does_not_have(config):
    config.train_dataloader.dataset.metainfo = dict(classes=('cat', 'dog'))
    with pytest.raises(PreflightError, match=r"file has \['ellipse', .*metainfo has \['cat', 'dog'\]; set"):
        preflight.check_config(config, ('train',))
    del config.train_dataloader.dataset['metainfo']  # then mmdet means the 80 classes of COCO
    with pytest.raises(PreflightError, match="metainfo has .*'person', .* and 70 more"):
        preflight.check_config(config, ('train',))


@pytest.mark.parametrize('head', ['roi_head.bbox_head', 'roi_head.mask_head'])
def test_heads_with_fewer_classes_than_the_data(config, head):
    path = Path(config.train_dataloader.dataset.data_root) / config.train_dataloader.dataset.ann_file
    labels = len(json.loads(path.read_text())['categories'])
    config.merge_from_dict({f'model.{head}.num_classes': labels + 1})
    preflight.check_config(config, ('train',))  # a class too many is a waste, not an error
    config.merge_from_dict({f'model.{head}.num_classes': labels - 1})
    with pytest.raises(PreflightError, match=rf'model.{head}: num_classes={labels - 1}, .* set num_classes={labels}'):
        preflight.check_config(config, ('train',))


def test_a_head_of_the_users_own_may_count_classes_otherwise(config):
    class Head(FCNMaskHead):
        pass

    config.merge_from_dict({'model.roi_head.mask_head.num_classes': 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS._module_dict, 'HeadOfAnother', Head)
        config.model.roi_head.mask_head.type = 'HeadOfAnother'
        preflight.check_config(config, ('train',))
    config.model.roi_head.mask_head.type = 'FCNMaskHead'
    with pytest.raises(PreflightError, match='mask_head: num_classes=1'):
        preflight.check_config(config, ('train',))


@pytest.mark.parametrize('wrap', ['RepeatDataset', 'ClassBalancedDataset', 'ConcatDataset', 'MultiImageMixDataset'])
def test_wrapped_data_sets_are_checked(config, wrap):
    inner = config.train_dataloader.dataset
    inner.ann_file = 'no.json'
    twice = dict(type='RepeatDataset', times=2, dataset=inner)
    wrapped = dict(datasets=[twice]) if wrap == 'ConcatDataset' else dict(dataset=inner)
    config.train_dataloader.dataset = dict(type=wrap, **wrapped)
    with pytest.raises(PreflightError, match='data/shapes/no.json does not exist'):
        preflight.check_config(config, ('train',))


def test_a_folder_that_is_not_there(config):
    config.train_dataloader.dataset = dict(type='mmpretrain.ImageNet', data_root='data/no-such-folder', split='train')
    with pytest.raises(PreflightError, match="data_root='data/no-such-folder' of ImageNet is no folder"):
        preflight.check_config(config, ('train',))


@pytest.mark.parametrize('change', [dict(backend_args=dict(backend='petrel')), dict(data_root='s3://bucket/')])
def test_files_elsewhere_are_left_alone(config, change):
    config.train_dataloader.dataset.update(ann_file='no.json', **change)
    preflight.check_config(config, ('train',))


def test_grey_images_for_a_model_of_colours(config):
    """The preprocessor's mean has three values; mmdet would fail in the first step."""
    load = config.train_dataloader.dataset.pipeline[0]
    assert load.type == 'LoadImageFromFile'
    load.color_type = 'grayscale'
    with pytest.raises(PreflightError, match="bgr_to_rgb=True needs images of 3 channels.* leave out color_type='gray"):
        preflight.check_config(config, ('train',))
    config.model.data_preprocessor.update(bgr_to_rgb=False, mean=[127.5], std=[50.0])
    config.model.backbone.in_channels = 1
    preflight.check_config(config, ('train',))


def test_mmdet_script_is_found_in_a_source_checkout(tmp_path, monkeypatch):
    """An editable install has no .mim folder."""
    for name in ('mmdet/__init__.py', 'tools/train.py'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    origin = type('Spec', (), dict(origin=str(tmp_path / 'mmdet/__init__.py')))
    monkeypatch.setattr(mmdet_script.importlib.util, 'find_spec', lambda name: origin)
    assert mmdet_script.find_script('train.py') == tmp_path / 'tools/train.py'
    with pytest.raises(FileNotFoundError, match="mmdet's test.py was not found at .*reinstall"):
        mmdet_script.find_script('test.py')
    monkeypatch.setattr(mmdet_script.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(FileNotFoundError, match='mmdet is not installed .* tools/setup_env.sh'):
        mmdet_script.find_script('test.py')
    with pytest.raises(FileNotFoundError, match='mmpretrain is not installed .* pip install mmpretrain torchvision'):
        mmdet_script.find_script('test.py', 'mmpretrain')


def test_whose_script_a_config_wants(tmp_path):
    for scope in ('mmdet', 'mmpretrain'):
        (tmp_path / f'{scope}.py').write_text(f'default_scope = {scope!r}')
    (tmp_path / 'none.py').write_text('default_scope = None')
    (tmp_path / 'broken.py').write_text('(')
    (tmp_path / 'child.py').write_text("_base_ = 'mmpretrain::convnext/convnext-tiny_32xb128_in1k.py'")
    scopes = dict(mmpretrain='mmpretrain', child='mmpretrain', mmdet='mmdet', none='mmdet', broken='mmdet')
    scopes['missing'] = 'mmdet'
    for name, toolbox in scopes.items():
        assert mmdet_script.toolbox_of(['--amp', str(tmp_path / f'{name}.py'), '--resume']) == toolbox
    assert mmdet_script.toolbox_of(['--help']) == 'mmdet'


def test_threads_that_wait_sleep_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv('GOMP_SPINCOUNT', '')  # so that it is as before afterwards
    for names, expected in (
        ({}, '1000'),
        ({'GOMP_SPINCOUNT': '5'}, '5'),
        ({'OMP_WAIT_POLICY': 'ACTIVE'}, None),
    ):
        for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'):
            monkeypatch.delenv(name, raising=False)
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        mmdet_script.let_threads_sleep()
        assert os.environ.get('GOMP_SPINCOUNT') == expected
