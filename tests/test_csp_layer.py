"""CSP layers, their blocks and Darknet's stages run as one operation, with the gradients of their own code in fp64."""

import copy

import pytest
import torch
from cases import count_model_bytes, make_lean_copy
from conv_models import randomize_norms
from mmcv.cnn import ConvModule
from mmdet.models.backbones.darknet import Darknet
from mmdet.models.layers import CSPLayer
from mmdet.models.layers.csp_layer import CSPNeXtBlock, DarknetBottleneck
from test_residual_chain import (
    assert_plain,
    assert_right_in_unusual_passes,
    compute_gradients,
    largest_difference,
)
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.ops import csp_layer as csp_op
from sbp_mmdet.ops.common import batch_and_group_norms
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors

BN, GN = dict(type='BN'), dict(type='GN', num_groups=4)
NEXT = dict(use_cspnext_block=True, act_cfg=dict(type='SiLU'))
LAYERS = {
    'CSPNeXt': NEXT,
    'CSPNeXt, attention': dict(NEXT, channel_attention=True),
    'CSPNeXt, eval': dict(NEXT, channel_attention=True, norm_eval=True),
    'Darknet': {},
    'Darknet, eval': dict(norm_eval=True),
    'depthwise': dict(use_depthwise=True),
    'no shortcut': dict(add_identity=False),
    'no shortcut, nine blocks': dict(add_identity=False, num_blocks=9),
    'group norm': dict(norm_cfg=GN),
    'LeakyReLU': dict(act_cfg=dict(type='LeakyReLU', negative_slope=0.1)),
    'ReLU': dict(act_cfg=dict(type='ReLU')),
    'ReLU, eval': dict(act_cfg=dict(type='ReLU'), norm_eval=True),
    'Hardswish, eval': dict(act_cfg=dict(type='HSwish'), norm_eval=True),
    'one block': dict(NEXT, num_blocks=1),
    'seven blocks': dict(NEXT, num_blocks=7),
}


def build_layer(norm_eval=False, num_blocks=2, **options):
    model = randomize_norms(CSPLayer(8, 16, num_blocks=num_blocks, **{'norm_cfg': BN, **options}))
    return model.apply(lambda m: m.eval() if norm_eval and isinstance(m, nn.BatchNorm2d) else m)


def build_stage(norm_eval=False, blocks=3):
    """Return a stage of Darknet: a layer of stride 2 and blocks."""
    norm, act = dict(type='BN'), dict(type='LeakyReLU', negative_slope=0.1)
    model = randomize_norms(Darknet.make_conv_res_block(8, 16, blocks, norm_cfg=norm, act_cfg=act))
    return model.apply(lambda m: m.eval() if norm_eval and isinstance(m, nn.BatchNorm2d) else m)


