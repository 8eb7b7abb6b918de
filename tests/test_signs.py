"""Signs of life: what the log, ``print(model)`` and the visualizers say of a training with LeanHook."""

import logging
import types

import pytest
import torch
from cases import build
from mmdet.models.backbones import ResNet
from oracles import image

from sbp_mmdet import LeanHook, apply_lean, remove_lean
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.plan.memory import saved_bytes
from sbp_mmdet.report import StoredBytes

MODELS = {
    **{name: (lambda name=name: build(name)) for name in ('stock Swin', 'SBPConvNeXt', 'SBPViT')},
    'ResNet': lambda: ResNet(18, norm_eval=False),
}


def prepared(name):
    model = MODELS[name]().float()
    model.train()
    return model, image(2, 64, 64, dtype=torch.float32).requires_grad_(False)


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('amp', [False, True], ids=['fp32', 'bf16'])
def test_counts_are_those_of_whole_passes(name, amp):
    """Autograd's hooks over the whole model are the oracle: each storage once, parts that stay as they are included."""
    model, x = prepared(name)

    def run():
        with torch.autocast('cpu', torch.bfloat16, enabled=amp):
            return model(x)

    def whole(preset):
        remove_lean(model)
        report = apply_lean(model, preset)
        return report, saved_bytes(run, [*model.parameters(), *model.buffers()])

    found = {preset: whole(preset)[1] for preset in ('none', 'with_cp')}
    report, found['exact'] = whole('exact')
    counter = StoredBytes(model, report.changed)
    run()
    counted = counter.stop()
    assert not counter.failed and counter.autocast == amp and not any(m._forward_hooks for m in model.modules())
    # In mixed precision a plain layer may put out another precision than the changed one, whose outputs are looked at.
    slack = (0.06 if amp else 0) * found['none']
    for key, preset in dict(now='exact', before='none', with_cp='with_cp').items():
        least = 0 if report.left else found[preset] - slack  # the oracle has the layers that were left alone too
        assert least <= counted[key] <= found[preset] + slack, key
    assert counted['now'] < counted['before']


@pytest.mark.parametrize('name', MODELS)
def test_counting_changes_nothing(name):
    """Gradients, running statistics and random numbers are those of a step that is not counted."""
    model, x = prepared(name)
    names, found = apply_lean(model, 'exact').changed, []
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for counted in (False, True):
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(3)
        counter = StoredBytes(model, names) if counted else None
        sum(out.square().sum() for out in model(x)).backward()
        found.append([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), torch.rand(1)])
        found[-1] = [t.clone() for t in found[-1]]
        assert counter is None or counter.stop()['now']
    for plain, counted in zip(*found, strict=True):  # sums of biases depend on where torch aligns a tensor
        torch.testing.assert_close(counted, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
    assert torch.equal(found[0][-1], found[1][-1])


def test_what_is_checkpointed_around_stores_nothing_itself():
    model, x = prepared('stock Swin')
    changed = apply_lean(model, 'exact', modules=['stages.0', 'norm0']).changed
    checkpoint_modules(model, ['stages.0'])
    counter = StoredBytes(model, changed)
    sum(out.sum() for out in model(x)).backward()
    assert [*counter._names.values()] == ['norm0'] and counter.stop()['before']


def test_a_module_that_cannot_run_twice_is_named():
    model, x = prepared('stock Swin')
    norm = model.norm0
    changed = apply_lean(model, 'exact').changed
    forward, calls = type(norm).forward, []

    def once(self, x):
        calls.append(self)
        if calls.count(self) > 1 and self is norm:
            raise RuntimeError('only once')
        return forward(self, x)

    type(norm).forward = once
    try:
        counter = StoredBytes(model, changed)
        model(x)
    finally:
        type(norm).forward = forward
    assert counter.failed == {'norm0': 'RuntimeError: only once'} and counter.stop()['now']


class Runner(types.SimpleNamespace):
    """As far as hooks look at one."""

    def __init__(self, model):
        super().__init__(model=model, logger=logging.getLogger('signs'), iter=0, visualizer=self, scalars={}, hooks=[])

    def add_scalars(self, scalars, step):
        self.scalars[step] = scalars


def said(hook, model, caplog, steps=2, amp=False):
    """What a training of some steps logs, by level, and its scalars."""
    runner = Runner(model)
    with caplog.at_level(logging.INFO, 'signs'):
        hook.before_run(runner)
        for runner.iter in range(steps):
            hook.before_train_iter(runner, runner.iter)
            with torch.autocast('cpu', torch.bfloat16, enabled=amp):
                sum(out.float().sum() for out in model(image(2, 64, 64, dtype=torch.float32))).backward()
            hook.after_train_iter(runner, runner.iter)
    return {level: [r.message for r in caplog.records if r.levelname == level] for level in ('INFO', 'WARNING')}, runner


def test_the_block_in_the_log(caplog):
    model, _ = prepared('stock Swin')
    log, runner = said(LeanHook('sbp'), model, caplog)
    report, remark, stored = log['INFO']
    assert report.splitlines() == [
        "LeanHook: preset='sbp': 13 modules changed, 0 left alone",
        'changed: 4 SwinBlock, 2 PatchMerging: gradients from 0.5 of the positions, preset sbp',
        'changed: 1 SwinBlock, 1 PatchMerging, 1 PatchEmbed, 4 LayerNorm: exact, stores less',
        'training targets are made piece by piece',
    ]
    assert 'small objects' in remark and not log['WARNING']
    assert stored.startswith('LeanHook: in the first step the changed modules stored 0.2 MB for the backward pass')
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
        ('SBPViT', 'exact', False, r"less than now. In mixed precision 'exact' gains more"),
        ('ResNet', 'exact', True, r"preset='with_cp' stores less here, and preset='int8' less than now"),
        ('SBPConvNeXt', 'exact', True, None),
        ('stock Swin', 'none', False, 'LeanHook changes nothing: no preset'),
    ],
)
def test_poor_choices(name, preset, amp, message, caplog):
    model, _ = prepared(name)
    log, _ = said(LeanHook(preset), model, caplog, amp=amp)
    assert [message in text for text in log['WARNING']] == [True] if message else not log['WARNING']


def test_two_hooks_change_modules_of_their_own():
    runner = Runner(ResNet(18, base_channels=8))
    runner.hooks += [LeanHook(modules=['layer1']), LeanHook('int8', modules=['layer2']), LeanHook('int8')]
    for hook in runner.hooks[:2]:
        hook.before_run(runner)
    with pytest.raises(ValueError, match=r'stands twice in custom_hooks, and both change \d+ modules, such as layer1'):
        runner.hooks[2].before_run(runner)


def test_what_was_not_named_is_no_unknown_module():
    model = torch.nn.ModuleDict(dict(one=ResNet(18), two=torch.nn.Linear(2, 2)))
    assert apply_lean(model, modules=['one']).left['two'] == 'modules=[...] does not name it'
    assert apply_lean(model).left['two'] == 'no lean form of it is known'


def test_a_hook_whose_modules_do_not_run(caplog):
    model, _ = prepared('stock Swin')
    model.unused = build('stock Swin')
    log, _ = said(LeanHook(modules=['unused']), model, caplog)
    assert log['WARNING'] == ['LeanHook: no changed module ran in the first step, so nothing is saved']
