"""Every tool that builds a detector finds and applies the hooks that change its model."""

import copy
import logging
import pickle
import types

import pytest
import torch
from mmcv.cnn import ConvAWS2d, ConvModule, ConvWS2d
from mmdet.models.backbones.resnet import BasicBlock
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.registry import HOOKS
from mmengine import DefaultScope, Registry, registry
from mmengine.hooks import Hook
from mmengine.model import BaseModel, BaseModule
from torch import nn

from sbp_mmdet import CheckpointModulesHook, LeanHook, TargetsInChunksHook, apply_lean, remove_lean
from sbp_mmdet.checkpointing import checkpoint_modules
from sbp_mmdet.surgery import (
    Mixin,
    ModelHook,
    detectors,
    mix_in,
    mix_out,
    model_hook_class,
    model_hooks,
    named_submodules,
    unwrap,
)

SISTERS_HOOKS = Registry('hook', scope='sister_of_mmdet', parent=registry.HOOKS)


@HOOKS.register_module()
class ProjectsLeanNeckHook(ModelHook):
    """A project's own hook that keeps gradients exact."""

    exact = True

    def apply(self, model):
        return f'{checkpoint_modules(model, ["neck"])} lean'


@HOOKS.register_module()
class ProjectsOtherHook(Hook):
    """A project's hook that changes no model."""


def test_hooks_of_this_package():
    for kind in (CheckpointModulesHook, TargetsInChunksHook, LeanHook):
        assert model_hook_class(dict(type=kind.__name__)) is model_hook_class(dict(type=kind)) is kind
    assert model_hook_class(dict(type='ProjectsOtherHook')) is None
    assert CheckpointModulesHook.exact and TargetsInChunksHook.exact and not ModelHook.exact
    kinds = ('ProjectsOtherHook', 'ProjectsLeanNeckHook', 'TargetsInChunksHook')
    hooks = model_hooks([dict(type=kind, priority='LOW') for kind in kinds])
    assert [type(hook).__name__ for hook in hooks] == [*kinds[1:]]
    assert list(model_hooks(None)) == []


@pytest.mark.parametrize('hook', ['LeanHook', 'mmdet.LeanHook'])
def test_configs_of_sister_projects_name_the_hook_as_mmdets_do(hook):
    assert isinstance(SISTERS_HOOKS.build(dict(type=hook)), LeanHook)
    with DefaultScope.overwrite_default_scope('sister_of_mmdet'):
        assert [type(found) for found in model_hooks([dict(type=hook)])] == [LeanHook]


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
    assert isinstance(model.neck, Mixin) and unwrap(model) is model


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
    assert isinstance(detector.neck, Mixin) and unwrap(whole) is detector
    assert detectors(whole) == {'': detector} and detectors(detector.backbone) == {}
    pair = nn.ModuleDict(dict(student=detector, teacher=copy.deepcopy(detector)))
    assert detectors(pair) == dict(student=pair['student'], teacher=pair['teacher'])
    pair['student'].backbone = nn.ModuleDict(dict(backbone=nn.Identity()))  # a wrapper of a backbone
    assert detectors(pair) == dict(student=pair['student'], teacher=pair['teacher'])


@pytest.mark.parametrize('names', [[], ['']])
def test_members_have_names(names):
    with pytest.raises(ValueError, match=r'modules=.* must name submodules'):
        list(named_submodules(nn.Linear(2, 2), names))


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


def test_an_outermost_mixin_stays_in_front():
    layer = nn.Identity()
    for mixin in (Shifted, Doubled, Tripled):
        mix_in(layer, mixin)
    assert layer(torch.tensor(5.0)) == 31 and type(layer).__name__ == 'Identity'
    mixins = [kind for kind in type(layer).__mro__ if kind in (Shifted, Doubled, Tripled)]
    assert mixins == [Shifted, Tripled, Doubled]
    other = pickle.loads(pickle.dumps(layer))
    assert type(other) is type(layer) and type(copy.copy(layer)) is type(copy.deepcopy(layer)) is type(layer)
    mix_out(layer, (Doubled, Shifted))
    assert layer(torch.tensor(5.0)) == 15 and other(torch.tensor(5.0)) == 31
    mix_out(layer, Mixin)
    assert type(layer) is nn.Identity


@pytest.mark.parametrize('preset', ['exact', 'exact_min', 'with_cp'])
def test_a_new_instance_of_a_changed_class_is_plain(preset):
    """``nn.Sequential`` makes its slices by calling its class, as users do to make a layer like a given one."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), ConvModule(4, 4, 3), BasicBlock(4, 4)
    plain = nn.Sequential(*layers).double().train()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    apply_lean(model, preset, verify=False)
    assert type(model[:3]) is nn.Sequential and type(type(model[3])(3, 4, 1)) is ConvModule
    for part in (slice(0, 3), slice(0, 5)):
        outs = [m[part](x) for m in (model, plain)]
        torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-10)
        gradients = [
            torch.autograd.grad(out.square().sum(), [*m[part].parameters()])
            for m, out in zip((model, plain), outs, strict=True)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    new = type(model[4])(3, 3).double().train()
    new(x).sum().backward()
    assert type(new) is BasicBlock and new.conv1.weight.grad is not None


class Initialised(BaseModule):
    """Layers of classes that derive from those that ``init_cfg`` names."""

    def __init__(self):
        super().__init__(init_cfg=dict(type='Constant', layer=['Conv2d', '_BatchNorm'], val=0.5, bias=0.25))
        self.conv, self.layers = ConvWS2d(3, 4, 1), nn.Sequential(ConvAWS2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_weights_are_initialised_by_the_names_of_base_classes(preset):
    """mmengine's ``init_cfg`` looks at a module's class and its bases, when a runner's hooks have changed the model."""
    torch.manual_seed(0)
    plain = Initialised()
    lean = copy.deepcopy(plain)
    apply_lean(lean, preset, verify=False)
    assert isinstance(lean.conv, Mixin)
    for model in (plain, lean):
        model.init_weights()
    for expected, actual in zip(plain.parameters(), lean.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert (lean.conv.weight == 0.5).all()


@pytest.mark.parametrize('mode', [True, False])
def test_scripting_a_changed_model_is_an_error_that_says_what_to_do(mode):
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).train(mode)
    model = copy.deepcopy(plain)
    apply_lean(model)
    before = [*map(type, model.modules())]
    with pytest.raises(ValueError, match=r'remove_lean\(model\)'):
        torch.jit.script(model)
    assert [*map(type, model.modules())] == before
    remove_lean(model)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(torch.jit.script(model)(images), plain(images))
