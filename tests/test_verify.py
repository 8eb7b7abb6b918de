"""Verification finds planted faults and restores the own code, and changes nothing else in a training."""

import contextlib
import copy
import re

import pytest
import torch
from helpers import ROOT
from mmcv.cnn import ConvModule
from mmdet.models import ResNet
from mmdet.models.necks import CSPNeXtPAFPN
from oracles import random_images
from test_own_code import PreActivation
from torch import nn
from verify_models import MODELS, apply_and_get_log, assert_fallback, assert_plain_training, build_in_training

from sbp_mmdet import LeanHook, apply_lean
from sbp_mmdet.adapters import LeanModule, channel_attention
from sbp_mmdet.ops import (
    attention,
    channel_mlp,
    conv_norm_act,
    deformable_attention,
    deformable_encoder_layer,
    downsample,
    layer_norm,
    window_attention,
)
from sbp_mmdet.ops.activation import ActivationSettings
from sbp_mmdet.ops.common.autograd_function import Operation
from sbp_mmdet.plan.command import main

VERIFIES = True


# Operation, and a model that runs it.
OPERATIONS = {
    'MLP of ConvNeXt': (channel_mlp, 'ConvNeXt'),
    'MLP of ViT': (channel_mlp, 'ViT'),
    'downsample': (downsample, 'Swin'),
    'attention': (attention, 'ViT'),
    'window attention': (window_attention, 'Swin'),
    'layer norm': (layer_norm, 'Swin'),
    'conv, norm, act': (conv_norm_act, 'ResNet'),
    'with batch statistics': (conv_norm_act, 'ResNet in training mode'),
    'with group norm': (conv_norm_act, 'ResNet with group norm'),
    'deformable attention': (deformable_attention, 'attention'),
    'encoder layer': (deformable_encoder_layer, 'encoder'),
}


def operation_in(module):
    return next(value for value in vars(module).values() if isinstance(value, Operation))


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('name', MODELS)
def test_no_false_alarm(name, preset, caplog):
    if preset == 'int8' and name.startswith('CSP layer'):
        # A depthwise convolution and its norm undo the scale of the norm in front, whose gradient nearly cancels.
        pytest.skip('of this gradient eight bits leave noise on maps of a few hundred positions')
    _, records = apply_and_get_log(build_in_training(name), caplog, preset=preset)
    assert [r.levelname for r in records] == ['INFO']
    assert 'against their own code' in records[0].message and 'not be compared' not in records[0].message


def faulty_forward(operation, monkeypatch):
    original = operation.forward

    def forward(*args):
        out, saved = original(*args)
        return out * 1.1, saved

    monkeypatch.setattr(operation, 'forward', forward)


def faulty_gradient(operation, monkeypatch, number):
    original = operation.backward

    def backward(*args):
        gradients = [*original(*args)]
        gradients[number] = None if gradients[number] is None else gradients[number] * 1.2
        return operation.gradients(*gradients)

    monkeypatch.setattr(operation, 'backward', backward)


@pytest.mark.parametrize('case', OPERATIONS)
def test_a_fault_in_the_forward_pass(case, monkeypatch, caplog):
    module, name = OPERATIONS[case]
    faulty_forward(operation_in(module), monkeypatch)
    assert_fallback(name, caplog)


FIELDS = [
    (case, i, field)
    for case, (module, _) in OPERATIONS.items()
    for i, field in enumerate(operation_in(module).gradients._fields)
    if field not in ('factor', 'residual')
]


@pytest.mark.parametrize(('case', 'number'), [f[:2] for f in FIELDS], ids=[f'{f[0]}-{f[2]}' for f in FIELDS])
def test_a_fault_in_a_gradient(case, number, monkeypatch, caplog):
    module, name = OPERATIONS[case]
    operation = operation_in(module)
    original, seen = operation.backward, []

    def backward(*args):
        gradients = [*original(*args)]
        if args[3][number] and float(gradients[number].abs().max()):
            seen.append(1)
            gradients[number] = gradients[number] * 1.2
        return operation.gradients(*gradients)

    monkeypatch.setattr(operation, 'backward', backward)
    model = build_in_training(name)
    plain = copy.deepcopy(model)
    report, records = apply_and_get_log(model, caplog)
    if not seen:
        pytest.skip('this model does not ask for it')
    assert_plain_training(model, plain, report, records)


