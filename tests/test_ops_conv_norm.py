"""Convolution, norm, residual and activation in one operation agree with torch's own modules."""

import copy

import pytest
import torch
from helpers import FP16, needs_fp16
from mmcv.cnn.bricks.swish import Swish
from oracles import DEVICE, assert_equal_statistics
from torch import nn

from sbp_mmdet.ops.common.activations import ACTIVATIONS, Activation
from sbp_mmdet.ops.common.autograd_function import Form
from sbp_mmdet.ops.common.kept_maps import add, keep
from sbp_mmdet.ops.common.shared_maps import Scope
from sbp_mmdet.ops.conv_norm_act import ConvNormSettings, ConvNormTensors, conv_norm

MODULES = {
    'relu': nn.ReLU(),
    'relu6': nn.ReLU6(),
    'leaky_relu': nn.LeakyReLU(0.1),
    'silu': nn.SiLU(),
    'swish': Swish(),
    'hardswish': nn.Hardswish(),
    'gelu': nn.GELU('tanh'),
    None: nn.Identity(),
}
KINDS = {
    'plain': {},
    'strided': dict(stride=2, padding=1),
    'dilated': dict(padding=2, dilation=2),
    'depthwise': dict(groups=8, padding=1),
    'groups and bias': dict(groups=2, padding=(1, 0), bias=True),
}
NORMS = ['none', 'fixed', 'batch', 'group']
FROZEN = ['', 'conv', 'norm', 'conv norm', 'x', 'all but x', 'no affine']


class Layer(nn.Module):
    """Convolution, norm, residual and activation, computed by stock modules or by the operation."""

    def __init__(self, norm='batch', act='relu', bias=False, frozen='', storage=None, channels=8, kernel=3, **geometry):
        super().__init__()
        self.storage, self.name, self.act = storage, act, MODULES[act]
        self.conv = nn.Conv2d(channels, 8, kernel, bias=bias or norm == 'none', **geometry)
        affine = 'affine' not in frozen
        self.norm = dict(none=nn.Identity(), group=nn.GroupNorm(4, 8, affine=affine)).get(norm)
        self.norm = self.norm or nn.BatchNorm2d(8, affine=affine)
        for values in (*self.norm.parameters(), *self.norm.buffers()):
            if values.is_floating_point():
                values.data.uniform_(0.5, 1.5)
        if norm != 'none' and affine:
            self.norm.weight.data[::3] *= -1
        if isinstance(self.norm, nn.BatchNorm2d):
            self.norm.bias is None or self.norm.bias.data.sub_(1)
        if act == 'relu6':  # values on both sides of 6
            for module in (self.conv, self.norm):
                if getattr(module, 'weight', None) is not None:
                    module.weight.data.mul_(2)
        self.norm.train(norm != 'fixed')
        self.kind = norm
        self.conv.requires_grad_('conv' not in frozen and 'but' not in frozen)
        self.norm.requires_grad_('norm' not in frozen and 'but' not in frozen)

    def forward(self, x, residual=None):
        conv, norm = self.conv, self.norm
        if self.storage is None:
            out = norm(conv(x))
            return self.act(out if residual is None else out + residual)
        act = self.name and Activation(self.name, slope=0.1, approximate='tanh')
        form = Form('reference') if self.storage == 'reference' else Form(storage=self.storage)
        settings = ConvNormSettings(
            form, conv.stride, conv.padding, conv.dilation, conv.groups, self.kind, num_groups=4, activation=act
        )
        affine = getattr(norm, 'weight', None), getattr(norm, 'bias', None)
        running = getattr(norm, 'running_mean', None), getattr(norm, 'running_var', None)
        return conv_norm(settings, ConvNormTensors(x, conv.weight, conv.bias, *affine, *running, residual))


def build_stock_and_lean(storage, dtype=torch.float64, **options):
    """Return a stock layer, and the same layer computed by the operation."""
    torch.manual_seed(0)
    stock = Layer(**options).to(DEVICE, dtype)
    lean = copy.deepcopy(stock)
    for module in lean.modules():
        module.storage = storage
    return stock, lean


