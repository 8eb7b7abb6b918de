"""Chains of residual blocks have the outputs and gradients of the blocks' own code in fp64."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from cases import count_model_bytes, make_lean_copy
from mmdet.models.backbones import res2net, resnet, resnext
from mmdet.models.layers import ResLayer
from oracles import DEVICE, assert_equal_statistics
from torch import nn

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.common import sign_bits
from sbp_mmdet.ops.common.sign_bits import SignBits, SignPacker, SignReader
from sbp_mmdet.plan.memory import peak_bytes

BN, GN, WS = dict(type='BN'), dict(type='GN', num_groups=4), dict(type='ConvWS')
# Block, arguments of the stage, whether batch norms are in evaluation mode.
STAGES = {
    'Bottleneck': (resnet.Bottleneck, dict(stride=2), True),
    'Bottleneck, caffe': (resnet.Bottleneck, dict(stride=2, style='caffe'), True),
    'Bottleneck, caffe, stride 3': (resnet.Bottleneck, dict(stride=3, style='caffe'), True),
    'Bottleneck, caffe, average pooling': (resnet.Bottleneck, dict(stride=2, style='caffe', avg_down=True), True),
    'Bottleneck, dilated': (resnet.Bottleneck, dict(dilation=2), True),
    'Bottleneck, average pooling': (resnet.Bottleneck, dict(stride=2, avg_down=True), True),
    'Bottleneck, batch statistics': (resnet.Bottleneck, dict(stride=2, avg_down=True), False),
    'Bottleneck, group norm': (resnet.Bottleneck, dict(stride=2, norm_cfg=GN), True),
    'Bottleneck, weight standardisation': (resnet.Bottleneck, dict(stride=2, norm_cfg=GN, conv_cfg=WS), True),
    'ResNeXt': (resnext.Bottleneck, dict(stride=2, groups=4, base_width=8, base_channels=8), True),
    'Res2Net': (res2net.Bottle2neck, dict(stride=2, scales=4, base_width=26), True),
    'Res2Net, three groups and caffe': (res2net.Bottle2neck, dict(stride=2, scales=3, style='caffe'), True),
    'Res2Net, batch statistics': (res2net.Bottle2neck, dict(stride=2, scales=4), False),
    'Res2Net, group norm': (res2net.Bottle2neck, dict(stride=2, scales=2, base_width=32, norm_cfg=GN), True),
    'BasicBlock': (resnet.BasicBlock, dict(stride=2), True),
    'BasicBlock, batch statistics': (resnet.BasicBlock, dict(stride=2), False),
}


def build_stage(block=resnet.Bottleneck, options=None, norm_eval=True, blocks=8, width=8):
    """Return a stage with norms that look trained, on ``DEVICE``; it is longer than a chain."""
    torch.manual_seed(0)
    kind = res2net.Res2Layer if block is res2net.Bottle2neck else ResLayer
    model = kind(block, 16, width, blocks, **{'stride': 2, 'norm_cfg': BN, **(options or {})})
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            nn.init.uniform_(module.weight, 0.3, 0.8)
            nn.init.normal_(module.bias, std=0.2)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 2)
            module.train(not norm_eval)
    return model.double().to(DEVICE)


def random_map(size=(17, 22), channels=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, *size, dtype=torch.float64, generator=generator).to(DEVICE)


def compute_gradients(model, x, run=None, needs_x=True):
    """Return output and gradients of input and parameters."""
    x = x.clone().requires_grad_(needs_x)
    model.zero_grad()
    out = (run or model)(x)
    out.sin().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), gradients | ({'x': x.grad} if needs_x else {})


def largest_difference(actual, expected):
    """Return the largest relative difference of a gradient."""
    assert actual.keys() == expected.keys()
    return max(((actual[name] - g).norm() / g.norm()).item() for name, g in expected.items())


def assert_plain(lean, plain, x=None, most=1e-11, **options):
    x = random_map() if x is None else x
    actual, expected = compute_gradients(lean, x, **options), compute_gradients(plain, x, **options)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-11)
    assert largest_difference(actual[1], expected[1]) < most
    assert_equal_statistics(dict(lean.named_buffers()), dict(plain.named_buffers()))


def build_lean_and_plain(*args, preset='exact', **kwargs):
    plain = build_stage(*args, **kwargs)
    return make_lean_copy(plain, preset), plain


@pytest.mark.parametrize('name', STAGES)
@pytest.mark.parametrize('needs_x', [True, False])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_gradients_are_those_of_the_blocks_own_code(name, needs_x, preset):
    lean, plain = build_lean_and_plain(*STAGES[name], preset=preset)
    for _ in range(2):  # running statistics move twice
        assert_plain(lean, plain, needs_x=needs_x)


@pytest.mark.parametrize(('block', 'norm_eval', 'preset', 'most'), [
    (resnet.Bottleneck, True, 'exact', 0.21), (resnet.Bottleneck, False, 'exact', 0.17),
    (resnet.BasicBlock, True, 'exact', 0.30), (resnet.BasicBlock, False, 'exact', 0.27),
    (resnet.Bottleneck, True, 'exact_min', 0.14), (resnet.Bottleneck, False, 'exact_min', 0.09),
])  # fmt: skip
def test_stored_bytes(block, norm_eval, preset, most):
    lean, plain = (model.float() for model in build_lean_and_plain(block, None, norm_eval, blocks=6, preset=preset))
    x = random_map((32, 32)).float()
    assert count_model_bytes(lean, x) < most * count_model_bytes(plain, x)


@pytest.mark.parametrize('style', ['pytorch', 'caffe'])
def test_one_gradient_of_a_strided_block_has_the_size_of_its_input(style):
    """The one through the shortcut is a quarter of it, so two whole gradients never exist at a time."""
    stage = make_lean_copy(build_stage(options=dict(style=style), blocks=1, width=4))
    x = random_map((64, 64)).requires_grad_()
    assert peak_bytes(lambda: stage(x).sum().backward()) < 2 * x.nbytes


@pytest.mark.parametrize(('preset', 'block', 'blocks'), [
    *itertools.product(['exact'], [resnet.Bottleneck], [2, 3, 6, 7]),
    *itertools.product(['exact'], [resnet.BasicBlock], [1, 2, 7]),
    *itertools.product(['exact_min'], [resnet.Bottleneck, resnet.BasicBlock], [1, 2, 7]),
])  # fmt: skip
def test_no_more_is_stored_than_checkpoints_of_blocks_store(block, blocks, preset):
    """The bound allows for signs, which take one bit in 32."""
    lean, plain = (model.float() for model in build_lean_and_plain(block, None, blocks=blocks, preset=preset))
    x, run = random_map((32, 32)).float(), type(plain).forward

    def checkpointed(x):
        for member in plain:
            x = cp.checkpoint(member, x, use_reentrant=False)
        return x

    plain.forward = checkpointed
    counts, most = count_model_bytes(lean, x), count_model_bytes(plain, x)
    out = run(plain, x)
    assert counts - out.nbytes <= most + blocks * 3 * out.nbytes / 32


@pytest.mark.parametrize(('group', 'most'), [(0, 7.3), (2**22, 7.3 + 0.38)])
def test_what_was_used_is_freed(group, most, monkeypatch):
    """The first block, of stride 2, has the largest maps; at its peak, the maps of later blocks have been freed.

    Signs are packed one by one, as those of large maps, or together: the maps inside of blocks then exist as bytes.
    """
    monkeypatch.setattr(sign_bits, '_GROUP', group)
    lean, x = build_lean_and_plain(blocks=3, width=16)[0].float(), torch.randn(8, 16, 28, 28).to(DEVICE)

    def run():
        lean.zero_grad()
        lean(x.clone().requires_grad_()).square().mean().backward()

    run()
    assert peak_bytes(run) <= most * x.nbytes  # counted from the results of operations, on any device


@pytest.mark.parametrize('name', ['Bottleneck', 'Bottleneck, batch statistics', 'BasicBlock'])
@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
def test_a_convolution_that_answers_differently_the_second_time(name, preset, monkeypatch):
    """The error of the gradients is proportional to that of the convolutions, because no ReLU flips."""
    lean, plain = build_lean_and_plain(*STAGES[name], preset=preset)
    own, noise = torch.conv2d, torch.Generator().manual_seed(2)

    def other(*args, **kwargs):
        out = own(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # the forward pass
            return out
        return out + 1e-5 * out.std() * torch.randn(out.shape, dtype=out.dtype, generator=noise).to(out)

    expected = compute_gradients(plain, random_map((64, 64)))
    monkeypatch.setattr(torch, 'conv2d', other)  # which the chain calls, and the module's own code does not
    actual = compute_gradients(lean, random_map((64, 64)))
    assert torch.equal(actual[0].gt(0), expected[0].gt(0))
    assert 0 < largest_difference(actual[1], expected[1]) < 3e-4


def test_signs_of_odd_maps_and_of_values_that_are_not_finite():
    for shape in ((1, 1, 1, 1), (2, 3, 5, 7), (0, 3, 4, 4), (1, 16, 4, 4)):
        u = torch.randn(shape).to(DEVICE)
        for layout in (torch.contiguous_format, torch.channels_last):
            y = F.relu(u.contiguous(memory_format=layout))
            for again in (u.clone(), u.contiguous(memory_format=torch.channels_last)):
                result = SignBits.pack(y).relu_(again)
                assert torch.equal(result.gt(0), y.gt(0)) and torch.allclose(result, y, atol=1e-37)
                flipped = SignBits.pack(y).relu_(-again)
                assert torch.equal(flipped.gt(0), y.gt(0))
    nan = torch.tensor([1.0, -1.0, torch.nan, 0.0]).view(1, 4, 1, 1).to(DEVICE)
    assert SignBits.pack(F.relu(nan)).relu_(nan.clone()).flatten().tolist()[:2] == [1.0, 0.0]
    assert SignBits.pack(F.relu(nan)).relu_(nan.clone()).isnan().any()


@pytest.mark.parametrize(('limit', 'number'), [(0, 6), (290, 4), (500, 3), (2**22, 2)])
def test_signs_that_are_packed_together(limit, number, monkeypatch):
    """Each map gets its own signs back, in whichever order the maps are read, and if one is read again."""
    monkeypatch.setattr(sign_bits, '_GROUP', limit)
    shapes = (1, 3, 5, 7), (2, 8, 3, 3), (1, 1, 1, 1), (1, 2, 3, 3), (1, 16, 4, 4), (1, 4, 6, 6)
    layouts = itertools.cycle((torch.contiguous_format, torch.channels_last))
    maps = [torch.randn(shape).to(DEVICE).relu_().contiguous(memory_format=next(layouts)) for shape in shapes]
    packer = SignPacker()
    numbers = [packer.add(y.clone(), kind) for y, kind in zip(maps, 'ababbb', strict=True)]
    signs = packer.finish()
    assert sum(map(len, signs.packed)) <= sum(y.numel() for y in maps) / 8 + len(signs.packed)
    for group in signs.groups:  # a map larger than half of the limit is packed alone
        sizes = [maps[i].numel() for i in group]
        assert len(group) == 1 or (sum(sizes) <= limit and max(sizes) <= limit / 2)
    assert len(signs.packed) == number
    reader = SignReader(signs)
    for i in (0, 2, 5, 4, 3, 1, 3, 0, 0):
        other = torch.randn_like(maps[i])
        result = reader.relu_(numbers[i], other.clone())
        assert torch.equal(result.gt(0), maps[i].gt(0))
        assert torch.equal(result, other.clamp(min=torch.finfo(other.dtype).tiny) * maps[i].gt(0))


FROZEN = {
    'the first two blocks': lambda m: [p for block in list(m)[:2] for p in block.parameters()],
    'norms': lambda m: [p for name, p in m.named_parameters() if 'bn' in name or 'downsample.1' in name],
    'convolutions': lambda m: [p for name, p in m.named_parameters() if 'conv' in name],
    'the second convolution of each block': lambda m: [block.conv2.weight for block in m],
    'the last block': lambda m: [*m[-1].parameters()],
    'all': lambda m: [*m.parameters()],
}


@pytest.mark.parametrize('norm_eval', [True, False])
def test_requires_grad_changes_between_steps(norm_eval):
    lean, plain = build_lean_and_plain(resnet.Bottleneck, None, norm_eval, blocks=4)
    for some in FROZEN.values():
        for model in (lean, plain):
            model.requires_grad_(True)
            for p in some(model):
                p.requires_grad_(False)
        assert_plain(lean, plain)
        if any(p.requires_grad for p in lean.parameters()):
            assert_plain(lean, plain, needs_x=False)


def test_frozen_blocks_in_front_store_nothing():
    lean, _ = build_lean_and_plain(blocks=5)
    for block in list(lean)[:4]:
        block.requires_grad_(False)
    x = random_map((32, 32))
    out = lean(x)
    # Input and output of the last block, one map of a quarter of their channels inside of it, signs of another, and
    # three numbers for each channel.
    assert count_model_bytes(lean, x) <= 2.263 * out.untyped_storage().nbytes()


def test_channels_last():
    lean, plain = build_lean_and_plain()
    x = random_map().contiguous(memory_format=torch.channels_last)
    assert_plain(lean.to(memory_format=torch.channels_last), plain, x)


@pytest.mark.parametrize('norm_eval', [True, False])
def test_autocast(norm_eval):
    """The errors are not larger than those of the plain model in this precision."""
    lean, plain = build_lean_and_plain(resnet.Bottleneck, None, norm_eval, blocks=4, width=16)
    x, exact = random_map(), compute_gradients(copy.deepcopy(plain), random_map())[1]

    def error(model):
        model = model.float()
        with torch.autocast(x.device.type, torch.bfloat16):
            gradients = compute_gradients(model, x.float())[1]
        assert all(g.dtype == torch.float32 for g in gradients.values())
        return torch.stack([(gradients[name] - g).norm() / g.norm() for name, g in exact.items()]).mean()

    assert error(lean) < 1.3 * error(plain)


@pytest.mark.parametrize('norm_eval', [True, False])
def test_two_passes_a_retained_graph_and_a_checkpoint(norm_eval):
    lean, plain = build_lean_and_plain(resnet.Bottleneck, None, norm_eval, blocks=4)
    assert_right_in_unusual_passes(lean, plain, random_map(), random_map((9, 30)))


def assert_right_in_unusual_passes(lean, plain, first, second):
    """Two passes before a backward pass, a graph that is used twice, and a checkpoint give the right gradients."""

    def twice(model, x):
        return torch.cat([model(x).flatten(), model(second).flatten()])

    actual, expected = (compute_gradients(m, first, lambda x, m=m: twice(m, x)) for m in (lean, plain))
    assert largest_difference(actual[1], expected[1]) < 1e-11
    out = lean(first).sin().sum()
    for _ in range(2):
        lean.zero_grad()
        out.backward(retain_graph=True)
        once = {name: p.grad.clone() for name, p in lean.named_parameters()}
    assert largest_difference(once, compute_gradients(plain, first, needs_x=False)[1]) < 1e-11
    actual = compute_gradients(lean, first, lambda x: cp.checkpoint(lean, x, use_reentrant=False))
    assert largest_difference(actual[1], compute_gradients(plain, first)[1]) < 1e-11


def _hook(block):
    block.conv2.register_forward_hook(lambda module, args, out: out * 0.5)


def _instance_forward(block):
    block.norm3.forward = lambda x: x * 0.5


def _other_activation(block):
    block.relu = nn.LeakyReLU(0.3)


class _Other(resnet.Bottleneck):
    def forward(self, x):
        return super().forward(x) * 0.5


def _subclass(block):
    block.__class__ = _Other


def _circular(block):
    block.conv2.padding_mode = 'circular'
    block.conv2._reversed_padding_repeated_twice = [1, 1, 1, 1]


def _block_hook(block):
    block.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


CHANGES = [_hook, _instance_forward, _other_activation, _subclass, _circular, _block_hook]


@pytest.mark.parametrize('change', CHANGES)
def test_a_block_that_is_not_the_stock_one_runs_its_own_code(change):
    plain = build_stage(blocks=5)
    change(plain[2])
    lean = copy.deepcopy(plain)
    apply_lean(lean)
    assert_plain(lean, plain)


@pytest.mark.parametrize('change', [_hook, _block_hook])
def test_hooks_that_come_later_run(change):
    lean, plain = build_lean_and_plain(blocks=5)
    assert_plain(lean, plain)
    for model in (lean, plain):
        change(model[2])
    assert_plain(lean, plain)


def test_evaluation_runs_the_own_code_and_no_images_pass():
    lean, plain = build_lean_and_plain()
    assert torch.equal(lean.eval()(random_map()), plain.eval()(random_map()))
    with torch.no_grad():
        torch.testing.assert_close(lean.train()(random_map()[:0]), plain.train()(random_map()[:0]))


def test_eight_bits_store_less_and_are_near():
    plain = build_stage(blocks=6)
    exact, rounded = copy.deepcopy(plain), copy.deepcopy(plain)
    apply_lean(exact)
    apply_lean(rounded, 'int8')
    x = random_map((32, 32))
    actual, expected = compute_gradients(rounded, x), compute_gradients(plain, x)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-11)
    assert largest_difference(actual[1], expected[1]) < 0.03
    x = x.float()
    assert count_model_bytes(rounded.float(), x) < 0.6 * count_model_bytes(exact.float(), x)


class Head(nn.Module):
    """Head that calls its blocks one by one, as in Double-Head."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('norm_eval', [True, False])
def test_a_block_outside_of_a_stage_is_a_chain_by_itself(norm_eval, preset):
    plain = Head(build_stage(norm_eval=norm_eval, blocks=3))
    lean, shapes = copy.deepcopy(plain), []
    apply_lean(lean, preset)
    lean.blocks[1].register_forward_hook(lambda block, args, out: shapes.append(out.shape))
    assert_plain(lean, plain)
    assert len(shapes) == 1  # the block is called, so a hook on it runs
    assert count_model_bytes(lean, random_map()) < 0.5 * count_model_bytes(plain, random_map())
