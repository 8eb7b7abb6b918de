"""What the fused operations store for the backward pass, in bytes, and what they leave out for frozen parameters."""

import pytest
import torch
from helpers import FP16
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import (
    DOWNSAMPLE,
    KINDS,
    MLP,
    autocast,
    differentiate,
    downsample_inputs,
    fused_downsample,
    fused_mlp,
    fused_norm,
    half,
    keep_mask,
    keep_of,
    mlp_inputs,
    stored,
)
from oracles import assert_near
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet.masks import positions
from sbp_mmdet.ops.chunks import CHUNK
from sbp_mmdet.ops.storage import store


@given(trainable=st.sets(st.sampled_from(MLP), min_size=1), kind=KINDS, recompute=st.sampled_from([False, True]))
def test_frozen_mlp_parameters(trainable, kind, recompute):
    """Gradients for those who ask, and no more stored than for all."""
    tensors, _ = mlp_inputs()
    f = fused_mlp(keep_of(kind, keep_mask(kind, 5, 6)), recompute)
    everything = differentiate(f, tensors)
    actual = differentiate(f, tensors, trainable)
    assert_near(actual, {n: g if n in trainable or n == 'out' else None for n, g in everything.items()}, 1e-13)
    assert stored(f, tensors, trainable) <= stored(f, tensors)
    assert stored(f, tensors, ['shortcut']) == 0


@given(trainable=st.sets(st.sampled_from(DOWNSAMPLE), min_size=1), kind=KINDS)
def test_frozen_downsample_parameters(trainable, kind):
    tensors = downsample_inputs()
    keep = keep_of(kind, keep_mask(kind, 4, 3))
    f = fused_downsample(keep)
    everything = differentiate(f, tensors)
    actual = differentiate(f, tensors, trainable)
    assert_near(actual, {n: g if n in trainable or n == 'out' else None for n, g in everything.items()}, 1e-13)
    assert stored(f, tensors, trainable) <= stored(f, tensors)


@pytest.mark.parametrize('recompute', [False, True])
def test_frozen_inputs_store_no_xhat(recompute):
    """x-hat is for the norm and what lies before and behind it; the second pointwise layer needs the hidden one."""
    tensors, _ = mlp_inputs(n=2, c=8, d=20, height=5, width=6)
    keep = positions(keep_mask('half', 5, 6))
    rows = 2 * len(keep.keep)
    used = stored(fused_mlp(keep, recompute), tensors, ['weight2', 'bias2', 'gamma'])
    assert used <= rows * (8 if recompute else 20) * 8 + rows * 8 + keep.keep.nbytes
    tensors = downsample_inputs(n=2, c=6, height=10, width=12)
    used = stored(fused_downsample(keep), tensors, ['norm_bias', 'bias'])
    assert used <= rows * 4 * 8 + keep.keep.nbytes


@pytest.mark.parametrize('kept', [0, 7, 20, 30])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, FP16])
@pytest.mark.parametrize('recompute', [False, True])
def test_mlp_stores(kept, dtype, recompute):
    """For each kept position x-hat, 1 / deviation and the hidden layer; nothing else, nothing of the others."""
    tensors, _ = mlp_inputs(n=3, c=8, d=20, height=5, width=6, dtype=torch.promote_types(dtype, torch.float32))
    keep = positions(torch.arange(30).view(5, 6) < kept)
    f = fused_mlp(keep, recompute)
    f = f if dtype.itemsize > 2 else half(f, dtype)
    deviation = 8 if dtype == torch.float64 else 4
    row = (8 + 20 * (not recompute)) * dtype.itemsize + deviation
    assert stored(f, tensors) == 3 * kept * row + keep.keep.nbytes


@pytest.mark.parametrize('kept', [0, 5, 12])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_downsample_stores(kept, dtype):
    tensors = downsample_inputs(n=2, c=6, height=8, width=6, dtype=torch.promote_types(dtype, torch.float32))
    keep = positions(torch.arange(12).view(4, 3) < kept)
    deviation = 8 if dtype == torch.float64 else 4
    f = fused_downsample(keep)
    f = f if dtype.itemsize > 2 else autocast(f, dtype)
    assert stored(f, tensors) == 2 * kept * 4 * (6 * dtype.itemsize + deviation) + keep.keep.nbytes


def test_layer_norm_stores():
    """Under autocast x-hat in reduced precision; where the convolution before it is stored anyway, nothing."""
    tensors, conv = mlp_inputs(dtype=torch.float32)
    tensors = {name: tensors[name] for name in ('x', 'norm_weight', 'norm_bias')}
    n, c, height, width = tensors['x'].shape
    assert stored(autocast(fused_norm(), torch.bfloat16), tensors) == n * height * width * (2 * c + 4)
    assert stored(fused_norm(conv), tensors, extra=[conv.input.values, conv.weight, conv.bias]) == 0


def test_mlp_with_conv_stores_indices_only():
    tensors, conv = mlp_inputs()
    keep = positions(keep_mask('half', 5, 6))
    assert (
        stored(fused_mlp(keep, 'conv', conv), tensors, extra=[conv.input.values, conv.weight, conv.bias])
        == keep.keep.nbytes
    )


@pytest.mark.parametrize('images', [1, 3, 64])
def test_int8_takes_small_images_together(images, monkeypatch):
    """The number of operations does not grow with the number of images, as long as these are small."""
    x = torch.randn(images, 7, 5, generator=torch.Generator().manual_seed(0))

    class Operations(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.mul, torch.ops.aten.round_)
            return func(*args, **(kwargs or {}))

    for chunk, each in ((2**24, 1), (1, images)):  # together, and one by one
        monkeypatch.setitem(CHUNK, 'cuda', chunk)
        with Operations() as operations:
            kept = store(x, 'int8', 1)
            again = kept.load(torch.float32)
        assert operations.number == 2 + 2 * each  # the scale and loading; a quotient and its rounding
        scale = x.abs().amax(1, keepdim=True) / 127
        assert torch.equal(kept.values, (x / scale).round().to(torch.int8)) and torch.equal(again, kept.values * scale)
