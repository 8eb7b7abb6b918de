"""All forms of each operation run in the branches of CUDA with fake tensors.

Tokens and maps of odd sizes, both layouts (bf16: one), fp32, fp16 and bf16.
"""

import dataclasses
import itertools

import pytest
import torch
from fake_cuda import backward, copy_to_gpu, simulate_gpu, unset_fake_temporarily
from ops_cases import CASES, INDEX, Form, get_positions, kept_heads, kept_tokens, make_mask
from torch import nn

from sbp_mmdet.ops.common import flash as flash
from sbp_mmdet.ops.common.layer_norms import norm_backward, run_norm
from sbp_mmdet.ops.common.precision import Stored
from sbp_mmdet.ops.common.rerun_conv import convolve
from sbp_mmdet.ops.layer_norm import NormSettings, NormTensors, layer_norm
from sbp_mmdet.ops.max_pool import PoolSettings, PoolTensors, max_pool
from sbp_mmdet.stochastic_backprop.masks import Positions

PRECISIONS = {'fp32': None, 'fp16': torch.float16, 'bf16': torch.bfloat16}
LAYOUTS = {'nchw': torch.contiguous_format, 'nhwc': torch.channels_last}
FORMS = [Form(), Form(storage='int8'), Form('reference')]
# Elements of a chunk: the 30 rows of an image have three, or 18 kept ones two; three windows of 9 rows have one.
CHUNKED = dict(mlp=240, grn=240, windows=1000, shifted=1000)
RAN = {}  # test to how many combinations it ran; the last test counts them


@pytest.fixture(scope='module')
def mode():
    with simulate_gpu() as mode:
        yield mode


def compute_on_cpu(f, *args, **options):
    """Return the result of ``f`` with numbers, on the CPU."""
    with unset_fake_temporarily():
        return f(*args, **options)


def assert_gradients_match(f, tensors, dtype):
    """Assert that under autocast each gradient has the device, type and shape of its tensor."""
    leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in tensors.items()}
    with torch.autocast('cuda', dtype, enabled=dtype is not None):
        out = f(**leaves)
    assert out.is_cuda
    gradients = backward([out])
    for name, tensor in leaves.items():
        if tensor is not None:
            grad = gradients[tensor]
            assert grad.is_cuda and grad.dtype == tensor.dtype and grad.shape == tensor.shape, name


def make_inputs(case, layout, dtype, **sizes):
    """Return the tensors of a case with maps in a layout. Under autocast, outputs of convolutions are in half
    precision."""
    tensors, given = case.inputs(dtype=torch.float32, **sizes)
    for name in ('x', 'shortcut'):
        if name in tensors and tensors[name].dim() == 4:
            tensors[name] = tensors[name].contiguous(memory_format=LAYOUTS[layout])
    if dtype and {'weight1', 'conv'} & {*tensors, *given}:
        tensors['x'] = tensors['x'].to(dtype)
    if given:
        conv = given['conv']
        settings = dataclasses.replace(conv.settings, dtype=tensors['x'].dtype)
        given = dict(conv=conv._replace(input=Stored(tensors['x']), settings=settings))
    return tensors, given


def get_kept(case, kind, form):
    """Return the kept positions of a case, or ``None`` if the case does not support the kind of mask."""
    if kind is None:
        return {}
    if case.kept is kept_heads:
        return None if form == Form('reference') else case.kept(kind)[0]
    prefix = int(case.kept is kept_tokens)
    return dict(positions=get_positions(make_mask(kind), prefix))


def list_combinations(name, half=None):
    """Yield forms, kept positions, sizes of tensors and options.

    With ``half``, 0 or 1, these are one half of the combinations or the other. Each has all pairs of a form with kept
    positions, and of either with sizes.
    """
    case, first = CASES[name], name.split()[0]
    forms = [form for form in FORMS if case.reference or form.implementation == 'fused']
    for (i, form), kind in itertools.product(enumerate(forms), (None, 'half') if case.kept else (None,)):
        kept = get_kept(case, kind, form)
        if kept is None:
            continue
        both = (
            (form, kept, {}, {}),
            (form, kept, dict(affine=False), dict(chunk=CHUNKED[first]) if first in CHUNKED else {}),
        )
        yield from both if half is None else [both[(i + (kind is None) + half) % 2]]


ON_MAPS = [name for name, case in CASES.items() if case.inputs()[0]['x'].dim() == 4]  # tokens have one layout


