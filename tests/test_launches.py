"""Blocks launch no more kernels than they should, and their matrix products are aligned in memory."""

from unittest import mock

import launches
import pytest
import torch
from fake_cuda import simulate_gpu
from launches import AMP, Launches, count_block_launches
from torch import nn

from sbp_mmdet.ops.common import precision as precision

# At most so many launches, forward and backward pass together, and bytes that they move, relative to plain. Plain ViT's
# attention has no flash kernel here and moves its maps, so its bytes say nothing.
LIMITS = {
    ('ConvNeXt-B, stage 1', 'fp16'): dict(exact=(90, 0.91), int8=(104, 1.02), sampled=(177, 0.95), sbp=(73, 0.72)),
    ('ConvNeXt-B, stage 3', 'fp16'): dict(exact=(64, 1.0), int8=(75, 1.12), sampled=(113, 1.06), sbp=(67, 0.81)),
    ('ConvNeXt V2-B, stage 3', 'fp16'): dict(exact=(112, 0.68), int8=(123, 0.72), sampled=(178, 0.71)),
    ('Swin-B, stage 1, shifted', 'fp16'): dict(
        exact=(181, 1.03), exact_min=(268, 1.22), int8=(245, 1.1), sampled=(396, 1.08), sbp=(170, 0.96)
    ),
    ('Swin-B, stage 3, shifted', 'fp16'): dict(
        exact=(116, 1.04), exact_min=(139, 1.22), int8=(132, 1.12), sampled=(229, 1.1), sbp=(121, 0.98)
    ),
    ('ViT-B', 'fp16'): dict(exact=(98, 1.0), exact_min=(110, 1.0), int8=(113, 1.0), sampled=(220, 1.0), sbp=(111, 1.0)),
    ('ResNet-50, stage 2', 'fp16'): dict(exact=(67, 0.96), exact_min=(77, 1.02), int8=(107, 1.78)),
    ('ResNet-50, stage 2, whole', 'fp16'): dict(exact=(258, 1.27), exact_min=(305, 1.39), int8=(347, 1.64)),
    ('CSPNeXt, BN', 'fp16'): dict(exact=(117, 1.03), exact_min=(133, 1.12), int8=(232, 1.66)),
    ('CSPNeXt, SyncBN', 'fp16'): dict(exact=(189, 1.03), exact_min=(205, 1.11), int8=(304, 1.6)),
    ('DINO, encoder layer', 'fp16'): dict(exact=(192, 1.17), int8=(294, 1.32)),
    ('DINO, decoder layer', 'fp16'): dict(exact=(251, 1.32), int8=(253, 1.33)),
}


@pytest.fixture(scope='module')
def mode():
    """Open the fake GPU, and skip the initialisation of weights, which have no numbers there."""
    skipped = dict.fromkeys(('kaiming_uniform_', 'trunc_normal_', 'uniform_'), lambda tensor, *args, **kwargs: tensor)
    with simulate_gpu() as mode, mock.patch.multiple(nn.init, **skipped):
        yield mode


def count_launches(mode, *case):
    """Return the launches and the bytes of a block's forward and backward pass."""
    parts = count_block_launches(mode, *case)
    return sum(part.total for part in parts), sum(part.bytes for part in parts)


@pytest.mark.parametrize(('block', 'amp'), LIMITS)
def test_launches_and_bytes_of_a_block(block, amp, mode):
    plain, moved = count_launches(mode, block, 'none', AMP[amp])
    for preset, (limit, share) in LIMITS[block, amp].items():
        counts, own = count_launches(mode, block, preset, AMP[amp])
        assert counts <= limit, (preset, counts)
        assert own <= share * moved, (preset, own / moved)
        assert preset not in ('exact', 'sbp') or counts <= 2.1 * plain, (preset, counts, plain)


def test_what_counts_as_a_launch(mode):
    """Views and allocations are no launches; a norm of columns copies them first; a convolution has three gradients."""
    x = torch.empty(2, 6, 8, device='cuda')
    with Launches() as found:
        y = x.transpose(1, 2).flatten(0, 1).view(2, 8, 6)  # a copy
        torch.empty_like(y).add_(y)
        torch.native_layer_norm(x.mT, (6,), None, None, 1e-5)
    assert found.number == dict(clone=1, add_=1, native_layer_norm=2)


def test_what_counts_as_a_launch_of_lists(mode):
    """CUDA multiplies lists by one kernel if pairs have the same shape and strides, and all tensors one precision."""
    x, row = torch.empty(4, 8, device='cuda'), torch.empty(4, 1, device='cuda')
    with Launches() as found:
        torch._foreach_mul_([x, row], [x, row])
        torch._foreach_add_([x, x, x], [row, row, row])
        torch._foreach_mul([x, x], [x.half(), x.half()])
        torch._foreach_add([x, x], [x.new_empty(8, 4).t()] * 2)
        torch._foreach_copy_([x, x], [x.half(), x.half()])
    del found.number['_to_copy']
    assert found.number == dict(_foreach_mul_=1, _foreach_add_=3, _foreach_mul=2, _foreach_add=2, _foreach_copy_=1)


def test_what_counts_as_bytes(mode):
    """Memory that is read and written counts once: an expanded tensor is small, and a view has no bytes."""
    x, row = torch.empty(4, 8, device='cuda'), torch.empty(1, 8, device='cuda')
    with Launches() as found:
        x.add_(row.expand(4, 8)).view(-1)
    assert found.bytes == (4 * 8 + 8 + 4 * 8) * 4


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sampled', 'sbp'])
def test_matrix_products_are_aligned(preset, mode, monkeypatch):
    """Maps may have an odd number of positions, so that their columns begin at any address."""
    for block, size in (
        ('ConvNeXt-B, stage 1', (796, 1332)),
        ('ConvNeXt-B, stage 3', (800, 1344)),
        ('ViT-B', (800, 1344)),
    ):
        monkeypatch.setattr(launches, 'IMAGES', (2, 3, *size))
        products = [p for part in count_block_launches(mode, block, preset, torch.float16) for p in part.products]
        assert len(products) >= 12
        assert not {p for p in products if not p.aligned}, block


def test_a_torch_without_products_in_full_precision(mode, monkeypatch):
    """Before torch 2.8, another branch is taken, which sums in parts."""
    new, _ = count_launches(mode, 'ConvNeXt-B, stage 3', 'exact', torch.float16)
    monkeypatch.setattr(precision, '_sums_in_full', lambda device, dtype: False)
    assert new < count_launches(mode, 'ConvNeXt-B, stage 3', 'exact', torch.float16)[0] <= new + 6
