"""Borrowed activations and int8 storage, against oracles written from their definition: every dropped row's gradient
runs through a layer whose stored activations are those of its kept row; the forward pass is exact."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FP16
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import (
    autocast,
    cast,
    differentiate,
    downsample_inputs,
    fused_downsample,
    fused_mlp,
    fused_norm,
    half,
    keep_mask,
    mlp_inputs,
    plain,
    plain_downsample,
    plain_mlp,
    stored,
)
from oracles import assert_near, gradients, image, relative_error, small_backbone

from sbp_mmdet import ops
from sbp_mmdet.analysis import peak_bytes
from sbp_mmdet.masks import Positions, positions, sample_mask
from sbp_mmdet.ops.storage import store

SHAPES = st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 9), (1, 12), (1, 7), (1, 7)]))
STORAGE = st.sampled_from(['native', 'int8'])


def draw(kind, height, width, seed):
    """Positions with neighbours; at least one is kept."""
    if kind == 'grid':
        mask = sample_mask(height, width, 0.5, 'grid', torch.Generator().manual_seed(seed))
    else:
        mask = keep_mask(kind, height, width, seed)
    mask[seed % height, seed % width] = True
    return positions(mask, nearest=True)


def lenders(keep: Positions):
    """For each position the place among the kept ones whose activations it uses, and its weight."""
    place = torch.empty(len(keep.keep) + len(keep.drop), dtype=torch.int64)
    place[keep.keep] = torch.arange(len(keep.keep))
    pairs = torch.arange(len(keep.drop)) if keep.nearest.index is None else keep.nearest.index
    place[keep.drop] = pairs
    weight = torch.full(place.shape, 0.75, dtype=torch.float64)
    for k, position in enumerate(keep.keep.tolist()):
        weight[position] = 1 + 0.25 * int((pairs == k).sum())
    return place, weight


def rounded(x, dims):
    """To 255 steps for each image and channel."""
    step = x.abs().amax(dims, keepdim=True) / 127
    return torch.where(step > 0, (x / step).round() * step, x)


def borrowed(x, keep, storage):
    """x-hat (n, L, ..., C) and reciprocal deviation that each position's gradient uses."""
    xhat = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    rstd = (x.var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
    kept = xhat[:, keep.keep]
    kept = rounded(kept, 1) if storage == 'int8' else kept
    place, _ = lenders(keep)
    return kept[:, place].detach().requires_grad_(), rstd[:, keep.keep][:, place].detach()


def through_norm(grad, xhat, rstd):
    """Derivative of the norm, written out."""
    return rstd * (grad - grad.mean(-1, keepdim=True) - xhat * (grad * xhat).mean(-1, keepdim=True))


def folded(weight, bias, norm_weight, norm_bias):
    norm_weight = weight.new_ones(weight.shape[1]) if norm_weight is None else norm_weight
    norm_bias = weight.new_zeros(weight.shape[1]) if norm_bias is None else norm_bias
    return weight * norm_weight, bias + weight @ norm_bias


def grads_of_folded(products, leaves):
    """From the gradients of folded weight and bias those of what they were folded from."""
    asked = {name: t for name, t in leaves.items() if t is not None}
    found = torch.autograd.grad(products[0], list(asked.values()), products[1])
    return dict(zip(asked, found, strict=True))


def oracle_mlp(tensors, keep, storage='native', factor=None, approximate='none', x=None):
    """By the definition, in double precision. ``x``: what the backward pass computes x-hat from, if that is not x."""
    t = {n: v if v is None else v.detach().double().requires_grad_() for n, v in tensors.items()}
    out = plain_mlp(*t.values(), mask=torch.tensor(True), factor=factor, approximate=approximate).detach()
    g = torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape)
    rows = g.flatten(2).mT  # (N, L, C)
    rows = rows if factor is None else rows * factor[:, None, None].double()
    _, weight = lenders(keep)
    xhat, rstd = borrowed((t['x'] if x is None else x.double()).flatten(2).mT, keep, storage)
    w1, b1 = folded(t['weight1'], t['bias1'], t['norm_weight'], t['norm_bias'])
    gamma = rows.new_ones(rows.shape[2]) if t['gamma'] is None else t['gamma']
    product = F.gelu(xhat @ w1.mT + b1, approximate=approximate) @ t['weight2'].mT
    all_rows, weighted = (rows * gamma * product).sum(), (rows * weight[:, None] * gamma * product).sum()
    constant = (rows * gamma * t['bias2']).sum()

    def grad(of, *names):
        return torch.autograd.grad(of, names, retain_graph=True)

    dxhat, db1 = grad(all_rows, xhat, b1)
    dw1, dw2 = grad(weighted, w1, t['weight2'])
    grads = dict.fromkeys(tensors) | dict(out=out, shortcut=g, weight2=dw2, bias2=grad(constant, t['bias2'])[0])
    grads['x'] = through_norm(dxhat, xhat, rstd).mT.view(out.shape)
    if t['gamma'] is not None:
        grads['gamma'] = grad(weighted, t['gamma'])[0] + grad(constant, t['gamma'])[0]
    return grads | grads_of_folded(
        ((w1, b1), (dw1, db1)), {n: t[n] for n in ('norm_weight', 'norm_bias', 'weight1', 'bias1')}
    )


