"""The attention kernels with row statistics agree with automatic differentiation of the definition."""

import math
from unittest import mock

import pytest
import torch
from oracles import relative_error

from sbp_mmdet.ops.common import flash as flash

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
needs_fake_cuda = pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='fake tensors of an old torch')
DEVICES = ['cpu', pytest.param('cuda', marks=cuda)]
ROUNDING = {torch.float64: 1e-13, torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def heads(n=2, h=3, tokens=37, d=16, dtype=torch.float64, device='cpu', seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, n, tokens, h, d, generator=generator, dtype=torch.float64)
    return rows.to(device, dtype).transpose(2, 3).unbind(0)


def some(rows, index):
    return rows.index_select(2, index.to(rows.device))


def check(grad, q, k, v):
    """Compare both passes with the definition in fp64, for every second query and every third key."""
    queries, keys = torch.arange(0, q.shape[2], 2), torch.arange(0, k.shape[2], 3)
    out, lse = flash.attend(q, k, v)
    qd, kd, vd, g = (t.double() for t in (q, k, v, grad))
    scores = qd @ kd.mT / math.sqrt(q.shape[-1])
    tolerance = ROUNDING[q.dtype]
    assert relative_error(out, scores.softmax(-1) @ vd) < tolerance
    assert relative_error(lse, scores.logsumexp(-1)) < tolerance
    rows = (some(grad, queries), some(q, queries), some(k, keys), some(v, keys), some(out, queries), some(lse, queries))
    actual = flash.attend_backward(*rows)
    # What the softmax's derivative gives for these entries of the map.
    qd, kd, vd, g = some(qd, queries), some(kd, keys), some(vd, keys), some(g, queries)
    softmax = some(scores.softmax(-1), queries)[..., keys.to(q.device)]
    own = (g * some(scores.softmax(-1) @ v.double(), queries)).sum(-1, keepdim=True)
    ds = softmax * (g @ vd.mT - own) / math.sqrt(q.shape[-1])
    for part, expected in zip(actual, (ds @ kd, ds.mT @ qd, softmax.mT @ g), strict=True):
        assert part.dtype == q.dtype
        assert relative_error(part, expected) < tolerance


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('d', [5, 16, 64])
@pytest.mark.parametrize('dtype', list(ROUNDING))
def test_kernels(device, dtype, d):
    q, k, v, grad = heads(d=d, dtype=dtype, device=device)
    check(grad, q, k, v)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16])
@pytest.mark.parametrize('entries', [1, 2 * 37 * 37, 2**24])
def test_plain_path_in_chunks(dtype, entries):
    q, k, v, grad = heads(dtype=dtype)
    with mock.patch.object(flash, '_kernel', lambda *_: 'plain'), mock.patch.object(flash, '_MAP', entries):
        check(grad, q, k, v)


def test_nothing_kept():
    q, k, v, _ = heads()
    empty, none = q[:, :, :0], torch.empty(2, 3, 0, dtype=torch.float64)
    assert flash.attend(empty, k, v)[0].shape == empty.shape
    for part, like in zip(flash.attend_backward(empty, empty, k, v, empty, none), (empty, k, v), strict=True):
        assert torch.equal(part, torch.zeros_like(like))


@needs_fake_cuda
@pytest.mark.parametrize(
    'off, kernel', [('', 'flash'), ('flash', 'efficient'), ('mem_efficient', 'flash'), ('flash mem_efficient', 'plain')]
)
def test_kernels_that_the_user_switched_off_are_not_called(off, kernel):
    fake = pytest.importorskip('torch._subclasses.fake_tensor')
    switches = [getattr(torch.backends.cuda, f'enable_{name}_sdp') for name in off.split()]
    q, k, v = torch.randn(3, 2, 3, 50, 8, dtype=torch.float64)
    grad, *expected = torch.randn_like(q), *flash.attend(q, k, v)
    expected += flash.attend_backward(grad, q, k, v, *expected)
    try:
        for switch in switches:
            switch(False)
        with fake.FakeTensorMode(), mock.patch.object(flash, '_ampere', lambda _: True):
            assert flash._kernel(torch.empty(2, 3, 50, 64, dtype=torch.float16, device='cuda')) == kernel
        with mock.patch.object(torch.ops.aten, '_scaled_dot_product_flash_attention_for_cpu') as called:
            actual = flash.attend(q, k, v)
            assert called.called == ('flash' not in off)
        if 'flash' in off:
            torch.testing.assert_close([*actual, *flash.attend_backward(grad, q, k, v, *actual)], expected)
            # Statistics of one kernel in the backward pass of another, where the switch is a context of the forward.
            torch.testing.assert_close([*flash.attend_backward(grad, q, k, v, *expected[:2])], expected[2:])
    finally:
        for switch in switches:
            switch(True)


@needs_fake_cuda
@pytest.mark.parametrize('version, kernel', [('2.1.2', 'efficient'), ('2.2.0', 'flash'), ('2.13.0', 'flash')])
def test_flash_is_left_out_where_its_backward_pass_has_another_contract(version, kernel, monkeypatch):
    fake = pytest.importorskip('torch._subclasses.fake_tensor')
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion(version))
    with fake.FakeTensorMode(), mock.patch.object(flash, '_ampere', lambda _: True):
        assert flash._kernel(torch.empty(2, 3, 50, 64, dtype=torch.float16, device='cuda')) == kernel


@pytest.mark.parametrize(
    'dtype, d, ampere, kernel',
    [
        (torch.float16, 64, True, 'flash'),
        (torch.float16, 64, False, 'efficient'),
        (torch.float32, 64, True, 'efficient'),
        (torch.bfloat16, 64, False, 'plain'),
        (torch.float16, 20, True, 'plain'),
        (torch.float64, 64, True, 'plain'),
    ],
)
@needs_fake_cuda
def test_kernels_of_cuda_are_called_as_they_are_declared(dtype, d, ampere, kernel):
    """Fake tensors check the arguments, shapes and layouts of CUDA's kernels without a GPU, and compute nothing."""
    fake = pytest.importorskip('torch._subclasses.fake_tensor')
    with fake.FakeTensorMode(), mock.patch.object(flash, '_ampere', lambda _: ampere):
        q = torch.empty(2, 50, 3, d, dtype=dtype, device='cuda').transpose(1, 2)
        assert flash._kernel(q) == kernel
        if kernel == 'plain':
            return
        out, lse = flash.attend(q, q, q)
        assert out.shape == q.shape and out.stride() == q.stride()
        assert lse.shape == q.shape[:3] and lse.dtype == torch.promote_types(dtype, torch.float32)
        rows, out, lse = q.narrow(2, 0, 21), out.narrow(2, 0, 21), torch.empty(2, 3, 21, device='cuda')
        for part, like in zip(flash.attend_backward(rows, rows, q, q, out, lse), (rows, q, q), strict=True):
            assert part.shape == like.shape and part.dtype == dtype
