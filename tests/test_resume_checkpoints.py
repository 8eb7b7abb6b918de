"""A run starts only from a checkpoint that is whole, safe to read, and of this detector."""

import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_project
from mmdet.registry import MODELS
from mmengine.fileio import get_file_backend
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.registry import init_default_scope

import sbp_mmdet.resume as resume

import checkpoints  # isort: skip  (helpers puts tools/ on the path)
import mmdet_script  # isort: skip
import preflight  # isort: skip
from preflight import PreflightError  # isort: skip

# --- written whole or not at all -----------------------------------------------------------------------------------


def test_atomic_backend_writes(tmp_path):
    backend = get_file_backend(str(tmp_path), backend_args=dict(backend='atomic'))
    path = tmp_path / 'new folder/model.pth'
    backend.put(b'one', str(path))
    backend.put(b'two', path)
    assert path.read_bytes() == b'two'
    backend.put_text('zwölf', path)
    assert path.read_text(encoding='utf-8') == 'zwölf'
    assert os.listdir(path.parent) == ['model.pth']


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    backend, path = resume.AtomicBackend(), tmp_path / 'model.pth'
    backend.put(b'old', path)

    def full_disk(_):
        raise OSError('no space left')

    with monkeypatch.context() as patch, pytest.raises(OSError, match='no space'):
        patch.setattr(os, 'fsync', full_disk)
        backend.put(b'new', path)
    assert path.read_bytes() == b'old'
    backend.put(b'newer', path)  # what the interrupted write left is not in the way
    assert path.read_bytes() == b'newer' and os.listdir(tmp_path) == ['model.pth']


# --- readable without trusting it ----------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=['torch', 'older torch'])
def read(request, monkeypatch):
    if request.param and not resume._ALLOWS_BY_NAME:
        pytest.skip('before torch 2.6 what to allow cannot be given by name')
    monkeypatch.setattr(resume, '_ALLOWS_BY_NAME', request.param)
    return resume.read_checkpoint


def test_what_mmengine_stores_is_loaded_weights_only(tmp_path, read):
    hub = MessageHub('test_resume')
    for loss in (3.0, 1.0, 2.0):
        hub.update_scalar('train/loss', loss)
    kinds = (np.float32, np.float64, np.int64, np.bool_)
    for kind in kinds:
        hub.update_info(str(kind), kind(1))
    hub.update_info('palette', np.arange(6, dtype=np.uint8).reshape(2, 3))
    torch.save(dict(message_hub=hub.state_dict(), meta=dict(classes=('a', 'b'))), tmp_path / 'a.pth')
    content = read(tmp_path / 'a.pth')['message_hub']
    history = content['log_scalars']['train/loss']
    assert isinstance(history, HistoryBuffer) and history.data[0].tolist() == [3, 1, 2]
    assert (history.min(), history.statistics('mean'), history.current()) == (1, 2, 2)
    assert content['runtime_info']['palette'].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert all(type(content['runtime_info'][str(kind)]) is kind for kind in kinds)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    'evil',
    [
        Evil(os.system, 'exit 1'),
        Evil(getattr, os, 'system'),
        Evil(getattr, HistoryBuffer, '__init__'),
        Evil(getattr, np.ndarray, 'tofile'),
        Evil(getattr, HistoryBuffer(), 'mean'),
        Evil(eval, '1'),
    ],
    ids=lambda evil: f'{evil.call[0].__name__}-{evil.call[1][-1]}',
)
def test_what_mmengine_does_not_store_is_refused(tmp_path, read, evil):
    """pickle uses getattr for the methods of the log history, and an attack would need it."""
    if isinstance(evil.call[1][0], type(os)):
        evil.call = (getattr, (Evil(__import__, 'os'), 'system'))
    torch.save(dict(a=evil), tmp_path / 'evil.pth')
    with pytest.raises(pickle.UnpicklingError):
        read(tmp_path / 'evil.pth')


# --- whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / 'epoch_2.pth'
    torch.save(dict(state_dict=dict(a=torch.arange(3000.0))), path)
    return path