@given(
    seed=st.integers(0, 99),
    shape=SHAPES,
    kind=st.sampled_from(['grid', 'half', 'few', 'full']),
    storage=STORAGE,
    dtype=st.sampled_from([(torch.float64, 1e-10), (torch.float32, 2e-5)]),
    approximate=st.sampled_from(['none', 'tanh']),
    affine=st.booleans(),
    gamma=st.sampled_from([1.0, None]),
    scaled=st.booleans(),
    recompute=st.sampled_from([False, True, 'conv']),
    chunk=st.sampled_from([1, 40, 2**20]),
)
@settings(max_examples=100)
def test_mlp_with_neighbours(seed, shape, kind, storage, dtype, approximate, affine, gamma, scaled, recompute, chunk):
    dtype, tolerance = dtype
    if storage == 'int8':
        # A rounding difference in x-hat may turn into a whole step of int8; and a stored hidden layer is exact.
        dtype, tolerance, recompute = torch.float64, 1e-10, recompute or True
    tensors, conv = mlp_inputs(seed, *shape, affine=affine, gamma=gamma, dtype=dtype)
    keep = draw(kind, *shape[-2:], seed)
    factor = torch.tensor([1.25, 0.0, 2.0], dtype=dtype)[: shape[0]] if scaled else None
    options = dict(factor=factor, approximate=approximate)
    f = fused_mlp(keep, recompute, conv, storage=storage, chunk=chunk, **options)
    actual = differentiate(f, tensors)
    if recompute == 'conv':
        storage = 'native'  # x-hat is not stored
    assert_near(actual, oracle_mlp(tensors, keep, storage, **options), tolerance)


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 9), (1, 12), (2, 9), (2, 9)])),
    kind=st.sampled_from(['grid', 'half', 'few', 'full']),
    storage=STORAGE,
    affine=st.booleans(),
)
def test_downsample_with_neighbours(seed, shape, kind, storage, affine):
    tensors = downsample_inputs(seed, *shape, affine=affine)
    n, c, height, width = tensors['x'].shape
    keep = draw(kind, height // 2, width // 2, seed)
    actual = differentiate(fused_downsample(keep, storage=storage), tensors)

    t = {n: v if v is None else v.detach().requires_grad_() for n, v in tensors.items()}
    out = plain_downsample(*t.values(), mask=torch.tensor(True))
    rows = torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape).flatten(2).mT
    patches = F.unfold(t['x'], 2, stride=2).view(n, c, 4, -1).permute(0, 3, 2, 1)  # (N, L, 4, C)
    xhat, rstd = borrowed(patches, keep, storage)
    weight = t['weight'].flatten(2).mT.flatten(1)  # (C', 4C), pixel by pixel
    norm = [None if p is None else p.repeat(4) for p in (t['norm_weight'], t['norm_bias'])]
    w, b = folded(weight, t['bias'], *norm)
    y = xhat.flatten(2) @ w.mT
    _, share = lenders(keep)
    (dxhat,) = torch.autograd.grad((rows * y).sum(), xhat, retain_graph=True)
    (dw,) = torch.autograd.grad((rows * share[:, None] * y).sum(), w, retain_graph=True)
    leaves = {name: t[name] for name in ('norm_weight', 'norm_bias', 'weight', 'bias')}
    expected = dict.fromkeys(tensors) | dict(out=out.detach())
    expected |= grads_of_folded(((w, b), (dw, rows.sum((0, 1)))), leaves)
    dx = through_norm(dxhat, xhat, rstd).permute(0, 3, 2, 1).reshape(n, c * 4, -1)
    expected['x'] = F.fold(dx, (height, width), 2, stride=2)
    assert_near(actual, expected, 1e-10)


def test_a_kept_position_has_its_own_gradient():
    """That of the input: borrowing changes what dropped positions send, nothing else."""
    tensors, _ = mlp_inputs(height=6, width=8)
    keep = draw('grid', 6, 8, 0)
    exact = differentiate(plain(plain_mlp, mask=torch.tensor(True)), tensors)['x'].flatten(2)
    actual = differentiate(fused_mlp(keep, True), tensors)['x'].flatten(2)
    assert relative_error(actual[:, :, keep.keep], exact[:, :, keep.keep]) < 1e-12
    assert relative_error(actual[:, :, keep.drop], exact[:, :, keep.drop]) > 1e-3


