"""SyncBN of two processes that run a backbone in different ways: the result is that of batch norm over all images.

A process without images calls the layers of a chain one by one, and so does one in which somebody has registered a
hook, for example to show feature maps in the first process only. Their norms communicate with those of the chain.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from conv_models import BACKBONES, build_module
from helpers import run_ranks
from mmengine.model import convert_sync_batchnorm
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.verify import checks

VERIFIES = True
TRAINED = ['ResNet-18, training', 'ResNetV1d-50', 'ResNeXt-50', 'Res2Net', 'HRNet']


def leave_alone(model):
    pass


def hook_activations(model):
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda *args: None)


def compute_loss(outs):
    """Return a loss that is the sum of those of the images."""
    weights = [torch.linspace(-2, 3, out.shape[1:].numel(), dtype=out.dtype).cos().view(out.shape[1:]) for out in outs]
    return sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))


def compare_ranks(name, preset, split, change):
    """Compare each process of two with one process that has all images; the first has the images before ``split``."""
    dist.init_process_group('gloo')
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = build_module(BACKBONES[name][0] | dict(norm_eval=False))
    lean = convert_sync_batchnorm(copy.deepcopy(whole))
    if dist.get_rank() == 1:
        change(lean)
    apply_lean(lean, preset, verify=False)
    compute_loss(whole(images)).backward()
    compute_loss(lean([images[:split], images[split:]][dist.get_rank()])).backward()
    for p, q in zip(lean.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(p.grad)
        assert (p.grad - q.grad).norm() <= 1e-9 * q.grad.norm().clamp_min(1e-2)
    torch.testing.assert_close(dict(lean.named_buffers()), dict(whole.named_buffers()), rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', TRAINED)
def test_a_rank_without_images(name, preset):
    run_ranks(compare_ranks, name, preset, 4, leave_alone, seconds=60)


@pytest.mark.parametrize('name', TRAINED)
def test_a_rank_with_hooks(name):
    run_ranks(compare_ranks, name, 'exact', 3, hook_activations, seconds=60)


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize(('name', 'split', 'change'), [
    ('ResNeSt', 3, hook_activations), ('plugins', 3, hook_activations),
    ('plugins', 4, leave_alone),  # mmdet's ResNeSt refuses a batch without images
])  # fmt: skip
def test_blocks_that_are_recomputed_in_one_rank_or_in_both(preset, name, split, change):
    """The recomputation does not communicate."""
    run_ranks(compare_ranks, name, preset, split, change, seconds=60)


def verify_with_hooks_in_one_rank():
    dist.init_process_group('gloo')
    model, lengths = build_module(BACKBONES['ResNet-18, training'][0]), []
    if dist.get_rank() == 1:
        hook_activations(model)
    changed = len(apply_lean(model).changed)
    checks.all_reduce = lambda flags, op: lengths.append(len(flags))  # gloo does not always notice other lengths
    compute_loss(model(torch.randn(2, 3, 64, 64, dtype=torch.float64))).backward()
    numbers = [None, None]
    dist.all_gather_object(numbers, (changed, lengths))
    assert numbers[0][0] != numbers[1][0] and numbers[0][1] == numbers[1][1], numbers
    dist.destroy_process_group()


def test_verification_where_the_ranks_changed_different_modules():
    run_ranks(verify_with_hooks_in_one_rank, seconds=60)
