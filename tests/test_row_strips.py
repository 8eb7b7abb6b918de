"""The region proposal network and the feature pyramid in strips of rows train like their own code in fp64."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from cases import count_model_bytes, make_lean_copy
from mmdet.models.dense_heads import RPNHead
from mmdet.models.necks import FPN
from stand_ins import copy_into_module
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.ops import feature_pyramid

WIDE = 40_000  # columns: a strip has a few rows


class Heads(nn.Module):
    """A feature pyramid with the head of a region proposal network on it."""

    def __init__(self, **options):
        super().__init__()
        self.neck = FPN(**{'in_channels': [3, 5, 6], 'out_channels': 4, 'num_outs': 4, **options})
        self.rpn_head = RPNHead(4, 1, feat_channels=6, anchor_generator=dict(
            type='AnchorGenerator', scales=[8], ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32]))  # fmt: skip

    def forward(self, maps):
        return [out for outs in self.rpn_head(self.neck(maps)) for out in outs]


def build_heads(**options):
    torch.manual_seed(0)
    return Heads(**options).double()


def random_maps(height=19, width=WIDE, number=1):
    made = torch.Generator().manual_seed(1)
    sizes = [(-(-height // 2**i), -(-width // 2**i)) for i in range(3)]
    return [
        torch.randn(number, c, *size, dtype=torch.float64, generator=made)
        for c, size in zip([3, 5, 6], sizes, strict=True)
    ]


def compute_gradients(model, inputs, needs=(True, True, True), layout=torch.contiguous_format):
    """Return outputs and gradients of inputs and parameters."""
    inputs = [x.clone(memory_format=layout).requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    model.zero_grad()
    outs = model(inputs)
    sum(out.mul_(2).sin().sum() for out in outs).backward()  # others may work on an output in place
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [out.detach() for out in outs], gradients | {i: x.grad for i, x in enumerate(inputs) if x.grad is not None}


def largest_difference(actual, expected):
    assert actual.keys() == expected.keys()
    return max(((actual[name] - g).norm() / g.norm().clamp_min(1e-300)).item() for name, g in expected.items())


def assert_plain(lean, plain, inputs, **options):
    actual, expected = compute_gradients(lean, inputs, **options), compute_gradients(plain, inputs, **options)
    for out, other in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(out, other, rtol=1e-11, atol=1e-11)
    assert largest_difference(actual[1], expected[1]) < 1e-11


@pytest.fixture(params=['exact', 'exact_min'])
def preset(request):
    """Yield the presets with which the hidden map or only its signs are stored."""
    return request.param


@pytest.mark.parametrize('needs', [(True, True, True), (False, True, False), (False, False, False)])
def test_gradients_are_those_of_the_modules_own_code(preset, needs):
    plain = build_heads()
    lean = make_lean_copy(plain, preset)
    assert_plain(lean, plain, random_maps() if all(needs) else random_maps(9, 30), needs=needs)


@pytest.mark.parametrize('options', [
    dict(add_extra_convs='on_output', num_outs=5),
    dict(add_extra_convs='on_input', relu_before_extra_convs=True, num_outs=5),
    dict(start_level=1, num_outs=3), dict(end_level=1, num_outs=2), dict(norm_cfg=dict(type='BN')),
    dict(upsample_cfg=dict(mode='bilinear')), dict(add_extra_convs='on_lateral'),
])  # fmt: skip
@pytest.mark.parametrize(('height', 'width', 'number'), [(37, 50, 2), (1, 9, 1)])
def test_pyramids_of_all_kinds_and_maps_of_all_sizes(preset, options, height, width, number):
    plain = build_heads(**options)
    assert_plain(make_lean_copy(plain, preset), plain, random_maps(height, width, number))


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_outputs_of_a_pyramid_in_strips(layout, monkeypatch):
    """On a GPU, presets for which memory comes first compute the second convolutions in strips."""
    whole = feature_pyramid._forward_strips

    def in_strips(s, lateral):
        cuda = types.SimpleNamespace(is_cuda=True, shape=lateral.shape, device=lateral.device)
        seen.append(len(whole(s, cuda)))
        assert len(whole(s, lateral)) == 1
        return whole(s, cuda)

    monkeypatch.setattr(feature_pyramid, '_forward_strips', in_strips)
    for preset, most in (('exact', 1), ('exact_min', 2), ('int8', 2)):
        plain, seen = build_heads(), []
        lean = make_lean_copy(plain, preset)
        maps = [x.contiguous(memory_format=layout) for x in random_maps()]
        for out, expected in zip(lean.neck(maps), plain.neck(maps), strict=True):
            torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
            assert out.stride() == expected.stride()
        assert max(seen) == most


def test_frozen_parameters(preset):
    for frozen in ('rpn_conv', 'rpn_cls', 'lateral_convs', 'fpn_convs', 'rpn_head', 'neck', 'bias', 'weight'):
        plain = build_heads()
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(frozen not in name)
        assert_plain(make_lean_copy(plain, preset), plain, random_maps(9, 30))


def test_channels_last(preset):
    plain = build_heads().to(memory_format=torch.channels_last)
    lean = make_lean_copy(plain, preset)
    assert_plain(lean, plain, random_maps(9, 30, 2), layout=torch.channels_last)


def test_outputs_that_nobody_uses(preset):
    plain = build_heads()
    lean = make_lean_copy(plain, preset)

    def last(model):
        return lambda inputs: model.rpn_head(model.neck(inputs)[1:2])[1]

    found = []
    for model in (lean, plain):
        inputs = [x.requires_grad_() for x in random_maps(9, 30)]
        model.zero_grad()
        sum(out.sin().sum() for out in last(model)(inputs)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        found[-1] |= {i: x.grad for i, x in enumerate(inputs) if x.grad is not None}
    # The head's two outputs are one operation, so the unused one gets a gradient of zero; an unused level gets none.
    found[0] = {name: g for name, g in found[0].items() if 'rpn_cls' not in str(name) or g.any()}
    assert largest_difference(*found) < 1e-11


def test_autocast(preset):
    """The errors are not larger than those of the plain modules in this precision."""
    plain, inputs = build_heads(), random_maps(33, 64)
    exact = compute_gradients(plain, inputs)[1]

    def error(model):
        model = model.float()
        with torch.autocast('cpu', torch.bfloat16):
            gradients = compute_gradients(model, [x.float() for x in inputs])[1]
        assert all(g.dtype == torch.float32 for g in gradients.values())
        return torch.stack([(gradients[name] - g).norm() / g.norm() for name, g in exact.items()]).mean()

    assert error(make_lean_copy(plain, preset)) < 1.3 * error(copy.deepcopy(plain))


def test_a_convolution_that_answers_differently_the_second_time(preset, monkeypatch):
    """No ReLU flips."""
    plain = build_heads()
    lean, own, noise = make_lean_copy(plain, preset), F.conv2d, torch.Generator().manual_seed(2)

    def other(*args, **kwargs):
        out = own(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # the forward pass
            return out
        return out + 1e-5 * out.std() * torch.randn(out.shape, dtype=out.dtype, generator=noise)

    expected = compute_gradients(plain, random_maps(64, 64))
    monkeypatch.setattr(F, 'conv2d', copy_into_module('torch.nn.functional', other, 'conv2d'))  # as if torch did it
    assert largest_difference(compute_gradients(lean, random_maps(64, 64))[1], expected[1]) < 1e-4


def test_stored_bytes(preset):
    """The maps of the pyramid and the signs of the hidden maps are stored, and no lateral.

    Laterals and the pyramid's maps have 4 channels, hidden maps 6.
    """
    plain, inputs = build_heads(), random_maps(32, 64)
    everything = count_model_bytes(plain, inputs)
    most = dict(exact=0.74, exact_min=0.4)[preset]
    assert count_model_bytes(make_lean_copy(plain, preset), inputs) < most * everything
    assert count_model_bytes(make_lean_copy(plain, 'int8'), inputs) < 0.2 * everything


def test_a_loss_of_the_instances_own_does_not_matter():
    """The loss calls the forward pass, not the other way round."""
    plain, inputs = build_heads(), random_maps(32, 64)
    lean = make_lean_copy(plain)
    before = count_model_bytes(lean, inputs)
    lean.rpn_head.loss_and_predict = lambda *args: None
    assert count_model_bytes(lean, inputs) == before < count_model_bytes(plain, inputs)


def test_eight_bits_are_near():
    plain = build_heads()
    expected, actual = (
        compute_gradients(model, random_maps(40, 64)) for model in (plain, make_lean_copy(plain, 'int8'))
    )
    assert largest_difference(actual[1], expected[1]) < 0.03


class _Other(RPNHead):
    def forward_single(self, x):
        return super().forward_single(x * 0.5)


def _hook_on_hidden(model):
    model.rpn_head.rpn_conv.register_forward_hook(lambda module, args, out: out * 0.5)


def _hook_on_lateral(model):
    model.neck.lateral_convs[1].register_forward_hook(lambda module, args, out: out * 0.5)


def _hook_on_output(model):
    model.neck.fpn_convs[0].conv.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def _subclass(model):
    model.rpn_head.__class__ = _Other


def _circular(model):
    conv = model.rpn_head.rpn_conv
    conv.padding_mode, conv._reversed_padding_repeated_twice = 'circular', [1, 1, 1, 1]


def _replaced(model):
    own = model.rpn_head.forward_single
    model.rpn_head.forward_single = lambda x: own(x * 0.5)


CHANGES = [_hook_on_hidden, _hook_on_lateral, _hook_on_output, _subclass, _circular]


@pytest.mark.parametrize('change', CHANGES)
def test_what_is_not_known_runs_its_own_code(change):
    plain = build_heads()
    change(plain)
    lean = copy.deepcopy(plain)
    report = apply_lean(lean)
    assert_plain(lean, plain, random_maps(9, 30))
    assert {'neck', 'rpn_head'} & report.left.keys()


@pytest.mark.parametrize('change', [*CHANGES[:3], _replaced])
def test_changes_that_come_later_are_seen(change):
    plain = build_heads()
    lean = make_lean_copy(plain)
    for model in (lean, plain):
        change(model)
    assert_plain(lean, plain, random_maps(9, 30))


def test_evaluation_runs_the_own_code_and_no_images_pass():
    plain = build_heads()
    lean = make_lean_copy(plain)
    for one, other in zip(lean.eval()(random_maps(9, 30)), plain.eval()(random_maps(9, 30)), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(lean.train()(random_maps(9, 30, 0)), plain.train()(random_maps(9, 30, 0)), strict=True):
        assert one.shape == other.shape