def test_equal_neighbours_make_it_exact():
    """Where kept and dropped positions have the same activations, nothing is lost but the borders of 7x7 windows."""
    tensors, _ = mlp_inputs(height=6, width=8)
    tensors['x'] = tensors['x'][:, :, :, ::2].repeat_interleave(2, 3)
    keep = draw('grid', 6, 8, 0)
    actual = differentiate(fused_mlp(keep, True), tensors)
    exact = differentiate(plain(plain_mlp, mask=torch.tensor(True)), tensors)
    for name in ('x', 'bias1', 'bias2', 'shortcut'):
        assert relative_error(actual[name], exact[name]) < 1e-12


def test_convolution_of_a_rounded_input():
    """Output, input's and bias's gradient are exact; the weight's is that of the rounded input."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(6, 6, 7, padding=3, groups=6).double()
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64, requires_grad=True)
    out, again = ops.convolve(conv, x, 'int8')
    grad = torch.randn_like(out)
    leaves = [x, conv.weight, conv.bias]
    actual = torch.autograd.grad(out, leaves, grad)
    exact = torch.autograd.grad(conv(x), leaves, grad)
    from_rounded = torch.autograd.grad(conv(rounded(x.detach(), (2, 3))), conv.weight, grad)[0]
    assert relative_error(out, conv(x)) < 1e-12
    assert relative_error(actual[0], exact[0]) < 1e-12
    assert relative_error(actual[1], from_rounded) < 1e-12
    assert relative_error(actual[1], exact[1]) > 1e-5
    assert relative_error(actual[2], exact[2]) < 1e-12
    assert relative_error(again.run(), conv(rounded(x, (2, 3)))) < 1e-12


def test_convolution_under_autocast():
    """A rounded input adds little to the error of half precision."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(16, 16, 7, padding=3, groups=16)
    x, grad = torch.randn(2, 2, 16, 24, 24).bfloat16().float()
    truth = torch.autograd.grad(conv.double()(x.double()), conv.weight, grad.double())[0]
    conv.float()
    with torch.autocast('cpu', torch.bfloat16):
        out, _ = ops.convolve(conv, x.bfloat16(), 'int8')
        plain_out = conv(x)
    assert torch.equal(out, plain_out)
    actual = torch.autograd.grad(out, conv.weight, grad.bfloat16())[0]
    assert actual.dtype == torch.float32
    assert relative_error(actual, truth) < 0.02


@pytest.mark.parametrize('dtype', [None, torch.bfloat16])
def test_norm_of_a_rounded_input(dtype):
    tensors, _ = mlp_inputs(n=2, c=8, height=9, width=7, dtype=torch.float32 if dtype else torch.float64)
    tensors = {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')}
    f = fused_norm(storage='int8')
    actual = differentiate(autocast(f, dtype) if dtype else f, tensors)

    t = cast(tensors, torch.float64)
    x = t['x'].permute(0, 2, 3, 1)
    xhat = rounded(F.layer_norm(x, x.shape[-1:], eps=1e-6), (1, 2))
    rstd = (x.var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
    g = torch.arange(x.numel(), dtype=torch.float64).mul(1.7).cos().view(t['x'].shape).permute(0, 2, 3, 1)
    expected = dict(
        x=through_norm(g * t['norm_weight'], xhat, rstd).permute(0, 3, 1, 2),
        norm_weight=(g * xhat).sum((0, 1, 2)),
        norm_bias=g.sum((0, 1, 2)),
        out=F.layer_norm(x, x.shape[-1:], t['norm_weight'], t['norm_bias'], 1e-6).permute(0, 3, 1, 2),
    )
    assert_near(actual, {name: expected[name] for name in actual}, 1e-2 if dtype else 1e-10)


def test_rounding():
    """To the nearest of 255 steps of each image and channel; zeros stay zeros; what is not finite is not hidden."""
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 1.0])[:, None, None]
    x[0, 4, 1, 1], x[1, 4, 0, 0] = torch.inf, torch.nan
    loaded = store(x, 'int8', (2, 3)).load(torch.float64)
    finite = slice(0, 4)
    step = x[:, finite].abs().amax((2, 3), keepdim=True) / 127
    assert ((loaded - x)[:, finite].abs() <= step / 2 * (1 + 1e-12)).all()
    assert relative_error(loaded[:, finite].abs().amax((2, 3)), x[:, finite].abs().amax((2, 3))) < 1e-12
    assert not loaded[:, 4].isfinite().any(1).any()
    assert store(x[:0], 'int8', (2, 3)).load(torch.float64).shape == (0, 5, 3, 4)


