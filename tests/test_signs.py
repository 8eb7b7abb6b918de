"""Log, ``print(model)`` and visualizers report what a training with LeanHook does."""

import contextlib
import functools
import logging
import types
from unittest import mock

import pytest
import torch
from cases import build
from mmdet.models.backbones import ResNet
from mmengine.visualization import Visualizer
from oracles import random_images

from sbp_mmdet import LeanHook, apply_lean, remove_lean
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.plan.memory import saved_bytes
from sbp_mmdet.report import UNKNOWN
from sbp_mmdet.verify import first_pass
from sbp_mmdet.verify.checks import verify_modules

MODELS = {
    **{name: (lambda name=name: build(name)) for name in ('stock Swin', 'SBPConvNeXt', 'SBPViT')},
    'ResNet': lambda: ResNet(18, norm_eval=False),
}


def build_with_images(name):
    model = MODELS[name]().float()
    model.train()
    return model, random_images(2, 64, 64, dtype=torch.float32).requires_grad_(False)


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('amp', [False, True], ids=['fp32', 'bf16'])
def test_counts_are_those_of_whole_passes(name, amp):
    """Autograd's hooks over the whole model, unchanged parts included, are the oracle; each storage counts once."""
    model, x = build_with_images(name)

    def run():
        with torch.autocast('cpu', torch.bfloat16, enabled=amp):
            return model(x)

    def whole(preset):
        remove_lean(model)
        report = apply_lean(model, preset)
        return report, saved_bytes(run, [*model.parameters(), *model.buffers()])

    found = {preset: whole(preset)[1] for preset in ('none', 'with_cp')}
    report, found['exact'] = whole('exact')
    findings = verify_modules(model, report.changed, run_on(x, amp))
    assert not findings.skipped and findings.autocast == amp
    # In mixed precision a plain layer may put out another precision than the changed one, whose outputs are looked at.
    slack = (0.06 if amp else 0) * found['none']
    for key, preset in dict(now='exact', before='none', with_cp='with_cp').items():
        least = 0 if report.left else found[preset] - slack  # the oracle has the layers that are unchanged too
        # Alone, a changed convolution does not see what the layer before it keeps and would hand on.
        most = (1.2 if (name, key) == ('ResNet', 'now') else 1) * found[preset] + slack
        assert least <= findings.stored[key] <= most, key
    assert findings.stored['now'] < findings.stored['before']


def run_on(x, amp=False):
    def run(model):
        with torch.autocast('cpu', torch.bfloat16, enabled=amp):
            model(x)

    return run


def test_what_is_checkpointed_around_stores_nothing_itself():
    model, x = build_with_images('stock Swin')
    changed = apply_lean(model, 'exact', modules=['stages.0', 'norm0']).changed
    checkpoint_modules(model, ['stages.0'])
    findings = verify_modules(model, changed, run_on(x))
    assert [kind.name for kind in findings.kinds if kind.bytes['before']] == ['LayerNorm']


def _step(model, batch, wrapper):
    with wrapper.optim_context(model):
        wrapper.update_params(sum(out.float().sum() for out in model(batch)))


class Runner(types.SimpleNamespace):
    """Runner with the attributes that hooks read."""

    def __init__(self, model):
        super().__init__(model=model, logger=logging.getLogger('signs'), iter=0, visualizer=self, scalars={}, hooks=[])
        self.optim_wrapper = types.SimpleNamespace(optim_context=contextlib.nullcontext)
        vars(model)['train_step'] = functools.partial(_step, model)

    def add_scalars(self, scalars, step):
        self.scalars[step] = scalars


def train_and_get_log(hook, model, caplog, steps=2, amp=False):
    """Return the log of a training run of some steps by level, and its scalars."""
    runner = Runner(model)
    with caplog.at_level(logging.INFO, 'signs'):
        hook.before_run(runner)
        for runner.iter in range(steps):
            hook.before_train_iter(runner, runner.iter, data_batch=random_images(2, 64, 64, dtype=torch.float32))
            with torch.autocast('cpu', torch.bfloat16, enabled=amp):
                sum(out.float().sum() for out in model(random_images(2, 64, 64, dtype=torch.float32))).backward()
            hook.after_train_iter(runner, runner.iter)
    return {level: [r.message for r in caplog.records if r.levelname == level] for level in ('INFO', 'WARNING')}, runner


