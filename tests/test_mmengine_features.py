"""mmengine's own features beside the hook: ``compile``, ``activation_checkpointing``, ``efficient_conv_bn_eval``."""

import copy
import logging
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from conv_models import randomize_norms
from mmcv.cnn import ConvModule
from mmdet.models.backbones import CSPNeXt, ResNet
from mmdet.models.necks import FPN
from mmengine.model import BaseModel
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import nn
from unusual_models import assert_same, find_lean_modules, random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.verify.first_pass import FirstPass

VERIFIES = True


class Detector(BaseModel):
    """A backbone and a neck with a loss."""

    def __init__(self, backbone, neck=None):
        super().__init__()
        self.backbone, self.neck = backbone, neck or nn.Identity()

    def forward(self, inputs, mode='loss'):
        return dict(loss=sum(out.square().mean() for out in self.neck(self.backbone(inputs))))


DETECTORS = {
    'ResNet': lambda: Detector(ResNet(18, base_channels=8), FPN([8, 16, 32, 64], 8, 5)),
    'CSPNeXt': lambda: Detector(CSPNeXt(deepen_factor=0.167, widen_factor=0.125)),
}


def train(model, folder, hooks=(), steps=2, loop=None, **cfg):
    """Train with mmengine's runner; return the trained weights and the log."""
    generator, said = torch.Generator().manual_seed(0), []
    data = [dict(inputs=torch.randn(3, 64, 64, generator=generator, dtype=torch.float64)) for _ in range(2 * steps)]
    loader = dict(batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False), dataset=data)
    runner = Runner(
        model=model,
        work_dir=f'{folder}',
        train_cfg=loop or dict(by_epoch=True, max_epochs=1),
        train_dataloader=loader | dict(collate_fn=lambda b: dict(inputs=torch.stack([d['inputs'] for d in b]))),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        custom_hooks=[*hooks],
        default_scope='mmdet',
        experiment_name=f'{folder.name}_{len(hooks)}_{"_".join(cfg)}',
        default_hooks=dict(checkpoint=None, logger=None),
        cfg=cfg,
    )
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    runner.logger.addHandler(handler)
    runner._init_model_weights = lambda: None
    runner.train()
    return {name: p.detach().clone() for name, p in runner.model.named_parameters()}, said


def largest_difference(actual, expected):
    return max(float((actual[name] - p).norm() / p.norm().clamp_min(1e-3)) for name, p in expected.items())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='a compiler of before torch 2.4')
@pytest.mark.parametrize('name', DETECTORS)
def test_compile_of_the_runner(name, tmp_path):
    """Lean modules run as usual and the rest is compiled, without warnings of the compiler."""
    torch.compiler.reset()
    model, hook = DETECTORS[name]().double(), dict(type='LeanHook')
    plain, _ = train(copy.deepcopy(model), tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        compiled, said = train(model, tmp_path, [hook], compile=dict(backend='eager'))
    assert largest_difference(compiled, plain) < 1e-6
    assert any('verified' in line for line in said)
    assert not [w for w in caught if 'ynamo' in f'{w.message}{w.filename}' and 'sbp_mmdet' in f'{w.message}']


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='a compiler of before torch 2.4')
@pytest.mark.skipif(shutil.which('g++') is None, reason='no C++ compiler')
def test_compile_of_the_runner_with_kernels(tmp_path, monkeypatch):
    """``compile=True``: the step calls backward, so the compiler must leave the operations' backward passes alone."""
    # torch takes a precompiled header from its cache that was made for other instructions (ATEN_CPU_CAPABILITY).
    cache = Path(tempfile.gettempdir(), f'inductor_{torch.backends.cpu.get_cpu_capability()}_{os.getuid()}')
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', f'{cache}')
    torch.compiler.reset()
    model = Detector(ResNet(18, base_channels=8, num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,)))
    plain, _ = train(copy.deepcopy(model.double()), tmp_path)
    compiled, _ = train(model, tmp_path, [dict(type='LeanHook')], compile=True)
    assert largest_difference(compiled, plain) < 1e-6


def test_activation_checkpointing_of_the_runner(tmp_path):
    """What it checkpoints is verified as everything else, and is not counted: a checkpoint saves no more than plain."""
    checkpointed = ['backbone.layer2', 'backbone.layer3.0']
    model = DETECTORS['ResNet']().double()
    hook = dict(type='LeanHook')
    expected, _ = train(copy.deepcopy(model), tmp_path, activation_checkpointing=checkpointed)
    _, usual = train(copy.deepcopy(model), tmp_path, [hook])
    actual, said = train(model, tmp_path, [hook], activation_checkpointing=checkpointed)
    assert largest_difference(actual, expected) < 1e-10
    verified = [next(line for line in log if 'verified' in line) for log in (usual, said)]
    assert verified[1].split(' against')[0] == verified[0].split(' against')[0]
    stored = [float(re.search(r'unchanged they would store ([\d.]+) MB', '\n'.join(log))[1]) for log in (usual, said)]
    assert stored[1] < stored[0]
    assert not [line for line in said if 'replaced' in line or 'not verified' in line]


