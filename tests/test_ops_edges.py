"""Inputs at the edges of what plain modules take: empty batches, strides, devices, precisions."""

import contextlib

import pytest
import torch
from ops_cases import CASES, Case, differentiate

from sbp_mmdet.ops.common.autograd_function import Form

FORMS = dict(exact=Form(), int8=Form(storage='int8'))


def kinds_of(case: Case):
    return [kind for kind in case.kinds if kind in (None, 'half', 'empty')]


NAMES = [(name, kind) for name, case in CASES.items() for kind in kinds_of(case)]


@contextlib.contextmanager
def default_device(device):
    before = torch.get_default_device() if hasattr(torch, 'get_default_device') else 'cpu'
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name, kind', NAMES)
def test_a_batch_without_images(name, kind, form):
    """As a backbone of crops has it in a step without any: gradients of parameters are zero."""
    case = CASES[name]
    tensors, given = case.inputs(n=0)
    lean, _ = case.both(kind, FORMS[form], given)
    found = differentiate(lean, tensors)
    assert found.pop('out').shape[0] == 0
    for key, tensor in tensors.items():
        assert tensor is None or torch.equal(found[key], torch.zeros_like(tensor)), key


@pytest.mark.parametrize('name, kind', NAMES)
def test_another_default_device(name, kind):
    """Whoever sets one means new tensors of a script, not those of an operation on other tensors."""
    case = CASES[name]
    tensors, given = case.inputs()
    lean, plain = case.both(kind, given=given)
    expected = differentiate(plain, tensors)
    weight = torch.randn_like(expected['out'])

    def gradients(f):
        leaves = {n: t if t is None else t.detach().clone().requires_grad_() for n, t in tensors.items()}
        out = f(**leaves)
        out.backward(weight)
        return [out.detach(), *(t.grad for t in leaves.values() if t is not None)]

    with default_device('meta'):
        found = gradients(lean)
    for a, b in zip(found, gradients(plain), strict=True):
        torch.testing.assert_close(a, b)


def strided(x):
    """The same numbers, with dimensions in another order and gaps between the numbers of the last one."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype).transpose(0, -1).contiguous().transpose(0, -1)
    wide[..., ::2] = x.detach()
    return wide[..., ::2]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name, kind', NAMES)
def test_any_strides(name, kind, form):
    """Of all inputs and of the gradient."""
    case = CASES[name]
    tensors, given = case.inputs()
    lean, _ = case.both(kind, FORMS[form], given)

    def gradients(change):
        leaves = {n: t if t is None else change(t).requires_grad_() for n, t in tensors.items()}
        out = lean(**leaves)
        weight = torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)
        grads = torch.autograd.grad(out, [t for t in leaves.values() if t is not None], change(weight))
        return [out.detach(), *grads]

    for a, b in zip(gradients(strided), gradients(torch.clone), strict=True):
        torch.testing.assert_close(a, b)