def random_map(size=(9, 14), number=2):
    return torch.randn(number, 8, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def count_saving_nodes(model):
    """Return how many nodes of autograd's graph save tensors of a forward pass."""
    out = model(random_map())  # torch 2.1 frees the nodes of a graph whose output is gone
    seen, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return len([node for node in seen if type(node).__name__ != 'AccumulateGrad'])


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('needs_x', [True, False])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_gradients_are_those_of_the_layers_own_code(name, needs_x, preset):
    plain = build_layer(**LAYERS[name])
    lean = make_lean_copy(plain, preset)
    assert count_saving_nodes(lean) == 1
    plain.load_state_dict(lean.state_dict())
    for _ in range(2):  # running statistics move twice
        assert_plain(lean, plain, random_map(), needs_x=needs_x)


@pytest.mark.parametrize('norm_eval', [True, False])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_a_stage_of_darknet(norm_eval, preset):
    plain = build_stage(norm_eval, blocks=14)  # longer than a chain
    lean = make_lean_copy(plain, preset)
    assert count_saving_nodes(lean) == 3  # with the layer in front
    plain.load_state_dict(lean.state_dict())
    assert_plain(lean, plain, random_map())


@pytest.mark.parametrize('kind', [CSPNeXtBlock, DarknetBottleneck])
def test_a_block_alone(kind):
    plain = randomize_norms(kind(8, 8, norm_cfg=BN))
    lean = make_lean_copy(plain)
    assert count_saving_nodes(lean) == 1
    plain.load_state_dict(lean.state_dict())
    assert_plain(lean, plain, random_map())


# Bytes in maps of eight channels: of a layer with two blocks of two or three convolutions of eight channels, a layer of
# eight channels on each side, and one of sixteen behind.
STORED = {
    ('CSPNeXt', 'exact'): 10, ('CSPNeXt, attention', 'exact'): 10, ('CSPNeXt, eval', 'exact'): 10,
    ('CSPNeXt, attention', 'exact_min'): 4, ('CSPNeXt, eval', 'exact_min'): 4,
    ('Darknet', 'exact'): 8, ('Darknet', 'exact_min'): 4, ('depthwise', 'exact_min'): 2,
    ('no shortcut, nine blocks', 'exact'): 22, ('LeakyReLU', 'exact_min'): 8,
    ('CSPNeXt, attention', 'int8'): 10 / 4 + 1, ('Darknet', 'int8'): 8 / 4 + 1,
}  # fmt: skip


@pytest.mark.parametrize(('name', 'preset'), STORED)
def test_stored_bytes(name, preset):
    """At most the outputs of all convolutions and statistics are stored.

    ``exact_min`` stores the outputs of dense 3x3 convolutions and of the last convolution.
    """
    lean, x = make_lean_copy(build_layer(**LAYERS[name]), preset).float(), random_map((32, 32)).float()
    maps = count_model_bytes(lean, x) / x.nbytes
    assert STORED[name, preset] - 1 < maps < STORED[name, preset] + 0.05


@pytest.mark.parametrize('blocks', [1, 2, 8])
def test_a_stage_of_darknet_stores_its_convolutions_and_few_sums(blocks):
    """Maps have sixteen channels at a quarter of the size. The next layer adds two of the sums again."""
    lean = make_lean_copy(
        nn.Sequential(build_stage(blocks=blocks), ConvModule(16, 16, 1, norm_cfg=BN).double())
    ).float()
    x = random_map((64, 64)).float()
    assert count_model_bytes(lean, x) < (1 + 1.5 * blocks + blocks // 4 + 1 + 0.05) * x.nbytes / 2


FROZEN = {
    'nothing': lambda m: [],
    'norms': lambda m: [p for name, p in m.named_parameters() if '.bn.' in name],
    'convolutions': lambda m: [p for name, p in m.named_parameters() if '.conv.' in name],
    'all but the last layer': lambda m: [p for name, p in m.named_parameters() if 'final' not in name],
    'the first layers': lambda m: [*m.main_conv.parameters(), *m.short_conv.parameters()],
    'the blocks': lambda m: [*m.blocks.parameters()],
    'the attention': lambda m: [*m.attention.parameters()],
    'all but the attention': lambda m: [p for name, p in m.named_parameters() if 'attention' not in name],
    'all': lambda m: [*m.parameters()],
}


@pytest.mark.parametrize('norm_eval', [True, False])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_requires_grad_changes_between_steps(norm_eval, preset):
    plain = build_layer(norm_eval, channel_attention=True, **NEXT)
    lean = make_lean_copy(plain, preset)
    for some in FROZEN.values():
        for model in (lean, plain):
            model.requires_grad_(True)
            for p in some(model):
                p.requires_grad_(False)
        assert_plain(lean, plain, random_map())
        if any(p.requires_grad for p in lean.parameters()):
            assert_plain(lean, plain, random_map(), needs_x=False)


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_two_passes_a_retained_graph_and_a_checkpoint(preset):
    plain = build_layer(channel_attention=True, **NEXT)
    lean = make_lean_copy(plain, preset)
    assert_right_in_unusual_passes(lean, plain, random_map(), random_map((5, 30)))


def test_a_second_derivative_is_an_error():
    lean, x = make_lean_copy(build_layer()), random_map().requires_grad_()
    (grad,) = torch.autograd.grad(lean(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='differentiate twice'):
        grad.sum().backward()


@pytest.mark.parametrize('norm_eval', [True, False])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_autocast(norm_eval, preset):
    """The errors are not larger than those of the plain model in this precision."""
    plain = build_layer(norm_eval, channel_attention=True, **NEXT)
    exact = compute_gradients(copy.deepcopy(plain), random_map())[1]

    def error(model):
        model = model.float()
        with torch.autocast('cpu', torch.bfloat16):
            gradients = compute_gradients(model, random_map().float())[1]
        assert all(g.dtype == torch.float32 for g in gradients.values())
        return torch.stack([(gradients[name] - g).norm() / g.norm() for name, g in exact.items()]).mean()

    assert error(make_lean_copy(plain, preset)) < 1.3 * error(plain)


def test_channels_last_evaluation_and_no_images():
    plain = build_layer(channel_attention=True, **NEXT)
    lean = make_lean_copy(plain)
    x = random_map().contiguous(memory_format=torch.channels_last)
    assert_plain(copy.deepcopy(lean).to(memory_format=torch.channels_last), copy.deepcopy(plain), x)
    assert torch.equal(lean.eval()(random_map()), plain.eval()(random_map()))
    with torch.no_grad():
        torch.testing.assert_close(lean.train()(random_map()), plain.train()(random_map()))
        torch.testing.assert_close(lean(random_map(number=0)), plain(random_map(number=0)))


@pytest.mark.parametrize('attention', [False, True])
def test_a_frozen_layer_saves_nothing(attention):
    plain = build_layer(channel_attention=attention, **NEXT).requires_grad_(False)
    out = make_lean_copy(plain)(random_map())
    assert not out.requires_grad
    torch.testing.assert_close(out, plain(random_map()))


def test_eight_bits_are_near():
    plain = build_layer(channel_attention=True, **NEXT)
    actual, expected = (
        compute_gradients(make_lean_copy(plain, 'int8'), random_map()),
        compute_gradients(plain, random_map()),
    )
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-11)
    assert largest_difference(actual[1], expected[1]) < 0.1


def _hook(model):
    model.blocks[1].conv2.pointwise_conv.register_forward_hook(lambda module, args, out: out * 0.5)


def _hook_of_the_list(model):
    model.blocks.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def _hook_of_the_attention(model):
    model.attention.fc.register_forward_hook(lambda module, args, out: out * 0.5)


def _instance_forward(model):
    norm = model.main_conv.bn
    norm.forward = lambda x: x * 0.5


def _other_activation(model):
    model.short_conv.activate = nn.Tanh()


class _Other(CSPNeXtBlock):
    def forward(self, x):
        return super().forward(x) * 0.5


def _subclass(model):
    model.blocks[0].__class__ = _Other


def _circular(model):
    conv = model.blocks[0].conv1.conv
    conv.padding_mode, conv._reversed_padding_repeated_twice = 'circular', [1, 1, 1, 1]


def _order(model):
    model.final_conv.order = ('norm', 'conv', 'act')
    model.final_conv.bn = nn.BatchNorm2d(16).double()


class _Lora(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv, self.a = conv, nn.Conv2d(8, 8, 1).double()

    def forward(self, x):
        return self.conv(x) + self.a(x)


def _lora(model):
    torch.manual_seed(3)
    model.main_conv.conv = _Lora(model.main_conv.conv)


def _parametrized(model):
    nn.utils.parametrizations.weight_norm(model.short_conv.conv)


LATE = [_hook, _hook_of_the_list, _hook_of_the_attention, _parametrized]
CHANGES = [*LATE, _instance_forward, _other_activation, _subclass, _circular, _order, _lora]


@pytest.mark.parametrize('change', CHANGES)
def test_a_layer_that_is_not_the_stock_one_runs_its_own_code(change):
    plain = build_layer(channel_attention=True, **NEXT)
    change(plain)
    lean = make_lean_copy(plain)
    assert count_saving_nodes(lean) > 1
    plain.load_state_dict(lean.state_dict())
    assert_plain(lean, plain, random_map())


@pytest.mark.parametrize('change', LATE)
def test_changes_that_come_later_are_seen(change):
    plain = build_layer(channel_attention=True, **NEXT)
    lean = make_lean_copy(plain)
    assert_plain(lean, plain, random_map())
    for model in (lean, plain):
        change(model)
    assert_plain(lean, plain, random_map())


def test_what_runs_its_own_code_is_named():
    plain = build_layer(**NEXT)
    _lora(plain)
    report = apply_lean(plain, verify=False)
    assert '_Lora' in report.left['main_conv']


def test_group_norm_in_full_precision_does_not_round_a_shortcut(monkeypatch):
    """Where autocast runs group norm in full, as on a GPU, a block whose norm gives zero returns its input."""
    monkeypatch.setattr(csp_op, 'keeps_full_precision', lambda s, x: s.norm == 'group')
    monkeypatch.setattr(batch_and_group_norms, '_for_group_norm', lambda z, weight: z.to(weight.dtype))
    layer = ConvNormSettings(norm='group', num_groups=4, activation=Activation('silu'), dtype=torch.bfloat16)
    x, weight, zeros = torch.randn(2, 8, 5, 7), torch.randn(8, 8, 1, 1, requires_grad=True), torch.zeros(8)
    tensors = ConvNormTensors(None, weight, None, zeros, zeros)
    assert torch.equal(csp_op.csp_layer(csp_op.CSPSettings((layer,), (1,), (True,)), x, [tensors]), x)
