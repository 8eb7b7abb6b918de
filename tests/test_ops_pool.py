"""dropped='pool' in the channel MLP, the downsampling layer and Algorithm 1, against its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import (
    differentiate,
    downsample_inputs,
    fused_downsample,
    fused_mlp,
    half,
    keep_mask,
    mlp_inputs,
    plain_norm,
    stored,
)
from oracles import assert_near, relative_error, where_pooled

from sbp_mmdet import ops, pooled
from sbp_mmdet.functional import shares
from sbp_mmdet.masks import Nearest, Positions, positions, sample_mask

KINDS = st.sampled_from(['grid', 'half', 'few', 'full'])


def draw(kind, height, width, seed=0):
    """Positions with neighbours; at least one is kept."""
    if kind == 'grid':
        mask = sample_mask(height, width, 0.5, 'grid', torch.Generator().manual_seed(seed))
    else:
        mask = keep_mask(kind, height, width, seed)
    mask[seed % height, seed % width] = True
    return positions(mask, nearest=True)


def oracle_mlp(keep, factor=None, approximate='none'):
    def run(x, shortcut, norm_weight, norm_bias, weight1, bias1, weight2, bias2, gamma):
        def f(x):
            x = F.linear(plain_norm(x, norm_weight, norm_bias), weight1, bias1)
            x = F.linear(F.gelu(x, approximate=approximate), weight2, bias2)
            return x if gamma is None else x * gamma

        branch = where_pooled(f, x.flatten(2).mT, keep).mT.view(x.shape)
        return shortcut + (branch if factor is None else branch * factor[:, None, None, None])

    return run


def oracle_downsample(keep):
    def run(x, norm_weight, norm_bias, weight, bias):
        n, c, height, width = x.shape
        patches = F.unfold(x, 2, stride=2).view(n, c, 4, -1).permute(0, 3, 2, 1)  # (N, L, 4, C)

        def f(patches):
            return F.linear(plain_norm(patches, norm_weight, norm_bias).mT.flatten(2), weight.flatten(1), bias)

        return where_pooled(f, patches, keep).mT.unflatten(2, (height // 2, width // 2))

    return run


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 9), (1, 12), (1, 7), (1, 7)])),
    kind=KINDS,
    dtype=st.sampled_from([(torch.float64, 1e-10), (torch.float32, 2e-5)]),
    approximate=st.sampled_from(['none', 'tanh']),
    affine=st.booleans(),
    gamma=st.sampled_from([1.0, None]),
    scaled=st.booleans(),
    form=st.sampled_from([False, True, 'conv', 'reference']),
    chunk=st.sampled_from([1, 40, None]),
)
@settings(max_examples=60)
def test_mlp(seed, shape, kind, dtype, approximate, affine, gamma, scaled, form, chunk):
    dtype, tolerance = dtype
    tensors, conv = mlp_inputs(seed, *shape, affine=affine, gamma=gamma, dtype=dtype)
    keep = draw(kind, *shape[-2:], seed)
    factor = torch.tensor([1.25, 0.0, 2.0], dtype=dtype)[: shape[0]] if scaled else None
    options = dict(factor=factor, approximate=approximate)
    if form == 'reference':
        f = fused_mlp(keep, False, dropped='pool', implementation=form, **options)
    else:
        f = fused_mlp(keep, form, conv, dropped='pool', chunk=chunk, **options)
    assert_near(differentiate(f, tensors), differentiate(oracle_mlp(keep, **options), tensors), tolerance)


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 9), (1, 12), (2, 9), (2, 9)])),
    kind=KINDS,
    affine=st.booleans(),
    implementation=st.sampled_from(['fused', 'reference']),
)
@settings(max_examples=40)
def test_downsample(seed, shape, kind, affine, implementation):
    tensors = downsample_inputs(seed, *shape, affine=affine)
    keep = draw(kind, shape[-2] // 2, shape[-1] // 2, seed)
    f = fused_downsample(keep, dropped='pool', implementation=implementation)
    actual, expected = differentiate(f, tensors), differentiate(_cropped(oracle_downsample(keep)), tensors)
    assert_near(actual, expected, 1e-10)


def _cropped(f):
    """Without an odd last row and column, which a 2x2/2 convolution leaves out."""
    return lambda x, **t: f(x=x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2], **t)


@pytest.mark.parametrize('kind', ['grid', 'few'])
def test_algorithm1_pooled(kind):
    f = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)).double()
    x, weight = torch.randn(2, 12, 6).double().requires_grad_(), torch.randn(2, 12, 5).double()
    keep = draw(kind, 3, 4)
    actual, expected = pooled(f, x, keep), where_pooled(f, x, keep)
    assert relative_error(actual, expected) < 1e-14
    grads = (torch.autograd.grad(out, [x, *f.parameters()], weight) for out in (actual, expected))
    for a, e in zip(*grads, strict=True):
        assert relative_error(a, e) < 1e-13
    with torch.no_grad():
        assert relative_error(pooled(f, x, keep), expected) < 1e-14


def test_algorithm1_pooled_with_positions_of_each_image():
    f = torch.nn.Linear(6, 5).double()
    x, weight = torch.randn(2, 12, 6).double().requires_grad_(), torch.randn(2, 12, 5).double()
    each = [positions((torch.arange(12) % 3 == i).view(3, 4), nearest=True) for i in range(2)]
    keep, drop, index = (torch.stack(t) for t in zip(*((p.keep, p.drop, p.nearest.index) for p in each), strict=True))
    own = Positions(keep, drop, Nearest(index, torch.stack([p.nearest.starts for p in each])))
    check_each(f, x, weight, own, each)
    # One for one: no index is stored.
    mask = torch.tensor([True, False]).repeat(6).view(3, 4)
    own, each = positions(mask.expand(2, 3, 4), nearest=True), [positions(mask, nearest=True)] * 2
    assert own.nearest.index is None and own.keep.dim() == 2
    check_each(f, x, weight, own, each)


def check_each(f, x, weight, own, each):
    """Positions of each image do what those of one image do to it."""
    expected = torch.cat([where_pooled(f, x[i : i + 1], p) for i, p in enumerate(each)])
    grads = (torch.autograd.grad(out, [x, *f.parameters()], weight) for out in (pooled(f, x, own), expected))
    for a, e in zip(*grads, strict=True):
        assert relative_error(a, e) < 1e-13


def test_alike_neighbours_make_it_exact():
    """Where positions of a group are alike and get multiples of one gradient. A bias that nothing follows: always."""
    tensors, _ = mlp_inputs(height=6, width=8)
    keep = draw('grid', 6, 8)
    lender = torch.empty(48, dtype=torch.int64)
    lender[keep.keep], lender[keep.drop] = keep.keep, keep.keep
    for name in ('x', 'shortcut'):
        tensors[name] = tensors[name].flatten(2)[:, :, lender].view(tensors[name].shape)
    weight = torch.randn(2, 8, 48, dtype=torch.float64)[:, :, lender].view(2, 8, 6, 8) * torch.rand(6, 8).double()

    def squared(f):
        return lambda **t: (f(**t) * weight).sum().view(1)

    all_kept = differentiate(squared(fused_mlp(None, True)), tensors)
    assert_near(differentiate(squared(fused_mlp(keep, True, dropped='pool')), tensors), all_kept, 1e-12)
    other, _ = mlp_inputs(1, height=6, width=8)
    found = [differentiate(f, other)['bias2'] for f in (fused_mlp(None, True), fused_mlp(keep, True, dropped='pool'))]
    assert relative_error(*found) < 1e-12


@pytest.mark.parametrize('trainable', ['x', 'weight1', 'bias1', 'weight2', 'gamma bias2', 'shortcut'])
def test_only_some_need_gradients(trainable):
    tensors, _ = mlp_inputs()
    keep = draw('few', 5, 6)
    found = [
        differentiate(f, tensors, trainable.split()) for f in (fused_mlp(keep, True, dropped='pool'), oracle_mlp(keep))
    ]
    assert_near(*found, 1e-11)


@pytest.mark.parametrize('form', [dict(), dict(recompute=True), dict(storage='int8'), dict(implementation='reference')])
def test_stored_bytes_are_those_of_zero(form):
    """But for the indices: which positions were dropped, and where they go."""
    tensors, _ = mlp_inputs(height=6, width=8)
    keep, form = draw('half', 6, 8), dict(form)
    recompute = form.pop('recompute', False)
    used = {d: stored(fused_mlp(keep, recompute, dropped=d, **form), tensors) for d in ('zero', 'pool')}
    assert used['zero'] <= used['pool'] <= used['zero'] + 5 * keep.drop.nbytes + 2 * 8 * len(keep.keep)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind', ['grid', 'few'])
def test_half_precision(dtype, kind):
    for gamma in (1.0, 1e-6):
        tensors, _ = mlp_inputs(3, 2, 32, 128, 12, 12, gamma=gamma, dtype=torch.float32)
        tensors['x'] = tensors['x'].to(dtype).float()
        keep = draw(kind, 12, 12, 3)
        actual = differentiate(half(fused_mlp(keep, True, dropped='pool'), dtype), tensors)
        expected = differentiate(oracle_mlp(keep), {n: t.double() for n, t in tensors.items()})
        names = actual if gamma == 1.0 else ('out', 'shortcut', 'weight2', 'bias2', 'gamma')
        assert_near({n: actual[n] for n in names}, {n: expected[n] for n in names}, 0.05 if kind == 'few' else 0.03)


def test_pairs_are_needed():
    tensors, _ = mlp_inputs()
    keep = positions(keep_mask('half', 5, 6))
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    for form in ('fused', 'reference'):
        with pytest.raises(ValueError, match='nearest=True'):
            fused_mlp(keep, False, dropped='pool', implementation=form)(**tensors)
    with pytest.raises(ValueError, match="dropped='nearest' needs implementation='fused'"):
        ops.MLPSettings(dropped='nearest', implementation='reference')


@given(seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]))
def test_shares_are_the_nearest_multiples(seed, dtype):
    """Of the groups' sums, also where squares would leave the range of fp16; 0 where nothing comes in."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1e-2 if dtype == torch.float16 and seed % 2 else 300.0
    kept, dropped = (torch.randn(2, n, 16, generator=generator).mul(scale).to(dtype) for n in (3, 7))
    kept[0, 0] = dropped[0, :2] = 0
    pairs = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    total = kept.double().index_add(1, pairs, dropped.double())
    found = shares(total.to(dtype), dropped, pairs)
    wanted = [
        torch.linalg.lstsq(s[:, None], g).solution for s, g in zip(total[:, pairs][0], dropped[0].double(), strict=True)
    ]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (
        relative_error(found[0, :, 0].double(), torch.cat(wanted))
        < dict(float64=1e-12, float32=1e-5, float16=5e-3)[str(dtype)[6:]]
    )
