"""Res2Net's blocks give the outputs and gradients of their own code, whatever the norms and settings of their groups.

Those of unchanged blocks are tested in test_residual_chain.py.
"""

import pytest
import torch
from cases import make_lean_copy
from mmdet.models.backbones import res2net
from test_residual_chain import build_stage, compute_gradients, largest_difference, random_map
from torch import nn

NORMS = {
    'first in evaluation mode': lambda i, norm: norm.train(i != 0),
    'second in evaluation mode': lambda i, norm: norm.train(i != 1),
    'first in training mode': lambda i, norm: norm.train(i == 0),
    'last in training mode': lambda i, norm: norm.train(i == 2),
    'second is a group norm': lambda i, norm: _group_norm(norm) if i == 1 else norm,
    'last is a batch norm': lambda i, norm: norm if i == 2 else _group_norm(norm),
    'all kinds': lambda i, norm: _group_norm(norm) if i == 1 else norm.train(i == 2),
}


def _group_norm(norm):
    return nn.GroupNorm(2, norm.num_features).to(norm.weight)


def _compare(lean, plain, most=1e-10):
    actual, expected = compute_gradients(lean, random_map()), compute_gradients(plain, random_map())
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-10)
    assert largest_difference(actual[1], expected[1]) < most


def _build(norm_eval=True):
    return build_stage(res2net.Bottle2neck, dict(stride=2, scales=4, base_width=32), norm_eval, blocks=2)


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize(('preset', 'most'), [('exact', 1e-10), ('exact_min', 1e-10), ('int8', 0.05)])
def test_groups_with_norms_of_different_kinds(name, preset, most):
    """A split layer saves the norm's input of some groups and the norm's output of others, by the kind of the norm."""
    plain = _build(norm_eval=False)
    for block in plain:
        for i, norm in enumerate(block.bns):
            block.bns[i] = NORMS[name](i, norm)
    _compare(make_lean_copy(plain, preset), plain, most)


def _third_group_is_last(block):
    """Leave the fourth group of channels out."""
    block.scales = 3
    block.conv3.weight = nn.Parameter(block.conv3.weight[:, : 3 * block.width])


def _narrow_groups(block):
    """Make the groups so narrow that they leave channels out."""
    block.width = 3
    for conv, norm in zip(block.convs, block.bns, strict=True):
        conv.weight = nn.Parameter(conv.weight[:3, :3])
        norm.weight, norm.bias = (nn.Parameter(p[:3]) for p in (norm.weight, norm.bias))
        norm.running_mean, norm.running_var = norm.running_mean[:3], norm.running_var[:3]
    block.conv3.weight = nn.Parameter(block.conv3.weight[:, :12])


def _other_type(block):
    block.stage_type = 'other'


def _one_convolution_more(block):
    block.convs.append(nn.Conv2d(4, 4, 3))


CHANGES = [_third_group_is_last, _narrow_groups, _other_type, _one_convolution_more]


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('later', [False, True])
def test_other_groups_than_those_of_a_split_layer(change, later):
    plain = _build()
    if not later:
        change(plain[1])
    lean = make_lean_copy(plain)
    if later:
        for model in (lean, plain):
            change(model[1])
    _compare(lean, plain)


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('fixed', ['bn1', 'bn3', 'bns.0', 'bns.2', 'downsample'])
def test_norms_of_different_kinds_in_half_precision(preset, fixed):
    """In fp16 the factors of norms in evaluation mode have two parts; other norms have none."""
    plain = _build(norm_eval=False)
    for name, norm in plain.named_modules():
        norm.train(fixed not in name)
    exact = compute_gradients(plain, random_map())[1]
    models = make_lean_copy(plain, preset).half(), plain.half()
    actual, half = (compute_gradients(m, random_map().half(), lambda x, m=m: m(x).float())[1] for m in models)
    actual, half = (sum((g[name] - exact[name]).norm() / exact[name].norm() for name in exact) for g in (actual, half))
    assert actual < 1.3 * half
