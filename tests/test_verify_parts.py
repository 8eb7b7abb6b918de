"""For large inputs, gradients are compared on the first images and rows, outputs and stored bytes on all."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmdet.models.backbones import ResNet
from mmdet.models.necks import FPN
from oracles import random_images
from torch import nn
from torch.utils.checkpoint import checkpoint
from verify_models import build_in_training

from sbp_mmdet import apply_lean
from sbp_mmdet.ops import conv_norm_act
from sbp_mmdet.verify import parts_of_inputs
from sbp_mmdet.verify.checks import verify_modules
from sbp_mmdet.verify.parts_of_inputs import first_part

VERIFIES = True


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(parts_of_inputs._LEAST, 'cpu', 2**12)


def random_maps(*shapes):
    return [torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) for shape in shapes]


def test_images_come_before_rows(small):
    (x,), named = first_part(tuple(random_maps((16, 8, 20, 10))), dict(skip=None))
    assert x.shape == (3, 8, 20, 10) and named == dict(skip=None)
    assert torch.equal(x, random_maps((16, 8, 20, 10))[0][:3])


def test_rows_stay_even_or_odd_and_in_proportion(small):
    ((first, second),), _ = first_part((random_maps((2, 16, 41, 20), (2, 16, 21, 10)),), {})
    assert first.shape == (2, 16, 9, 20) and second.shape == (2, 16, 5, 10)


def test_tokens_are_cut_with_the_size_of_their_map(small):
    (x, size), named = first_part((*random_maps((2, 56 * 20, 16)), (56, 20)), {})
    assert size == (28, 20) and x.shape == (2, 560, 16) and not named


def test_rows_of_a_matrix(small):
    (x,), _ = first_part(tuple(random_maps((64, 512))), {})
    assert x.shape == (8, 512)


@pytest.mark.parametrize(
    'args',
    [
        (torch.randn(2, 8, 4, 4),),  # small
        (torch.randn(2, 999, 16),),  # tokens of a map of unknown size
        (torch.randn(64, 99, 16), torch.ones(64, 99, dtype=torch.bool)),  # a mask
        (torch.randn(64, 99, 16), torch.randn(4, 16)),  # something that has no images
        (torch.randn(99999),),
        (),
    ],
)
def test_what_is_small_or_of_another_kind_is_left_whole(args, small):
    assert first_part(args, {}) is None


def test_a_gpu_takes_the_whole(small):
    assert first_part((torch.empty(9, 99, 99, 9, device='meta'),), {}) is None


def verify_and_count(model, x):
    return verify_modules(
        model, [name for name, m in model.named_modules() if hasattr(m, '_lean')], lambda model: model(x)
    )


@pytest.mark.parametrize('make', [lambda: ResNet(50, base_channels=8), lambda: Neck()], ids=['ResNet', 'FPN'])
def test_stored_bytes_are_those_of_the_whole(make, monkeypatch):
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 3, 96, 64)
    model.train()
    apply_lean(model, verify=False)
    whole = verify_and_count(copy.deepcopy(model), x)
    monkeypatch.setitem(parts_of_inputs._LEAST, 'cpu', 2**12)
    ran = []
    compare_part = parts_of_inputs.first_part
    monkeypatch.setattr(
        'sbp_mmdet.verify.checks.first_part', lambda *call: ran.append(found := compare_part(*call)) or found
    )
    part = verify_and_count(model, x)
    assert any(ran) and not part.failed and part.stored == whole.stored
    assert [(kind.name, kind.skipped) for kind in part.kinds] == [(kind.name, kind.skipped) for kind in whole.kinds]


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.down = ConvModule(3, 8, 3, padding=1), ConvModule(8, 8, 3, stride=2, padding=1)
        self.neck = FPN([8, 8], 8, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.neck((x, self.down(x)))


def test_an_output_that_is_wrong_behind_the_part_is_found(small, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(ConvModule(3, 8, 3, padding=1, norm_cfg=dict(type='BN'))).train()
    x = torch.randn(4, 3, 96, 64)
    apply_lean(model, verify=False)
    convolve = conv_norm_act.convolve

    def wrong(*args):
        out = convolve(*args)
        (out if isinstance(out, torch.Tensor) else out[0])[:, :, 60:].mul_(1.01)
        return out

    assert not verify_and_count(model, x).failed
    monkeypatch.setattr(conv_norm_act, 'convolve', wrong)
    assert verify_and_count(model, x).failed


@pytest.mark.parametrize('name', ['ViTDet', 'encoder', 'attention', 'fusion'])
def test_a_checkpoint_around_the_first_pass(name):
    """torch refuses to recompute a pass that saves other tensors than the first one; those of the verification count.

    The operations of these models record gradients in their backward passes.
    """
    model = build_in_training(name)
    report = apply_lean(model)
    outs = checkpoint(model, random_images(2, 64, 96, dtype=torch.float32), use_reentrant=False)
    sum(out.square().mean() for out in outs).backward()
    assert report.changed and not any('verification' in reason for reason in report.left.values())