def run_step(layer, x, *residual):
    """Return the output, and the gradients by name, of a loss with a different gradient at each entry."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, *residual)]
    layer.zero_grad()
    out = layer(*inputs)
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(out)
    if out.requires_grad:
        (out * weights).sum().backward()
    named = [(str(i), t) for i, t in enumerate(inputs)] + list(layer.named_parameters())
    return out.detach(), {name: t.grad for name, t in named}


def assert_same(stock, lean, *inputs, tolerance=1e-10):
    (out, grads), (lean_out, lean_grads) = run_step(stock, *inputs), run_step(lean, *inputs)
    torch.testing.assert_close(lean_out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lean_grads, grads, rtol=tolerance, atol=tolerance)
    statistics = [{n: b for n, b in m.named_buffers() if b.is_floating_point()} for m in (lean, stock)]
    assert_equal_statistics(*statistics)


def random_map(requires_grad=True, size=9, channels=8, dtype=torch.float64, n=3):
    x = torch.randn(n, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE).requires_grad_(requires_grad)


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('act', MODULES)
@pytest.mark.parametrize('residual', [False, True])
def test_gradients_are_those_of_stock_modules(norm, act, residual):
    for storage in ('native', 'reference'):
        stock, lean = build_stock_and_lean(storage, norm=norm, act=act, padding=1)
        assert_same(stock, lean, random_map(), *[random_map()] * residual)


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('frozen', FROZEN)
def test_geometry_and_frozen_parts(norm, kind, frozen):
    if norm == 'none' and 'norm' in frozen + 'affine':
        frozen = frozen.replace('norm', '')
    # A norm is folded into the weight or, where that is larger than the map, scales the map.
    for act, layout, size in (('relu', torch.channels_last, 9), ('silu', torch.contiguous_format, 4)):
        stock, lean = build_stock_and_lean('native', norm=norm, act=act, frozen=frozen, **KINDS[kind])
        x = random_map(size=size).detach().contiguous(memory_format=layout)
        assert_same(stock, lean, x.requires_grad_(frozen != 'x'))


def test_every_activation_is_compared():
    assert set(MODULES) - {None} == set(ACTIVATIONS)


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('dtype', [FP16, torch.bfloat16])
@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize('storage', ['native', 'int8'])
@pytest.mark.parametrize('act', ['relu', 'swish', 'hardswish', 'gelu'])
def test_half_precision_is_as_near_as_that_of_stock_modules(norm, dtype, autocast, storage, act):
    """The distance to fp64 is computed over all gradients together."""
    stock, lean = build_stock_and_lean(storage, norm=norm, act=act, padding=1, bias=norm == 'none')
    x = random_map(size=4 if act == 'swish' else 9)
    _, expected = run_step(stock, x)
    errors = []
    for layer in (stock, lean):
        layer.to(torch.float32 if autocast else dtype)
        with torch.autocast(x.device.type, dtype, enabled=autocast):
            out, grads = run_step(layer, x.detach().to(torch.float32 if autocast else dtype).requires_grad_())
        assert all(g.dtype == (torch.float32 if autocast else dtype) for g in grads.values())
        # CUDA's autocast runs group norm in full precision.
        assert out.dtype == (torch.float32 if x.is_cuda and autocast and norm == 'group' else dtype)
        errors.append(
            relative_distance(*(torch.cat([g.flatten() for g in actual.values()]) for actual in (grads, expected)))
        )
    assert errors[1] < 1.5 * errors[0] + (0.03 if storage == 'int8' else 0.001)


def relative_distance(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


class Chain(nn.Sequential):
    """Consecutive layers, optionally with a residual connection around every second layer."""

    residual = None

    def forward(self, x):
        with Scope():
            return self.run_layers(x)

    def run_layers(self, x):
        for layer in self:
            if self.residual == 'before activation':
                x = layer(x, x)
            elif self.residual == 'after activation':
                out = layer(x)
                x = out + x if layer.storage is None else add(out, x, layer.storage)
            else:
                x = layer(x)
        return x


def build_chains(storage, number=6, residual=None, **options):
    torch.manual_seed(0)
    stock = Chain(*(Layer(padding=1, **options) for _ in range(number))).to(DEVICE, torch.float64)
    stock.residual = residual
    lean = copy.deepcopy(stock)
    for layer in lean:
        layer.storage = storage
    return stock, lean


def count_stored_maps(model, x):
    """Return how many maps of the size of x are stored between the passes."""
    parameters = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), t)  # held, so that no other takes its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    nbytes = sum(size for place, (size, _) in seen.items() if place not in parameters)
    del out
    return nbytes / x.untyped_storage().nbytes()


@pytest.mark.parametrize(
    'options, plain, exact, int8',
    [  # of six layers and their input
        (dict(norm='fixed', act='relu'), 13, 7, 7),
        (dict(norm='fixed', act='silu'), 18, 7, 7),
        (dict(norm='fixed', act=None), 12, 6, 6),
        (dict(norm='batch', act='relu'), 13, 7, 7),
        (dict(norm='batch', act='silu'), 18, 7, 7),
        (dict(norm='group', act='silu'), 18, 7, 7),
        (dict(norm='none', act='relu'), 7, 7, 7),
        (dict(norm='fixed', act='relu', residual='before activation'), 13, 7, 7),
        (dict(norm='batch', act='relu', residual='before activation'), 13, 9, 13),
        (dict(norm='batch', act='silu', residual='after activation'), 18, 8, 9),
        (dict(norm='fixed', act='relu', frozen='conv norm'), 6, 6, 6),
        (dict(norm='fixed', act=None, frozen='conv norm'), 0, 0, 0),
        (dict(norm='fixed', act=None, frozen='norm'), 6, 6, 6),
    ],
)
def test_every_map_is_stored_once(options, plain, exact, int8):
    x = random_map(size=128, n=1)
    for storage, number, unit, more in (('native', exact, 1, 0.01), ('int8', int8, 1 / 8, 0.14)):
        stock, lean = build_chains(storage, **options)
        if storage == 'native':
            assert_same(stock, lean, x, tolerance=1e-9)
        least, most = number * unit, number * unit * (1 + more) + 0.01
        assert least <= count_stored_maps(lean, x) <= most  # with numbers a channel, and steps in fp64
    if options.get('frozen') is None:
        assert count_stored_maps(stock, x) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('act', MODULES)
def test_eight_bits(norm, act):
    """The forward pass is exact, and so are input gradients that use no rounded number."""
    x = random_map(size=24)
    stock, lean = build_chains('int8', 3, norm=norm, act=act)
    (out, grads), (lean_out, lean_grads) = run_step(stock, x), run_step(lean, x)
    torch.testing.assert_close(lean_out, out, rtol=1e-10, atol=1e-10)
    exact = norm in ('none', 'fixed') and act in ('relu', 'leaky_relu', None)
    for name, grad in grads.items():
        if grad.norm() < 1e-9:  # of a convolution's bias in front of a norm
            continue
        is_bias = name == '0' or name.endswith('norm.bias') or (norm == 'none' and name.endswith('conv.bias'))
        assert relative_distance(lean_grads[name], grad) < (1e-10 if exact and is_bias else 0.1), name


def test_eight_bits_keep_signs_where_a_threshold_lies_just_below_a_group_of_rows():
    for seed in range(100):
        x = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(seed))
        low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        threshold = low + 0.3 * (high - low)
        read = keep(x, 'int8', threshold).load(torch.float32)
        assert torch.equal(read > threshold, x > threshold)
        assert (read - x).abs().le(0.51 * (high - low) / 252).all()


def test_eight_bits_keep_sides_and_means():
    x = torch.randn(4, 3, 40, 40, dtype=torch.float64)
    x[0, 0], x[1, 0] = x[0, 0].abs(), 0
    for threshold in (None, 0.0, torch.tensor([0.5, -1.0, 9.0], dtype=torch.float64).view(3, 1, 1)):
        map = keep(x, 'int8', threshold)
        read = map.load(torch.float64)
        step = map.unit.repeat_interleave(40 // map.unit.shape[2], 2)
        assert map.unit.shape[2] == 40  # neighbours share a scale
        assert map.values.dtype == torch.int8
        assert ((read - x).abs() <= step / 2 * (1 + 1e-9)).all()
        assert ((read - x).mean((2, 3), keepdim=True).abs() <= step.amax(2, keepdim=True) / 8).all()
        if threshold is not None:
            assert torch.equal((read > threshold)[2:], (x > threshold)[2:])
    assert keep(x[:, :, :3, :3], 'int8').values.dtype == torch.float64  # scales would take more


@pytest.mark.parametrize('threshold', [None, 2.0**17])
def test_eight_bits_of_values_far_from_zero(threshold):
    """Values are subtracted before they are divided by their step, so that they lose no digits."""
    x = 2**17 + torch.randn(2, 3, 16, 16)
    map = keep(x, 'int8', threshold)
    step = map.unit.repeat_interleave(16 // map.unit.shape[2], 2)
    assert ((map.load(torch.float32) - x).abs() <= 0.5 * step + 2**-6).all()  # and the distance of numbers there


@pytest.mark.parametrize('value', [float('inf'), float('-inf'), float('nan')])
def test_what_is_not_finite_is_read_as_such(value):
    x = torch.randn(1, 2, 8, 8)
    x[0, 1, 0, 0] = value
    for threshold in (None, 0.0):
        read = keep(x, 'int8', threshold).load(torch.float32)
        assert not read[0, 1, :4].isfinite().any() and read[0, 0].isfinite().all()


@pytest.mark.parametrize('storage', ['native', 'int8'])
def test_what_was_written_to_is_not_shared(storage):
    stock, lean = build_chains(storage, 2, norm='batch', act='silu')

    def run_changed(chain, x):
        with Scope():
            out = chain[0](x)
            out.mul_(2)
            return chain[1](out)

    grads = []
    for chain in (stock, lean):
        loss = run_changed(chain, random_map()).square().sum()
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*chain.parameters()])]))
    assert relative_distance(grads[1], grads[0]) < (1e-10 if storage == 'native' else 0.02)


def test_what_torch_has_stored_is_not_rounded():
    _, lean = build_stock_and_lean('int8', norm='fixed', act='relu', padding=1)
    before = nn.Sequential(nn.ReLU(), lean)
    x = random_map(size=32)
    assert count_stored_maps(before, x) == pytest.approx(1 + 1 / 8, rel=0.05)
    stock = nn.Sequential(nn.ReLU(), build_stock_and_lean('int8', norm='fixed', act='relu', padding=1)[0])
    (_, grads), (_, lean_grads) = run_step(stock, x), run_step(before, x)
    assert relative_distance(lean_grads['1.conv.weight'], grads['1.conv.weight']) < 1e-10


def test_one_layer_may_store_exactly_and_the_next_in_eight_bits():
    """A layer that stores exactly reads no rounded map; a layer that rounds may read an exact one."""
    x = random_map(size=16)
    for first, second in (('native', 'int8'), ('int8', 'native')):
        stock, lean = build_chains(first, 2, norm='fixed', act='silu')
        for chain, storage in ((stock, None), (lean, second)):
            chain[1].storage, chain[1].name, chain[1].act = storage, 'relu', nn.ReLU()
        (_, grads), (_, lean_grads) = run_step(stock, x), run_step(lean, x)
        assert relative_distance(lean_grads['1.conv.weight'], grads['1.conv.weight']) < 1e-10


def test_refusals():
    with pytest.raises(ValueError, match="norm='layer' is unknown; choose one of none, fixed, batch, group"):
        ConvNormSettings(norm='layer')
    with pytest.raises(ValueError, match="activation 'mish' is unknown; choose one of relu"):
        Activation('mish')
    _, lean = build_stock_and_lean('native', norm='batch')
    for given in (random_map(size=3, n=1), random_map(n=0)):
        with pytest.raises(ValueError, match='more than 1 value per channel'):
            lean(given)


@needs_fp16
@pytest.mark.parametrize('kernel', [1, 3])
@pytest.mark.parametrize('residual', [False, True])
@pytest.mark.parametrize('k', [0.0, 1e-6, 1e-4, 1.0])
@pytest.mark.parametrize('channels', ['all', 'half'])
@pytest.mark.parametrize('magnitude', [1e-3, 1.0, 300.0])
def test_small_factors_of_a_fixed_norm_in_fp16(k, channels, kernel, residual, magnitude):
    """Residual branches may begin at zero: gradients are finite where those of plain code are, and as near to fp64."""
    torch.manual_seed(0)
    stock = Layer('fixed', 'relu', channels=8, kernel=kernel, padding=kernel // 2).double()
    stock.norm.weight.data[:: 1 if channels == 'all' else 2] = k
    stock.norm.bias.data.fill_(1.0)
    x = 3 + torch.randn(2, 8, 20, 20, dtype=torch.float64)
    weight = magnitude * (1 + torch.randn(2, 8, 20, 20, dtype=torch.float64))
    found = {}
    for name, dtype in dict(truth=torch.float64, plain=torch.float32, lean=torch.float32).items():
        layer = copy.deepcopy(stock).to(dtype)
        layer.storage = 'native' if name == 'lean' else None
        given = [x.to(dtype, copy=True).requires_grad_() for _ in range(1 + residual)]
        with torch.autocast('cpu', torch.float16, enabled=dtype is torch.float32):
            out = layer(*given)
        out.backward(weight.to(out.dtype))
        found[name] = [t.grad.double() for t in (*given, *layer.parameters())]
    if all(t.isfinite().all() for t in found['plain']):  # otherwise the step is skipped
        for truth, plain, lean in zip(*found.values(), strict=True):
            error, rounding = ((t - truth).norm() for t in (lean, plain))
            assert error <= 2 * rounding + 2e-3 * truth.norm()
    assert magnitude > 1 or all(t.isfinite().all() for t in found['plain'])
