"""RepVGG blocks and CSP blocks of mmyolo train like their own code in fp64 and store less."""

import copy
import functools

import pytest
import torch
from mmcv.cnn import ConvModule
from mmdet.models.layers.csp_layer import DarknetBottleneck as MMDetBottleneck
from oracles import DEVICE, assert_near, compute_loss
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import adapter_of
from sbp_mmdet.plan.memory import saved_bytes

of_mmyolo = functools.partial(define_in_module, 'mmyolo.models.layers.yolo_bricks')


@of_mmyolo
class RepVGGBlock(nn.Module):
    """RepVGG block of mmyolo, by its definition."""

    def __init__(self, channels, out=None, alpha=False, act=nn.ReLU, norm='BN'):
        super().__init__()
        norm, out = norm and dict(type=norm), out or channels
        self.nonlinearity, self.se = act(inplace=True), nn.Identity()
        self.alpha = nn.Parameter(torch.ones(1)) if alpha else None
        self.rbr_identity = nn.BatchNorm2d(channels) if out == channels else None
        self.rbr_dense = ConvModule(channels, out, 3, padding=1, bias=False, norm_cfg=norm, act_cfg=None)
        self.rbr_1x1 = ConvModule(channels, out, 1, bias=False, norm_cfg=norm, act_cfg=None)

    def forward(self, x):
        out = self.rbr_1x1(x)
        out = self.rbr_dense(x) + (out if self.alpha is None else self.alpha * out)
        return self.nonlinearity(self.se(out if self.rbr_identity is None else out + self.rbr_identity(x)))


@of_mmyolo
class DarknetBottleneck(MMDetBottleneck):
    """Darknet bottleneck of mmyolo, which derives from mmdet's and has other convolutions."""

    def __init__(self, channels):
        super().__init__(channels, channels)
        keys = dict(padding=1, norm_cfg=dict(type='BN'), act_cfg=dict(type='SiLU'))
        self.conv1, self.conv2 = (ConvModule(channels, channels, 3, **keys) for _ in range(2))
        self.add_identity = True


def blocks(*made):
    torch.manual_seed(0)
    model = nn.Sequential(*made).double().to(DEVICE).train()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5 + 0.3)
    return model


def random_images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 8, 12, 10, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def run_step(model):
    model = copy.deepcopy(model)
    x = random_images()
    out = model(x)
    leaves = dict((name, p) for name, p in model.named_parameters() if p.requires_grad) | dict(input=x)
    gradients = dict(zip(leaves, torch.autograd.grad(compute_loss((out,)), [*leaves.values()]), strict=True))
    return gradients | dict(model.named_buffers(), output=out.detach())


def count_stored_maps(model):
    model, x = copy.deepcopy(model), random_images()
    return saved_bytes(lambda: model(x), exclude=[x, *model.parameters(), *model.buffers()]) / (8 * x.numel())


def make_lean_copy(model, preset='exact'):
    changed = copy.deepcopy(model)
    return changed, apply_lean(changed, preset=preset, verify=False)


@pytest.mark.parametrize('keys', [{}, dict(alpha=True), dict(act=nn.SiLU), dict(out=6)], ids=str)
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_repvgg_blocks_are_exact(keys, preset):
    model = blocks(RepVGGBlock(8), RepVGGBlock(8, **keys))
    changed, report = make_lean_copy(model, preset)
    assert_near(run_step(changed), run_step(model), 1e-11)
    assert {'0', '1'} <= {*report.changed} and not report.left


@pytest.mark.parametrize('preset, most', [('exact', 4.1), ('exact_min', 2.1)])
def test_repvgg_blocks_store_two_maps_or_one(preset, most):
    model = blocks(RepVGGBlock(8), RepVGGBlock(8))
    assert count_stored_maps(model) > 5.9 and count_stored_maps(make_lean_copy(model, preset)[0]) < most


def test_a_frozen_or_hooked_repvgg_block_is_exact():
    model = blocks(RepVGGBlock(8), RepVGGBlock(8))
    model[1].requires_grad_(False)
    assert_near(run_step(make_lean_copy(model)[0]), run_step(model), 1e-11)
    model[0].rbr_1x1.register_forward_hook(lambda module, args, out: 2 * out)
    changed, report = make_lean_copy(model)
    assert_near(run_step(changed), run_step(model), 1e-11)
    assert '0' in report.changed


def test_repvgg_blocks_without_norms_or_branches_keep_their_code():
    for block in (RepVGGBlock(8, norm=None), RepVGGBlock(8)):
        if block.rbr_1x1.with_norm:
            block.rbr_reparam = nn.Conv2d(8, 8, 3, padding=1)
        model = blocks(block, RepVGGBlock(8))
        changed, report = make_lean_copy(model)
        assert '0' in report.left and '1' in report.changed
        if 'rbr_reparam' not in block._modules:
            assert_near(run_step(changed), run_step(model), 1e-11)


def test_repvgg_blocks_count_a_batch_once():
    model = blocks(RepVGGBlock(8))
    changed, _ = make_lean_copy(model, 'exact_min')
    for each in (model, changed):
        each(random_images()).sum().backward()
    assert_near(dict(changed.named_buffers()), dict(model.named_buffers()), 1e-12)


def test_a_class_that_derives_from_a_known_one_by_its_init_alone_is_known():
    model = blocks(DarknetBottleneck(8), DarknetBottleneck(8))
    changed, report = make_lean_copy(model)
    assert_near(run_step(changed), run_step(model), 1e-11)
    assert {'0', '1'} <= {*report.changed} and not report.left

    class Other(DarknetBottleneck):
        def forward(self, x):
            return 2 * super().forward(x)

    assert (
        adapter_of(model[0]) is adapter_of(Other(8))
        and '0' in make_lean_copy(blocks(Other(8), DarknetBottleneck(8)))[1].left
    )