@pytest.mark.parametrize('recompute', [False, True])
def test_what_is_stored(recompute):
    """With neighbours nothing but indices more than without; with int8 one byte an entry and a scale per channel."""
    tensors, _ = mlp_inputs(n=3, c=8, d=20, height=6, width=8, dtype=torch.float32)
    keep = draw('grid', 6, 8, 0)
    without = Positions(keep.keep, keep.drop)
    assert len(keep.keep) == 24 and keep.nearest.index is None
    zero = stored(half(fused_mlp(without, recompute), torch.bfloat16), tensors)
    assert stored(half(fused_mlp(keep, recompute), torch.bfloat16), tensors) == zero + keep.drop.nbytes
    int8 = stored(half(fused_mlp(without, recompute, storage='int8'), torch.bfloat16), tensors)
    assert zero - int8 == 3 * 24 * 8 - 3 * 8 * 4


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
@pytest.mark.parametrize('kind', ['grid', 'half'])
def test_neighbours_in_half_precision(dtype, kind):
    """As far from the oracle as half precision is; a small layer scale only takes those out of fp16's range that pass
    through it."""
    for gamma in (1.0, 1e-6):
        tensors, _ = mlp_inputs(3, 2, 32, 128, 12, 12, gamma=gamma, dtype=torch.float32)
        tensors['x'] = tensors['x'].to(dtype).float()
        keep = draw(kind, 12, 12, 3)
        actual = differentiate(half(fused_mlp(keep, True), dtype), tensors)
        expected = oracle_mlp(tensors, keep)
        names = actual if gamma == 1.0 else ('out', 'shortcut', 'weight2', 'bias2', 'gamma')
        actual, expected = ({name: grads[name] for name in names} for grads in (actual, expected))
        assert_near(actual, expected, 0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize('options', [{}, dict(keep_ratio=1.0), dict(dropped='nearest'), dict(dropped='pool')], ids=str)
@pytest.mark.parametrize('recompute', [True, 'block'])
def test_int8_backbone_is_near_native(options, recompute):
    """All of a backbone: same forward pass, and gradients within a few hundredths of those without rounding."""
    x = image(2, 64, 96)
    found = {}
    for storage in ('native', 'int8'):
        backbone = small_backbone(dict(storage=storage, recompute=recompute, **options))
        found[storage] = gradients(backbone, x)
        outs = backbone(x)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(outs, small_backbone()(x), strict=True))
    errors = [relative_error(found['int8'][name], g) for name, g in found['native'].items()]
    assert max(errors) < 0.1
    assert sum(errors) / len(errors) > 1e-5


def test_backbone_where_dropped_positions_send_gradients():
    """Every way to compute the same estimate gives the same; where neighbours are alike, and what they get back is,
    the estimates are much nearer to exact than dropping is."""
    x = F.interpolate(image(2, 8, 12), (64, 96), mode='bicubic')

    def grads(sbp_cfg):
        backbone = small_backbone(sbp_cfg)
        torch.manual_seed(0)
        loss = sum(out.square().sum() for out in backbone(x))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(backbone.parameters()))])

    exact, zero = grads(None), grads({})
    nearest, pool = (
        [grads(dict(dropped=dropped, recompute=recompute)) for recompute in (False, True, 'block')]
        for dropped in ('nearest', 'pool')
    )
    pool.append(grads(dict(dropped='pool', implementation='reference')))
    for estimates in (nearest, pool):
        for actual in estimates:
            assert relative_error(actual, estimates[0]) < 1e-10
    errors = [((actual - exact).norm() / exact.norm()).item() for actual in (zero, nearest[0], pool[0])]
    assert 0.01 < min(errors[1:]) <= max(errors[1:]) < 0.5 * errors[0], errors


@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_dropped_rows_count_in_a_chunk(ratio):
    """What exists of the hidden layer at a time is bounded by a chunk, for the rows that come with kept ones too."""
    tensors, _ = mlp_inputs(n=1, c=8, d=64, height=32, width=32, dtype=torch.float32)
    keep = positions(sample_mask(32, 32, ratio, 'random', torch.Generator().manual_seed(0)), nearest=True)
    chunk = 32 * 64
    out = fused_mlp(keep, True, chunk=chunk)(**{name: t.requires_grad_() for name, t in tensors.items()})
    peak = peak_bytes(lambda: out.sum().backward())
    # Maps and weight gradients of this size, and a few chunks; twice a chunk for rows that come unevenly.
    maps = 8 * out.numel() * 4 + 6 * 64 * 8 * 4
    assert peak < maps + 2 * 5 * chunk * 4
