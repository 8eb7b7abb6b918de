"""Each operation in each form agrees with its definition in plain torch; the table is in ops_cases.py."""

import all_ops as ops
import pytest
import torch
import torch.nn.functional as F
from helpers import FP16, needs_fp16
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops_cases import (
    CASES,
    KINDS,
    TAKES_FACTOR,
    Form,
    cast_tensors,
    channel_mlp,
    count_stored_bytes_of,
    differentiate,
    downsample_inputs,
    get_positions,
    make_mask,
    mlp_inputs,
    norm_linear,
    output_gradient,
    plain_mlp,
    plain_norm_linear,
    run_after_autocast_convolution,
    run_under_autocast,
    window_case,
    wrap_operation,
)
from oracles import DEVICE, assert_near, relative_error

from sbp_mmdet.ops.common.folding import normalise
from sbp_mmdet.ops.common.layer_norms import TokenNorm
from sbp_mmdet.ops.common.precision import store

FUSED, REFERENCE = Form(), Form('reference')
FORMS = [(name, FUSED) for name in CASES] + [(name, REFERENCE) for name, case in CASES.items() if case.reference]
KEPT = [(name, form, kind) for name, form in FORMS for kind in CASES[name].kinds]
DTYPES = st.sampled_from([(torch.float64, 1e-10), (torch.float32, 1e-5)])
OPTIONS = [
    ('mlp', dict(affine=False, gamma=None), dict(approximate='tanh')),
    ('mlp', dict(), dict(chunk=1)),
    ('mlp with convolution', dict(affine=False), dict(chunk=100)),
    ('mlp of tokens', dict(gamma=None), dict(chunk=100)),
    ('grn', dict(affine=False), dict(chunk=60)),
    ('grn', dict(gamma=None), dict()),
    ('downsample', dict(affine=False), dict()),
    ('norm_linear', dict(affine=False, bias=False), dict()),
    ('layer_norm', dict(affine=False), dict()),
    ('qkv', dict(affine=False, bias=False, gamma=None), dict()),
    ('query', dict(affine=False, bias=False, gamma=None), dict()),
    ('windows', dict(affine=False), dict(chunk=1)),
    ('shifted windows', dict(bias=False), dict(chunk=1000)),
]


@pytest.mark.parametrize(('name', 'form', 'kind'), KEPT)
def test_values_and_gradients(name, form, kind):
    """In fp64, each operation agrees with its definition, with stochastic depth where it supports it."""
    case = CASES[name]
    tensors, given = case.inputs()
    options = dict(factor=torch.tensor([1.6, 0.0], dtype=torch.float64)) if name in TAKES_FACTOR else {}
    f, plain = case.both(kind, form, given, **options)
    assert_near(differentiate(f, tensors), differentiate(plain, tensors), 1e-12)


@pytest.mark.parametrize(('name', 'form', 'kind'), [(n, f, k) for n, f, k in KEPT if n in TAKES_FACTOR and k != 'few'])
def test_a_number_for_all_images(name, form, kind):
    """Where all images have one factor of stochastic depth, it may be given as a number."""
    case = CASES[name]
    for sizes in (dict(), dict(gamma=None))[: 1 if name.endswith('windows') else 2]:
        tensors, given = case.inputs(**sizes)
        f, _ = case.both(kind, form, given, factor=1.6)
        _, plain = case.both(kind, form, given, factor=torch.full((2,), 1.6, dtype=torch.float64))
        assert_near(differentiate(f, tensors), differentiate(plain, tensors), 1e-12)


