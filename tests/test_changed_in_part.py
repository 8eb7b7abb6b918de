"""A changed model of which a part is changed anew, or changed back."""

import copy

import pytest
import torch
from cases import build
from conv_models import BACKBONES, build_module
from mmdet.models.backbones.darknet import ResBlock
from mmdet.models.backbones.resnet import Bottleneck
from oracles import assert_near, compute_gradients, random_images

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.passes import DrawsInPasses


@pytest.mark.parametrize('undo', ['none', 'remove'])
@pytest.mark.parametrize(('family', 'block'), [('stock Swin', 'stages.1.blocks.0'), ('stock ConvNeXt', 'stages.2.0')])
def test_a_block_with_stochastic_depth_is_changed_back(family, block, undo):
    """The backbone goes on to draw images for the other blocks; at this rate, none is dropped."""
    model, x = build(family, drop_path_rate=1e-12), random_images(2, 37, 52)
    model.train()
    apply_lean(model, verify=False)
    if undo == 'none':
        apply_lean(model, 'none', modules=[block])
    else:
        remove_lean(model.get_submodule(block))
    assert not isinstance(model.get_submodule(block), LeanModule) and isinstance(model, DrawsInPasses)
    assert_near(compute_gradients(model, x), compute_gradients(build(family), x), 1e-9)


# Backbone, its blocks, and the beginning of the names of blocks that are followed by none but such blocks.
CHAINS = {
    'ResNet': (dict(type='ResNet', depth=50, base_channels=8), Bottleneck, 'layer'),
    'Darknet': (BACKBONES['Darknet'][0], ResBlock, 'conv_res_block2.res'),
}


@pytest.mark.parametrize('preset', ['exact', 'none'])
@pytest.mark.parametrize('name', CHAINS)
def test_the_new_settings_of_blocks_that_are_not_called_count(name, preset):
    """A stage runs its blocks as chains, without calling them."""
    cfg, kind, beginning = CHAINS[name]
    plain, x = build_module(cfg), random_images(2, 64, 64)
    lean = copy.deepcopy(plain)
    apply_lean(lean, 'int8', verify=False)
    blocks = [name for name, module in plain.named_modules() if isinstance(module, kind)]
    apply_lean(lean, preset, modules=blocks, verify=False)
    gradients = []
    for model in (lean, plain):
        own = {name: p for name, p in model.named_parameters() if name.startswith(beginning)}
        loss = sum(out.sin().sum() for out in model(x))
        gradients.append(dict(zip(own, torch.autograd.grad(loss, [*own.values()]), strict=True)))
    assert_near(*gradients, 1e-9)
