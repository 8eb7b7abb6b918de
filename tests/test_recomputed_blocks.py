"""`exact_min` and `int8` recompute blocks of ResNets that run code of their own, and save no more than `with_cp`."""

import copy

import pytest
import torch
from cases import count_model_bytes, make_lean_copy
from conv_models import CONTEXT, assert_same, build_module, randomize_norms, run_step
from mmdet.registry import MODELS as REGISTRY
from mmengine.registry import init_default_scope
from oracles import DEVICE
from test_unusual_models import BEFORE, MODELS
from torch import nn
from unusual_models import assert_same as assert_same_in_steps
from unusual_models import random_images

from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.ops.common.kept_maps import keep_input
from sbp_mmdet.ops.common.shared_maps import Scope

R50 = dict(type='ResNet', depth=50, base_channels=8, frozen_stages=-1)
WHERE = dict(stage_with_dcn=(False, False, True, True))
ATTENTION = dict(type='GeneralizedAttention', spatial_range=-1, num_heads=4, attention_type='0010', kv_stride=2)
ATTENTION = dict(cfg=ATTENTION, stages=(False, False, True, True), position='after_conv2')
SPLIT = dict(type='ResNeSt', depth=50, base_channels=16, stem_channels=16, radix=2, avg_down_stride=True)
SWITCHED = dict(type='SAC', use_deform=True)
BACKBONES = {
    'DCN': dict(R50, dcn=dict(type='DCN', deform_groups=1), **WHERE),
    'DCNv2': dict(R50, dcn=dict(type='DCNv2', deform_groups=1), **WHERE),
    'DCNv2, batch statistics': dict(R50, dcn=dict(type='DCNv2', deform_groups=1), norm_eval=False, **WHERE),
    'context block': dict(R50, plugins=[CONTEXT]),
    'context block, batch statistics': dict(R50, plugins=[CONTEXT], norm_eval=False),
    'attention': dict(R50, plugins=[ATTENTION]),
    'ResNeSt': dict(SPLIT, norm_eval=False),
    'TridentNet': dict(
        type='TridentResNet', depth=50, base_channels=8, num_branch=3, test_branch_idx=1, strides=(1, 2, 2),
        dilations=(1, 1, 1), num_stages=3, trident_dilations=(1, 2, 3), out_indices=(2,), frozen_stages=-1,
    ),
    'DetectoRS': dict(
        type='DetectoRS_ResNet', depth=50, base_channels=8, frozen_stages=-1, conv_cfg=dict(type='ConvAWS'),
        sac=SWITCHED, stage_with_sac=(False, True, True, True), norm_eval=False,
    ),
}  # fmt: skip


def build(name):
    """Build a backbone whose offsets and gates are not zero, as they are at the beginning of a training."""
    whole = name == 'TridentNet'  # the last block of the stage concatenates the branches
    init_default_scope('mmdet')
    plain = randomize_norms(REGISTRY.build(copy.deepcopy(BACKBONES[name]))) if whole else build_module(BACKBONES[name])
    for key, p in plain.named_parameters():
        if any(word in key for word in ('offset', 'gamma', 'channel_add_conv', 'switch', 'context')):
            p.data.normal_(std=0.1)
        elif 'conv2' in key and whole:  # memory that nobody has written to
            nn.init.kaiming_normal_(p)
    return plain


def images(double=True):
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    return (x.double() if double else x).to(DEVICE)


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('name', BACKBONES)
def test_gradients_and_statistics_are_those_of_the_own_code(name, preset):
    """Running statistics, which the recomputation would update again, move in two steps as often as in plain ones."""
    plain = build(name)
    lean = make_lean_copy(plain, preset)
    for _ in range(2):
        assert_same(run_step(lean, images()), run_step(plain, images()))


@pytest.mark.parametrize('preset', ['exact_min', 'int8'])
@pytest.mark.parametrize('name', BACKBONES)
def test_no_more_is_stored_than_checkpoints_of_blocks_store(name, preset):
    plain = build(name).float()
    x = images(double=False)
    lean, checkpointed = make_lean_copy(plain, preset), make_lean_copy(plain, 'with_cp')
    assert count_model_bytes(lean, x) <= count_model_bytes(checkpointed, x)


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
def test_blocks_of_a_stage_without_plugins_form_a_chain(preset):
    """Their lists of plugins are empty where only another stage has some."""
    lean = make_lean_copy(build('context block'), preset)
    assert isinstance(lean.layer1, LeanModule) and not isinstance(lean.layer2, LeanModule)


@pytest.mark.parametrize('needs_x', [True, False])
def test_the_input_of_a_recomputed_block_is_saved_once(needs_x):
    """A layer that reads the same map, such as a pyramid's, saves no copy of it in eight bits or half precision."""
    model, x = nn.Sequential(nn.Conv2d(6, 4, 1)).to(DEVICE), images(double=False).repeat(1, 2, 1, 1)
    checkpoint_modules(model, ['0'])
    with Scope():
        x = x.requires_grad_(needs_x) * 2
        out = model(x)
        for storage, cast in (('int8', x), ('native', x.to(torch.bfloat16))):
            assert keep_input(x, cast, storage).values is x
        x.add_(1)  # as in plain code, an error of autograd
        assert keep_input(x, x, 'int8').values is not x
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        out.sum().backward()


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'int8'])
@pytest.mark.parametrize('name', ['DCNv2', 'context block', 'TridentNet'])
def test_a_hook_runs_once_in_a_step(name, preset):
    """A block with a hook inside is not recomputed from the step on in which the hook is there."""
    plain = build(name)
    lean, calls = make_lean_copy(plain, preset), []
    for model in (lean, plain):
        run_step(model, images())
        model.layer3[1].conv2.register_forward_hook(lambda module, args, out: calls.append(module))
    actual, number = run_step(lean, images()), len(calls)
    expected = run_step(plain, images())
    assert number == len(calls) - number > 0
    if preset != 'int8':
        assert_same(actual, expected)


def test_a_block_of_somebody_is_not_recomputed():
    """The code of a class that no known library has may not run twice."""
    plain = build('TridentNet')

    class Block(type(plain.layer3[1])):
        def forward(self, x):
            return super().forward(x)

    plain.layer3[1].__class__ = Block
    lean, calls = copy.deepcopy(plain), []
    Block.forward = lambda self, x: calls.append(self) or super(Block, self).forward(x)
    lean = make_lean_copy(lean, 'exact_min')
    assert_same(run_step(lean, images()), run_step(plain, images()))
    assert len(calls) == 2


def test_parameters_that_are_frozen_between_steps():
    plain = build('DCNv2')
    lean = make_lean_copy(plain, 'exact_min')
    for word in ('conv_offset', 'layer3.0', 'bn', 'conv2.weight'):
        for model in (lean, plain):
            for key, p in model.named_parameters():
                p.requires_grad_(word not in key)
        assert_same(run_step(lean, images()), run_step(plain, images()))


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'with_cp'])
def test_a_weight_whose_class_has_other_functions_is_not_recomputed(preset):
    """torch disables these functions in the backward pass, so a recomputation would run without them."""
    family, change, _ = BEFORE['such a weight in a bottleneck']
    plain = MODELS[family]()
    change(plain)
    later = MODELS[family]()
    later.load_state_dict(plain.state_dict())
    lean = [make_lean_copy(plain, preset), make_lean_copy(later, preset)]
    change(lean[1])  # after the change of the model
    for model in lean:
        assert_same_in_steps(model, copy.deepcopy(plain), random_images())