@pytest.mark.parametrize(('name', 'sizes', 'options'), OPTIONS, ids=str)
def test_options(name, sizes, options):
    case = CASES[name]
    tensors, given = case.inputs(**sizes)
    for form in [FUSED] + [REFERENCE] * (case.reference and 'chunk' not in options):
        for kind in case.kinds[:2]:
            f, plain = case.both(kind, form, given, **options)
            assert_near(differentiate(f, tensors), differentiate(plain, tensors), 1e-12)


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 12), (1, 24), (1, 7), (1, 7)])),
    kind=KINDS,
    dtype=DTYPES,
    affine=st.booleans(),
    gamma=st.sampled_from([1.0, None]),
    scaled=st.booleans(),
    again=st.booleans(),
    chunk=st.sampled_from([1, 40, 2**20]),
)
@example(0, (1, 4, 8, 3, 5), None, (torch.float64, 1e-10), True, 1.0, True, False, 40)  # rows that are a view
@settings(max_examples=60 if DEVICE != 'meta' else 10)  # which shows whether tensors of two devices are mixed
def test_mlp_of_any_shape(seed, shape, kind, dtype, affine, gamma, scaled, again, chunk):
    dtype, tolerance = dtype
    tensors, conv = mlp_inputs(seed, *shape, affine=affine, gamma=gamma, dtype=dtype)
    mask = make_mask(kind, *shape[-2:], seed)
    factor = torch.tensor([1.25, 0.0, 2.0], dtype=dtype)[: shape[0]] if scaled else None
    f = channel_mlp(positions=get_positions(mask), conv=conv if again else None, chunk=chunk, factor=factor)
    actual = differentiate(f, tensors)
    assert actual['out'].dtype == dtype
    double = cast_tensors(tensors, torch.float64)
    truth = differentiate(
        lambda **t: plain_mlp(**t, mask=mask, factor=factor if factor is None else factor.double()), double
    )
    assert_near(actual, truth, tolerance)


