"""Swin's attention layer and patch merging against mmdet's modules and their definition, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from mmdet.models.backbones.swin import ShiftWindowMSA
from oracles import mask_of, relative_error, where_sbp

from sbp_mmdet.analysis.memory import saved_bytes
from sbp_mmdet.masks import positions
from sbp_mmdet.ops.linears import NormLinearSettings, NormLinearTensors, norm_linear
from sbp_mmdet.ops.windows import WindowSettings, WindowTensors, window_attention

C, HEADS, WINDOW = 8, 2, 3
SIZES = [(6, 9), (7, 8), (3, 3), (2, 4), (10, 5)]
NAMES = ['norm_weight', 'norm_bias', 'qkv_weight', 'qkv_bias', 'table', 'proj_weight', 'proj_bias']


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(shift, qkv_bias=True):
    torch.manual_seed(0)
    attn = ShiftWindowMSA(C, HEADS, WINDOW, shift, qkv_bias=qkv_bias, dropout_layer=dict(type='DropPath', drop_prob=0))
    norm = torch.nn.LayerNorm(C)
    for i, p in enumerate([*attn.parameters(), *norm.parameters()]):
        p.data = random(*p.shape, seed=i)
    return attn.double(), norm.double()


def tensors(attn, norm, x, factor=None):
    msa = attn.w_msa
    parameters = (norm.weight, norm.bias, msa.qkv.weight, msa.qkv.bias, msa.relative_position_bias_table)
    return WindowTensors(x, *parameters, msa.proj.weight, msa.proj.bias, msa.relative_position_index, factor)


def settings(attn, size, **options):
    return WindowSettings(HEADS, WINDOW, attn.shift_size, size, attn.w_msa.scale, **options)


def gradients(out, wanted):
    weight = torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape)
    return torch.autograd.grad(out, wanted, weight)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize(
    ('shift', 'chunk', 'bias'), [(0, None, True), (1, 1, True), (1, 1000, False), (2, 1, True), (2, None, False)]
)
def test_attention_is_mmdets(size, shift, chunk, bias):
    attn, norm = layer(shift, bias)
    x = random(2, size[0] * size[1], C).requires_grad_()
    factor = torch.tensor([2.0, 0.5], dtype=torch.float64)
    expected = x + attn(norm(x), size) * factor[:, None, None]
    given = tensors(attn, norm, x, factor)
    found = window_attention(settings(attn, size, chunk=chunk), given)
    torch.testing.assert_close(found, expected)
    wanted = [t for t in given[:-2] if t is not None]
    for a, b in zip(gradients(found, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('name', ['x', *NAMES])
def test_one_gradient_alone(name):
    attn, norm = layer(1)
    given = tensors(attn, norm, random(2, 56, C))
    given = given._replace(**{n: getattr(given, n).detach() for n in ('x', *NAMES)})
    given = given._replace(**{name: getattr(given, name).requires_grad_()})
    found = gradients(window_attention(settings(attn, (7, 8)), given), getattr(given, name))[0]
    expected = gradients(given.x + attn_of(given, attn), getattr(given, name))[0]
    torch.testing.assert_close(found, expected)


def attn_of(t, attn):
    """mmdet's module with these tensors in place of its own."""
    names = dict(qkv_weight='qkv.weight', qkv_bias='qkv.bias', table='relative_position_bias_table')
    names |= dict(proj_weight='proj.weight', proj_bias='proj.bias')
    state = {f'w_msa.{own}': getattr(t, name) for name, own in names.items()}
    normed = F.layer_norm(t.x, (C,), t.norm_weight, t.norm_bias)
    return torch.func.functional_call(attn, state, (normed, (7, 8)))


def test_what_attention_stores():
    attn, norm = layer(1)
    x = random(2, 64, C).requires_grad_()
    given = tensors(attn, norm, x)
    native = saved_bytes(
        lambda: window_attention(settings(attn, (8, 8)), given), [t for t in given if torch.is_tensor(t)]
    )
    assert native == 8 * 2 * 64 * (C + 1)  # x-hat and its deviation
    int8 = saved_bytes(
        lambda: window_attention(settings(attn, (8, 8), storage='int8'), given),
        [t for t in given if torch.is_tensor(t)],
    )
    assert int8 == 2 * 64 * (C + 8) + 8 * 2 * C  # with one scale for each image and channel


