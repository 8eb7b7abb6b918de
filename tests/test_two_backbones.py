"""Models of several backbones, such as those for colour and infrared images: all of them train lean."""

import copy
import itertools

import pytest
import torch
from cases import build
from oracles import assert_near, compute_gradients, random_images
from test_draws import are_independent, draw_masks, find_dropped_images
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import LeanModule


class Streams(nn.Module):
    """Backbones that see the same images, whose maps are added."""

    def __init__(self, **backbones):
        super().__init__()
        self.names = [*backbones]
        for name, backbone in backbones.items():
            self.add_module(name, backbone)

    def forward(self, x):
        return tuple(map(sum, zip(*(getattr(self, name)(x) for name in self.names), strict=True)))


class Detector(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return self.backbone(x)


def build_stream(number, family='stock Swin', **options):
    return build(family, seed=number, **options)


MODELS = {
    'two in a detector': lambda **options: Streams(
        backbone=build_stream(0, **options), second=build_stream(1, **options)
    ),
    'two in a backbone': lambda **options: Detector(
        Streams(colour=build_stream(0, **options), infrared=build_stream(1, **options))
    ),
    'two by themselves': lambda **options: Streams(
        colour=build_stream(0, **options), infrared=build_stream(1, **options)
    ),
}


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_gradients(name, preset):
    plain, x = MODELS[name](), random_images(2, 64, 64)
    lean = copy.deepcopy(plain)
    report = apply_lean(lean, preset, verify=False)
    assert_near(compute_gradients(lean, x), compute_gradients(plain, x), 1e-11)
    changed = {name for name in report.changed if 'blocks' in name or 'downsample' in name}
    assert len(changed) == 2 * 8 and not report.left


@pytest.mark.parametrize('name', MODELS)
def test_positions_are_dropped_in_both(name):
    """The gradients are those of Algorithm 1 in plain autograd."""
    lean, x = MODELS[name](), random_images(1, 70, 93)
    reference = copy.deepcopy(lean)
    apply_lean(lean, 'sbp', sampler='random', verify=False)
    apply_lean(reference, 'reference', sampler='random', verify=False)
    assert_near(compute_gradients(lean, x), compute_gradients(reference, x), 1e-11)


def test_backbones_of_two_families():
    plain, x = Detector(Streams(a=build_stream(0), b=build_stream(1, 'stock ConvNeXt'))), random_images(1, 64, 64)
    lean = copy.deepcopy(plain)
    report = apply_lean(lean, 'exact', verify=False)
    for name in ('a', 'b'):
        expected = compute_gradients(plain.backbone.get_submodule(name), x)
        assert_near(compute_gradients(lean.backbone.get_submodule(name), x), expected, 1e-11)
        assert sum(inside.startswith(f'backbone.{name}') for inside in report.changed) >= 8


def test_a_block_outside_of_a_backbone_is_named():
    model = Detector(build_stream(0))
    model.neck = copy.deepcopy(model.backbone.stages[3].blocks[0])
    report = apply_lean(model, 'exact', verify=False)
    assert 'does not belong to a backbone' in report.left['neck'] and not isinstance(model.neck, LeanModule)


def build_two(seed, preset, **keys):
    model = nn.ModuleDict({name: build_stream(seed, drop_path_rate=0.5) for name in ('one', 'two')})
    apply_lean(model, preset, verify=False, **keys)
    return model


def test_they_draw_independently(iteration):
    iteration(3)
    model = build_two(0, 'exact')
    (one,), (two,) = map(find_dropped_images, model.values())
    assert one.keys() == two.keys()
    assert all(are_independent(a, b) for a, b in itertools.combinations([*one.values(), *two.values()], 2))
    resumed = build_two(1, 'exact')
    (alone,) = find_dropped_images(build('stock Swin', dict(preset='exact'), drop_path_rate=0.5))
    assert all(torch.equal(one[branch], dropped) for branch, dropped in alone.items())
    for name, found in (('one', one), ('two', two)):
        (again,) = find_dropped_images(resumed[name])
        assert all(torch.equal(again[branch], dropped) for branch, dropped in found.items())
    thinned = build_two(0, 'sbp', sampler='random')
    first, second = (draw_masks(thinned[name]) for name in thinned)
    assert not all(torch.equal(first[layer], second[layer]) for layer in first)