def test_damage(whole, tmp_path):
    assert checkpoints.describe_damage(whole) is None
    content = whole.read_bytes()
    for size in (2, 100, len(content) // 2, len(content) - 30):
        whole.write_bytes(content[:size])
        assert checkpoints.describe_damage(whole) == 'is truncated'
    for at in (len(content) // 4, len(content) // 2):
        bad = bytearray(content)
        bad[at] ^= 1
        whole.write_bytes(bad)
        assert 'is corrupt (check sum of ' in checkpoints.describe_damage(whole)
    whole.write_bytes(b'')
    assert checkpoints.describe_damage(whole) == 'is empty'
    whole.write_bytes(b'version https://git-lfs')
    assert checkpoints.describe_damage(whole) == 'is not a checkpoint of torch'
    assert checkpoints.describe_damage(tmp_path / 'none.pth') == 'does not exist'
    torch.save(dict(a=torch.ones(3)), whole, _use_new_zipfile_serialization=False)
    assert checkpoints.describe_damage(whole) is None


def test_resume_falls_back_to_the_last_whole_checkpoint(whole, tmp_path):
    last = checkpoints.last_whole_checkpoint
    assert last(tmp_path) == (None, None)  # nothing was written yet: the run begins
    pointer = tmp_path / 'last_checkpoint'
    pointer.write_text(str(whole))
    assert last(tmp_path) == (whole, None)

    content = whole.read_bytes()
    older, newer, best = (tmp_path / name for name in ('epoch_1.pth', 'epoch_10.pth', 'best_coco_epoch_9.pth'))
    newer.write_bytes(content[:500])
    best.write_bytes(content)
    pointer.write_text(str(newer))
    path, reason = last(tmp_path)
    assert path == whole and reason == f'{newer}, which {pointer} names, is truncated'
    older.write_bytes(content)
    whole.unlink()
    assert last(tmp_path)[0] == older
    pointer.write_text('')  # killed between opening and writing it
    assert last(tmp_path) == (older, f'{pointer} is empty')
    older.write_bytes(content[:-1])
    assert last(tmp_path) == (None, f'{pointer} is empty')


# --- of this detector ----------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp('checkpoints'), train=2, val=2)


@pytest.fixture
def config(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    init_default_scope('mmdet')
    return preflight.load_config('tiny.py')


@pytest.fixture
def state(config):
    return MODELS.build(config.model).state_dict()


def save(state, path='epoch_1.pth', **parts):
    torch.save(dict(state_dict=state, meta={}, message_hub=MessageHub('x').state_dict(), optimizer={}) | parts, path)
    return str(path)


def test_weights_that_parts_of_the_model_start_from(config, state):
    """mmengine would read them after everything is built, and end in a traceback."""
    Path('whole.pth').write_bytes(Path(save(state)).read_bytes())
    Path('short.pth').write_bytes(Path('whole.pth').read_bytes()[:1000])
    for path in ('whole.pth', 'open-mmlab://resnet50'):  # addresses are in test_preflight_keys.py
        config.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=path)
        checkpoints.check_initial_weights(config)
    for path, problem in (('gone.pth', 'does not exist'), ('short.pth', 'is truncated')):
        config.model.backbone.init_cfg = [dict(type='Kaiming'), dict(type='Pretrained', checkpoint=path)]
        with pytest.raises(PreflightError, match=f'model.backbone.init_cfg.1.checkpoint: {path} {problem}; name a who'):
            mmdet_script.check_start(config, SimpleNamespace(resume=None))


KINDS = [dict(whole_run=True), dict(all_weights=True), {}]


@pytest.mark.parametrize('kind', KINDS)
def test_checkpoint_of_the_detector(config, state, kind):
    path = save(state)
    checkpoints.check_checkpoint(path, '--resume', config, **kind)
    # Only sbp_cfg differs: the same weights serve with SBP and without it.
    for sbp_cfg in (None, dict(preset='exact'), dict(preset='reference')):
        config.model.backbone.sbp_cfg = sbp_cfg
        checkpoints.check_checkpoint(path, '--resume', config, **kind)
        missing, unexpected = MODELS.build(config.model).load_state_dict(state)
        assert not missing and not unexpected
    save(OrderedDict((f'module.{name}', value) for name, value in state.items()))
    checkpoints.check_checkpoint(path, '--resume', config, **kind)
    checkpoints.check_checkpoint('https://example.org/a.pth', '--resume', config, **kind)


@pytest.mark.skipif(not hasattr(torch.serialization, 'add_safe_globals'), reason='this torch has no list of classes')
def test_check_leaves_alone_what_torch_load_allows(config, state):
    torch.serialization.add_safe_globals([HistoryBuffer])
    allowed = set(torch.serialization.get_safe_globals())
    checkpoints.check_checkpoint(save(state), '--resume', config, whole_run=True)
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize('kind', KINDS)
def test_checkpoint_of_another_arch(config, state, kind):
    path = save(state)
    config.model.backbone.arch.channels = [16, 32, 64, 128]
    config.model.neck.in_channels = [16, 32, 64, 128]
    message = r'--resume: epoch_1.pth is of another model: \d+ weights .*, \(8, 3, 4, 4\) there and \(16, 3, 4, 4\) in '
    with pytest.raises(PreflightError, match=message):
        checkpoints.check_checkpoint(path, '--resume', config, **kind)
    with pytest.raises(PreflightError, match='no weight of other.pth has a name of this detector: it has a, the'):
        torch.save(dict(a=torch.ones(2)), 'other.pth')
        checkpoints.check_checkpoint('other.pth', 'load_from', config)


def test_checkpoint_with_other_classes(config, state):
    path = save(state)
    config.model.roi_head.bbox_head.num_classes = config.model.roi_head.mask_head.num_classes = 7
    checkpoints.check_checkpoint(path, 'load_from', config)  # fine-tuning: mmengine leaves the last layers out
    for kind in KINDS[:2]:
        with pytest.raises(PreflightError, match='is of another model: .*check arch and num_classes'):
            checkpoints.check_checkpoint(path, '--resume', config, **kind)


def test_classification_checkpoint_as_mmpretrain_writes_it(config, state):
    backbone = {name: value for name, value in state.items() if name.startswith('backbone.')}
    path = save(backbone | {'head.fc.weight': torch.ones(1000, 64)})
    checkpoints.check_checkpoint(path, 'load_from', config)
    for kind in KINDS[:2]:
        with pytest.raises(PreflightError, match='lacks .* is it a backbone only'):
            checkpoints.check_checkpoint(path, '--resume', config, **kind)


def save_vit(config, **options):
    arch = dict(num_layers=2, embed_dims=32, num_heads=2)
    config.model.backbone = dict(type='SBPViT', arch=arch, img_size=64, **options)
    config.model.neck.in_channels = [8, 16, 32, 32]
    return MODELS.build(config.model)


def rename_as_in_mmpretrain(name):
    for ours, theirs in (
        ('patch_embed.proj', 'patch_embed.projection'),
        ('backbone.norm.', 'backbone.ln1.'),
        ('backbone.blocks.', 'backbone.layers.'),
        ('.mlp.fc1.', '.ffn.layers.0.0.'),
        ('.mlp.fc2.', '.ffn.layers.1.'),
    ):
        name = name.replace(ours, theirs)
    return re.sub(r'(layers\.\d\.)norm', r'\1ln', name)


@pytest.mark.parametrize('change', ['size', 'names', 'module'])
def test_checkpoint_that_the_model_makes_its_own(config, change, capsys):
    """Loading runs with its real hooks and reports nothing twice; resuming has no hooks for the optimizer."""
    state = save_vit(config).state_dict()
    if change == 'size':
        config.model.backbone.img_size = 128
    else:
        state = OrderedDict((rename_as_in_mmpretrain(name), value) for name, value in state.items())
    assert not any(MODELS.build(config.model).load_state_dict(state, strict=False))  # nothing missing or left over
    if change == 'module':
        state = OrderedDict((f'module.{name}', value) for name, value in state.items())
    path = save(state)
    capsys.readouterr()
    for kind in KINDS[1:]:
        checkpoints.check_checkpoint(path, 'load_from', config, **kind)
    assert capsys.readouterr() == ('', '')
    with pytest.raises(PreflightError, match='backbone.pos_embed, .* there' if change == 'size' else r'lacks \d+ weig'):
        checkpoints.check_checkpoint(path, '--resume', config, **KINDS[0])


def test_checkpoint_of_another_vit(config):
    path = save(save_vit(config).state_dict() | {'backbone.pos_embed': torch.ones(1, 18, 32)})  # no square
    with pytest.raises(PreflightError, match=r'1 weights .* backbone.pos_embed, \(1, 18, 32\) there and \(1, 17, 32\)'):
        checkpoints.check_checkpoint(path, 'load_from', config)


def test_checkpoint_of_a_model_that_needs_memory_to_be_built(config):
    depths = dict(depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1])
    config.model.backbone = dict(type='mmdet.SwinTransformer', embed_dims=8, **depths)
    path = save(MODELS.build(config.model).state_dict())
    checkpoints.check_checkpoint(path, 'load_from', config)
    config.model.backbone.embed_dims, config.model.neck.in_channels = 16, [16, 32, 64, 128]
    with pytest.raises(PreflightError, match=r'is of another model: .*, \(8, 3, 4, 4\) there and \(16, 3, 4, 4\) in'):
        checkpoints.check_checkpoint(path, 'load_from', config)


def test_weights_alone_cannot_be_resumed(config, state):
    torch.save(dict(state_dict=state, meta={}), 'best_coco_epoch_1.pth')
    with pytest.raises(PreflightError, match='cannot be resumed from: it lacks optimizer, message_hub, .* load_from'):
        checkpoints.check_checkpoint('best_coco_epoch_1.pth', '--resume', config, whole_run=True)
    checkpoints.check_checkpoint('best_coco_epoch_1.pth', 'checkpoint', config, all_weights=True)


def test_damaged_checkpoint(config, whole):
    whole.write_bytes(whole.read_bytes()[:300])
    with pytest.raises(PreflightError, match=r'load_from: .*epoch_2.pth is truncated; name a whole checkpoint'):
        checkpoints.check_checkpoint(str(whole), 'load_from', config)


# --- what the scripts make of it -----------------------------------------------------------------------------------


ATOMIC = {'default_hooks.checkpoint.backend_args.backend': 'atomic'}
EVALUATION = {'default_hooks.evaluation.type': 'EvaluateEndedHook'}


def test_training_writes_whole_checkpoints(config, capsys):
    options = mmdet_script.checkpoint_options
    hook = config.default_hooks.checkpoint
    assert options(config) == ATOMIC | EVALUATION
    for own in (dict(backend_args=dict(backend='petrel')), dict(out_dir='s3://bucket')):
        config.default_hooks.checkpoint = {**hook, **own}
        assert options(config) == EVALUATION
    assert not capsys.readouterr().err
    config.default_hooks.checkpoint = {**hook, 'max_keep_ckpts': 1}
    options(config)
    said = capsys.readouterr().err
    assert 'max_keep_ckpts=1' in said and '2 is safe' in said
    config.default_hooks.checkpoint = None
    assert options(config) == EVALUATION
    config.default_hooks.evaluation = None
    assert options(config) == {}
    config.default_hooks = None  # the runner takes it for the default hooks
    config.merge_from_dict(options(config))
    hook = dict(type='CheckpointHook', backend_args=dict(backend='atomic'))
    assert config.default_hooks == dict(checkpoint=hook, evaluation=dict(type='EvaluateEndedHook'))
    config.pop('default_hooks')
    assert options(config) == ATOMIC | EVALUATION | {'default_hooks.checkpoint.type': 'CheckpointHook'}


def check_and_get_resume(config, work_dir, resume=None):
    """Check the start of a run, and return the value of ``--resume`` afterwards."""
    args = SimpleNamespace(resume=resume, work_dir=str(work_dir), config='tiny.py')
    mmdet_script.check_start(config, args)
    return args.resume


def test_what_a_training_starts_from(config, state, tmp_path):
    assert (
        check_and_get_resume(config, tmp_path) is None and check_and_get_resume(config, tmp_path, 'auto') == 'auto'
    )  # no checkpoint yet
    save(state, tmp_path / 'epoch_1.pth')
    whole = str(tmp_path / 'epoch_1.pth')
    (tmp_path / 'epoch_2.pth').write_bytes((tmp_path / 'epoch_1.pth').read_bytes()[:-9])
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'epoch_2.pth'))
    assert check_and_get_resume(config, tmp_path, 'auto') == whole
    config.resume = True  # in the config, instead of --resume
    assert check_and_get_resume(config, tmp_path) == whole
    config.load_from = str(tmp_path / 'epoch_2.pth')
    assert check_and_get_resume(config, tmp_path, 'auto') == whole
    with pytest.raises(PreflightError, match='--resume: .*epoch_2.pth is truncated'):
        check_and_get_resume(config, tmp_path)
    config.resume = False
    with pytest.raises(PreflightError, match='load_from: .*epoch_2.pth is truncated'):
        check_and_get_resume(config, tmp_path)
    with pytest.raises(PreflightError, match='--resume: .*none.pth does not exist'):
        check_and_get_resume(config, tmp_path, 'none.pth')


def test_load_from_counts_until_there_is_something_to_resume(config, state, tmp_path, capsys):
    config.load_from = str(tmp_path / 'start.pth')
    save(state, tmp_path / 'start.pth')
    assert (
        check_and_get_resume(config, tmp_path / 'run', 'auto') is None
    )  # mmdet's script forgets load_from where it has --resume
    assert 'starts from load_from=' in capsys.readouterr().err
    (tmp_path / 'run').mkdir()
    save(state, tmp_path / 'run/epoch_1.pth')
    (tmp_path / 'run/last_checkpoint').write_text(str(tmp_path / 'run/epoch_1.pth'))
    assert check_and_get_resume(config, tmp_path / 'run', 'auto') == 'auto'
