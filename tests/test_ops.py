"""The fused operations against the definition of SBP in plain autograd, and against Algorithm 1."""

import dataclasses

import pytest
import torch
from helpers import FP16
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops_cases import (
    KINDS,
    algorithm1_mlp,
    autocast,
    cast,
    differentiate,
    downsample_inputs,
    fused_downsample,
    fused_mlp,
    fused_norm,
    half,
    keep_mask,
    keep_of,
    mlp_inputs,
    plain,
    plain_downsample,
    plain_mlp,
    plain_norm2d,
)
from oracles import assert_near, relative_error

from sbp_mmdet.analysis import saved_bytes
from sbp_mmdet.masks import positions
from sbp_mmdet.ops.storage import store

DTYPES = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-5)])


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 12), (1, 24), (1, 7), (1, 7)])),
    kind=KINDS,
    dtype=DTYPES,
    approximate=st.sampled_from(['none', 'tanh']),
    affine=st.booleans(),
    gamma=st.sampled_from([1.0, None]),
    scaled=st.booleans(),
    recompute=st.sampled_from([False, True, 'conv']),
    chunk=st.sampled_from([1, 40, 2**20]),
)
@example(0, (1, 4, 8, 3, 5), None, (torch.float64, 1e-10), 'none', True, 1.0, True, False, 40)  # rows that are a view
@settings(max_examples=100)
def test_mlp(seed, shape, kind, dtype, approximate, affine, gamma, scaled, recompute, chunk):
    dtype, tolerance = dtype
    tensors, conv = mlp_inputs(seed, *shape, affine=affine, gamma=gamma, dtype=dtype)
    mask = keep_mask(kind, *shape[-2:], seed)
    factor = torch.tensor([1.25, 0.0, 2.0], dtype=dtype)[: shape[0]] if scaled else None
    options = dict(factor=factor, approximate=approximate)
    f = fused_mlp(keep_of(kind, mask), recompute, conv, chunk=chunk, **options)
    actual = differentiate(f, tensors)
    assert actual['out'].dtype == dtype
    truth = dict(mask=mask, approximate=approximate, factor=None if factor is None else factor.double())
    assert_near(actual, differentiate(plain(plain_mlp, **truth), cast(tensors, torch.float64)), tolerance)
    algorithm1 = plain(algorithm1_mlp, keep=positions(mask), **options)
    assert_near(actual, differentiate(algorithm1, tensors), tolerance)


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 12), (1, 12), (2, 9), (2, 9)])),
    kind=KINDS,
    dtype=DTYPES,
    affine=st.booleans(),
)
def test_downsample(seed, shape, kind, dtype, affine):
    dtype, tolerance = dtype
    tensors = downsample_inputs(seed, *shape, affine=affine, dtype=dtype)
    mask = keep_mask(kind, shape[-2] // 2, shape[-1] // 2, seed)
    actual = differentiate(fused_downsample(keep_of(kind, mask)), tensors)
    assert actual['out'].dtype == dtype
    truth = differentiate(plain(plain_downsample, mask=mask), cast(tensors, torch.float64))
    assert_near(actual, truth, tolerance)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('affine', [True, False])
@pytest.mark.parametrize('recompute', [True, False])
def test_layer_norm(dtype, affine, recompute):
    tensors, conv = mlp_inputs(c=8, affine=affine, dtype=dtype)
    tensors = {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')}
    actual = differentiate(fused_norm(conv if recompute else None), tensors)
    truth = differentiate(plain(plain_norm2d), cast(tensors, torch.float64))
    assert_near(actual, truth, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize('recompute', [False, True])
@pytest.mark.parametrize('kind', ['half', None])
def test_mlp_gradcheck(kind, recompute):
    """Numerical derivatives of the kept outputs: those of SBP are exact."""
    tensors, _ = mlp_inputs(n=2, c=4, d=5, height=2, width=3)
    keep = keep_of(kind, keep_mask(kind, 2, 3, seed=1))
    f = fused_mlp(keep, recompute, factor=torch.tensor([1.5, 0.5], dtype=torch.float64))

    def kept(*args):
        out = f(**dict(zip(tensors, args, strict=True))).flatten(2)
        return out if keep is None else out.index_select(2, keep.keep)

    args = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(kept, args)


@pytest.mark.parametrize('kind', ['half', None])
def test_downsample_gradcheck(kind):
    tensors = downsample_inputs(n=2, c=4, c_out=3, height=5, width=4)
    keep = keep_of(kind, keep_mask(kind, 2, 2, seed=1))

    def kept(*args):
        out = fused_downsample(keep)(**dict(zip(tensors, args, strict=True))).flatten(2)
        return out if keep is None else out.index_select(2, keep.keep)

    assert torch.autograd.gradcheck(kept, [t.requires_grad_() for t in tensors.values()])


class Errors:
    """Squared errors of the fused and the plain implementation per gradient, summed over seeds: enough entries that
    their ratio is a property of the arithmetic and not of a draw."""

    def __init__(self):
        self.sums = {}

    def add(self, actual, plain, truth):
        for name, value in truth.items():
            sums = self.sums.setdefault(name, [0.0, 0.0])
            for i, other in enumerate((actual, plain)):
                sums[i] += (other[name].double() - value).square().sum().item()

    def assert_fused_as_good(self, limit=1.2):
        ratios = {name: (a / p) ** 0.5 for name, (a, p) in self.sums.items() if p}
        assert len(ratios) >= 5
        assert max(ratios.values()) <= limit, ratios


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
@pytest.mark.parametrize('gamma', [1.0, 1e-6, None])
@pytest.mark.parametrize('recompute', [False, True, 'conv'])
def test_mlp_in_half_precision(dtype, gamma, recompute):
    errors = Errors()
    for seed in range(12):
        tensors, conv = mlp_inputs(seed, 2, 32, 128, 12, 12, gamma=gamma, dtype=torch.float32)
        conv = conv._replace(
            input=store(conv.input.load(dtype), 'native', ()), settings=dataclasses.replace(conv.settings, dtype=dtype)
        )
        tensors['x'] = conv.run().float()
        mask = keep_mask('half', 12, 12, seed)
        oracle = plain(plain_mlp, mask=mask)
        actual = differentiate(half(fused_mlp(positions(mask), recompute, conv), dtype), tensors)
        truth = differentiate(oracle, cast(tensors, torch.float64))
        expected = differentiate(half(oracle, dtype), tensors)
        assert actual['out'].dtype == expected['out'].dtype
        if gamma is None:
            for grads in (actual, expected, truth):
                grads.pop('gamma')
        errors.add(actual, expected, truth)
    errors.assert_fused_as_good()


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
def test_downsample_in_half_precision(dtype):
    errors = Errors()
    for seed in range(12):
        tensors = downsample_inputs(seed, 2, 32, 64, 16, 16, dtype=torch.float32)
        oracle = plain(plain_downsample, mask=keep_mask('half', 8, 8, seed))
        keep = positions(keep_mask('half', 8, 8, seed))
        actual = differentiate(autocast(fused_downsample(keep), dtype), tensors)
        truth = differentiate(oracle, cast(tensors, torch.float64))
        errors.add(actual, differentiate(autocast(oracle, dtype), tensors), truth)
    errors.assert_fused_as_good()


def test_without_gradients():
    tensors, _ = mlp_inputs()
    mask = keep_mask('half', 5, 6)
    f = fused_mlp(positions(mask), False)
    assert not f(**tensors).requires_grad
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    with torch.no_grad():
        out = f(**tensors)
        assert saved_bytes(lambda: f(**tensors)) == 0
    assert not out.requires_grad
    assert relative_error(out, plain(plain_mlp, mask=mask)(**tensors)) < 1e-12


def test_gradients_accumulate():
    tensors, _ = mlp_inputs()
    f = fused_mlp(positions(keep_mask('half', 5, 6)), False)
    expected = differentiate(f, tensors)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    for factor in (1.0, 2.0):
        out = f(**leaves)
        weight = torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape)
        out.backward(factor * weight)
    assert_near({n: t.grad for n, t in leaves.items()}, {n: 3 * expected[n] for n in leaves}, 1e-13)


@pytest.mark.parametrize('kind', ['half', None])
def test_channels_last(kind):
    """Values and gradients do not depend on the layout of the feature maps."""
    last = dict(memory_format=torch.channels_last)
    keep = keep_of(kind, keep_mask(kind, 4, 3))
    for f, tensors in (
        (fused_mlp(keep, False), mlp_inputs(height=4, width=3)[0]),
        (fused_downsample(keep), downsample_inputs(height=8, width=6)),
        (fused_norm(), {n: t for n, t in mlp_inputs()[0].items() if n in ('x', 'norm_weight', 'norm_bias')}),
    ):
        expected = differentiate(f, tensors)
        maps = {n: t.contiguous(**last) for n, t in tensors.items() if n in ('x', 'shortcut')}
        actual = differentiate(f, tensors | maps)
        assert_near(actual, expected, 1e-12)
        assert actual['out'].is_contiguous(**last)


@pytest.mark.parametrize('kind', ['half', None])
def test_any_layout_of_the_incoming_gradient(kind):
    """Expanded, as sum() sends it, and strided."""
    keep = keep_of(kind, keep_mask(kind, 4, 3))
    for f, tensors in (
        (fused_mlp(keep, False, factor=torch.ones(1, dtype=torch.float64)), mlp_inputs(n=1, height=4, width=3)[0]),
        (fused_downsample(keep), downsample_inputs(n=1, height=8, width=6)),
    ):
        leaves = [t.requires_grad_() for t in tensors.values()]
        for layout in (lambda g: g[:1, :1, :1, :1].expand(g.shape), lambda g: g.transpose(2, 3).contiguous().mT):
            out = f(**tensors)
            weight = layout(torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape))
            actual = torch.autograd.grad(out, leaves, weight)
            expected = torch.autograd.grad(f(**tensors), leaves, weight.clone(memory_format=torch.contiguous_format))
            assert all(relative_error(a, e) < 1e-12 for a, e in zip(actual, expected, strict=True))


def test_double_backward_is_refused():
    for f, tensors in (
        (fused_mlp(None, False), mlp_inputs()[0]),
        (fused_downsample(), downsample_inputs()),
    ):
        leaves = {name: t.requires_grad_() for name, t in tensors.items()}
        (grad,) = torch.autograd.grad(f(**leaves).square().sum(), leaves['x'], create_graph=True)
        with pytest.raises(RuntimeError, match='twice.*once_differentiable'):
            grad.sum().backward()
