"""Models that differ from the stock ones train like the plain ones: no unknown code is bypassed.

Each case changes a model in the way of a user, before or after ``apply_lean``. Outputs and all gradients have to be
those of the plain model in fp64, code of the user's has to run as often, and what runs its own code is named.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import build
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import ResNet
from mmengine.logging import MMLogger
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from unusual_changes import BEFORE, BLOCK, add_hook
from unusual_models import (
    CALLS,
    MODELS,
    Deformable,
    DoubledNorm,
    Doubling,
    StochasticDepth,
    Tokens,
    assert_same,
    build_resnet,
    conv_module,
    find_lean_modules,
    note_call,
    random_images,
    run_step,
)

from sbp_mmdet import LeanHook, adapter, apply_lean, remove_lean
from sbp_mmdet.adapters import ADAPTERS, ChannelMLPBinding, LeanBlock


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()


PLUGIN = dict(cfg=dict(type='ContextBlock', ratio=1 / 4), stages=(False, True), position='after_conv2')


@pytest.fixture(autouse=True, scope='module')
def quiet():
    MMLogger.get_current_instance().setLevel('ERROR')
    yield
    MMLogger.get_current_instance().setLevel('INFO')


@pytest.mark.parametrize('name', BEFORE)
def test_changed_before(name):
    family, change, named = BEFORE[name]
    stock = MODELS[family]()
    torch.manual_seed(0)
    change(stock)
    parametrized = any(map(parametrize.is_parametrized, stock.modules()))
    if (
        parametrized or 'own' in name or 'instance' in name or 'forward of' in name or 'norm' in name
    ):  # copies would share closures
        plain = MODELS[family]()
        torch.manual_seed(0)
        change(plain)
        plain.load_state_dict(stock.state_dict())
    else:
        plain = copy.deepcopy(stock)
    report = apply_lean(stock, verify=False)
    assert find_lean_modules(stock), 'the rest is lean'
    assert_same(stock, plain, random_images())
    assert_same(stock, plain, random_images())
    assert not named or named in report.left, report
    assert report.left.keys().isdisjoint(report.changed)


AFTER = {name: case for name, case in BEFORE.items() if 'subclass' not in name}


@pytest.mark.parametrize('name', AFTER)
def test_changed_after_a_step(name):
    """The next step takes later changes into account."""
    family, change, _ = AFTER[name]
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    apply_lean(lean, verify=False)
    assert_same(lean, plain, random_images())
    if family == 'ResNet' or family == 'deep stem':
        plain.load_state_dict(lean.state_dict())
    for model in (lean, plain):
        torch.manual_seed(0)
        change(model)
    plain.load_state_dict(lean.state_dict())
    assert_same(lean, plain, random_images())
    assert_same(lean, plain, random_images())


def test_a_hook_that_goes_leaves_the_module_lean():
    lean = MODELS['Swin']()
    apply_lean(lean, verify=False)
    norm = lean.get_submodule(f'{BLOCK}.norm1')
    handle = norm.register_forward_hook(note_call)
    run_step(lean, random_images())
    assert set(lean.get_submodule(BLOCK)._lean.bound.bindings) == {'mlp'}
    handle.remove()
    run_step(lean, random_images())
    assert set(lean.get_submodule(BLOCK)._lean.bound.bindings) == {'attention', 'mlp'}


@pytest.mark.parametrize('family', MODELS)
def test_hooks_of_every_module(family):
    """Profilers and trackers register such hooks, which have to see every module."""
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    apply_lean(lean, verify=False)
    names = {id(m): name for model in (lean, plain) for name, m in model.named_modules()}
    handle = register_module_forward_hook(lambda module, args, out: CALLS.append(names[id(module)]))
    try:
        assert_same(lean, plain, random_images())
    finally:
        handle.remove()
    plain.load_state_dict(lean.state_dict())
    assert_same(lean, plain, random_images())


@pytest.mark.parametrize('family', ['Swin', 'ConvNeXt', 'ResNet'])
def test_compiled_blocks(family):
    """The call of a compiled block is not that of its class."""
    torch._dynamo.reset()
    lean, plain = MODELS[family](), MODELS[family]()
    plain.load_state_dict(lean.state_dict())
    name = dict(Swin=f'{BLOCK}.ffn', ConvNeXt='stages.0.0.act', ResNet='layer1.0.relu')[family]
    apply_lean(lean, verify=False)
    lean.get_submodule(name).compile(backend='eager')
    assert_same(lean, plain, random_images())


def test_plugins_run_their_own_code():
    lean = build_resnet(plugins=[PLUGIN])
    plain = copy.deepcopy(lean)
    assert any(name.startswith('layer2.0.') for name in apply_lean(lean, verify=False).changed) or find_lean_modules(
        lean
    )
    add_hook('layer2.0.context_block')(lean), add_hook('layer2.0.context_block')(plain)
    assert_same(lean, plain, random_images())


class FlatBlock(nn.Module):
    """A user's block with a user's adapter, whose stochastic depth is torchvision's."""

    def __init__(self, width, rate):
        super().__init__()
        self.norm, self.act, self.depth = nn.LayerNorm(width), nn.GELU(), StochasticDepth(rate)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.depth(self.down(self.act(self.up(self.norm(x)))))


