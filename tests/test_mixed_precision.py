"""Models whose parameters have several precisions train as they do plain, as near to full precision as plain code."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import FP16, needs_fp16
from ops_cases import CASES
from test_class_patches import FAMILIES
from torch import nn
from unusual_models import random_images

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common import precision
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.decomposed_attention import DecomposedSettings, _append_embeddings

NORMS = (nn.LayerNorm, nn.BatchNorm2d, nn.GroupNorm)


pytestmark = pytest.mark.usefixtures('quiet')


def norms_in_full(model):
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.float()


def layers_in_half(model):
    model.float()
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.bfloat16()


def norms_in_double(model):
    model.float()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.double()


def first_children_in_half(model):
    model.float()
    children = [*model.children()]
    for child in children[: len(children) // 2 + 1]:
        child.bfloat16()


def every_other_in_half(model):
    model.float()
    for module in [m for m in model.modules() if not [*m.children()]][::2]:
        module.bfloat16()


CHANGES = dict(
    norms_in_full=norms_in_full,
    layers_in_half=layers_in_half,
    norms_in_double=norms_in_double,
    first_children_in_half=first_children_in_half,
    every_other_in_half=every_other_in_half,
    bf16=lambda model: model.bfloat16(),
    fp16=lambda model: model.half(),
)


def run_step(model, x, amp):
    torch.manual_seed(0)
    with torch.autocast('cpu', torch.bfloat16) if amp else contextlib.nullcontext():
        outs = model(x)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    weights = (torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().view_as(out) for out in outs)
    sum((out.double() * w).sum() for out, w in zip(outs, weights, strict=True)).backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    kinds = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
    return [out.detach().double() for out in outs], gradients, kinds


def relative_distance(actual, expected):
    pairs = [*zip(actual, expected, strict=True)]
    total = sum(float(b.square().sum()) for _, b in pairs)
    return (sum(float((a - b).square().sum()) for a, b in pairs) / total) ** 0.5


@pytest.mark.parametrize('amp', [False, True], ids=['', 'autocast'])
@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('family', FAMILIES)
def test_several_precisions(family, change, amp):
    plain = FAMILIES[family]()
    CHANGES[change](plain)
    full, lean = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    x = random_images()
    dtypes = [next(plain.parameters()).dtype, torch.float32]
    for dtype in dtypes:
        try:
            expected = run_step(plain, x.to(dtype), amp)
            break
        except (RuntimeError, ValueError):
            plain.zero_grad()
    else:
        pytest.skip('plain does not run')
    try:
        apply_lean(lean, verify=False)
    except ValueError as refused:
        assert 'parameters are' in str(refused)
        return
    actual, exact = run_step(lean, x.to(dtype), amp), run_step(full, x.to(dtype).double(), False)
    assert actual[2] == expected[2]
    assert relative_distance(actual[0], exact[0]) <= 2 * relative_distance(expected[0], exact[0]) + 1e-3
    ours, plains = (relative_distance(run[1].values(), exact[1].values()) for run in (actual, expected))
    assert ours <= 2 * plains + 1e-3


@needs_fp16
@pytest.mark.parametrize('name', ['norm_linear', 'qkv', 'grn'])
def test_gradients_of_the_input_of_a_norm_are_not_rounded_in_between(name):
    """Inputs with a deviation of 0.004 have gradients that fp16 cannot hold, but the input's fp32 can."""
    case = CASES[name]
    tensors = {key: t.float() if isinstance(t, torch.Tensor) else t for key, t in case.inputs()[0].items()}
    tensors['x'] = (tensors['x'] * 2e-3).requires_grad_()
    with torch.autocast('cpu', torch.float16):
        out = case.run()(**tensors)
    out.backward(torch.full_like(out, 300.0))
    assert tensors['x'].grad.isfinite().all() and tensors['x'].grad.abs().max() > 65504


@needs_fp16
def test_products_may_be_summed_in_half(monkeypatch):
    """If the user lets CUDA sum products in fp16, they are not asked for another precision."""
    monkeypatch.setattr(precision, '_sums_in_full', lambda device, dtype: True)
    a, b = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)) for n in (3, 4))
    flags = torch.backends.cuda.matmul
    if not hasattr(flags, 'allow_fp16_accumulation'):
        pytest.skip('this torch always sums in full precision')
    before, flags.allow_fp16_accumulation = flags.allow_fp16_accumulation, True
    try:
        product = precision.accumulate(None, a.half(), b.half())
    finally:
        flags.allow_fp16_accumulation = before
    assert product.dtype is torch.float32 and torch.allclose(product, a.t() @ b, atol=2e-2)


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
def test_relative_positions_are_resized_before_they_are_rounded(dtype):
    """Embeddings are resized in full precision, as in plain code under CUDA's autocast, and rounded once."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 30, 8, generator=generator).to(dtype)
    t = {name: torch.randn(7, 8, generator=generator) for name in ('rows', 'columns')}
    long, *_ = _append_embeddings(DecomposedSettings(Form(), 2, dtype=dtype), t, q, q, q, (5, 6))
    for name, n, place in (('rows', 5, slice(8, 13)), ('columns', 6, slice(13, 19))):
        table = F.interpolate(t[name].t()[None], size=2 * n - 1, mode='linear')[0].t().to(dtype)
        index = torch.arange(n)[:, None] - torch.arange(n) + n - 1
        equation = 'bnhwc,hkc->bnhwk' if name == 'rows' else 'bnhwc,wkc->bnhwk'
        expected = torch.einsum(equation, q.unflatten(2, (5, 6)), table[index]).flatten(2, 3)
        assert torch.equal(long[..., place], expected)
