"""Operations accept what plain modules accept: empty batches, any strides, devices and precisions."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from helpers import FP16
from ops_cases import CASES, Case, differentiate
from oracles import OperationNames, assert_near

from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm

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
    """A backbone of crops may get such a batch; the gradients of its parameters are zero."""
    case = CASES[name]
    tensors, given = case.inputs(n=0)
    lean, _ = case.both(kind, FORMS[form], given)
    gradients = differentiate(lean, tensors)
    assert gradients.pop('out').shape[0] == 0
    for key, tensor in tensors.items():
        assert tensor is None or torch.equal(gradients[key], torch.zeros_like(tensor)), key


@pytest.mark.parametrize('name, kind', NAMES)
def test_another_default_device(name, kind):
    """A default device is meant for new tensors of a script, not for those of an operation on tensors of another
    device."""
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
        actual = gradients(lean)
    for a, b in zip(actual, gradients(plain), strict=True):
        torch.testing.assert_close(a, b)


def strided(x):
    """Return the same values with another order of dimensions in memory, and with gaps in between."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype).transpose(0, -1).contiguous().transpose(0, -1)
    wide[..., ::2] = x.detach()
    return wide[..., ::2]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name, kind', NAMES)
def test_any_strides(name, kind, form):
    """All inputs and the incoming gradient may have any strides."""
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


@pytest.mark.parametrize('recompute', [False, True])
def test_a_group_norm_of_any_strides(recompute):
    """torch's kernels of group norm read parameters past their strides; the module of torch makes them contiguous."""
    torch.manual_seed(0)
    tensors = dict(x=torch.randn(2, 3, 5, 4), weight=torch.randn(6, 3, 1, 1), bias=torch.randn(6))
    tensors = {name: t.double() for name, t in tensors.items()}
    tensors |= {name: strided(torch.randn(6).double()) for name in ('norm_weight', 'norm_bias')}

    def lean(x, weight, bias, norm_weight, norm_bias):
        settings = ConvNormSettings(norm='group', num_groups=3, recompute=recompute)
        return conv_norm(settings, ConvNormTensors(x, weight, bias, norm_weight, norm_bias))

    def plain(x, weight, bias, norm_weight, norm_bias):
        return F.group_norm(F.conv2d(x, weight, bias), 3, norm_weight, norm_bias)

    assert_near(differentiate(lean, tensors), differentiate(plain, tensors), 1e-12)


@pytest.mark.parametrize('dtype', [FP16, torch.bfloat16])
@pytest.mark.parametrize('name', [name for name in CASES if 'convolution' not in name])
def test_norms_in_fp32_in_a_model_in_half_precision(name, dtype):
    """A user may cast a model and keep its norms in fp32; gradients have the precision of their tensors."""
    case = CASES[name]
    tensors, given = case.inputs()
    apart = {n for n in tensors if n.startswith('norm') or (name == 'layer_norm' and n != 'x')}
    mixed = {n: t if t is None else t.to(torch.float32 if n in apart else dtype) for n, t in tensors.items()}
    lean, plain = case.both(None, given=given)
    actual = differentiate(lean, mixed)
    expected = differentiate(plain, {n: t if t is None else t.double() for n, t in mixed.items()})
    for key, truth in expected.items():
        if truth is not None:
            assert key == 'out' or actual[key].dtype == mixed[key].dtype
            assert (actual[key] - truth).norm() < (0.01 if dtype is torch.float16 else 0.05) * truth.norm(), key


# Operations that add atomically on CUDA, see torch.use_deterministic_algorithms.
ATOMIC = {'index_add', 'index_add_', 'scatter_add', 'scatter_add_', 'put_', 'put', 'bincount', 'histc'}


@pytest.mark.parametrize('name', CASES)
def test_nothing_is_added_in_an_order_that_differs_from_run_to_run(name):
    case = CASES[name]
    tensors, given = case.inputs()
    lean, _ = case.both(None, given=given)
    with OperationNames() as called:
        differentiate(lean, tensors)
    assert called.names and not called.names & ATOMIC
