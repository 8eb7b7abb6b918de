"""A region proposal network whose loss reads some anchors trains like its own code in fp64."""

import pytest
import torch
import torch.nn.functional as F
from cases import count_model_bytes, make_lean_copy
from helpers import FP16
from mmdet.models.dense_heads import RPNHead
from mmdet.models.task_modules import RandomSampler
from stand_ins import copy_into_module
from torch.utils.flop_counter import FlopCounterMode

from sbp_mmdet.ops import dense_head
from sbp_mmdet.ops.common import row_strips
from sbp_mmdet.ops.common.activations import Activation
from sbp_mmdet.ops.common.kept_maps import KeptCat, KeptMap
from sbp_mmdet.ops.common.sign_bits import SignBits
from sbp_mmdet.verify.checks import verify_modules

NUMBER = 12  # anchors of an image
ANCHORS = dict(type='AnchorGenerator', scales=[8], ratios=[0.5, 1.0, 2.0], strides=[4])


def build_head(**options):
    torch.manual_seed(0)
    head = RPNHead(4, 1, feat_channels=6, anchor_generator=ANCHORS, **options).double()
    head.sampler = RandomSampler(NUMBER, 0.5)
    torch.nn.init.normal_(head.rpn_conv.weight)
    torch.nn.init.normal_(head.rpn_conv.bias)
    return head


