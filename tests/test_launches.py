"""Launches of blocks at the sizes of the recipe, and how their matrix products lie in memory, counted without a GPU."""

import launches
import pytest
import torch
from fake_cuda import gpu_that_is_not_there
from launches import AMP, Launches, block_launches

from sbp_mmdet.ops.common import precision as precision

# At most so many, forward and backward pass together. Plain blocks: 53, 124, 93 and 33.
LIMITS = {
    ('ConvNeXt-B, stage 1', 'bf16'): dict(exact=93, int8=109, sampled=189, sbp=73),
    ('ConvNeXt-B, stage 1', 'fp16'): dict(exact=104, int8=120, sampled=200, sbp=83),
    ('ConvNeXt-B, stage 3', 'bf16'): dict(exact=68, int8=84, sampled=121, sbp=69),
    ('ConvNeXt-B, stage 3', 'fp16'): dict(exact=78, int8=94, sampled=131, sbp=79),
    ('Swin-B, stage 1, shifted', 'fp16'): dict(exact=205, int8=234, sampled=451, sbp=193),
    ('Swin-B, stage 3, shifted', 'fp16'): dict(exact=142, int8=170, sampled=270, sbp=147),
    ('ViT-B', 'fp16'): dict(exact=107, int8=135, sampled=245, sbp=118),
    ('ResNet-50, stage 2', 'fp16'): dict(exact=69, int8=122),
    ('ResNet-50, stage 4', 'fp16'): dict(exact=69, int8=122),
}


@pytest.fixture(scope='module')
def mode():
    with gpu_that_is_not_there() as mode:
        yield mode


def launched(mode, *case):
    return sum(part.total for part in block_launches(mode, *case))


@pytest.mark.parametrize(('block', 'amp'), LIMITS)
def test_launches_of_a_block(block, amp, mode):
    plain = launched(mode, block, 'none', AMP[amp])
    for preset, limit in LIMITS[block, amp].items():
        found = launched(mode, block, preset, AMP[amp])
        assert found <= limit, preset
        assert preset not in ('exact', 'sbp') or found <= 2.1 * plain, (preset, found, plain)


def test_what_counts_as_a_launch(mode):
    """A view and an allocation are none; a norm of columns copies them first; a convolution has three gradients."""
    x = torch.empty(2, 6, 8, device='cuda')
    with Launches() as found:
        y = x.transpose(1, 2).flatten(0, 1).view(2, 8, 6)  # a copy
        torch.empty_like(y).add_(y)
        torch.native_layer_norm(x.mT, (6,), None, None, 1e-5)
    assert found.number == dict(clone=1, add_=1, native_layer_norm=2)


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sampled', 'sbp'])
def test_matrix_products_are_aligned(preset, mode, monkeypatch):
    """Also where a map has an odd number of positions, so that its columns begin anywhere."""
    for block, size in (
        ('ConvNeXt-B, stage 1', (796, 1332)),
        ('ConvNeXt-B, stage 3', (800, 1344)),
        ('ViT-B', (800, 1344)),
    ):
        monkeypatch.setattr(launches, 'IMAGES', (2, 3, *size))
        products = [p for part in block_launches(mode, block, preset, torch.float16) for p in part.products]
        assert len(products) >= 12
        assert not {p for p in products if not p.aligned}, block


def test_a_torch_without_products_in_full_precision(mode, monkeypatch):
    """The branch of torch before 2.8 is taken, and sums in pieces."""
    new = launched(mode, 'ConvNeXt-B, stage 3', 'exact', torch.float16)
    monkeypatch.setattr(precision, '_sums_in_full', lambda device, dtype: False)
    assert new < launched(mode, 'ConvNeXt-B, stage 3', 'exact', torch.float16) <= new + 6