@LOOPS.register_module(force=True)
class QuietLoop(EpochBasedTrainLoop):
    """A loop that calls hooks before an iteration without its batch, or not at all."""

    def __init__(self, *args, calls, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = calls

    def run_iter(self, idx, data_batch):
        if self.calls:
            self.runner.call_hook('before_train_iter', batch_idx=idx)
        self.runner.model.train_step(data_batch, self.runner.optim_wrapper)
        self._iter += 1


@pytest.mark.parametrize('calls', [True, False])
def test_a_loop_that_does_not_announce_its_batches(calls, tmp_path):
    """The model is verified at its first pass, once, and trains as the plain one."""
    model, loop = DETECTORS['ResNet']().double(), dict(type='QuietLoop', max_epochs=1, calls=calls)
    expected, _ = train(copy.deepcopy(model), tmp_path, loop=loop)
    actual, said = train(model, tmp_path, [dict(type='LeanHook')], loop=loop)
    assert largest_difference(actual, expected) < 1e-10
    assert len([line for line in said if 'against their own code' in line]) == 1, said
    assert not isinstance(model, FirstPass) and '_verification' not in vars(model)


@pytest.mark.parametrize('calls', [True, False])
def test_two_hooks_of_such_a_loop(calls, tmp_path):
    """Each has its modules verified, as they would be with this hook alone."""

    def verified(*parts):
        hooks = [dict(type='LeanHook', modules=part) for part in parts]
        loop = dict(type='QuietLoop', max_epochs=1, calls=calls)
        _, said = train(DETECTORS['ResNet']().double(), tmp_path / f'{"_".join(parts)}_{calls}', hooks, loop=loop)
        return [line.split(' against')[0] for line in said if 'against their own code' in line]

    alone = [*verified('backbone'), *verified('neck')]
    assert len(alone) == 2 and verified('backbone', 'neck') == alone


def test_a_loop_that_announces_its_batches(tmp_path):
    model = DETECTORS['ResNet']().double()
    _, said = train(model, tmp_path, [dict(type='LeanHook')])
    assert [line.split(':')[0] for line in said if 'against their own code' in line] == ['LeanHook']
    assert not isinstance(model, FirstPass) and '_verification' not in vars(model)


def bn_eval(model):
    turn_on_efficient_conv_bn_eval(model, ['backbone'])


def resnet(**options):
    return nn.ModuleDict(dict(backbone=randomize_norms(ResNet(18, base_channels=8, norm_eval=True, **options))))


class OnImages(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model['backbone'](x)


def test_efficient_conv_bn_eval_before(caplog):
    """A backbone that efficient_conv_bn_eval has replaced by a graph is left unchanged, and the report says so."""
    lean = resnet()
    bn_eval(lean)
    plain = copy.deepcopy(lean)
    report = apply_lean(lean)
    assert 'replaced' in report.left['backbone']
    assert_same(OnImages(lean), OnImages(plain), random_images())


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('verify', [False, True])
def test_efficient_conv_bn_eval_after(training, verify):
    """efficient_conv_bn_eval of a changed backbone raises an error of one line."""
    lean = randomize_norms(ResNet(18, base_channels=8, norm_eval=True))
    plain = copy.deepcopy(lean)
    apply_lean(lean, verify=verify)
    lean.train(training)
    with pytest.raises(ValueError, match='efficient_conv_bn_eval') as found:
        turn_on_efficient_conv_bn_eval(nn.ModuleDict(dict(backbone=lean)), 'backbone')
    assert '\n' not in f'{found.value}'
    assert ('_verification' in vars(lean)) is verify and 'forward' not in vars(lean)
    lean.train()
    assert_same(lean, plain, random_images())


@pytest.mark.parametrize('norm_eval', [False, True])
def test_efficient_conv_bn_eval_of_a_layer(norm_eval):
    options = dict(padding=1, norm_cfg=dict(type='BN'), efficient_conv_bn_eval=True)
    lean = randomize_norms(nn.Sequential(ConvModule(3, 8, 3, **options), ConvModule(8, 8, 3, **options)))
    for module in lean.modules():
        if norm_eval and isinstance(module, nn.BatchNorm2d):
            module.eval()
    plain = copy.deepcopy(lean)
    apply_lean(lean)
    assert find_lean_modules(lean)
    assert_same(lean, plain, random_images())