@given(
    seed=st.integers(0, 99),
    shape=st.tuples(*(st.integers(*limits) for limits in [(1, 3), (4, 12), (1, 12), (2, 9), (2, 9)])),
    kind=KINDS,
    dtype=DTYPES,
)
def test_downsample_of_any_shape(seed, shape, kind, dtype):
    dtype, tolerance = dtype
    tensors = downsample_inputs(seed, *shape, dtype=dtype)
    mask = make_mask(kind, shape[-2] // 2, shape[-1] // 2, seed)
    actual = differentiate(norm_linear(positions=get_positions(mask)), tensors)
    assert actual['out'].dtype == dtype
    truth = differentiate(lambda **t: plain_norm_linear(**t, mask=mask), cast_tensors(tensors, torch.float64))
    assert_near(actual, truth, tolerance)


@pytest.mark.parametrize(('name', 'form', 'kind'), [(n, f, k) for n, f, k in KEPT if k in (None, 'half')])
def test_frozen_parameters(name, form, kind):
    """Only trainable parameters get gradients, and not more is stored than if all are trainable."""
    case = CASES[name]
    tensors, given = case.inputs()
    f, _ = case.both(kind, form, given)
    everything, most = differentiate(f, tensors), count_stored_bytes_of(f, tensors, given=given)
    for trainable in [[n] for n in tensors] + [list(tensors)[1::2]]:
        actual = differentiate(f, tensors, trainable)
        expected = {n: g if n in trainable or n == 'out' else None for n, g in everything.items()}
        assert_near(actual, expected, 1e-13)
        if form == FUSED:
            assert count_stored_bytes_of(f, tensors, trainable, given) <= most
    if name.startswith('mlp'):
        assert count_stored_bytes_of(f, tensors, ['shortcut']) == 0


BIG = dict(n=8, c=32, d=128)
HALF = [('mlp', BIG | dict(gamma=gamma)) for gamma in (1.0, 1e-6, None)]
HALF += [('mlp with convolution', BIG), ('grn', BIG), ('downsample', BIG)]
HALF += [(name, dict(n=8, c=48)) for name in ('qkv', 'query', 'head', 'windows', 'shifted windows')]


@pytest.mark.parametrize('dtype', [torch.bfloat16, FP16])
@pytest.mark.parametrize(('name', 'sizes'), HALF, ids=str)
def test_half_precision(name, sizes, dtype):
    """The result is not much further from fp64 than plain torch under autocast.

    Squared errors are summed over so many entries that their ratio depends on the arithmetic, not on a single draw.
    """
    case, sums = CASES[name], {}
    kind = 'half' if case.kept else None
    for seed in range(6):
        made_in_half = dict(half=dtype) if name.startswith('mlp') or 'convolution' in name else {}
        tensors, given = case.inputs(seed=seed, dtype=torch.float32, **made_in_half, **sizes)
        f, plain = case.both(kind, FUSED, given)
        run = run_after_autocast_convolution if name.startswith('mlp') else run_under_autocast
        ours, theirs = (differentiate(run(g, dtype), tensors) for g in (f, plain))
        for key, truth in differentiate(plain, cast_tensors(tensors, torch.float64)).items():
            if truth is not None:
                assert ours[key].dtype == theirs[key].dtype
                parts = torch.stack([ours[key] - truth, theirs[key] - truth, truth])
                sums[key] = sums.get(key, 0) + parts.flatten(1).square().sum(1)
    for key, (own, other, size) in sums.items():
        # What fp32 leaves where nothing is in half precision is no matter.
        assert own**0.5 <= 1.5 * other**0.5 + 1e-6 * size**0.5, (key, (own / other) ** 0.5)


@needs_fp16
@pytest.mark.parametrize(('gradient', 'gamma'), [(7e4, 1e-6), (200.0, 0.01), (1.0, 1.0), (1e-6, 1.0)])
def test_fp16_keeps_the_range_of_the_plain_block(gradient, gamma):
    """Loss scaling makes the gradient of the block large; a small layer scale makes that of the branch small again."""
    tensors, _ = mlp_inputs(n=1, height=64, width=64, affine=False, dtype=torch.float32)
    tensors['gamma'] = torch.full((8,), gamma)

    def scaled(f):
        return lambda **t: gradient * f(**t).double()

    truth = differentiate(scaled(plain_mlp), cast_tensors(tensors, torch.float64))
    actual = differentiate(scaled(run_after_autocast_convolution(channel_mlp(), torch.float16)), tensors)
    for name in ('weight2', 'bias2', 'gamma'):
        assert (actual[name] - truth[name]).norm() < 5e-3 * truth[name].norm(), name


@pytest.mark.parametrize('name', ['mlp', 'mlp of tokens'])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)])
def test_an_input_in_another_precision_than_products(name, dtype, tolerance):
    """Products are in fp32; the input has more or fewer digits."""
    tensors, _ = CASES[name].inputs(dtype=torch.float32)
    tensors['x'] = tensors['x'].to(dtype)
    truth = differentiate(plain_mlp, cast_tensors(tensors, torch.float64))
    settings = ops.MLPSettings(dtype=torch.float32)
    actual = differentiate(lambda **t: ops.channel_mlp(settings, ops.MLPTensors(**t)), tensors)
    assert actual['x'].dtype == dtype
    assert_near({'x': actual.pop('x')}, {'x': truth.pop('x')}, max(tolerance, 2 * torch.finfo(dtype).eps))
    assert_near(actual, truth, tolerance)


@pytest.mark.parametrize('full', ['gamma', 'norm_weight', 'weight2'])
def test_weights_in_half_precision_and_one_parameter_in_full(full):
    """A model in half precision may keep some parameters in full precision."""
    tensors, _ = CASES['mlp'].inputs(dtype=torch.bfloat16)
    tensors[full] = tensors[full].float()
    truth = differentiate(plain_mlp, cast_tensors(tensors, torch.float64))
    for key, value in differentiate(channel_mlp(), tensors).items():
        assert relative_error(value, truth[key]) < 0.03, key


