"""Linear layers with large weights have the gradients of their own code in fp64."""

import copy
import itertools

import pytest
import torch
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.skip_arithmetic import SkipArithmetic

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


def test_the_input_is_freed_before_its_gradient_is_allocated(pair):
    """Beside the gradient of the weight one map exists; plain holds the input and its gradient at the same time."""
    rows, peaks = 2**9, []
    for model, precision in itertools.product(pair, (None, torch.bfloat16)):
        model.zero_grad()
        # bytes do not depend on values, and products in bf16 are slow on many CPUs
        with LiveBytes() as live, SkipArithmetic(lambda: True):
            for phase in ('first step', 'second step'):  # the second one adds to an existing gradient
                start = torch.zeros((), requires_grad=True)
                with torch.autocast('cpu', precision, enabled=precision is not None):
                    loss = model(start.expand(1, rows, WIDTH) + 1).sum()
                live.phase = phase
                loss.backward()
                del loss
                live.phase = None
        peaks.append(live.peaks['second step'])
    map, cast = 4 * rows * WIDTH, 2 * 2**21
    weight, few = 4 * pair[0][1].weight.numel(), 2 * 4 * rows * 512 + 2**20
    assert peaks[0] > 2 * weight + 2 * map
    assert peaks[2] < 2 * weight + map + few
    assert peaks[3] < min(2 * weight + map + 2 * cast + few, peaks[1])


def update_at_once(p):
    p.data.sub_(0.1 * p.grad)
    p.grad = None


def take_a_step_at_once(p):
    torch.optim.SGD([p], 0.1).step()
    p.grad = None


@pytest.mark.parametrize('step', [update_at_once, take_a_step_at_once])
def test_weight_that_is_updated_in_the_backward_pass(pair, step):
    """The gradient of the input is that of the weight of the forward pass."""
    plain, lean = (copy.deepcopy(model).double() for model in pair)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    weight, bias = plain[1].parameters()
    for p in lean.parameters():
        p.register_post_accumulate_grad_hook(step)
    expected = compute_gradients(plain, x)
    actual = compute_gradients(lean, x)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-11, atol=1e-11)
    for p, before in zip(lean.parameters(), (weight, bias), strict=True):
        torch.testing.assert_close(p.detach(), before.detach() - 0.1 * before.grad, rtol=1e-11, atol=1e-11)
