"""Steps that update nothing, however a ``train_step`` uses its optimizer wrapper."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.presets import Settings
from sbp_mmdet.verify.dry_run import NoUpdate
from sbp_mmdet.verify.first_pass import verify_changed

VERIFIES = True


def at_once(wrapper, loss):
    wrapper.update_params(loss)


def in_parts(wrapper, loss):
    wrapper.backward(wrapper.scale_loss(loss))
    if wrapper.should_update():
        wrapper.step()
        wrapper.zero_grad()


def by_the_optimizer(wrapper, loss):
    optimizer = wrapper.optimizer
    assert wrapper._accumulative_counts == 1 and wrapper.get_lr() == dict(lr=[1.0])
    optimizer.zero_grad(set_to_none=True)
    loss.backward() if wrapper._backward else None
    for group in (*optimizer.param_groups, *wrapper.param_groups):
        assert group['lr'] == 1.0
        group['lr'] *= 0.5  # a schedule of the model's own
    optimizer.step()


def one_of_two(wrapper, loss):
    assert len(wrapper) == 2 and 'a' in wrapper and [*wrapper.keys()] == ['a', 'b']
    wrapper['a'].update_params(loss)


def all_of_two(wrapper, loss):
    for each in wrapper.values():
        each.zero_grad()
    loss.backward() if wrapper['a']._backward else None
    for _, each in wrapper.items():
        each.step()


def by_the_optimizers_of_two(wrapper, loss):
    loss.backward() if wrapper['a']._backward else None
    for name, groups in wrapper.param_groups.items():
        groups[0]['lr'] *= 0.5
        wrapper.optim_wrappers[name].optimizer.step()


OF_TWO = [one_of_two, all_of_two, by_the_optimizers_of_two]


@pytest.mark.parametrize('backward', [False, True])
@pytest.mark.parametrize('use', [at_once, in_parts, by_the_optimizer, *OF_TWO])
def test_no_update(use, backward):
    model = nn.Linear(2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    wrappers = [OptimWrapper(torch.optim.SGD([p], lr=1.0)) for p in model.parameters()]
    wrapper = OptimWrapperDict(a=wrappers[0], b=wrappers[1]) if use in OF_TWO else wrappers[0]
    use(NoUpdate(wrapper, backward), model(torch.ones(1, 2)).sum())
    assert all(torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
    assert all((p.grad is not None) == backward for p in model.parameters())
    assert all(one.get_lr() == dict(lr=[1.0]) for one in wrappers)


@pytest.mark.parametrize('wrapped', [False, True])
def test_what_a_wrapper_does_not_have_is_an_attribute_error(wrapped):
    wrapper = NoUpdate(OptimWrapper(torch.optim.SGD([torch.zeros(1)], lr=1.0)))
    with pytest.raises(AttributeError, match='no_such'):
        _ = (wrapper.optimizer if wrapped else wrapper).no_such
    assert isinstance(copy.copy(wrapper), NoUpdate)  # Python looks for methods of an object without attributes


class TwoPasses(nn.Module):
    """A model whose step, as that of adversarial training, runs a backward pass between two forward passes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (ConvModule(3, 4, 3, norm_cfg=dict(type='BN')) for _ in range(2))

    def step(self, x, *names):
        for name in names:
            getattr(self, name)(x).sum().backward()


def verify_steps(*names):
    model = TwoPasses().train()
    report, x = apply_lean(model, verify=False), torch.randn(2, 3, 8, 8)
    return verify_changed(model, report, Settings.parse(dict(preset='exact')), lambda dry: dry.step(x, *names))


def test_a_backward_pass_of_the_models_own():
    """The verification ends there, because it has no gradients. What ran before was compared, and the log says so."""
    findings = verify_steps('first', 'second')
    assert findings.missed == ['second'] and [*findings.kinds[0].modules] == ['first']
    text = f'{findings}'
    assert text.startswith('verified 1 module against')
    assert '; 1 module was not compared, such as second: the model calls backward by itself' in text


def test_a_step_that_fails_behind_all_modules():
    """Nothing is left to be verified, whatever the step does with the losses afterwards."""

    class Both(TwoPasses):
        def step(self, x, *names):
            loss = sum(getattr(self, name)(x).sum() for name in names)
            loss.backward()

    model = Both().train()
    report, x = apply_lean(model, verify=False), torch.randn(2, 3, 8, 8)
    settings = Settings.parse(dict(preset='exact'))
    findings = verify_changed(model, report, settings, lambda dry: dry.step(x, 'first', 'second'))
    assert findings.skipped is None and not findings.missed and not findings.silent
    assert f'{findings}'.startswith('verified 2 modules') and 'not compared' not in f'{findings}'


class Follows(nn.Module):
    """A student whose teacher follows it in each forward pass, past autograd, and which logs that."""

    def __init__(self):
        super().__init__()
        self.student = ConvModule(3, 4, 3, norm_cfg=dict(type='BN'), bias=True)
        self.teacher = nn.Conv2d(3, 4, 3).requires_grad_(False)

    def forward(self, x):
        self.teacher.weight.data.lerp_(self.student.conv.weight.data, 0.1)
        for name in ('known', 'new'):
            MessageHub.get_current_instance().update_scalar(name, 1.0)
        return self.student(x).mean() + self.teacher(x).mean()


def test_the_verification_keeps_what_a_forward_pass_writes_to_parameters_and_logs(monkeypatch):
    hub = MessageHub.get_instance('follows')
    monkeypatch.setattr(MessageHub, 'get_current_instance', lambda: hub)
    hub.update_scalar('known', 0.0)  # of an earlier step
    torch.manual_seed(0)
    model, x = Follows(), torch.randn(2, 3, 8, 8)
    expected = model.teacher.weight.lerp(model.student.conv.weight, 0.1)
    assert apply_lean(model).changed
    model(x).backward()
    torch.testing.assert_close(model.teacher.weight, expected, rtol=0, atol=0)
    assert [hub.get_scalar(name).data[0].tolist() for name in ('known', 'new')] == [[0.0, 1.0], [1.0]]
