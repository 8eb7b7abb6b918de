"""The planner counts what a GPU holds besides the model, and refuses what it cannot count."""

import collections
import copy
import json
import subprocess
import sys

import pytest
import torch
from helpers import make_environment
from mmdet.models import RetinaNet
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.hooks import Hook
from torch import nn

from sbp_mmdet.plan import command
from sbp_mmdet.plan.detector import build_detector, measure_detector
from sbp_mmdet.plan.held import held_tensors, state_bytes
from sbp_mmdet.plan.pages import describe_run
from sbp_mmdet.plan.snippet import snippet
from sbp_mmdet.plan.variants import is_plain, load_config, make_plain, own_gradients

RETINA = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
CASE = dict(batch=1, height=64, width=64, boxes=2)
pytestmark = pytest.mark.usefixtures('without_replay')


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
    config = make_plain(load_config(RETINA))
    config.model.backbone.update(depth=18, base_channels=8, init_cfg=None)
    config.model.neck.update(in_channels=[8, 16, 32, 64], out_channels=16)
    config.model.bbox_head.update(in_channels=16, feat_channels=16, stacked_convs=1)
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
    """A teacher is built without its weights, which mmdet's LAD would download."""
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
    assert not is_plain(config) and is_plain(make_plain(config)) and own_gradients(config) == 'exact'
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
    (tmp_path / 'loud.py').write_text(
        "import atexit, os\nprint('loud')\nos.system('echo louder')\natexit.register(print, 'at exit')\n"
    )
    (tmp_path / 'a.py').write_text(f"_base_ = '{RETINA}'\ncustom_imports = dict(imports=['loud'])\n")
    words = ['-W', 'ignore', '-m', 'sbp_mmdet.plan', 'plan', 'a.py', '--budget', '80GiB', '--batch', '1', '--json']
    words += ['--size', '64x64', '--boxes', '2']
    path = f'{tmp_path}:{make_environment()["PYTHONPATH"]}' if 'PYTHONPATH' in make_environment() else str(tmp_path)
    variables = make_environment(PYTHONPATH=path)
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert json.loads(done.stdout)['answer'] == 'none', done.stderr
    assert all(word in done.stderr for word in ('loud\n', 'louder\n', 'at exit\n'))


class SignMomentum(torch.optim.Optimizer):
    """Optimizer of one's own, with one state, although it has two betas; it counts its steps."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.99)))
        self.steps = [0]

    @torch.no_grad()
    def step(self):
        self.steps[0] += 1
        for group in self.param_groups:
            for p in group['params']:
                mean = self.state[p].setdefault('mean', torch.zeros_like(p))
                p.sub_(mean.lerp_(p.grad, 0.1).sign(), alpha=group['lr'])


OPTIMIZERS = {
    'SGD': {},
    'SGD with momentum': dict(momentum=0.9),
    'RMSprop': {},
    'Adadelta': {},
    'ASGD': {},
    'AdamW with amsgrad': dict(amsgrad=True),
    'Rprop': {},
}


@pytest.mark.parametrize('name', [*OPTIMIZERS, 'of my own'])
def test_states_are_those_of_a_step(name):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5))
    kind = SignMomentum if name == 'of my own' else getattr(torch.optim, name.partition(' ')[0])
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1, **OPTIMIZERS.get(name, {}))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces the optimizer's step by one that notes its calls
    before = copy.deepcopy(model.state_dict())
    said = state_bytes(optimizer)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()) and not optimizer.state
    assert getattr(optimizer, 'steps', [0]) == [0] and not getattr(optimizer, '_opt_called', False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    made = [v.nbytes for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    assert sorted(said) == sorted(made)
    assert state_bytes(optimizer) == ([] if made else said)  # states that exist are not new


class FeatureBank:
    """Object of a class of the user's with tensors in a queue."""

    def __init__(self):
        self.tensors = collections.deque([torch.zeros(3), torch.zeros(5)])


def test_what_lists_dicts_and_objects_of_the_users_hold_counts():
    model, hook = nn.Linear(2, 2), Hook()
    model.queue, model.hidden, model.bank = torch.zeros(7), [nn.Linear(2, 1, bias=False)], FeatureBank()
    hook.shadow, hook.model, hook.itself = {'a': dict(b=(torch.zeros(11),))}, model, hook
    hook.data = torch.utils.data.TensorDataset(torch.zeros(100))  # lies on the host
    assert sorted(t.numel() for t in held_tensors(model)) == [2, 2, 3, 4, 5, 7]
    assert sorted(t.numel() for t in held_tensors(model, hook)) == [2, 2, 3, 4, 5, 7, 11]


def test_accumulated_gradients_count(retina, alone):
    """The largest step finds the gradients of the steps before it when its forward pass begins."""
    config = Config(retina.to_dict())
    config.optim_wrapper.accumulative_counts = 4
    row = measure_detector(config, **CASE)
    assert row['forward'] - alone['forward'] == row['gradients'] == alone['gradients'] > 0


@pytest.mark.parametrize('dtype', ['float64', 'float32', torch.float64])
def test_precisions_that_autocast_of_a_gpu_refuses_are_counted_without_it(retina, alone, dtype):
    config = Config(retina.to_dict())
    config.optim_wrapper.update(type='AmpOptimWrapper', dtype=dtype)
    assert measure_detector(config, **CASE)['forward'] == alone['forward']
    config.optim_wrapper.dtype = 'bfloat16'
    # with images so small, the casts of the weights count more than the smaller maps
    assert measure_detector(config, **CASE)['forward'] != alone['forward']


class OwnHook(Hook):
    """A hook of the user's."""


def test_what_is_not_counted_is_said(retina):
    config = Config(retina.to_dict())
    assert 'Not counted' not in describe_run(config)
    config.custom_hooks = [dict(type=OwnHook), dict(type='EMAHook')]
    config.compile = True
    config.train_dataloader = dict(collate_fn=dict(type='crops_of_batches'))
    said = describe_run(config)
    assert 'collate_fn=crops_of_batches' in said and 'rehearse runs it' in said
    assert 'Not counted: what OwnHook may hold' in said and 'Not counted: compile=True' in said and 'EMA' not in said
