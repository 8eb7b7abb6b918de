"""Hooks that another hook registers before training make modules run their own code, and the log says so once."""

import logging
from types import SimpleNamespace

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from torch import nn

from sbp_mmdet import LeanHook, apply_lean
from sbp_mmdet.presets import Settings
from sbp_mmdet.verify.first_pass import verify_changed, warn_of_own_code


def build(preset='exact', frozen_stages=1):
    init_default_scope('mmdet')
    torch.manual_seed(0)
    model = MODELS.build(dict(type='ResNet', depth=18, base_channels=8, frozen_stages=frozen_stages))
    model.train()
    return model, apply_lean(model, preset, verify=False)


def watch(model):
    """Register a hook with every module, as ``wandb.watch`` does."""
    for module in model.modules():
        module.register_forward_hook(lambda *args: None)


def warnings_of(model, report):
    said = []
    return warn_of_own_code(model, report, 'LeanHook', lambda text, level: said.append(text)), said


def test_one_message_for_all_modules(caplog):
    model, report = build()
    assert warnings_of(model, report) == ([], [])
    watch(model)
    names, (text,) = warnings_of(model, report)
    blocks = {f'layer{stage}.{block}' for stage in (2, 3, 4) for block in (0, 1)}
    assert blocks <= {*names} <= {*report.changed}, names
    assert 'because they have hooks' in text and f'{len(names)} of {len(report.changed)} changed' in text
    assert len(text) < 300 and 'layer1' not in text  # frozen, so it saved nothing before
    model(torch.randn(1, 3, 64, 64))
    assert not [record for record in caplog.records if 'layer2' in record.getMessage()]
    assert warnings_of(model, report) == ([], [])  # once


def test_they_are_left_out_of_the_verification():
    model, report = build()
    settings = Settings.parse(dict(preset='exact'))
    watch(model.layer3)
    names, _ = warnings_of(model, report)
    findings = verify_changed(model, report, settings, lambda copy: copy(torch.randn(1, 3, 64, 64)))
    ran = {name for kind in findings.kinds for name in kind.modules}
    assert 'layer2.0' in ran and 'layer3.0' in names and 'layer3.0' not in ran
    assert not findings.own_code and not findings.failed


@pytest.mark.parametrize('change', ['hook', 'settings'])
def test_other_changes_have_another_cause(change):
    model, report = build()
    if change == 'hook':
        model.layer2[0].conv1.register_forward_hook(lambda *args: None)
    else:
        model.layer2[0].conv1 = nn.Sequential(model.layer2[0].conv1)
    _, (text,) = warnings_of(model, report)
    assert ('because they have hooks' in text) == (change == 'hook'), text


@pytest.mark.parametrize('modules', [None, ['layer2']])
def test_a_hook_that_undoes_the_change_of_another(modules):
    """A second hook whose preset undoes the change of the first is an error, which names the hook's preset."""
    model, _ = build('none')
    hooks = [LeanHook('exact'), LeanHook('none', modules=modules)]
    runner = SimpleNamespace(model=model, hooks=hooks, logger=logging.getLogger('hooks'), cfg=None)
    hooks[0].before_run(runner)
    with pytest.raises(ValueError, match="two LeanHooks, and one of them, with preset='none', undoes .* such as "):
        hooks[1].before_run(runner)


class Detector(nn.ModuleDict):
    """A backbone and a neck with a step that updates nothing."""

    def __init__(self):
        init_default_scope('mmdet')
        torch.manual_seed(0)
        backbone = dict(type='ResNet', depth=18, base_channels=8, frozen_stages=-1)
        neck = dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=8, num_outs=4)
        super().__init__(dict(backbone=MODELS.build(backbone), neck=MODELS.build(neck)))
        self.train()

    def train_step(self, data, wrapper):
        return self['neck'](self['backbone'](data))


def first_lines(*keys, hooks=None):
    """Run a detector's first step with a hook for each dict; return what the log says after the changes."""
    hooks, said, model = hooks or [LeanHook(**one) for one in keys], [], Detector()
    logger = SimpleNamespace(info=said.append, warning=said.append, log=lambda level, text: said.append(text))
    runner = SimpleNamespace(model=model, hooks=hooks, logger=logger, cfg=None, iter=0)
    runner.optim_wrapper, runner.visualizer = None, SimpleNamespace(add_scalars=lambda *args: None)
    for hook in hooks:
        hook.before_run(runner)
    said.clear()
    for hook in hooks:
        hook.before_train_iter(runner, 0, torch.randn(2, 3, 64, 64))
    return said


def test_each_of_two_hooks_reports_its_own_modules():
    backbone, neck = dict(modules='backbone'), dict(preset='exact_min', modules='neck')
    alone = [*first_lines(backbone), *first_lines(neck)]
    assert len(alone) == 4 and alone[1] != alone[3]
    assert first_lines(backbone, neck) == alone


def test_a_hook_that_is_used_again_verifies_again():
    """A notebook may give the same hook to several runners."""
    hook = LeanHook()
    first = first_lines(hooks=[hook])
    assert 'verified' in first[0] and first_lines(hooks=[hook]) == first
