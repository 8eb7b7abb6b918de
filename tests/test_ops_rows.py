"""Layouts, chunks and algebra under the operations agree with their definitions or with autograd."""

import pytest
import torch
import torch.nn.functional as F
from helpers import needs_fp16
from oracles import relative_error

from sbp_mmdet.ops.common import folding, layouts, precision
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.common.layouts import CHUNK, Chunk, cut_into_chunks, elements_at_a_time


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_tokens_and_maps(layout):
    x, index = normal(2, 3, 4, 5).contiguous(memory_format=layout), torch.tensor([1, 7, 19])
    tokens = layouts.tokens_of(x)
    assert torch.equal(tokens, x.permute(0, 2, 3, 1).reshape(2, 20, 3)) and layouts.tokens_of(tokens) is tokens
    assert torch.equal(layouts.in_shape(tokens, x.shape), x)
    empty = layouts.in_shape(layouts.empty_tokens(tokens.shape, layouts.layout_of(x), x.dtype, x.device), x.shape)
    assert empty.is_contiguous(memory_format=layout) and empty.shape == x.shape
    picked = tokens[:, index]
    alone = layouts.scatter_rows(picked, index, 20)
    assert torch.equal(alone[:, index], picked) and alone.count_nonzero() == picked.numel()
    summed = layouts.add_rows_(torch.ones(2, 4, 3, dtype=x.dtype), torch.tensor([3, 1, 0]), picked)
    assert torch.equal(summed[:, [3, 1, 0]], 1 + picked) and summed[:, 2].eq(1).all()
    assert torch.equal(layouts.add_rows_(picked.clone(), None, picked), 2 * picked)


def test_memory_format():
    x = normal(2, 3, 4, 5)
    assert layouts.memory_format(x) == torch.contiguous_format
    assert layouts.memory_format(x.contiguous(memory_format=torch.channels_last)) == torch.channels_last


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_normalise_and_its_gradient(dtype):
    x = (normal(50, 16, seed=1) * 3 + 1).to(dtype).double().requires_grad_()
    grad = normal(50, 16, seed=2).to(dtype)
    expected = F.layer_norm(x, (16,), eps=1e-3)
    (expected_grad,) = torch.autograd.grad(expected, x, grad.double())
    xhat, rstd = folding.normalise(x.detach().to(dtype), 1e-3, dtype)
    full = torch.promote_types(dtype, torch.float32)
    assert xhat.dtype == dtype and rstd.dtype == full
    assert relative_error(rstd, (x.var(1, correction=0, keepdim=True) + 1e-3).rsqrt()) < 4 * torch.finfo(full).eps
    assert relative_error(xhat, expected) < 4 * torch.finfo(dtype).eps
    actual = folding.normalise_backward(grad, xhat, rstd, dtype)
    assert actual.dtype == dtype
    assert relative_error(actual, expected_grad) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize('has_weight', [True, False])
@pytest.mark.parametrize('has_bias', [True, False])
def test_folding_and_its_gradient(has_weight, has_bias):
    weight, bias = normal(6, 4, seed=1).requires_grad_(), normal(6, seed=2).requires_grad_()
    norm_weight = normal(4, seed=3).requires_grad_() if has_weight else None
    norm_bias = normal(4, seed=4).requires_grad_() if has_bias else None
    xhat = normal(9, 4)
    affine = xhat * (1 if norm_weight is None else norm_weight) + (0 if norm_bias is None else norm_bias)
    out = F.linear(affine, weight, bias)
    with torch.no_grad():
        folded = folding.fold(weight, bias, norm_weight, norm_bias, torch.float64)
    assert relative_error(F.linear(xhat, *folded), out) < 1e-12

    grad = normal(9, 6, seed=5)
    with torch.no_grad():
        actual = folding.unfold(grad.T @ xhat, grad.sum(0), weight, norm_weight, norm_bias)
    parameters = [norm_weight, norm_bias, weight, bias]
    expected = torch.autograd.grad(out, [p for p in parameters if p is not None], grad)
    for got, want in zip([g for g in actual if g is not None], expected, strict=True):
        assert relative_error(got, want) < 1e-12
    dnw, dnb, dw, _ = folding.unfold(None, grad.sum(0), weight.detach(), norm_weight, norm_bias)
    assert dnw is dw is None and (dnb is None) != has_bias


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_accumulation_is_in_full_precision(dtype):
    """The sum has thousands of small terms, each of which bf16 would round away."""
    ones = torch.ones(4096, 2, dtype=dtype)
    assert precision.column_sums(ones).tolist() == [4096.0] * 2
    total = precision.zeros_for(torch.zeros(2, 2, dtype=dtype))
    for chunk in ones.split(8):
        precision.accumulate(total, chunk, chunk)
    assert total.dtype == torch.float32 and (total == 4096).all()