def sample(shape, number, seed=1):
    """Return a mask of some anchors of each image; those at the corners and some neighbours are among them."""
    mask = torch.zeros(shape, dtype=torch.float64)
    n, channels, height, width = shape
    made = torch.Generator().manual_seed(seed)
    places = [(0, 0), (0, width - 1), (height - 1, 0), (height - 1, width - 1), (height // 2, 1), (height // 2, 2)]
    for image in range(n):
        drawn = torch.randint(height * width, (max(number - len(places), 0),), generator=made).tolist()
        for row, column in [*places[:number], *(divmod(place, width) for place in drawn)]:
            mask[image, torch.randint(channels, (1,), generator=made), row, column] = 1
    return mask


def compute_gradients(head, x, number=NUMBER, trains_input=True, seed=1):
    """Return outputs and gradients of a loss that reads ``number`` anchors of each image."""
    x = x.clone().requires_grad_(trains_input)
    head.zero_grad()
    scores, boxes = (outs[0] for outs in head([x]))
    loss = (scores.sin() * sample(scores.shape, number, seed)).sum()
    (loss + (boxes.sin() * sample(boxes.shape, number, seed)).sum()).backward()
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    return [scores.detach(), boxes.detach()], found | (dict(x=x.grad) if trains_input else {})


def largest_difference(actual, expected):
    assert actual.keys() == expected.keys()
    return max(((actual[name] - g).norm() / g.norm().clamp_min(1e-300)).item() for name, g in expected.items())


def assert_plain(lean, plain, x, **options):
    actual, expected = compute_gradients(lean, x, **options), compute_gradients(plain, x, **options)
    for out, other in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(out, other, rtol=1e-11, atol=1e-11)
    assert largest_difference(actual[1], expected[1]) < 1e-11


def random_map(number, height, width):
    return torch.randn(number, 4, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=['exact', 'exact_min'])
def preset(request):
    """Yield the presets with exact gradients."""
    return request.param


@pytest.mark.parametrize('number', [0, 1, NUMBER, 400], ids=lambda number: f'{number} anchors')
@pytest.mark.parametrize('shape', [(1, 19, 400), (2, 23, 31), (3, 1, 60), (1, 5, 5)], ids=str)
def test_gradients_are_those_of_the_modules_own_code(preset, shape, number, monkeypatch):
    """The largest map has three strips, the smallest is one where few anchors are many; 400 are more than it says."""
    for device in row_strips._ELEMENTS:
        monkeypatch.setitem(row_strips._ELEMENTS, device, 20_000)
    plain = build_head()
    assert_plain(make_lean_copy(plain, preset), plain, random_map(*shape), number=number // 2)


def test_channels_last(preset):
    plain = build_head().to(memory_format=torch.channels_last)
    x = random_map(2, 23, 31).to(memory_format=torch.channels_last)
    assert_plain(make_lean_copy(plain, preset), plain, x)


def test_dilation(preset):
    plain = build_head()
    plain.rpn_conv.padding, plain.rpn_conv.dilation = (2, 3), (2, 3)
    assert_plain(make_lean_copy(plain, preset), plain, random_map(2, 23, 31))


@pytest.mark.parametrize('frozen', ['rpn_conv', 'rpn_cls', 'bias', 'weight', 'rpn', 'x'])
def test_frozen_parameters(preset, frozen):
    plain = build_head()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert_plain(make_lean_copy(plain, preset), plain, random_map(2, 23, 31), trains_input=frozen != 'x')


def test_gradients_that_are_not_finite_pass(preset):
    head = make_lean_copy(build_head(), preset)
    x = random_map(1, 23, 31).requires_grad_()
    scores = head([x])[0][0]
    scores.backward(F.pad(torch.full_like(scores[:, :, :1, :1], float('nan')), (0, 30, 0, 22)))
    assert x.grad[:, :, :2, :2].isnan().all() and not x.grad[:, :, 2:, 2:].any()
    assert head.rpn_conv.weight.grad.isnan().any()


def test_the_backward_pass_computes_what_has_a_gradient(preset):
    """12 anchors of 23 * 31 positions, for scores and for boxes."""
    plain = build_head()

    def count(head):
        loss = sum((out.sin() * sample(out.shape, NUMBER)).sum() for outs in head([x]) for out in outs)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_total_flops()

    x = random_map(1, 23, 31).requires_grad_()
    assert 0 < count(make_lean_copy(plain, preset)) < 0.25 * count(plain)


def test_the_signs_alone_are_saved():
    plain, x = build_head(), random_map(1, 64, 64)

    def count(head, sampler):
        head.sampler = sampler
        return count_model_bytes(head, [x])

    lean = make_lean_copy(plain)
    hidden = 6 * 64 * 64 * 8
    saved = count(lean, None) - count(lean, RandomSampler(NUMBER, 0.5))
    assert 0.95 * hidden < saved < hidden
    assert count(lean, None) == count(lean, RandomSampler(64 * 64, 0.5))


def test_a_product_that_answers_differently_the_second_time(preset, monkeypatch):
    """No ReLU flips: all gradients are right that do not read the recomputed values themselves."""
    plain, x = build_head(), random_map(1, 64, 64)
    lean, own, noise = make_lean_copy(plain, preset), torch.addmm, torch.Generator().manual_seed(2)
    expected = compute_gradients(plain, x)[1]

    def other(*args, **kwargs):
        out = own(*args, **kwargs)
        return out + 3 * out.std() * torch.randn(out.shape, dtype=out.dtype, generator=noise)

    monkeypatch.setattr(torch, 'addmm', copy_into_module('torch', other, 'addmm'))
    actual = compute_gradients(lean, x)[1]
    values = ('rpn_cls.weight', 'rpn_reg.weight')
    assert all(largest_difference({name: actual[name]}, {name: expected[name]}) > 0.1 for name in values)
    actual, expected = ({name: g for name, g in found.items() if name not in values} for found in (actual, expected))
    assert largest_difference(actual, expected) < 1e-11


@pytest.mark.parametrize('factor', [1, 1.1])
def test_the_verification_reaches_it(factor, monkeypatch):
    compute = dense_head.scatter_gradient
    monkeypatch.setattr(dense_head, 'scatter_gradient', lambda *args: factor * compute(*args))
    head = make_lean_copy(build_head())
    kinds = verify_modules(head, [''], lambda head: head([random_map(2, 24, 20).requires_grad_()])).kinds
    assert [bool(kind.disagrees) for kind in kinds] == [factor != 1]


@pytest.mark.parametrize('dtype', [FP16, torch.bfloat16], ids=str)
def test_half_precision(preset, dtype):
    """The errors are not larger than those of the plain module in this precision."""
    plain, x = build_head(), random_map(2, 23, 31)
    exact = compute_gradients(plain, x)[1]

    def error(head):
        found = compute_gradients(head.to(dtype), x.to(dtype))[1]
        assert all(g.dtype == dtype for g in found.values())
        return torch.stack([(found[name].double() - g).norm() / g.norm() for name, g in exact.items()]).mean()

    lean = make_lean_copy(plain, preset)
    assert error(lean) < 1.3 * error(plain)


def test_eight_bits_are_near():
    plain, x = build_head(), random_map(1, 40, 64)
    expected, actual = (compute_gradients(head, x)[1] for head in (plain, make_lean_copy(plain, 'int8')))
    assert largest_difference(actual, expected) < 0.03


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_signs_of_strips_are_those_of_the_map(layout):
    made = torch.Generator().manual_seed(0)
    y = torch.randn(2, 3, 11, 5, generator=made).relu().contiguous(memory_format=layout)
    strips = [y[:, :, i : i + 4].contiguous(memory_format=layout) for i in (0, 4, 8)]
    images, rows, columns = (torch.randint(n, (40,), generator=made) for n in (2, 11, 5))
    found = SignBits.at_in_strips([SignBits.pack(strip) for strip in strips], 4, y.shape, images, rows, columns)
    assert torch.equal(found, y[images, :, rows, columns] > 0)


def test_maps_that_have_to_be_computed_are_read_strip_by_strip():
    x = torch.ones(1, 2, 3, 4)
    assert dense_head._is_whole(KeptMap(x), torch.float32)
    computed = KeptMap(x, activation=Activation('relu')), KeptMap(x, scale=x, shift=x), KeptCat((KeptMap(x),))
    assert not any(dense_head._is_whole(saved, torch.float32) for saved in computed)
    assert not dense_head._is_whole(KeptMap(x), torch.float16)
