"""Steps that update nothing, however a ``train_step`` uses its optimizer wrapper."""

import pytest
import torch
from mmcv.cnn import ConvModule
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.verify.dry_run import NoUpdate

VERIFIES = True


def at_once(wrapper, loss):
    wrapper.update_params(loss)


def in_parts(wrapper, loss):
    wrapper.backward(wrapper.scale_loss(loss))
    if wrapper.should_update():
        wrapper.step()
        wrapper.zero_grad()


def one_of_two(wrapper, loss):
    assert len(wrapper) == 2 and 'a' in wrapper and [*wrapper.keys()] == ['a', 'b']
    wrapper['a'].update_params(loss)


def all_of_two(wrapper, loss):
    for each in wrapper.values():
        each.zero_grad()
    loss.backward() if wrapper['a']._backward else None
    for _, each in wrapper.items():
        each.step()


@pytest.mark.parametrize('backward', [False, True])
@pytest.mark.parametrize('use', [at_once, in_parts, one_of_two, all_of_two])
def test_no_update(use, backward):
    model = nn.Linear(2, 2)
    before = [p.detach().clone() for p in model.parameters()]
    wrappers = [OptimWrapper(torch.optim.SGD([p], lr=1.0)) for p in model.parameters()]
    wrapper = wrappers[0] if use in (at_once, in_parts) else OptimWrapperDict(a=wrappers[0], b=wrappers[1])
    use(NoUpdate(wrapper, backward), model(torch.ones(1, 2)).sum())
    assert all(torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
    assert all((p.grad is not None) == backward for p in model.parameters())


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