@needs_fp16
def test_long_sums_in_fp16_stay_in_range():
    """Rows are scaled to 1/16 of their maximum; the hidden layer is 9, so one product would exceed 65504."""
    rows_ = 131072
    a, b = torch.full((2, rows_), 1 / 16).half(), torch.full((rows_, 3), 9.0).half()
    total = torch.ones(2, 3)
    precision.accumulate(total, a.T, b)
    assert torch.equal(total, torch.full((2, 3), 1 + rows_ * 9 / 16))


def numbers_of(chunk, each):
    """Return the indices of a chunk's rows, numbered image after image."""
    rows = range(each)[chunk.rows]
    return [image * each + row for image in range(10)[chunk.images] for row in rows]


@pytest.mark.parametrize('images', [0, 1, 2, 5])
@pytest.mark.parametrize('each', [0, 1, 3, 7, 8, 9, 23, 24, 25])
def test_chunks(images, each):
    """Chunks contain all rows once and in order, at most 8 at a time, of about equal size, as views for any strides."""
    parts = cut_into_chunks(images, each, 4, torch.device('cpu'), 8 * 4)
    tokens = torch.arange(images * each * 2).view(images, 2, each).transpose(1, 2)
    whole = tokens.reshape(-1, 2)
    places = [numbers_of(chunk, each) for chunk in parts]
    assert sum(places, []) == list(range(images * each))
    sizes = [len(chunk.take_rows(tokens)) for chunk in parts]
    assert all(size <= 8 for size in sizes) and (not sizes or max(sizes) - min(sizes) <= max(each, len(sizes)))
    copy = torch.zeros_like(whole).view(images, each, 2)
    for chunk, place in zip(parts, places, strict=True):
        assert torch.equal(chunk.take_rows(tokens), whole[place])
        assert torch.equal(chunk.take_rows(tokens.flip(1), torch.arange(each).flip(0)), whole[place])
        chunk.put_(copy, whole[place])
    assert torch.equal(copy, tokens)


def test_a_chunk_of_a_wide_layer_has_enough_rows_for_its_products():
    sizes = 1, 1280, 2**14, torch.device('cpu')
    (one, two), few = cut_into_chunks(*sizes), cut_into_chunks(*sizes, 2**16)
    assert one.rows == slice(0, 640) and two.rows == slice(640, 1280)
    assert all(chunk.rows.stop - chunk.rows.start == 4 for chunk in few)  # who says how many, gets that


@pytest.mark.parametrize('form', [Form(minimal=True), Form(storage='int8')])
def test_presets_that_put_memory_first_compute_half_as_much_at_a_time(form, monkeypatch):
    cpu, cuda = torch.device('cpu'), torch.device('cuda')
    monkeypatch.setitem(CHUNK, 'cuda', 2**26)
    assert elements_at_a_time(cuda) == elements_at_a_time(cuda, Form()) == 2**26
    assert elements_at_a_time(cuda, form) == 2**25
    assert elements_at_a_time(cpu, form) == CHUNK['cpu']  # small enough as it is
    few, one = (cut_into_chunks(1, 2**16, 2**10, cuda, form=each) for each in (form, Form()))
    assert (len(few), len(one)) == (2, 1)


def test_a_chunk_of_every_other_row():
    """Rows 1 and 4 of images 0 and 2, out of three images with five rows each, are not a slice of all rows."""
    some = Chunk(slice(0, 3, 2), slice(1, 5, 3))
    x = torch.arange(15).view(3, 5, 1)
    assert some.num_images == 2
    assert some.take_rows(x).flatten().tolist() == [1, 4, 11, 14]
    backwards = torch.arange(5).flip(0)
    assert some.take_rows(x, backwards).flatten().tolist() == [3, 0, 13, 10]
    out = torch.zeros_like(x)
    some.put_(out, torch.tensor([[7], [8], [9], [6]]), backwards)
    assert out[:, :, 0].tolist() == [[8, 0, 0, 7, 0], [0] * 5, [6, 0, 0, 9, 0]]
