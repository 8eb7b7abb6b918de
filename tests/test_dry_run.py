"""Steps that update nothing, however a ``train_step`` uses its optimizer wrapper."""

import pytest
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from sbp_mmdet.verify.dry_run import NoUpdate


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