def test_a_fault_that_raises(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError('no kernel image')

    monkeypatch.setattr(operation_in(layer_norm), 'forward', broken)
    model = build_in_training('Swin')
    report, records = apply_and_get_log(model, caplog)
    assert any('no kernel image' in r.message for r in records if r.levelname == 'WARNING')
    failed = [name for name, reason in report.left.items() if 'no kernel image' in reason]
    assert failed and not any(isinstance(model.get_submodule(name), LeanModule) for name in failed)


def test_raise_stops(monkeypatch):
    faulty_forward(operation_in(layer_norm), monkeypatch)
    model = build_in_training('Swin')
    apply_lean(model, verify='raise')
    with pytest.raises(RuntimeError, match="verify='raise'.*patch_embed.*modules="):
        model(random_images(2, 64, 64, dtype=torch.float32))


def test_a_dropout_mask_that_is_not_the_forward_passes(monkeypatch, caplog):
    """Chunks draw other numbers than the plain module, so the backward pass is compared with the derivative of the
    forward."""
    monkeypatch.setattr(deformable_encoder_layer, 'replay_dropout', lambda device, state: contextlib.nullcontext())
    assert_fallback('encoder with dropout', caplog)


TRAININGS = [
    *((name, preset, None) for name in ('ConvNeXt', 'Swin', 'ViT') for preset in ('exact', 'int8', 'sampled', 'sbp')),
    *((name, 'exact', dtype) for name in ('ConvNeXt', 'Swin', 'ViT') for dtype in (torch.bfloat16, torch.float16)),
    *(('ResNet in training mode', 'exact', dtype) for dtype in (None, torch.bfloat16, torch.float16)),
    ('ConvNeXt', 'sampled', torch.bfloat16),
    ('ViT', 'sbp', torch.float16),
]


@pytest.mark.skipif(not hasattr(torch.amp, 'GradScaler'), reason='this torch scales no gradients on a CPU')
@pytest.mark.parametrize(('name', 'preset', 'amp'), TRAININGS)
def test_training_is_bit_for_bit_that_without(name, preset, amp):
    """Four steps use accumulation, a moving average, a hook that keeps features, autocast and a gradient scaler."""
    found = []
    for verify in (False, 'raise'):
        torch.manual_seed(3)
        model = build_in_training(name)
        kept = []
        next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d)).register_forward_hook(
            lambda module, args, out, kept=kept: kept.append(out.shape)
        )
        apply_lean(model, preset, verify=verify)
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler('cpu', enabled=amp is not None, growth_interval=2)
        for step in range(4):
            with torch.autocast('cpu', amp or torch.bfloat16, enabled=amp is not None):
                outs = model(random_images(2, 64, 64, dtype=torch.float32, seed=step))
            scaler.scale(sum(out.float().square().mean() for out in outs)).backward()
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                for a, b in zip(average.parameters(), model.parameters(), strict=True):
                    a.data.lerp_(b.data, 0.1)
        state = torch.tensor([len(kept), scaler.get_scale()])
        found.append([*model.state_dict().values(), *average.state_dict().values(), torch.rand(3), state])
    for plain, verified in zip(*found, strict=True):
        assert torch.equal(plain, verified)


@pytest.mark.parametrize('value', ['yes', 2, None])
def test_another_value_is_refused(value):
    with pytest.raises(ValueError, match=f'verify={value!r}.*raise'):
        LeanHook(verify=value)


SHAPES = ROOT / 'configs/sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'
THE_COMMAND = ['verify', str(SHAPES), '--batch', '1', '--size', '64x64']


def test_the_command_verifies_what_the_config_trains(capsys):
    """This config only thins its backbone; with ``preset='none'`` there is nothing to verify."""
    main(THE_COMMAND)
    kinds = capsys.readouterr().out
    assert 'ConvNeXtBlock' in kinds and 'ConvModule' not in kinds
    with pytest.raises(SystemExit, match='2'):
        main([*THE_COMMAND, '--cfg-options', 'model.backbone.sbp_cfg.preset=none'])
    assert "preset 'none' leaves every operation as it is" in capsys.readouterr().err


@pytest.mark.parametrize('broken', [False, True])
def test_the_command(broken, monkeypatch, capsys):
    """The command prints a table by kind of module, and its exit status is 1 if one disagrees."""
    if broken:
        faulty_forward(operation_in(conv_norm_act), monkeypatch)
    options = [*THE_COMMAND, '--preset', 'exact']
    with pytest.raises(SystemExit, match='1') if broken else contextlib.nullcontext():
        main(options)
    out = capsys.readouterr().out
    assert 'against their own code' in out and ('off' in out.split('verified')[0]) == broken