@pytest.mark.parametrize('affine', [('weight', 'bias'), ('weight',), ()], ids=str)
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_norm_of_tokens(affine, dtype):
    """The norm of x is the affine part of the norm of x-hat, and so are their gradients."""
    tensors, _ = CASES['mlp of tokens'].inputs(dtype=torch.float64)
    given = dict(weight=tensors['norm_weight'], bias=tensors['norm_bias'])
    weight, bias = (given[name].requires_grad_() if name in affine else None for name in ('weight', 'bias'))
    x = tensors['x'].requires_grad_()
    y = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    grad = output_gradient(y)
    leaves = [x, *[p for p in (weight, bias) if p is not None]]
    expected = torch.autograd.grad(y, leaves, grad)
    norm, needs = TokenNorm(weight, bias, 1e-6, dtype), (True, weight is not None, bias is not None)
    with torch.no_grad():
        xhat, rstd = normalise(x, 1e-6, torch.float64)
        rows, *statistics = norm.run(x.to(norm.full))
        tolerance = 1e-12 if dtype == torch.float64 else 0.01
        assert rows.dtype == dtype and relative_error(rows, y) < tolerance
        assert relative_error(norm.scale(xhat), y) < tolerance
        for source, known in ((x, statistics), (xhat, None)):
            dx, *others = norm.backward(grad, source, known, needs)
            dx = dx.view(x.shape) if known else dx.view(x.shape) * rstd
            for actual, truth in zip([dx, *[g for g in others if g is not None]], expected, strict=True):
                assert relative_error(actual, truth) < max(tolerance * 1e-3, 1e-12)


@needs_fp16
@pytest.mark.parametrize('scale', [0.0, 1.0, 5000.0])
def test_a_channel_without_gradient_in_fp16_throughout(scale):
    tensors, _ = mlp_inputs(n=3, d=32, dtype=torch.float16)
    factors = torch.ones(8, 1, 1)
    factors[3] = scale
    exact = differentiate(lambda **t: factors * plain_mlp(**t), cast_tensors(tensors, torch.float64))
    actual = differentiate(lambda **t: factors.half() * channel_mlp()(**t), tensors)
    for name in set(tensors) - {'x', 'shortcut'}:
        assert relative_error(actual[name], exact[name]) < 0.02, name


ON_MAPS = [name for name in CASES if name.split()[0] in ('mlp', 'grn', 'downsample', 'layer_norm')]
ON_MAPS.remove('mlp of tokens')


