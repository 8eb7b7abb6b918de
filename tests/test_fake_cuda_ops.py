"""What a GPU would refuse of each operation, found without one: all of its settings, in CUDA's branches.

Tokens and maps of odd sizes, both layouts, fp32, fp16 and bf16, positions shared by all images and of each image.
"""

import itertools

import pytest
import torch
from attention_cases import HEADS, attention_inputs, grid
from fake_cuda import backward, gpu_that_is_not_there, to_gpu
from ops_cases import downsample_inputs, fused_downsample, keep_mask, mlp_inputs
from test_fake_cuda import LAYOUTS, PRECISIONS
from test_ops_tokens import own_masks, own_positions
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from sbp_mmdet import ops
from sbp_mmdet.masks import Positions, positions
from sbp_mmdet.ops import flash
from sbp_mmdet.ops.storage import STORAGES, Stored
from sbp_mmdet.settings import DROPPED

EACH = pytest.mark.parametrize('precision', PRECISIONS)
EACH_LAYOUT = pytest.mark.parametrize('layout', LAYOUTS)
N, HEIGHT, WIDTH = 2, 5, 7
RAN = {}  # test to how many combinations it ran; the last test counts them


@pytest.fixture(scope='module')
def mode():
    with gpu_that_is_not_there() as mode:
        yield mode


def combinations(**choices):
    """Every combination of the choices, as dicts."""
    return [dict(zip(choices, found, strict=True)) for found in itertools.product(*choices.values())]


def ran(name):
    RAN[name] = RAN.get(name, 0) + 1


def made(f):
    """What ``f`` makes, with numbers and on the CPU."""
    with unset_fake_temporarily():
        return f()


def masks(height, width):
    """Positions by name, with a kept one for each dropped one: of all, of each image, and none."""

    def make():
        mask = keep_mask('half', height, width, seed=3)
        count = height * width // 2
        own = own_positions(own_masks(N, height, width, count), nearest=True)
        return dict(shared=positions(mask, nearest=True), own=own, all=None)

    return made(make)


def check(f, tensors, dtype):
    """Runs both passes under autocast: each gradient has the device, the type and the shape of its tensor."""
    leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in tensors.items()}
    with torch.autocast('cuda', dtype, enabled=dtype is not None):
        out = f(**leaves)
    assert out.is_cuda
    found = backward([out])
    for name, tensor in leaves.items():
        if tensor is not None:
            grad = found[tensor]
            assert grad.is_cuda and grad.dtype == tensor.dtype and grad.shape == tensor.shape, name


def in_layout(tensors, layout, dtype):
    """Maps in that layout. What a convolution made is in half precision where autocast is on."""
    tensors = {n: t if t is None else t.float() for n, t in tensors.items()}
    for name in ('x', 'shortcut'):
        if name in tensors and tensors[name].dim() == 4:
            tensors[name] = tensors[name].contiguous(memory_format=LAYOUTS[layout])
    return tensors | dict(x=tensors['x'].to(dtype or torch.float32))


FORMS = [
    *combinations(recompute=[False, True], storage=STORAGES, dropped=DROPPED),
    *combinations(implementation=['reference'], dropped=['zero', 'pool']),
]


@EACH
@EACH_LAYOUT
def test_channel_mlp(mode, precision, layout):
    dtype = PRECISIONS[precision]
    tensors = made(lambda: in_layout(mlp_inputs(0, N, 8, 20, HEIGHT, WIDTH)[0], layout, dtype))
    plain = to_gpu(mode, tensors)
    geometry = ops.ConvSettings((1, 1), (3, 3), (1, 1), 8, dtype or torch.float32)
    weight, bias = torch.empty(8, 1, 7, 7, device='cuda'), torch.empty(8, device='cuda')
    conv = ops.Conv(Stored(torch.empty_like(plain['x'])), weight, bias, geometry)
    factor = torch.empty(N, device='cuda')
    for form, (kind, keep), again, parts in itertools.product(
        FORMS, masks(HEIGHT, WIDTH).items(), (None, conv), ((True, True, factor), (False, False, None))
    ):
        if again is not None and not form.get('recompute') or kind == 'all' and form['dropped'] != 'zero':
            continue
        affine, gamma, scale = parts
        given = plain | (dict() if affine else dict(norm_weight=None, norm_bias=None))
        given |= dict() if gamma else dict(gamma=None)
        keep = keep and to_gpu(mode, keep)
        settings = ops.MLPSettings(**form, approximate='none' if affine else 'tanh')

        def f(**t):
            return ops.channel_mlp(settings, ops.MLPTensors(**t, factor=scale, positions=keep, conv=again))  # noqa: B023

        check(f, given, dtype)
        ran('channel_mlp')