def test_the_command_verifies_each_of_two_hooks(tmp_path, monkeypatch, capsys):
    """A hook for the backbone and one for the neck: the second is verified, too, and a preset of own code is not."""
    hooks = ', '.join(
        f"dict(type='LeanHook', preset='{preset}', modules='{modules}')"
        for preset, modules in (('exact', 'backbone'), ('exact_min', 'neck'), ('with_cp', 'roi_head'))
    )
    config = f"_base_ = '{SHAPES}'\nmodel = dict(backbone=dict(sbp_cfg=None))\ncustom_hooks = [{hooks}]\n"
    (tmp_path / 'two.py').write_text(config)
    command = [THE_COMMAND[0], str(tmp_path / 'two.py'), *THE_COMMAND[2:]]
    main(command)
    out = capsys.readouterr().out
    first, second = out.split("preset='exact_min', modules=['neck']:")
    assert "preset='exact', modules=['backbone']:" in first and 'ConvNeXtBlock' in first and 'ConvModule' not in first
    assert 'ConvModule' in second and 'ConvNeXtBlock' not in second and "preset='with_cp'" not in out
    faulty_forward(operation_in(conv_norm_act), monkeypatch)
    with pytest.raises(SystemExit, match='1'):
        main(command)


@pytest.mark.parametrize(
    ('later', 'numbers'),
    [
        (dict(modules='1'), [1, 1]),
        (dict(preset='exact_min'), [2]),
        (dict(modules='0', preset='exact_min'), [1]),
        (dict(modules='0', preset='none'), []),
        (dict(modules='1', verify=False), [1]),
    ],
    ids=str,
)
def test_parts_that_are_changed_one_by_one(later, numbers, caplog):
    """The first pass verifies each change that is still in place."""
    model = nn.Sequential(*(ConvModule(3, 3, 3, norm_cfg=dict(type='BN')) for _ in range(2))).train()
    apply_lean(model, modules='0')
    _, records = apply_and_get_log(model, caplog, **later)
    assert [int(re.search(r'verified (\d+) module', record.message)[1]) for record in records] == numbers


@pytest.mark.parametrize('again', [False, True])
def test_a_changed_module_that_is_removed(again, caplog):
    model = nn.Sequential(*(ConvModule(3, 3, 3, norm_cfg=dict(type='BN')) for _ in range(2))).train()
    apply_lean(model)
    del model[1]
    if again:
        apply_and_get_log(model, caplog)
    model(torch.randn(2, 3, 8, 8))


def test_what_a_module_writes_to_its_input(monkeypatch):
    """An activation that should work in place, and does not, has the right output and gradients."""
    monkeypatch.setattr(
        channel_attention, 'ActivationSettings', lambda form, act, inplace: ActivationSettings(form, act)
    )
    model = PreActivation(torch.nn.SiLU).train()
    apply_lean(model, verify='raise')
    with pytest.raises(RuntimeError, match='input 0 after the call'):
        model(random_images(2, 12, 12, dtype=torch.float32))


@pytest.mark.parametrize('seed', range(3))
def test_gradients_that_are_rounding_errors_in_double_precision(seed):
    """The gradient of a bias in front of a batch norm is zero in exact arithmetic."""
    torch.manual_seed(seed)
    body = [torch.nn.LeakyReLU(0.2), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8)]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Sequential(*body)).double().train()
    apply_lean(model, verify='raise')
    model(random_images(2, 12, 12))


class BackboneAndNeck(torch.nn.Module):
    """A model of 61 changed or frozen modules. One of them is the neck, which ``exact_min`` recomputes as a whole."""

    def __init__(self):
        super().__init__()
        self.backbone = ResNet(depth=18, frozen_stages=1)
        self.neck = CSPNeXtPAFPN(in_channels=[128, 256, 512], out_channels=16, num_csp_blocks=1)

    def forward(self, x):
        return self.neck(self.backbone(x)[1:])


def test_the_line_adds_up_to_the_modules_of_the_report(caplog):
    """Four frozen modules are verified although they are unchanged, and the neck is changed without being verified."""
    report, records = apply_and_get_log(BackboneAndNeck().train(), caplog, preset='exact_min')
    assert (len(report.changed), len(report.left)) == (57, 4)
    said = records[0].message
    assert 'verified 60 modules (4 of them frozen) against' in said
    assert said.endswith('(relative); changed modules that only recompute their own code: 1')


def test_no_casts_of_weights_are_left_to_the_step(monkeypatch):
    """Older versions of torch use casts that were made without gradients where the weights need theirs."""
    events = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = ConvModule(3, 4, 3, norm_cfg=dict(type='BN'))
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            out = self.head(self.conv(x).mean((2, 3)))
            events.append('with gradients' if torch.is_grad_enabled() else 'without gradients')
            return out

    model = Model().train()
    apply_lean(model, 'exact')
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, 'clear_autocast_cache', lambda: events.append('cleared') or clear())
    with torch.autocast('cpu', torch.bfloat16):
        out = model(torch.randn(2, 3, 8, 8))
    assert [*dict.fromkeys(events)] == ['without gradients', 'cleared', 'with gradients']
    out.float().sum().backward()
    assert all(p.grad is not None for p in model.head.parameters())