def test_an_adapter_of_somebody_is_asked_too():
    @adapter(FlatBlock)
    class LeanFlatBlock(LeanBlock):
        def bindings(self):
            return dict(mlp=ChannelMLPBinding(self.norm, self.up, self.act, self.down, drop=self.depth))

    try:
        model = Tokens(FlatBlock(8, 0.5), nn.Conv1d(6, 6, 1), nn.Sequential()).double().train()
        model.conv = nn.Conv2d(1, 1, 1)
        report = apply_lean(model, verify=False)
        assert 'StochasticDepth' in report.left['layers.0']
        assert_same(model, copy.deepcopy(model), random_images())
    finally:
        del ADAPTERS[f'{__name__}.FlatBlock']


# Precision.


@pytest.mark.parametrize('family', ['ConvNeXt', 'Swin', 'ViT'])
def test_norms_in_full_precision(family):
    """A model is in bf16, its layer norms are in fp32, and autocast is on: modules that would fold norms run their own
    code."""
    lean = MODELS[family]().bfloat16()
    for module in lean.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    plain, x = copy.deepcopy(lean), random_images().bfloat16()
    report = apply_lean(lean, verify=False)
    found = []
    for model in (plain, lean):
        try:
            with torch.autocast('cpu', torch.bfloat16):
                out = model(x)
            found.append([o.float() for o in out])
            sum(o.square().mean() for o in found[-1]).backward()
        except RuntimeError as error:
            found.append(type(error))
    if isinstance(found[0], list):
        for a, b in zip(found[1], found[0], strict=True):
            assert F.mse_loss(a, b) < 1e-3 * b.square().mean()
    assert any('float32' in reason for reason in report.left.values())


# The model is the user's.


def test_nothing_is_frozen_for_the_user():
    """mmpretrain's VisionTransformer freezes its embeddings whenever this method is called."""

    class Freezing(type(MODELS['ViT of mmpretrain']())):
        def _freeze_stages(self):
            self.cls_token.requires_grad = False
            self.patch_embed.requires_grad_(False).eval()

        def train(self, mode=True):
            super().train(mode)
            self._freeze_stages()

    model = Freezing().double()
    before = [(p.requires_grad, m.training) for m in model.modules() for p in m.parameters(recurse=False)]
    report = apply_lean(model, verify=False)
    after = [(p.requires_grad, m.training) for m in model.modules() for p in m.parameters(recurse=False)]
    assert before == after
    assert report.left['patch_embed.projection'] == 'frozen'


def test_a_failed_change_keeps_the_preset_that_was_there():
    model = build('stock Swin', dict(preset='exact', verify=False), drop_path_rate=0.5)
    kinds = [*map(type, model.modules())]
    with pytest.raises(ValueError, match='neck'):
        apply_lean(model, 'sbp', modules=['neck'])
    assert [*map(type, model.modules())] == kinds
    block = model.get_submodule(BLOCK)
    assert "preset='exact'" in f'{block}'


def test_a_change_that_fails_half_way_is_taken_back(monkeypatch):
    model = build('stock Swin', dict(preset='exact', verify=False))
    kinds = [*map(type, model.modules())]

    def fail(model):
        raise ValueError('half way')

    monkeypatch.setattr('sbp_mmdet.apply.share_maps_within', fail)
    with pytest.raises(ValueError, match='half way'):
        apply_lean(model, 'int8', verify=False)
    assert [*map(type, model.modules())] == kinds
    assert "preset='exact'" in f'{model.get_submodule(BLOCK)}'


def test_parametrized_after_the_change_and_back():
    model = MODELS['ResNet']()
    apply_lean(model, verify=False)
    conv = model.get_submodule('layer2.1.conv2')
    parametrize.register_parametrization(conv, 'weight', Doubling())
    copied = copy.deepcopy(model)
    remove_lean(model)
    remove_lean(copied)
    assert not find_lean_modules(model) and not find_lean_modules(copied)
    plain = copy.deepcopy(model)
    assert_same(model, plain, random_images())
    parametrize.remove_parametrizations(conv, 'weight')
    assert type(conv) is nn.Conv2d


def test_efficient_conv_bn_eval_is_off_where_norms_are_folded():
    """mmengine would trace the changed modules, and its graph would run in their place."""

    class Log:
        def __getattr__(self, name):
            return lambda *args: None

    class Runner:
        cfg, hooks, logger = type('Cfg', (dict,), dict(__setattr__=dict.__setitem__))(), [], Log()
        model = nn.ModuleDict(dict(backbone=ResNet(18, base_channels=8), neck=nn.Identity()))

    Runner.cfg['efficient_conv_bn_eval'] = ['backbone', 'neck']
    LeanHook('exact').before_run(Runner())
    assert Runner.cfg['efficient_conv_bn_eval'] == ['neck']


def test_tracing_in_training_mode_is_an_error_that_says_what_to_do():
    model = nn.ModuleList([conv_module()])
    apply_lean(model, verify=False)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model[0][0]

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match='efficient_conv_bn_eval'):
        torch.fx.symbolic_trace(Outer())


def test_modules_of_deformable_detr_are_asked_one_by_one():
    """The layer is unsupported, and its parts are changed individually."""
    layer = Deformable().double().train()
    layer.layer.norms[0] = DoubledNorm(layer.layer.norms[0].normalized_shape).double()
    report = apply_lean(layer, verify=False)
    assert 'DoubledNorm' in report.left['layer']
    assert {type(layer.get_submodule(name)).__mro__[1].__name__ for name in report.changed} >= {
        'LeanFFN',
        'LeanDeformableAttention',
    }
    assert isinstance(layer.layer.self_attn, MultiScaleDeformableAttention)
