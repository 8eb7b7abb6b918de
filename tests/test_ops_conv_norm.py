"""Convolution, norm, residual and activation in one operation, against torch's own modules."""

import copy
import itertools

import pytest
import torch
from torch import nn

from sbp_mmdet.ops.conv_norm import ConvNormSettings, ConvNormTensors, Form, conv_norm
from sbp_mmdet.ops.maps import ACTIVATIONS, Activation, keep

MODULES = {
    'relu': nn.ReLU(),
    'leaky_relu': nn.LeakyReLU(0.1),
    'silu': nn.SiLU(),
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
FROZEN = ['', 'conv', 'norm', 'conv norm', 'x', 'all but x', 'no affine']


class Layer(nn.Module):
    """Conv, norm, (+ residual), activation: stock, or by the operation."""

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


def pair(storage, dtype=torch.float64, **options):
    """A stock layer and the same by the operation."""
    torch.manual_seed(0)
    stock = Layer(**options).to(dtype)
    lean = copy.deepcopy(stock)
    for module in lean.modules():
        module.storage = storage
    return stock, lean


def run(layer, x, *residual):
    """Output, and gradients by name, for a loss whose gradient is different everywhere."""
    inputs = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_(t.requires_grad) for t in (x, *residual)]
    layer.zero_grad()
    out = layer(*inputs)
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    if out.requires_grad:
        (out * weights).sum().backward()
    named = [(str(i), t) for i, t in enumerate(inputs)] + list(layer.named_parameters())
    return out.detach(), {name: t.grad for name, t in named}


def same(stock, lean, *inputs, tolerance=1e-10):
    (out, grads), (lean_out, lean_grads) = run(stock, *inputs), run(lean, *inputs)
    torch.testing.assert_close(lean_out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lean_grads, grads, rtol=tolerance, atol=tolerance)
    for a, b in zip(lean.buffers(), stock.buffers(), strict=True):
        if a.is_floating_point():
            assert torch.equal(a, b)


def image(requires_grad=True, size=9, channels=8, dtype=torch.float64, n=3):
    x = torch.randn(n, channels, size, size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize('norm', ['none', 'fixed', 'batch', 'group'])
@pytest.mark.parametrize('act', MODULES)
@pytest.mark.parametrize('residual', [False, True])
def test_gradients_are_those_of_stock_modules(norm, act, residual):
    stock, lean = pair('native', norm=norm, act=act, padding=1)
    same(stock, lean, image(), *[image()] * residual)
    lean.storage = 'reference'
    same(stock, lean, image(), *[image()] * residual)


@pytest.mark.parametrize('norm', ['none', 'fixed', 'batch', 'group'])
@pytest.mark.parametrize('kind, frozen', itertools.product(KINDS, FROZEN))
def test_geometry_and_frozen_parts(norm, kind, frozen):
    if norm == 'none' and 'norm' in frozen + 'affine':
        frozen = frozen.replace('norm', '')
    for act, channels_last in (('relu', True), ('silu', False)):
        stock, lean = pair('native', norm=norm, act=act, frozen=frozen, **KINDS[kind])
        x = image(requires_grad=frozen != 'x').detach()
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        same(stock, lean, x.requires_grad_(frozen != 'x'))
