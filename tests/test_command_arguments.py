"""Arguments of ``sbp-mmdet`` and paths in configs: what is wrong with them is one line that names the value."""

import pytest
import torch
from mmengine.config import Config
from test_command_errors import line_of

from sbp_mmdet.plan import command
from sbp_mmdet.plan.config_keys import describe_mistake
from sbp_mmdet.plan.planner import parse_bytes, parse_size

FRCNN = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
MASK_RCNN = 'mask-rcnn_r50_fpn_1x_coco.py'


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        (f'mmdet::mask_rcn/{MASK_RCNN}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        ('mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coc.py', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        ('mmdet::mask_rcn/mask-rcnn_r50_fpn_1x_coc.py', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        (f'mmdet::faster_rcnn/{MASK_RCNN}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        (f'mmdet::{MASK_RCNN.removesuffix(".py")}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        (f'configs/mask_rcnn/{MASK_RCNN}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        (f'mmdet:mask_rcnn/{MASK_RCNN}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
        ('confg/my_modle.py', 'configs/my_model.py'),
        ('configs/my_model', 'configs/my_model.py'),
        (f'confg/{MASK_RCNN}', f'mmdet::mask_rcnn/{MASK_RCNN}'),
    ],
)
def test_a_misspelt_path_of_a_config(name, said, tmp_path, capsys, monkeypatch):
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs/my_model.py').write_text('')
    monkeypatch.chdir(tmp_path)
    line = line_of(capsys, 'report', name)
    where = '' if '::' in name else f' (working folder: {tmp_path})'
    assert line == f'sbp-mmdet: error: config file {name} does not exist{where}; did you mean {said}?'
    (tmp_path / 'child.py').write_text(f'_base_ = {name!r}')
    if name.startswith('mmdet::') and name.endswith('.py'):
        assert line_of(capsys, 'report', 'child.py').endswith(f' does not exist; did you mean {said}?')


def test_a_path_that_resembles_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('mmdet::xyz/123.py', 'xyz/123.py', f'{tmp_path}/123.py', '::', 'child.py/mmm'):
        (tmp_path / 'child.py').write_text('')
        assert line_of(capsys, 'report', name).endswith('; check the path'), name
    assert line_of(capsys, 'report', '').endswith(
        'error: the name of the config is empty; give the path of a config file'
    )
    (tmp_path / 'loop.py').symlink_to('loop.py')
    assert line_of(capsys, 'report', 'loop.py').endswith('; check the path')  # and not: did you mean loop.py?
    assert line_of(capsys, 'report', 'mmdet::mask_rcnn').endswith(
        'error: mmdet::mask_rcnn is a folder; give the path of a config file in it'
    )


FILES = dict(
    model=dict(backbone=dict(init_cfg=dict(checkpoint='weights.pth'))),
    train_dataloader=dict(
        dataset=dict(ann_file='a/train.json', data_root='data/', img_suffix='.png', data_prefix=dict(img='img/'))
    ),
    val_dataloader=dict(dataset=dict(ann_file='a b.json', data_root='data/')),
    load_from='/there/my last.pth',
    my_variable='weights.pth',
)


@pytest.mark.parametrize(
    ('error', 'said'),
    [
        (
            FileNotFoundError('weights.pth can not be found.'),
            "model.backbone.init_cfg.checkpoint='weights.pth' does not exist; correct it",
        ),
        (
            FileNotFoundError(2, 'No such file or directory', 'data/a/train.json'),
            "train_dataloader.dataset.ann_file='a/train.json' (data/a/train.json) does not exist; correct it or its "
            'data_root',
        ),
        (
            FileNotFoundError(2, 'No such file or directory', 'data/a b.json'),
            "val_dataloader.dataset.ann_file='a b.json' (data/a b.json) does not exist; correct it or its data_root",
        ),
        (
            FileNotFoundError('/there/my last.pth can not be found.'),
            "load_from='/there/my last.pth' does not exist; correct it",
        ),
        (
            FileNotFoundError("Caught.\n[Errno 2] No such file or directory: 'data/img/a b/7.png'\n"),
            "train_dataloader.dataset.data_prefix.img='img/' (data/img/a b/7.png) does not exist; correct it or its "
            'data_root',
        ),
        (FileNotFoundError(2, 'No such file or directory', 'data/images/7.png'), None),
    ],
)
def test_the_key_of_a_missing_file(error, said):
    assert describe_mistake(Config(FILES), error) == said


def test_a_missing_file_is_one_of_a_data_set_first():
    path = 'data/coco/val.json'
    names = dict(val_evaluator=dict(ann_file=path), val_dataloader=dict(dataset=dict(ann_file='val.json')))
    said = describe_mistake(Config(names), FileNotFoundError(2, 'No such file or directory', path))
    assert said.startswith("val_dataloader.dataset.ann_file='val.json' (data/coco/val.json) does not exist")


def test_budgets_and_sizes():
    assert parse_bytes('8GiB') == 8 * 2**30
    assert parse_bytes(' 7.5 gb') == 7_500_000_000
    assert parse_bytes('6000MiB') == 6000 * 2**20
    for text in ('8', 'much', '8 GiBi'):
        with pytest.raises(ValueError, match=f"budget '{text}' cannot be read.*24GiB"):
            parse_bytes(text)
    for text in ('-1GB', '0GiB'):
        with pytest.raises(ValueError, match=f"budget '{text}' must be positive"):
            parse_bytes(text)
    assert parse_size('800x1333') == parse_size('800, 1333') == (800, 1333)
    for text, message in (('800', 'cannot be read'), ('axb', 'cannot be read'), ('16x1333', '32 or more')):
        with pytest.raises(ValueError, match=message):
            parse_size(text)


def test_a_misspelt_override(capsys):
    line = line_of(capsys, 'plan', FRCNN, '--budget', '8GiB', '--cfg-options', 'modle.backbone.depth=101')
    assert line.endswith("--cfg-options modle.backbone.depth: the config has no 'modle'; did you mean 'model'?")


def test_a_missing_budget_is_said_before_the_config_is_read(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(command, 'load_config', lambda *args: pytest.fail('the config was read'))
    with pytest.raises(SystemExit):
        command.main(['plan', FRCNN])
    with pytest.raises(SystemExit):
        command.main(['rehearse', FRCNN, '--budget', 'lots'])
    first, second = capsys.readouterr().err.splitlines()
    assert 'this machine has no GPU' in first and "budget 'lots' cannot be read" in second


def test_more_boxes_than_an_image_has_room_for(capsys):
    """16 x 24 boxes of 4 x 4 pixels cover an image of 64 x 96. A billion of them exhausted the machine's memory."""
    case = ['plan', FRCNN, '--budget', '8GiB', '--batch', '1', '--size', '64x96', '--boxes']
    for boxes in ('385', '1000000000'):
        line = line_of(capsys, *case, boxes)
        assert f'--boxes {boxes}: an image of 64 x 96 has room for 384 boxes of 4 x 4 pixels' in line
    command.main([*case, '384'])
    assert 'with 384 boxes each' in capsys.readouterr().out


@pytest.mark.parametrize('verb', [('plan', '--budget', '8GiB'), ('verify',)], ids=str)
def test_images_that_are_larger_than_the_memory_of_this_machine(verb, capsys, monkeypatch):
    """An image of a gigapixel has 3 GB of bytes, and 12 GB of numbers in single precision."""
    monkeypatch.setattr('os.sysconf', lambda name: {'SC_PHYS_PAGES': 10**6, 'SC_PAGE_SIZE': 14_999}[name])
    line = line_of(capsys, verb[0], FRCNN, *verb[1:], '--batch', '1', '--size', '25000x40000')
    said = f'takes {15e9 / 2**30:.2f} GiB of the memory of this machine, which has {14.999e9 / 2**30:.2f} GiB'
    assert 'a batch of 1 image of 25000 x 40000 with ' in line and said in line and line.endswith('(--size, --batch)')