def test_the_block_in_the_log(caplog):
    model, _ = build_with_images('stock Swin')
    log, runner = train_and_get_log(LeanHook('sbp'), model, caplog)
    report, thinned, remark, verified, stored = log['INFO']
    assert report.splitlines()[:3] == [
        "LeanHook: preset='sbp': 13 modules changed, 0 unchanged",
        'changed: 4 SwinBlock, 2 PatchMerging: gradients from 0.5 of the positions, preset sbp',
        'changed: 1 SwinBlock, 1 PatchMerging, 1 PatchEmbed, 4 LayerNorm: exact, stores less',
    ]
    assert thinned.endswith('(1, 1, 2, 0) of (1, 1, 2, 1), and 2 downsampling layers')
    assert 'small objects' in remark and not log['WARNING'] and 'verified 13 modules' in verified
    assert 'store 0.2 MB' in stored and 'sbp-mmdet plan' in stored
    assert [*runner.scalars] == [1] and runner.scalars[1]['lean/keep_ratio'] == 0.5
    assert 0 < runner.scalars[1]['lean/stored_mb_now'] < runner.scalars[1]['lean/stored_mb_before']
    assert "(0): SwinBlock(\n          preset='sbp', keeps 0.5 of the positions\n" in str(model)
    assert f'(norm0): {torch.nn.LayerNorm(8)!r}'[:-1] + ", preset='sbp')" in str(model)
    remove_lean(model)
    assert 'preset' not in str(model)
    apply_lean(model, 'with_cp')
    assert "(0): SwinBlock(\n          preset='with_cp'\n" in str(model)


@pytest.mark.parametrize(
    ('name', 'preset', 'amp', 'message'),
    [
        ('ResNet', 'exact', False, None),
        ('SBPConvNeXt', 'exact', True, None),
        ('stock Swin', 'none', False, "LeanHook changes nothing: preset='none'; remove the hook or"),
    ],
)
def test_poor_choices(name, preset, amp, message, caplog):
    model, _ = build_with_images(name)
    log, _ = train_and_get_log(LeanHook(preset), model, caplog, amp=amp)
    assert [message in text for text in log['WARNING']] == [True] if message else not log['WARNING']


def test_two_hooks_change_modules_of_their_own():
    runner = Runner(ResNet(18, base_channels=8))
    runner.hooks += [LeanHook(modules=['layer1']), LeanHook('int8', modules=['layer2']), LeanHook('int8')]
    for hook in runner.hooks[:2]:
        hook.before_run(runner)
    message = r'two LeanHooks, and both change \d+ modules, such as layer1'
    with pytest.raises(ValueError, match=message):
        runner.hooks[2].before_run(runner)


@pytest.mark.parametrize('announced', [True, False])
def test_stored_bytes_of_two_hooks_are_added(announced, monkeypatch):
    """The scalars have one name for each number, whether a runner announces its batches or not."""

    def count(*parts):
        runner = Runner(ResNet(18, base_channels=8))
        monkeypatch.setattr(Visualizer, '_instance_dict', dict(runner=runner))
        runner.hooks += [LeanHook(modules=[part]) for part in parts]
        for hook in runner.hooks:
            hook.before_run(runner)
        images = random_images(2, 64, 64, dtype=torch.float32)
        for hook in runner.hooks:
            if announced:
                hook.before_train_iter(runner, 0, data_batch=images)
            else:
                hook.before_train(runner)
        runner.model(images)
        return runner.scalars[1]

    with mock.patch.object(first_pass, '_off', 0):  # ends before the fixture that turned verification off
        first, second, both = count('layer1'), count('layer3'), count('layer1', 'layer3')
    assert min(first.values()) > 0 and {*both} == {*first}
    assert both == pytest.approx({key: first[key] + second[key] for key in first})


def test_what_was_not_named_is_no_unknown_module():
    model = torch.nn.ModuleDict(dict(one=ResNet(18), two=torch.nn.Linear(2, 2)))
    assert apply_lean(model, modules=['one']).left['two'] == 'modules=[...] does not name it'
    assert apply_lean(model).left['two'] == UNKNOWN


def test_a_hook_whose_modules_do_not_run(caplog):
    model, _ = build_with_images('stock Swin')
    model.unused = build('stock Swin')
    log, _ = train_and_get_log(LeanHook(modules=['unused']), model, caplog)
    (warning,) = log['WARNING']
    assert 'ran in the first step' in warning and 'modules=[...]' in warning
