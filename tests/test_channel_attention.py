"""Channel attention and activations by themselves train like their own code in fp64, and store no map of their own."""

import copy
import functools

import pytest
import torch
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks.swish import Swish
from mmdet.models.layers import InvertedResidual, SELayer
from mmdet.models.layers.se_layer import ChannelAttention
from oracles import DEVICE, assert_near, compute_loss
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.adapters import modules_bypassed_in
from sbp_mmdet.ops.activation import ActivationSettings, ActivationTensors, activate
from sbp_mmdet.ops.common.activations import ACTIVATIONS as OPERATION_ACTIVATIONS
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.plan.memory import saved_bytes

of_mmyolo = functools.partial(define_in_module, 'mmyolo.models.layers.yolo_bricks')
SIZE = (2, 8, 12, 10)
# Torch 2.1 stores the input of a mean, which the module's own code computes.
MEAN_STORES = saved_bytes(lambda: (torch.ones(2, requires_grad=True) * 1).mean()) > 0


def random_images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def build_conv(act=None, norm=True, width=8, size=3):
    norm = dict(type='BN') if norm else None
    return ConvModule(8, width, size, padding=size // 2, norm_cfg=norm, act_cfg=act and dict(type=act))


class Held(nn.Module):
    """A module within which layers hand on their maps."""

    def __init__(self, *held):
        super().__init__()
        self.held = nn.Sequential(*held)

    def forward(self, x):
        return self.held(x)


def build_plain_and_lean(module, preset='exact'):
    """Return a module in fp64, a changed copy, and the report of the change."""
    torch.manual_seed(0)
    module = module.double().to(DEVICE).train()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    lean = copy.deepcopy(module)
    return module, lean, apply_lean(lean, preset=preset, verify=False)


def run_step(module):
    x = random_images()
    out = module(x)
    leaves = dict(module.named_parameters(), input=x)
    return dict(
        zip(leaves, torch.autograd.grad(compute_loss((out,)), [*leaves.values()]), strict=True), output=out.detach()
    )


def count_stored_maps(module):
    """Return the stored bytes in units of a map of the input's size."""
    x = random_images()
    fixed = [x, *module.parameters(), *module.buffers()]
    return saved_bytes(lambda: module(x), exclude=fixed) / (8 * x.numel())


@of_mmyolo
class EffectiveSELayer(nn.Module):
    """Channel attention of mmyolo, by its definition."""

    def __init__(self, channels):
        super().__init__()
        self.fc, self.activate = ConvModule(channels, channels, 1, act_cfg=None), nn.Hardsigmoid()

    def forward(self, x):
        return x * self.activate(self.fc(x.mean((2, 3), keepdim=True)))


@of_mmyolo
class Branches(nn.Module):
    """Sum of two branches, followed by an activation alone, as in RepVGG and BiFPN."""

    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act, self.last = build_conv(), build_conv(size=1), act, build_conv()

    def forward(self, x):
        return self.last(self.act(self.first(x) + self.second(x)))


@of_mmyolo
class Apart(nn.Module):
    """Norm and activation that stand apart from the convolution in front."""

    def __init__(self, act):
        super().__init__()
        self.first, self.act, self.last = build_conv(), act, build_conv()

    def forward(self, x):
        return self.last(self.act(self.first(x)))


class DoublesInPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


ATTENTIONS = {
    'SELayer': lambda: SELayer(8, ratio=2, act_cfg=(dict(type='Swish'), dict(type='Sigmoid'))),
    'ChannelAttention': lambda: ChannelAttention(8),
    'EffectiveSELayer': lambda: EffectiveSELayer(8),
}
_CLASSES = (nn.SiLU, Swish, nn.GELU, nn.Hardswish, nn.ReLU6, nn.LeakyReLU)
ACTIVATIONS = {kind.__name__: kind for kind in _CLASSES}


@pytest.mark.parametrize('kind', ATTENTIONS)
def test_channel_attention_stores_the_map_of_the_layer_in_front(kind):
    plain, lean, report = build_plain_and_lean(Held(build_conv('SiLU'), ATTENTIONS[kind](), build_conv()))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert 'held.1' in report.changed and {*report.left} <= {'held.1.conv2.activate'}  # a sigmoid of numbers
    assert (
        count_stored_maps(plain) > 4.9 and count_stored_maps(lean) < 2.3 + MEAN_STORES
    )  # what the norms of the two convolutions need, and numbers


@pytest.mark.parametrize('kind', ATTENTIONS)
def test_channel_attention_by_itself_is_exact(kind):
    plain, lean, _ = build_plain_and_lean(Held(ATTENTIONS[kind](), DoublesInPlace()))
    assert_near(run_step(lean), run_step(plain), 1e-11)


@pytest.mark.parametrize('place', [1, 2])
def test_maps_that_are_written_to_are_not_shared(place):
    layers = [build_conv('SiLU'), ATTENTIONS['SELayer'](), build_conv(norm=False)]
    layers.insert(place, DoublesInPlace())
    plain, lean, _ = build_plain_and_lean(Held(*layers))
    assert_near(run_step(lean), run_step(plain), 1e-11)


def test_a_hook_in_channel_attention_runs():
    plain, lean, _ = build_plain_and_lean(Held(build_conv('SiLU'), ATTENTIONS['SELayer'](), build_conv()))
    for model in (plain, lean):
        model.held[1].global_avgpool.register_forward_hook(lambda module, args, out: 2 * out)
    assert_near(run_step(lean), run_step(plain), 1e-11)


@pytest.mark.parametrize('kind', ['GELU', 'SiLU'])
def test_a_hook_on_an_activation_does_not_switch_it_off(kind):
    """The module is called itself, so its hooks run in any case."""
    seen = []
    plain, lean, _ = build_plain_and_lean(Held(build_conv(), ACTIVATIONS[kind](), build_conv()))
    for model in (plain, lean):
        model.held[1].register_forward_hook(lambda module, args, out: seen.append(type(out.grad_fn).__name__))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert seen[0] != seen[1]  # the operation's node, not torch's
    assert lean.held[1] not in modules_bypassed_in(lean)


def test_derived_channel_attention_keeps_its_code():
    class Doubled(SELayer):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, lean, report = build_plain_and_lean(Held(build_conv('SiLU'), Doubled(8, ratio=2), build_conv()))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert 'held.1' in report.left


def test_inverted_residuals_store_what_their_norms_need():
    keys = dict(norm_cfg=dict(type='BN'), act_cfg=dict(type='Swish'))
    se = dict(channels=48, ratio=4, act_cfg=(dict(type='Swish'), dict(type='Sigmoid')))
    plain, lean, report = build_plain_and_lean(Held(InvertedResidual(8, 8, 48, se_cfg=se, **keys)))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert (
        {*report.left} <= {'held.0.se.conv2.activate'}
        and count_stored_maps(plain) > 50
        and count_stored_maps(lean) < 13.5 + 6 * MEAN_STORES  # of a map with six times the channels
    )  # two maps of 48 channels, one of 8


@pytest.mark.parametrize('inplace', [False, True])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_an_activation_behind_a_sum_stores_the_sum(act, inplace):
    kind = ACTIVATIONS[act]
    plain, lean, report = build_plain_and_lean(
        Held(Branches(kind(inplace=inplace) if act not in ('GELU', 'Swish') else kind()))
    )
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert 'held.0.act' in report.changed
    assert count_stored_maps(lean) < 4.1  # three norms, and the sum


@pytest.mark.parametrize('act', ACTIVATIONS)
def test_an_activation_behind_a_norm_stores_nothing(act):
    plain, lean, _ = build_plain_and_lean(Held(Apart(ACTIVATIONS[act]())))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert count_stored_maps(lean) < 2.1 < count_stored_maps(plain)


def test_activations_of_tokens_keep_their_code():
    layers = nn.Sequential(nn.Linear(10, 10), nn.GELU(), nn.Linear(10, 10))
    plain, lean, _ = build_plain_and_lean(Held(layers))
    assert_near(run_step(lean), run_step(plain), 0)


def test_eight_bits_are_near():
    plain, lean, _ = build_plain_and_lean(
        Held(build_conv('SiLU'), ATTENTIONS['SELayer'](), Branches(nn.SiLU())), 'int8'
    )
    actual, expected = run_step(lean), run_step(plain)
    assert torch.equal(actual['output'], expected['output'])
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 0.05 * max(gradient.norm(), 1e-3), name
    assert count_stored_maps(lean) < 2.5


@pytest.mark.parametrize('project, is_known', [('EfficientDet', True), ('EfficientDetOfMine', False)])
def test_layers_of_mmdets_own_projects_share_their_maps(project, is_known):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = build_conv('SiLU'), build_conv()

        def forward(self, x):
            return self.last(self.first(x))

    define_in_module(f'projects.{project}.bifpn', Pair)
    plain, lean, _ = build_plain_and_lean(Held(Pair()))
    assert_near(run_step(lean), run_step(plain), 1e-11)
    assert (count_stored_maps(lean) < 2.1) == is_known


@pytest.mark.parametrize('name', OPERATION_ACTIVATIONS)
def test_an_activation_by_itself_in_eight_bits(name):
    generator, activation = torch.Generator().manual_seed(1), Activation(name)
    x = torch.randn(3, 8, 24, 24, generator=generator, dtype=torch.float64).requires_grad_()
    settings = ActivationSettings(Form(storage='int8'), activation)
    (expected,) = torch.autograd.grad(activation(x).sin().sum(), x)
    (actual,) = torch.autograd.grad(activate(settings, ActivationTensors(x)).sin().sum(), x)
    assert (actual - expected).norm() < 0.02 * expected.norm()