@pytest.mark.parametrize(
    ('name', 'layout', 'precision'),
    [
        *((name, 'nchw', precision) for name in CASES for precision in PRECISIONS),
        *((name, 'nhwc', precision) for name in ON_MAPS for precision in ('fp32', 'fp16')),
    ],
)
def test_operation(name, layout, precision, mode):
    """All combinations run in fp16, one half of them in fp32 and the other in bf16; likewise in the other layout."""
    case, dtype = CASES[name], PRECISIONS[precision]
    half = {('fp32', 'nchw'): 0, ('bf16', 'nchw'): 1, ('fp32', 'nhwc'): 1, ('fp16', 'nhwc'): 0}.get((precision, layout))
    for form, kept, sizes, options in compute_on_cpu(lambda: list(list_combinations(name, half))):
        tensors, given = (copy_to_gpu(mode, part) for part in compute_on_cpu(make_inputs, case, layout, dtype, **sizes))
        if not sizes and name.split()[0] in ('mlp', 'grn', 'qkv', 'query', 'head', 'windows', 'shifted'):
            options['factor'] = torch.empty(2, device='cuda')
        if 'indows' in name:
            given = dict(index=copy_to_gpu(mode, INDEX))
        assert_gradients_match(case.run(form, **copy_to_gpu(mode, kept), **given, **options), tensors, dtype)
        RAN[name] = RAN.get(name, 0) + 1


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('precision', PRECISIONS)
def test_norm_of_a_convolution(precision, layout, mode):
    dtype, conv = PRECISIONS[precision], nn.Conv2d(8, 8, 3, padding=1, device='cuda')
    x = torch.empty(2, 8, 5, 7, device='cuda', dtype=dtype).to(memory_format=LAYOUTS[layout])
    for form in FORMS[0], FORMS[2]:

        def f(x, **t):
            out, rerun = convolve(conv, (conv.weight, conv.bias), x, form.storage)  # noqa: B023
            return layer_norm(NormSettings(form), NormTensors(out, **t, conv=rerun))  # noqa: B023

        assert_gradients_match(
            f, dict(x=x, weight=torch.empty(8, device='cuda'), bias=torch.empty(8, device='cuda')), dtype
        )


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('relu', [False, True])
def test_max_pool(relu, layout, mode):
    settings = PoolSettings(kernel=(3, 3), padding=(1, 1), relu=relu)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.empty(2, 8, 7, 9, device='cuda', dtype=dtype).to(memory_format=LAYOUTS[layout])
        assert_gradients_match(lambda x: max_pool(settings, PoolTensors(x)), dict(x=x), None)


@pytest.mark.parametrize('precision', PRECISIONS)
@pytest.mark.parametrize('ampere', [True, False], ids=['ampere', 'before'])
@pytest.mark.parametrize('name', ['qkv', 'query', 'head'])
def test_attention_kernels(name, ampere, precision, mode, monkeypatch):
    """Flash and memory-efficient kernels support heads of 8 channels; the heads of 4 above are too small for them."""
    monkeypatch.setattr(flash, '_ampere', lambda index: ampere)
    half = None if precision == 'fp16' else (ampere + (precision == 'bf16')) % 2
    for form, kept, sizes, options in compute_on_cpu(lambda: list(list_combinations(name, half))):
        tensors = copy_to_gpu(mode, compute_on_cpu(make_inputs, CASES[name], 'nchw', None, c=24, **sizes)[0])
        assert_gradients_match(
            CASES[name].run(form, **copy_to_gpu(mode, kept), **options), tensors, PRECISIONS[precision]
        )
        RAN['kernels'] = RAN.get('kernels', 0) + 1


def test_a_tensor_that_stays_on_the_cpu_is_seen(mode):
    """The tests above would fail if a tensor stayed on the CPU."""
    tensors = copy_to_gpu(mode, compute_on_cpu(make_inputs, CASES['downsample'], 'nchw', None)[0])
    found = compute_on_cpu(lambda: get_positions(make_mask('half')))
    keep = Positions(*(mode.from_tensor(index) for index in found[:2]))
    with pytest.raises(RuntimeError, match='device'):
        assert_gradients_match(CASES['downsample'].run(positions=keep), tensors, None)


def test_how_many_combinations_ran():
    """This test fails if a condition skips too many combinations."""
    if len(RAN) < len(CASES) + 1:
        pytest.skip('counted when all tests of this file ran')
    print(RAN)
    assert sum(RAN.values()) >= 430 and min(RAN.values()) >= 8, RAN


@pytest.mark.parametrize(('of_x', 'of_weight'), [(torch.float32, torch.float16), (torch.bfloat16, torch.float32)])
def test_a_layer_norm_of_two_precisions_runs_in_the_higher_one(of_x, of_weight):
    with simulate_gpu():
        x, grad = (torch.randn(5, 8, device='cuda', dtype=of_x) for _ in range(2))
        weight, bias = (torch.randn(8, device='cuda', dtype=of_weight) for _ in range(2))
        out, *statistics = run_norm(x, weight, bias, 1e-5)
        gradients = norm_backward(grad, x, statistics, weight, bias)
        assert {t.dtype for t in (out, *gradients)} == {torch.float32}
