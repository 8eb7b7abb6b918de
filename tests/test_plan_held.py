"""The planner counts what a GPU holds besides the model, and refuses what it cannot count."""

import json
import subprocess
import sys

import pytest
from helpers import make_environment
from mmdet.models import RetinaNet
from mmdet.registry import MODELS
from mmengine.config import Config

from sbp_mmdet.plan import command
from sbp_mmdet.plan.detector import build_detector, measure_detector
from sbp_mmdet.plan.snippet import snippet
from sbp_mmdet.plan.variants import is_plain, load_config, own_gradients, plain

RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
CASE = dict(batch=1, height=64, width=64, boxes=2)


@MODELS.register_module(force=True)
class WithTeacher(RetinaNet):
    """Detector that keeps a teacher outside of the tree of modules, as in mmdet's distillation."""

    def __init__(self, teacher: dict, **kwargs):
        super().__init__(**kwargs)
        object.__setattr__(self, 'teacher', MODELS.build(teacher))

    def train(self, mode: bool = True) -> None:
        super().train(mode)


@pytest.fixture(scope='module')
def retina():
    config = plain(load_config(RETINA))
    config.model.backbone.update(depth=18, base_channels=8, init_cfg=None)
    config.model.neck.in_channels = [8, 16, 32, 64]
    return config


@pytest.fixture(scope='module')
def alone(retina):
    return measure_detector(retina, **CASE)


def weights(config):
    model, _ = build_detector(config, 'cpu')
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_a_teacher_outside_of_the_tree_counts(retina, alone):
    config = Config(retina.to_dict())
    config.model = dict(config.model, type='WithTeacher', teacher=config.model)
    row = measure_detector(config, **CASE)
    assert row['peak'] - alone['peak'] == pytest.approx(weights(retina), rel=1e-3)


def test_weights_of_a_teacher_are_not_loaded(retina, tmp_path):
    """As in mmdet's LAD, whose config names a file that would be downloaded."""
    config = Config(retina.to_dict())
    config.dump(tmp_path / 'teacher.py')
    config.model.update(type='KnowledgeDistillationSingleStageDetector', teacher_config=str(tmp_path / 'teacher.py'))
    config.model.update(teacher_ckpt='nowhere.pth')
    assert build_detector(config, 'cpu')[0].teacher_model.backbone.depth == 18


def test_hooks_that_the_runner_names_count(retina, alone):
    config = Config(retina.to_dict())
    config.default_hooks = dict(ema=dict(type='EMAHook'), timer=None)
    assert measure_detector(config, **CASE)['parameters'] > 1.9 * alone['parameters']


def test_what_mmengine_checkpoints_is_counted(retina, tmp_path):
    case = dict(CASE, height=256, width=256)
    config = Config(retina.to_dict())
    config.activation_checkpointing = ['backbone']
    plain_step, own = (measure_detector(one, **case) for one in (retina, config))
    kept = [{part for part in one['saved'] if part.startswith('stage')} for one in (plain_step, own)]
    assert kept == [{'stage 2', 'stage 3', 'stage 4'}, set()] and own['forward'] < plain_step['forward']
    assert not is_plain(config) and is_plain(plain(config)) and own_gradients(config) == 'exact'
    config.dump(tmp_path / 'a.py')
    lines = snippet(load_config(tmp_path / 'a.py'), 'exact')
    (tmp_path / 'pasted.py').write_text(f'{(tmp_path / "a.py").read_text()}\n{lines}\n')
    assert load_config(tmp_path / 'pasted.py').activation_checkpointing is None


@pytest.mark.parametrize('optimizer', [{}, dict(optimizer='SGD')])
def test_several_optimizers_are_not_planned(optimizer, retina, tmp_path, capsys):
    config = Config(retina.to_dict())
    config.optim_wrapper = dict(type='OptimWrapper', **optimizer)
    config.dump(tmp_path / 'a.py')
    with pytest.raises(SystemExit):
        command.main(['plan', str(tmp_path / 'a.py'), '--budget', '8GiB', '--size', '64x64'])
    assert 'optim_wrapper has no optimizer that is a dict; write' in capsys.readouterr().err


@pytest.mark.parametrize('hooks', [1, 2])
def test_averaged_copies_count(retina, alone, hooks):
    config = Config(retina.to_dict())
    config.custom_hooks = [dict(type='EMAHook', ema_type='ExpMomentumEMA')] * hooks
    row = measure_detector(config, **CASE)
    assert row['peak'] - alone['peak'] == pytest.approx(hooks * weights(retina), rel=1e-3)


@pytest.mark.parametrize('verb', ['plan', 'rehearse'])
@pytest.mark.parametrize(
    ('key', 'kind'),
    [
        ('strategy', 'FSDPStrategy'),
        ('strategy', 'DeepSpeedStrategy'),
        ('strategy', 'ColossalAIStrategy'),
        ('model_wrapper_cfg', 'MMFullyShardedDataParallel'),
    ],
)
def test_a_strategy_is_refused_in_a_line(verb, key, kind, tmp_path, capsys):
    (tmp_path / 'a.py').write_text(f"_base_ = '{RETINA}'\n{key} = dict(type='{kind}')\n")
    with pytest.raises(SystemExit) as stopped:
        command.main([verb, str(tmp_path / 'a.py'), '--budget', '8GiB'])
    assert stopped.value.code == 2
    assert f'{key}={kind}' in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize('kind', ['DDPStrategy', 'SingleDeviceStrategy'])
def test_with_other_strategies_each_gpu_holds_all(kind, tmp_path, monkeypatch):
    (tmp_path / 'a.py').write_text(f"_base_ = '{RETINA}'\nstrategy = dict(type='{kind}')\n")
    monkeypatch.setattr(command, 'find_training_inputs', lambda *args, **kwargs: 1 / 0)  # what comes next
    with pytest.raises(ZeroDivisionError):
        command.main(['plan', str(tmp_path / 'a.py'), '--budget', '8GiB'])


def test_a_rehearsal_without_mmpretrain_says_what_to_write(capsys):
    with pytest.raises(SystemExit):
        command.main(['rehearse', 'mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'])
    said = capsys.readouterr().err
    assert "needs mmpretrain for mmpretrain.ConvNeXt, which is not installed. type='SBPConvNeXt' with" in said


def test_a_folder_is_called_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(['plan', str(tmp_path), '--budget', '8GiB'])
    assert f'{tmp_path} is a folder; give the path of a config file' in capsys.readouterr().err


def test_json_is_json_whatever_others_print(tmp_path):
    (tmp_path / 'loud.py').write_text("import os\nprint('loud')\nos.system('echo louder')\n")
    (tmp_path / 'a.py').write_text(f"_base_ = '{RETINA}'\ncustom_imports = dict(imports=['loud'])\n")
    words = ['-W', 'ignore', '-m', 'sbp_mmdet.plan', 'plan', 'a.py', '--budget', '80GiB', '--batch', '1', '--json']
    words += ['--size', '64x64', '--boxes', '2']
    path = f'{tmp_path}:{make_environment()["PYTHONPATH"]}' if 'PYTHONPATH' in make_environment() else str(tmp_path)
    variables = make_environment(PYTHONPATH=path)
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert json.loads(done.stdout)['answer'] == 'none', done.stderr
    assert 'loud\n' in done.stderr and 'louder\n' in done.stderr