@pytest.mark.parametrize(
    ('name', 'kind'), [(name, kind) for name in ON_MAPS for kind in (None, 'half') if CASES[name].kept or kind is None]
)
def test_layouts(name, kind):
    """Values and gradients depend neither on the layout of maps nor on that of the incoming gradient."""
    case = CASES[name]
    tensors, given = case.inputs()
    f, _ = case.both(kind, FUSED, given)
    expected = differentiate(f, tensors)
    last = dict(memory_format=torch.channels_last)
    maps = {n: t.contiguous(**last) for n, t in tensors.items() if n in ('x', 'shortcut')}
    if given:
        conv = given['conv']
        given = dict(conv=conv._replace(input=store(conv.input.values.contiguous(**last), 'native')))
    actual = differentiate(case.both(kind, FUSED, given)[0], tensors | maps)
    assert_near(actual, expected, 1e-12)
    assert actual['out'].is_contiguous(**last) and actual['x'].is_contiguous(**last)

    leaves = [t.requires_grad_() for t in tensors.values()]
    for layout in (lambda g: g[:1, :1, :1, :1].expand(g.shape), lambda g: g.transpose(2, 3).contiguous().mT):
        out = f(**tensors)
        weight = layout(output_gradient(out))
        actual = torch.autograd.grad(out, leaves, weight)
        expected = torch.autograd.grad(f(**tensors), leaves, weight.clone(memory_format=torch.contiguous_format))
        assert all(relative_error(a, e) < 1e-12 for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize('name', CASES)
def test_graph(name):
    """Without gradients nothing is saved. The same graph works twice, a new one once more, and there is no second
    derivative."""
    case = CASES[name]
    tensors, given = case.inputs()
    f, plain = case.both('half' if case.kept else None, FUSED, given)
    assert not f(**tensors).requires_grad
    with torch.no_grad():
        assert relative_error(f(**tensors), plain(**tensors)) < 1e-12
        assert count_stored_bytes_of(f, tensors, given=given) == 0
    if name == 'layer_norm':  # in fp64, and without a convolution before it, it is torch's own
        return
    expected = differentiate(f, tensors)
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    for passes in (1, 2):
        out = f(**leaves)
        for i in range(passes):
            out.backward(output_gradient(out), retain_graph=i + 1 < passes)
    assert_near({n: t.grad for n, t in leaves.items()}, {n: 3 * expected[n] for n in leaves}, 1e-13)
    with pytest.raises(RuntimeError, match='second time'):
        out.backward(output_gradient(out))
    (grad,) = torch.autograd.grad(f(**leaves).square().sum(), leaves['x'], create_graph=True)
    with pytest.raises(RuntimeError, match='differentiate twice'):
        grad.sum().backward()


@pytest.mark.parametrize('dtype', [torch.float64, pytest.param(torch.float16, marks=needs_fp16), torch.bfloat16])
def test_a_hidden_channel_of_grn_that_is_zero(dtype):
    """A channel may be zero, or nearly zero, at all positions: the derivative of the norm at zero is zero, and 1 / G is
    finite."""
    tensors, _ = CASES['grn'].inputs(dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    tensors['bias1'][:3] = torch.tensor([-40.0, -8.0, -5.0])
    tensors['weight1'][:3] *= 0.1
    f, plain = CASES['grn'].both()
    if dtype == torch.float64:
        assert_near(differentiate(f, tensors), differentiate(plain, tensors), 1e-12)
        return
    for loss_scale in (1.0, 64.0, 256.0):
        gradients = differentiate(lambda **t: loss_scale * run_under_autocast(f, dtype)(**t), tensors)  # noqa: B023
        assert all(value.isfinite().all() for value in gradients.values())


@pytest.mark.parametrize('size', [(6, 9), (7, 8), (3, 3), (2, 4), (10, 5)], ids=str)
@pytest.mark.parametrize(('shift', 'chunk'), [(0, None), (1, 1), (2, 1000)])
def test_windows_of_maps_of_any_size(size, shift, chunk):
    case = window_case(shift, size)
    tensors, _ = case.inputs(height=size[0], width=size[1])
    f, plain = case.both(chunk=chunk)
    assert_near(differentiate(f, tensors), differentiate(plain, tensors), 1e-12)


def test_attention_is_that_of_torchs_module():
    """The forward pass uses all tokens and heads, whatever the backward pass drops."""
    tensors, _ = CASES['qkv'].inputs(c=48)
    x, nw, nb, w, b, wp, bp, gamma = tensors.values()
    module = torch.nn.MultiheadAttention(48, 3, batch_first=True, dtype=torch.float64)
    module.in_proj_weight.data, module.in_proj_bias.data = w, b
    module.out_proj.weight.data, module.out_proj.bias.data = wp, bp
    y = F.layer_norm(x, (48,), nw, nb, 1e-6)
    expected = x + gamma * module(y, y, y, need_weights=False)[0]
    for name in ('qkv', 'query', 'head'):
        for form in (FUSED, REFERENCE):
            assert relative_error(CASES[name].both('half', form)[0](**tensors), expected) < 1e-13


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(num_heads=5), 'num_heads=5 must divide the 12 channels'),
        (dict(mode='keys'), "mode='keys' is unknown; choose one of"),
        (dict(mode='head', positions=get_positions(make_mask('half'), prefix=1)), 'drops heads, not tokens'),
        (dict(heads=torch.tensor([0])), 'drops tokens, not heads'),
    ],
)
def test_attention_names_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        wrap_operation(ops.attention, ops.AttentionSettings, ops.AttentionTensors)(**dict(num_heads=3) | options)(
            **CASES['qkv'].inputs()[0]
        )


def test_windows_name_bad_values():
    with pytest.raises(ValueError, match='30 tokens are no map of 7 x 9'):
        window_case(0, (7, 9)).both()[0](**CASES['windows'].inputs()[0])
    with pytest.raises(ValueError, match='shift=3 must be from 0 to 2, for windows of 3'):
        window_case(3).both()


def test_the_fused_mlp_knows_one_activation():
    with pytest.raises(ValueError, match="activation=.*relu.* needs implementation='reference'"):
        ops.MLPSettings(activation=torch.relu)
    settings = ops.MLPSettings(REFERENCE, activation=torch.relu)
    tensors, _ = CASES['mlp'].inputs()
    assert not torch.equal(ops.channel_mlp(settings, ops.MLPTensors(**tensors)), channel_mlp()(**tensors))