@EACH
def test_channel_mlp_of_tokens(mode, precision):
    dtype = PRECISIONS[precision]
    tensors = made(lambda: in_layout(mlp_inputs(0, N, 8, 20, HEIGHT, WIDTH, gamma=None)[0], 'nchw', dtype))
    del tensors['shortcut']
    tensors['x'] = made(lambda: tensors['x'].flatten(2).mT.contiguous())
    plain = to_gpu(mode, tensors)
    for form, (kind, keep) in itertools.product(FORMS, masks(HEIGHT, WIDTH).items()):
        if kind == 'all' and form['dropped'] != 'zero':
            continue
        keep = keep and to_gpu(mode, keep)
        settings = ops.MLPSettings(**form)
        check(
            lambda x, **t: ops.channel_mlp(settings, ops.MLPTensors(x, x, **t, positions=keep)),  # noqa: B023
            plain,
            dtype,
        )
        ran('channel_mlp of tokens')


LINEAR_FORMS = [
    *combinations(storage=STORAGES, dropped=DROPPED),
    *combinations(implementation=['reference'], dropped=['zero', 'pool']),
]


@EACH
@EACH_LAYOUT
def test_downsample(mode, precision, layout):
    dtype = PRECISIONS[precision]
    for height, width in ((6, 8), (7, 9)):
        tensors = to_gpu(mode, made(lambda: in_layout(downsample_inputs(0, N, 6, 9, height, width), layout, dtype)))  # noqa: B023
        for form, (kind, keep) in itertools.product(LINEAR_FORMS, masks(height // 2, width // 2).items()):
            if kind == 'all' and form['dropped'] != 'zero':
                continue
            keep = keep and to_gpu(mode, keep)
            check(fused_downsample(keep, **form), tensors, dtype)
            ran('downsample')


@EACH
def test_norm_linear(mode, precision):
    dtype = PRECISIONS[precision]
    shapes = dict(x=(N, HEIGHT * WIDTH, 8), norm_weight=(8,), norm_bias=(8,), weight=(12, 8), bias=(12,))
    for form, (kind, keep), bias in itertools.product(LINEAR_FORMS, masks(HEIGHT, WIDTH).items(), (True, False)):
        if kind == 'all' and form['dropped'] != 'zero':
            continue
        tensors = {n: torch.empty(shape, device='cuda') for n, shape in shapes.items() if bias or n != 'bias'}
        keep = keep and to_gpu(mode, keep)
        settings = ops.NormLinearSettings(**form)
        check(lambda **t: ops.norm_linear(settings, ops.NormLinearTensors(**t, positions=keep)), tensors, dtype)  # noqa: B023
        ran('norm_linear')


@EACH
@EACH_LAYOUT
def test_layer_norm_and_convolutions(mode, precision, layout):
    dtype = PRECISIONS[precision]
    conv = nn.Conv2d(8, 8, 3, padding=1, device='cuda')
    for storage, affine in itertools.product(STORAGES, (True, False)):
        x = torch.empty(N, 8, HEIGHT, WIDTH, device='cuda', dtype=dtype).to(memory_format=LAYOUTS[layout])
        weights = torch.empty(8, device='cuda') if affine else None
        for implementation in ('fused', 'reference'):
            if implementation == 'reference' and storage != 'native':
                continue
            settings = ops.NormSettings(storage=storage, implementation=implementation)
            tensors = dict(x=x.float(), weight=weights, bias=weights)
            check(lambda **t: ops.layer_norm(settings, ops.NormTensors(**t)), tensors, dtype)  # noqa: B023
            ran('layer_norm')

        def norm_of_convolution(x, **t):
            out, again = ops.convolve(conv, x, storage)  # noqa: B023
            return ops.layer_norm(ops.NormSettings(storage=storage), ops.NormTensors(out, **t, conv=again))  # noqa: B023

        check(norm_of_convolution, dict(x=x, weight=weights, bias=weights), dtype)
        ran('convolve')


@EACH
@EACH_LAYOUT
def test_mlp_with_response_normalisation(mode, precision, layout):
    dtype, c, d = PRECISIONS[precision], 6, 10
    shapes = dict(x=(N, c, HEIGHT, WIDTH), shortcut=(N, c, HEIGHT, WIDTH), norm_weight=(c,), norm_bias=(c,))
    shapes |= dict(weight1=(d, c), bias1=(d,), grn_weight=(d,), grn_bias=(d,), weight2=(c, d), bias2=(c,), gamma=(c,))
    tensors = in_layout({n: torch.empty(shape, device='cuda') for n, shape in shapes.items()}, layout, dtype)
    for storage, chunk, factor in itertools.product(STORAGES, (None, 3 * d), (None, torch.empty(N, device='cuda'))):
        settings = ops.GRNSettings(storage=storage, chunk=chunk)
        check(lambda **t: ops.grn_mlp(settings, ops.GRNTensors(**t, factor=factor)), tensors, dtype)  # noqa: B023
        ran('grn_mlp')


@EACH
@pytest.mark.parametrize('ampere', [True, False], ids=['ampere', 'before'])
@pytest.mark.parametrize('c', [12, 24], ids=['heads of 4', 'heads of 8'])
def test_attention(mode, precision, ampere, c, monkeypatch):
    """Kernels: flash, memory-efficient, and none that fits."""
    monkeypatch.setattr(flash, '_ampere', lambda index: ampere)
    dtype = PRECISIONS[precision]
    tensors = to_gpu(mode, made(lambda: in_layout(attention_inputs(c=c), 'nchw', None)))
    kinds = made(lambda: dict(half=grid('half', nearest=True), own=grid('half', images=N), all=None))
    keys = dict(recompute=[False, True, 'attention'], storage=STORAGES, dropped=['zero', 'pool'])
    forms = [*combinations(**keys), dict(implementation='reference', dropped='zero', recompute=False)]
    for form, attend, (kind, keep) in itertools.product(forms, ('qkv', 'query', 'head'), kinds.items()):
        heads = torch.empty(2, dtype=torch.int64, device='cuda') if attend == 'head' and kind == 'half' else None
        if form['dropped'] == 'pool' and (attend == 'head' or kind != 'half') or attend == 'head' and kind == 'own':
            continue
        if attend == 'qkv' and form['recompute'] == 'attention' and kind != 'all':
            continue
        if 'implementation' in form and heads is not None:
            continue  # how many heads are left out is read from the device: this form waits for it
        keep = to_gpu(mode, keep) if keep is not None and attend != 'head' else None
        settings = ops.AttentionSettings(HEADS, mode=attend, **form)
        check(
            lambda **t: ops.attention(settings, ops.AttentionTensors(**t, positions=keep, heads=heads)),  # noqa: B023
            tensors,
            dtype,
        )
        ran('attention')


@EACH
def test_window_attention(mode, precision):
    dtype, c, heads, window = PRECISIONS[precision], 8, 2, 3
    shapes = dict(norm_weight=(c,), norm_bias=(c,), qkv_weight=(3 * c, c), qkv_bias=(3 * c,))
    shapes |= dict(table=((2 * window - 1) ** 2, heads), proj_weight=(c, c), proj_bias=(c,))
    index = torch.empty(window**2, window**2, dtype=torch.int64, device='cuda')
    for size, shift, storage, bias, chunk in itertools.product(
        ((6, 9), (7, 8)), (0, 1), STORAGES, (True, False), (None, 1000)
    ):
        tensors = {'x': (N, size[0] * size[1], c)} | shapes
        tensors = {n: torch.empty(shape, device='cuda') for n, shape in tensors.items()}
        tensors |= dict() if bias else dict(qkv_bias=None)
        settings = ops.WindowSettings(heads, window, shift, size, 0.5, storage=storage, chunk=chunk)
        check(lambda **t: ops.window_attention(settings, ops.WindowTensors(**t, index=index)), tensors, dtype)  # noqa: B023
        ran('window_attention')


def test_a_tensor_that_stays_on_the_cpu_is_seen(mode):
    """Guards the tests above."""
    tensors = to_gpu(mode, made(lambda: in_layout(downsample_inputs(), 'nchw', None)))
    found = made(lambda: positions(keep_mask('half', 4, 3)))
    keep = Positions(*(mode.from_tensor(index) for index in found[:2]))
    with pytest.raises(RuntimeError, match='device'):
        check(fused_downsample(keep), tensors, None)


def test_how_many_combinations_ran():
    """So that a condition that leaves out too much is seen. Counted by hand once: 1,941."""
    if len(RAN) < 9:
        pytest.skip('counted when all tests of this file ran')
    assert sum(RAN.values()) >= 1900, RAN
