"""What is drawn in a step, and how it reaches layers that get it as an argument or look it up."""

import copy
import types

import pytest
import torch
import torch.utils.checkpoint as cp
from oracles import image, small_backbone
from torch import nn

from sbp_mmdet import SBPSwinTransformer, SBPViT, draws
from sbp_mmdet.draws import Thinned
from sbp_mmdet.masks import mask_generator, sample_mask
from sbp_mmdet.shared_draws import LayerDraws, MapDraws

TINY_VIT = dict(num_layers=3, embed_dims=12, num_heads=3)
RANDOM = dict(sampler='random', keep_ratio=[0.25, 0.5, 1, 0.5, 0.75])


class Plan(nn.Module):
    """What an object says that changes somebody's model in place."""

    sbp = types.SimpleNamespace(sampler='random', dropped='zero')

    def keep_ratios(self):
        return {(0, 'mlp', 1): 0.5, (1, 'mlp', 0): 0.25}

    def stage_sizes(self, height, width):  # rounded up, as where a model pads its maps
        return [(-(-height // s), -(-width // s)) for s in (4, 8, 16)]


class Model(nn.Module):
    """Looks its positions up in every pass that trains."""

    def __init__(self, plan, layer):
        super().__init__()
        self.weight, self.layer, self.seen = nn.Parameter(torch.ones(())), layer, []
        self.draws = LayerDraws(plan)
        self.register_forward_pre_hook(self.draws.begin)

    def forward(self, x):
        if torch.is_grad_enabled():
            self.seen.append(self.draws.of(self.layer).keep)
        return (x * self.weight).sum().square()


@pytest.mark.parametrize(
    'build',
    [
        lambda frozen: small_backbone({}, frozen_stages=frozen),
        lambda frozen: SBPViT(
            dict(num_layers=3, embed_dims=12, num_heads=3), img_size=64, sbp_cfg={}, frozen_blocks=frozen
        ),
        lambda frozen: SBPSwinTransformer(depths=(1, 1, 1, 1), frozen_stages=frozen, sbp_cfg={}),
    ],
)
def test_frozen_layers_are_told_of_once(build, monkeypatch):
    told = []
    monkeypatch.setattr(draws, 'print_log', lambda text, **options: told.append(text))
    build(1).train()
    assert not told
    backbone = build(3).train()
    backbone.eval().train()
    assert told == [f'{type(backbone).__name__}: all layers that sbp_cfg thins out are frozen, so it changes nothing']


def same(a, b):
    """Whether two dicts of positions are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key].keep, b[key].keep) for key in a)


@pytest.mark.parametrize('dropped', ['zero', 'nearest'])
def test_looked_up_positions_are_those_of_an_argument(dropped, iteration):
    iteration(3)
    backbone, x = small_backbone(dict(RANDOM, dropped=dropped)), image(2)
    assert isinstance(backbone, Thinned)
    draws = LayerDraws(backbone)
    assert draws.of((0, 0)) is None  # before any pass
    for _ in range(2):
        drawn = backbone.draw(x).positions
        draws.begin(backbone, (x,))
        looked_up = {key: draws.of(key) for key in backbone.keep_ratios()}
        assert same(drawn, looked_up) and draws.of((3, 0)) is None
        assert all((found.nearest is None) == (dropped == 'zero') for found in looked_up.values())
        assert draws.of((0, 0)) is draws.of((0, 0))


def test_of_a_plan_by_hand(iteration):
    iteration(5)
    model = Model(Plan(), (0, 'mlp', 1))
    model(torch.zeros(1, 3, 36, 20))
    base = sample_mask(5, 3, 0.5, 'random', mask_generator(torch.initial_seed(), 0, 5))
    whole = base.repeat_interleave(2, 0).repeat_interleave(2, 1)[:9, :5]
    assert torch.equal(model.seen[0], whole.flatten().nonzero().squeeze(1))
    base = sample_mask(5, 3, 0.25, 'random', mask_generator(torch.initial_seed(), 0, 5))
    assert torch.equal(model.draws.of((1, 'mlp', 0)).keep, base.flatten().nonzero().squeeze(1))


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_replays_of_two_passes_find_their_own(use_reentrant, iteration):
    iteration(1)
    model = Model(Plan(), (0, 'mlp', 1))
    inputs = [torch.randn(1, 3, size, 64).requires_grad_() for size in (64, 96)]
    losses = [cp.checkpoint(model, x, use_reentrant=use_reentrant) for x in inputs]
    forward, model.seen = model.seen, []
    sum(losses).backward()
    kept = [len(keep) for keep in model.seen]
    assert kept == [192, 128]  # the second pass is the first to run again
    if not use_reentrant:
        assert all(map(torch.equal, forward, reversed(model.seen)))


def test_no_pass_begins_without_training_and_gradients(iteration):
    iteration(0)
    x, other = image(1), image(1, 32, 64)
    model = Model(Plan(), (0, 'mlp', 1))
    model(x)
    with torch.no_grad():
        model(other)
    model.eval()
    model.draws.begin(model, (other,))
    assert model.draws.now.step == (0, 0) and len(model.draws.of((0, 'mlp', 1)).keep) == 128


def test_a_copy_looks_up_its_own():
    model = Model(Plan(), (0, 'mlp', 1))
    other = copy.deepcopy(model)
    other(image(1, 32, 32))
    assert model.draws.of((0, 'mlp', 1)) is None and len(other.seen[0]) == 32


def test_maps_take_the_masks_of_a_plan_where_sizes_agree(iteration):
    iteration(2)
    plan, x = Plan(), image(1)
    plan.training = True
    draws, layers = MapDraws(plan, 0.5, 'random', [plan]), LayerDraws(plan)
    for each in (draws, layers):
        each.begin(plan, (x,))
    found = draws.of(torch.zeros(2, 5, 16, 16), as_backbone=True)
    assert torch.equal(found.keep, layers.of((0, 'mlp', 1)).keep)
    mask = sample_mask(16, 16, 0.5, 'random', mask_generator(torch.initial_seed(), 0, 2))
    assert torch.equal(draws.of(torch.zeros(2, 5, 16, 16)).keep, mask.flatten().nonzero().squeeze(1))


def test_the_latest_draw_again(iteration):
    iteration(4)
    backbone, x = small_backbone(dict(RANDOM, skip_dropped_images=True), drop_path_rate=0.5), image(3)
    with pytest.raises(ValueError, match='no pass has drawn'):
        backbone.draw(x, again=True)
    backbone.draw(x)
    latest, again = backbone.draw(x), backbone.draw(x, again=True)
    assert same(latest.positions, again.positions)
    assert all(torch.equal(latest.images[key], again.images[key]) for key in latest.images)
    assert not same(latest.positions, backbone.draw(x).positions)
    assert backbone._draws._counter.latest == (4, 2)
