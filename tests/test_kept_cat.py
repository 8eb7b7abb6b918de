"""Blocks that concatenate outputs of convolutions, like CSP and ELAN, save each map once and train exactly."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmdet.models.layers import CSPLayer
from oracles import DEVICE, assert_near, compute_loss, randomize
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.plan.memory import saved_bytes

ACTS = dict(SiLU={}, LeakyReLU=dict(negative_slope=0.1), ReLU={})


class Elan(nn.Module):
    """Block of four parallel convolutions and one that follows their concatenation.

    Args:
        touched (str): Map that is written to in place: 'part' before the concatenation, 'late' after it, or 'whole'.
    """

    def __init__(self, act='SiLU', touched='', upsampled=False, frozen=False):
        super().__init__()
        keys = dict(norm_cfg=dict(type='BN'), act_cfg=act and dict(type=act, **ACTS[act]))
        self.first = ConvModule(4, 8, 1, **keys)
        self.others = nn.ModuleList(ConvModule(8, 8, 3, padding=1, **keys) for _ in range(3))
        self.last = ConvModule(32, 6, 1, **keys)
        self.touched, self.upsampled = touched, upsampled
        if frozen:
            self.first.requires_grad_(False)

    def forward(self, x):
        outs = [self.first(x)]
        for conv in self.others:
            outs.append(conv(outs[-1]))
        if self.upsampled:
            outs[0] = nn.functional.interpolate(outs[0][..., ::2, ::2], size=x.shape[2:])
        if self.touched == 'part':
            outs[-1].mul_(2)
        whole = torch.cat(outs, 1)
        if self.touched == 'late':
            outs[-1].mul_(2)
        if self.touched == 'whole':
            whole.mul_(2)
        return self.last(whole)


class Outer(nn.Module):
    """A module within which layers hand on their maps."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


define_in_module('mmyolo.models.layers', Elan, Outer)  # a known project


def run_step(module, x):
    out = module(x)
    leaves = {'input': x} | {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {'output': out.detach()} | dict(
        zip(leaves, torch.autograd.grad(compute_loss([out]), [*leaves.values()]), strict=True)
    )


def assert_exact_and_count(module, channels=4, **keys):
    """Assert that the changed module is exact, and return how many maps of one channel it stores."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, 6, 10, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()
    lean = copy.deepcopy(module)
    apply_lean(lean, verify=False, **keys)
    if not keys:
        assert_near(run_step(lean, x), run_step(module, x), 1e-11)
    fixed = [*lean.parameters(), *lean.buffers(), x]
    return saved_bytes(lambda: lean(x), exclude=fixed) / (x.element_size() * 2 * 60)


@pytest.mark.parametrize('act', ACTS)
def test_what_was_concatenated_is_not_stored(act):
    assert (
        assert_exact_and_count(randomize(Outer(Elan(act)))) < 4 * 8 + 6 + 2
    )  # outputs of convolutions, and statistics


@pytest.mark.parametrize('touched', ['part', 'late', 'whole'])
def test_writes_are_seen(touched):
    assert_exact_and_count(randomize(Outer(Elan(None, touched))))


def test_a_part_of_another_origin_is_stored_by_itself():
    assert assert_exact_and_count(randomize(Outer(Elan(upsampled=True)))) < 4 * 8 + 8 + 6 + 2


def test_a_frozen_part():
    assert_exact_and_count(randomize(Outer(Elan(frozen=True))))


def test_eight_bits():
    assert assert_exact_and_count(randomize(Outer(Elan())), preset='int8') < 0.25 * (4 * 8 + 6 + 2)


@pytest.mark.parametrize('attention', [False, True])
def test_csp_layers_of_mmdet(attention):
    layer = randomize(Outer(CSPLayer(4, 8, num_blocks=2, use_cspnext_block=True, channel_attention=attention)))
    assert_exact_and_count(layer)
