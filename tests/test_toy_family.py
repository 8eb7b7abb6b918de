"""A new family needs one adapter of a few lines; presets, draws, report, planner and benchmark work on it."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from cases import count_stored_bytes, get_draws, get_kept_masks
from helpers import RESEARCH  # noqa: F401  it puts research/ on the path
from mmcv.cnn.bricks import DropPath
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from oracles import assert_near, compute_gradients, random_images, relative_error
from torch import nn

import module_runs  # isort: skip

from sbp_mmdet import LeanHook, adapter, apply_lean, remove_lean
from sbp_mmdet.adapters import ADAPTERS, ChannelMLPBinding, LeanBlock, LeanModule, NormLinearBinding
from sbp_mmdet.plan.detector import build_detector, measure_detector
from sbp_mmdet.plan.variants import find_presets, load_config, make_plain, with_variant
from sbp_mmdet.presets import PRESETS

WIDTHS = [8, 12, 16]


class ToyBlock(nn.Module):
    """A block of a depthwise convolution and a channel MLP on tokens."""

    def __init__(self, width, rate):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.widen, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        self.act, self.drop = nn.GELU(), DropPath(rate)

    def forward(self, x):
        x = x + self.spatial(x)
        tokens = x.flatten(2).mT
        tokens = tokens + self.drop(self.narrow(self.act(self.widen(self.norm(tokens)))))
        return tokens.mT.unflatten(2, x.shape[2:])


class ToyShrink(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4 * before), nn.Linear(4 * before, after)

    def forward(self, x):
        height, width = (n // 2 for n in x.shape[2:])
        return self.project(F.unfold(x, 2, stride=2).mT).mT.unflatten(2, (height, width))

    def project(self, tokens):
        return self.linear(self.norm(tokens))


@MODELS.register_module()
class ToyNet(BaseModule):
    """Backbone of three levels with two blocks each; every level halves its map."""

    def __init__(self, widths=WIDTHS, rate=0.0, init_cfg=None):
        super().__init__(init_cfg)
        self.stem = nn.Conv2d(3, widths[0], 2, stride=2)
        self.levels = nn.ModuleList(nn.Sequential(ToyBlock(c, rate), ToyBlock(c, rate)) for c in widths)
        self.shrinks = nn.ModuleList(ToyShrink(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))

    def forward(self, x):
        outs = [self.levels[0](self.stem(x))]
        for shrink, level in zip(self.shrinks, self.levels[1:], strict=True):
            outs.append(level(shrink(outs[-1])))
        return tuple(outs)


def register():
    """Register everything that a new family needs."""

    @adapter(ToyBlock)
    class LeanToyBlock(LeanBlock):
        stride = 2

        def bindings(self):
            return dict(mlp=ChannelMLPBinding(self.norm, self.widen, self.act, self.narrow, drop=self.drop))

        def lean_forward(self, x):
            tokens = (x + self.spatial(x)).flatten(2).mT
            return super().lean_forward(tokens).mT.unflatten(2, x.shape[2:])

        @classmethod
        def others(cls, backbone, settings):
            return {(i, 'downsample'): (layer, LeanShrink) for i, layer in enumerate(backbone.shrinks, 1)}

    class LeanShrink(LeanModule):
        def bindings(self):
            return dict(patches=NormLinearBinding(self.norm, self.linear))

        def project(self, tokens):
            return self.run('patches', tokens)

        def lean_forward(self, x):
            return ToyShrink.forward(self, x)


@pytest.fixture(autouse=True)
def family():
    register()
    yield
    del ADAPTERS[f'{__name__}.ToyBlock']


def toy(preset=None, **keys):
    torch.manual_seed(0)
    model = ToyNet(rate=0.5).double().train()
    if preset:
        apply_lean(model, preset, **keys)
    return model


def test_report():
    report = apply_lean(nn.ModuleDict(dict(backbone=ToyNet())), 'sbp')
    thinned = 'gradients from 0.5 of the positions, preset sbp'
    assert report.changed == {
        **{f'backbone.levels.{i}.{j}': thinned if i < 2 else 'exact, stores less' for i in range(3) for j in range(2)},
        'backbone.shrinks.0': thinned,
        'backbone.shrinks.1': 'exact, stores less',
        # Convolutions that no part reads have an adapter of their own.
        **{f'backbone.levels.{i}.{j}.spatial': 'exact, stores less' for i in range(3) for j in range(2)},
        'backbone.stem': 'exact, stores less',
    }
    assert report.left == {}
    assert len(inspect.getsource(register).splitlines()) < 30


@pytest.mark.parametrize('preset', [name for name, preset in PRESETS.items() if preset.gradients in ('exact', 'sbp')])
def test_gradients(preset):
    """Gradients are exact, or those of the kept positions only."""
    x, lean = random_images(2, 36, 44), toy(preset)
    gradients, plain = compute_gradients(lean, x), toy()
    if preset in ('none', 'with_cp'):
        torch.manual_seed(0)
        gradients = compute_gradients(lean, x)
        torch.manual_seed(0)
        return assert_near(gradients, compute_gradients(plain, x), 1e-12)
    masks, draws = get_kept_masks(lean, x), get_draws(lean)
    with draws.latest_pass():
        images = {(i, j): draws.images((i, j, 'mlp'), 2) for i in range(3) for j in range(2)}
    assert set(masks) == ({(0, 0), (0, 1), (1, 0), (1, 1), (1, 'downsample')} if PRESETS[preset].thins else set())
    for i, level in enumerate(plain.levels):
        for j, block in enumerate(level):
            factor = 2 * images[i, j].double()[:, None, None]
            mask = masks.get((i, j), torch.ones(1, dtype=torch.bool)).flatten()[:, None]
            block.drop.forward = lambda y, factor=factor, mask=mask: factor * torch.where(mask, y, y.detach())
    if PRESETS[preset].thins:
        project, mask = plain.shrinks[0].project, masks[1, 'downsample'].flatten()[:, None]
        plain.shrinks[0].project = lambda tokens: torch.where(mask, (y := project(tokens)), y.detach())
    assert_near(gradients, compute_gradients(plain, x), 1e-10)


@pytest.mark.parametrize('preset', ['int8', 'sampled'])
def test_gradients_come_near(preset):
    x = F.interpolate(random_images(2, 6, 8), (36, 48), mode='bicubic')
    exact = compute_gradients(ToyNet().double().train(), x) and compute_gradients(toy('exact'), x)
    gradients = compute_gradients(toy(preset), x)
    assert gradients.keys() == exact.keys() and all(g.isfinite().all() for g in gradients.values())
    errors = [relative_error(gradients[name], grad) for name, grad in exact.items()]
    assert 1e-9 < max(errors) and (preset == 'sampled' or max(errors) < 0.1)


def test_stored_bytes():
    def stored(preset):
        model, x = ToyNet().train(), random_images(2, 64, 64, dtype=torch.float32)
        apply_lean(model, preset)
        return count_stored_bytes(lambda: model(x), [x, *model.parameters()])

    nbytes = {name: stored(name) for name in PRESETS}
    assert (
        nbytes['int8'] < nbytes['exact'] < 0.5 * nbytes['none'] and nbytes['sbp'] < nbytes['reference'] < nbytes['none']
    )
    assert nbytes['with_cp'] < 0.5 * nbytes['none']


def test_keys_hook_and_back():
    model = nn.ModuleDict(dict(backbone=ToyNet()))
    text = LeanHook('sbp', blocks=[2, 1, 0], keep_ratio=[0.25, 0.5, 0.75]).apply(model)
    assert 'gradients from 0.75 of the positions, preset sbp' in text
    with pytest.raises(ValueError, match="attention='head' has no effect in ToyNet"):
        apply_lean(model, 'sbp', attention='head')
    remove_lean(model)
    assert not any(isinstance(m, LeanModule) for m in model.modules())


def test_a_wrong_stride_is_an_error(monkeypatch):
    monkeypatch.setattr(ADAPTERS[f'{__name__}.ToyBlock'], 'stride', 4)
    with pytest.raises(ValueError, match=r'has a map of 396 positions, but 99 were expected.*stride=4'):
        toy('sbp')(random_images(1, 36, 44))


def test_what_may_be_registered():
    with pytest.raises(ValueError, match='ToyNet must derive from sbp_mmdet.adapters.LeanModule or LeanBlock'):
        adapter('a.B')(ToyNet)


@pytest.fixture(scope='module')
def detector():
    """Return a stock detector with the toy backbone."""
    config = load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    config.model.backbone = dict(type='ToyNet')
    config.model.neck.update(in_channels=WIDTHS, start_level=0)
    return make_plain(config)


def test_the_planner_counts_it(detector):
    case = dict(batch=1, height=64, width=96, boxes=2)
    reasons = find_presets(build_detector(detector, 'cpu')[0])
    assert not any(reasons.values())
    saved = {name: measure_detector(with_variant(detector, name), **case)['saved'] for name in PRESETS}
    backbone = {name: sum(found.get(part, 0) for part in ('stem', 'backbone')) for name, found in saved.items()}
    assert backbone['none'] > backbone['exact'] > backbone['int8']
    assert backbone['none'] > backbone['reference'] > backbone['sbp']


def test_the_benchmark_measures_it(detector):
    case = dict(batch=1, height=64, width=96, boxes=2, device='cpu')
    rows = module_runs.measure_module(
        detector, ['none', 'exact', 'sbp'], 'backbone.levels.0.0', amp='off', rounds=0, **case
    )
    none, exact, paper = rows
    assert none['saved_bytes'] > exact['saved_bytes'] and exact['error'] < 1e-5 < paper['error']


def test_an_adapter_without_a_forward_pass_is_refused():
    with pytest.raises(ValueError, match=r'Empty must define the method bindings\(\).+lean_forward\(\)'):
        adapter(ToyNet)(type('Empty', (LeanBlock,), {}))
