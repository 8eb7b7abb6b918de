"""Hooks that change a model: of this package or of a project, every tool that builds a detector asks their class."""

import copy
import logging
import types

import pytest
import torch
from helpers import CONFIGS
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.registry import HOOKS
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from torch import nn

from sbp_mmdet import CheckpointModulesHook, SBPModulesHook, TargetsInChunksHook
from sbp_mmdet.analysis.detector import measure_detector
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.savings import checkpoint_modules
from sbp_mmdet.study.subject import build_model
from sbp_mmdet.surgery import Mixin, ModelHook, detectors, members, mix_in, model_hook_class, model_hooks, unwrapped


@HOOKS.register_module()
class ProjectsLeanNeckHook(ModelHook):
    """Exact, as somebody registers it."""

    exact = True

    def apply(self, model):
        return f'{checkpoint_modules(model, ["neck"])} lean'


@HOOKS.register_module()
class ProjectsRoughNeckHook(ModelHook):
    """Not exact, and does not say so."""

    def apply(self, model):
        mix_in(model.neck, Rough)
        return 'rough'


@HOOKS.register_module()
class ProjectsOtherHook(Hook):
    """Changes no model."""


class Rough(Mixin):
    """Only the first map sends gradients."""

    def forward(self, inputs):
        return tuple(out.detach() if i else out for i, out in enumerate(super().forward(inputs)))


@pytest.fixture(scope='module')
def config():
    """The quick start's detector with few layers, without hooks."""
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    config.model.backbone.arch = dict(depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])
    config.model.neck.in_channels = [8, 16, 32, 64]
    config.custom_hooks = []
    return config


def with_hooks(config, *kinds):
    config = copy.deepcopy(config)
    config.custom_hooks = [dict(type=kind, priority='LOW') for kind in kinds]
    return config


def test_a_hook_of_a_project_is_applied_where_memory_is_counted(config):
    case = dict(batch=1, height=64, width=64, boxes=2)
    plain = measure_detector(config, **case)['saved']
    lean = measure_detector(with_hooks(config, 'ProjectsOtherHook', 'ProjectsLeanNeckHook'), **case)['saved']
    assert lean['neck'] < 0.8 * plain['neck']


def test_an_inexact_hook_is_left_out_of_the_exact_baseline(config):
    kinds = 'ProjectsRoughNeckHook', 'ProjectsOtherHook', 'ProjectsLeanNeckHook', SBPModulesHook
    config = with_hooks(config, *kinds[:3])
    config.custom_hooks.append(dict(type=kinds[3], modules=['rpn_head']))
    model = build_model(config)
    assert isinstance(model.neck, Mixin) and not isinstance(model.neck, Rough)
    assert not isinstance(model.rpn_head, Mixin)


def test_hooks_of_this_package():
    exact = {kind: kind.exact for kind in (CheckpointModulesHook, TargetsInChunksHook, SBPModulesHook)}
    assert list(exact.values()) == [True, True, False]
    for kind in exact:
        assert model_hook_class(dict(type=kind.__name__)) is model_hook_class(dict(type=kind)) is kind
    assert model_hook_class(dict(type='ProjectsOtherHook')) is None
    assert list(model_hooks(None)) == []


def test_a_hook_that_nobody_registered():
    with pytest.raises(ValueError, match="registered as 'ProjectsMissingHook'.*custom_imports"):
        list(model_hooks([dict(type='ProjectsMissingHook')]))


def test_the_runner_hands_over_the_model_and_logs_what_was_done(caplog):
    model = nn.Module()
    model.neck = nn.Linear(2, 2)
    logger = logging.getLogger('test_surgery')
    with caplog.at_level(logging.INFO, 'test_surgery'):
        ProjectsLeanNeckHook().before_run(types.SimpleNamespace(model=model, logger=logger))
    assert caplog.messages == ["ProjectsLeanNeckHook: ['neck'] lean"]
    assert isinstance(model.neck, Mixin) and unwrapped(model) is model


def test_the_detector_inside_of_test_time_augmentation():
    """tools/test.py --tta runs the hooks on the model that holds the detector."""

    class Detector(BaseModel):
        def __init__(self):
            super().__init__()
            self.backbone, self.neck = nn.Identity(), nn.Linear(2, 2)

        def forward(self):
            pass

    detector = Detector()
    whole = DetTTAModel(module=detector)
    CheckpointModulesHook('neck').before_run(types.SimpleNamespace(model=whole, logger=logging.getLogger()))
    assert isinstance(detector.neck, Mixin) and unwrapped(whole) is detector
    assert detectors(whole) == {'': detector} and detectors(detector.backbone) == {}
    pair = nn.ModuleDict(dict(student=detector, teacher=copy.deepcopy(detector)))
    assert detectors(pair) == dict(student=pair['student'], teacher=pair['teacher'])
    pair['student'].backbone = nn.ModuleDict(dict(backbone=nn.Identity()))  # a wrapper of a backbone
    assert detectors(pair) == dict(student=pair['student'], teacher=pair['teacher'])


@pytest.mark.parametrize('names', [[], ['']])
def test_members_have_names(names):
    with pytest.raises(ValueError, match=r'modules=.* must name submodules'):
        list(members(nn.Linear(2, 2), names))


def test_an_outermost_mixin_stays_in_front():
    class Doubled(Mixin):
        def forward(self, x):
            return 2 * super().forward(x)

    class Shifted(Mixin):
        outermost = True

        def forward(self, x):
            return super().forward(x) + 1

    class Tripled(Mixin):
        def forward(self, x):
            return 3 * super().forward(x)

    layer = nn.Identity()
    for mixin in (Shifted, Doubled, Tripled):
        mix_in(layer, mixin)
    assert layer(torch.tensor(5.0)) == 31 and type(layer).__name__ == 'Identity'
    mixins = [kind for kind in type(layer).__mro__ if kind in (Shifted, Doubled, Tripled)]
    assert mixins == [Shifted, Tripled, Doubled]