def test_attention_in_eight_bits_is_near():
    attn, norm = layer(1)
    x = random(2, 56, C).requires_grad_()
    given = tensors(attn, norm, x)
    exact, rounded = (window_attention(settings(attn, (7, 8), storage=s), given) for s in ('native', 'int8'))
    torch.testing.assert_close(exact, rounded)
    for a, b in zip(
        *(gradients(out, [x, norm.weight, attn.w_msa.qkv.weight]) for out in (exact, rounded)), strict=True
    ):
        assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


def test_attention_under_autocast():
    """As near to full precision as mmdet's module is."""
    attn, norm = layer(1)
    attn, norm, x = attn.float(), norm.float(), random(2, 56, C).float().requires_grad_()
    for p in attn.parameters():
        p.data /= 4  # of ordinary size: a steep softmax makes much of a rounding
    wanted = [x, norm.weight, attn.w_msa.qkv.weight, attn.w_msa.relative_position_bias_table]
    exact = x + attn(norm(x), (7, 8))
    with torch.autocast('cpu', torch.bfloat16):
        found = window_attention(settings(attn, (7, 8)), tensors(attn, norm, x))
        stock = x + attn(norm(x), (7, 8))
    assert found.dtype == torch.float32
    ours, theirs, true = ([out, *gradients(out.double(), wanted)] for out in (found, stock, exact))
    for a, b, c in zip(ours, theirs, true, strict=True):
        assert relative_error(a, c) < 3 * relative_error(b, c) < 0.05


def test_attention_says_what_is_wrong():
    attn, norm = layer(1)
    with pytest.raises(ValueError, match='56 tokens are no map of 7 x 9'):
        window_attention(settings(attn, (7, 9)), tensors(attn, norm, random(1, 56, C)))
    with pytest.raises(ValueError, match="storage='int4' is unknown"):
        settings(attn, (7, 8), storage='int4')
    with pytest.raises(ValueError, match='shift=3 must be from 0 to 2, for windows of 3'):
        WindowSettings(HEADS, WINDOW, 3, (7, 8), 1.0)


def linear_tensors(bias):
    given = dict(x=random(2, 20, C), norm_weight=random(C, seed=1), norm_bias=random(C, seed=2))
    given |= dict(weight=random(5, C, seed=3), bias=random(5, seed=4) if bias else None)
    return NormLinearTensors(**{n: t if t is None else t.requires_grad_() for n, t in given.items()})


@pytest.mark.parametrize('implementation', ['fused', 'reference'])
@pytest.mark.parametrize(('kept', 'bias'), [(None, False), (0.5, True), (0.0, False), (0.3, False)])
def test_norm_linear(implementation, kept, bias):
    given = linear_tensors(bias)
    mask = torch.rand(20, generator=torch.Generator().manual_seed(0)) < (1 if kept is None else kept)
    found = norm_linear(
        NormLinearSettings(1e-5, implementation=implementation),
        given._replace(positions=None if kept is None else positions(mask[None])),
    )

    def f(x):
        return F.linear(F.layer_norm(x, (C,), given.norm_weight, given.norm_bias), given.weight, given.bias)

    expected = where_sbp(f, given.x, mask[:, None])
    torch.testing.assert_close(found, expected)
    wanted = [t for t in given[:-1] if t is not None]
    for a, b in zip(gradients(found, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_norm_linear_with_neighbours():
    """The bias sees every gradient, the input gets one everywhere, and the kept ones are exact."""
    given = linear_tensors(True)
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[::2, 1::3] = True
    found = positions(mask, nearest=True)
    out = norm_linear(NormLinearSettings(1e-5, dropped='nearest'), given._replace(positions=found))
    exact = norm_linear(NormLinearSettings(1e-5), given)
    (dx, db), (exact_dx, exact_db) = (gradients(o, [given.x, given.bias]) for o in (out, exact))
    torch.testing.assert_close(db, exact_db)
    torch.testing.assert_close(dx[:, found.keep], exact_dx[:, found.keep])
    assert dx[:, found.drop].any(-1).all() and mask_of(found.keep, 4, 5).equal(mask)


def test_what_norm_linear_stores():
    given = linear_tensors(False)
    kept = given._replace(positions=positions(torch.arange(20)[None] % 2 == 0))
    known = [t for t in given if torch.is_tensor(t)]
    every, half = (saved_bytes(lambda t=t: norm_linear(NormLinearSettings(), t), known) for t in (given, kept))
    assert every == 8 * 2 * 20 * (C + 1)
    assert half == every // 2 + 8 * 10  # and the indices
