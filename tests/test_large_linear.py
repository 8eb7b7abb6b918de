"""Linear layers with large weights have the gradients of their own code in fp64."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import apply_lean

WIDTH = 2**14  # with 512 outputs, 8 million weights


@pytest.fixture(scope='module')
def pair():
    plain = nn.Sequential(nn.Flatten(2), nn.Linear(WIDTH, 512), nn.ReLU(inplace=True))
    lean = copy.deepcopy(plain)
    assert [*apply_lean(lean).changed] == ['1']
    return plain, lean


def compute_gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.sin().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_gradients_are_those_of_the_modules_own_code(pair):
    plain, lean = (copy.deepcopy(model).double() for model in pair)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for frozen in (None, '1.weight', '1.bias'):
        for model in (plain, lean):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name != frozen)
        torch.testing.assert_close(compute_gradients(lean, x), compute_gradients(plain, x), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(compute_gradients(lean, x[:0]), compute_gradients(plain, x[:0]))


def test_autocast(pair):
    x = torch.randn(2, 3, WIDTH)
    exact = compute_gradients(pair[0], x)
    with torch.autocast('cpu', torch.bfloat16):
        plain, lean = (compute_gradients(model, x) for model in pair)
    for one, other, reference in zip(lean, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert (one - reference).norm() < 1.1 * (other - reference).norm() + 1e-6 * reference.norm()


def test_the_gradient_of_the_weight_is_gone_before_that_of_the_input_is_made(pair):
    shapes = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, kind, types, args=(), kwargs=None):
            out = kind(*args, **(kwargs or {}))
            if kind in (torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor):
                shapes.append((kind.overloadpacket.__name__, *out.shape))
            return out

    x = torch.randn(2, 3, WIDTH)
    compute_gradients(pair[1], x)
    out = pair[1](x.requires_grad_()).sum()
    with Log():
        out.backward()
    order = [shapes.index(s) for s in [('mm', 512, WIDTH), ('add_', 512, WIDTH), ('mm', 6, WIDTH)]]
    assert order == sorted(order)
