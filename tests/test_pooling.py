"""Max pooling, VGG and EfficientDet's convolutions train like their own code in fp64."""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn import VGG, MaxPool2d
from mmdet.models.backbones import SSDVGG
from mmdet.models.layers import DynamicConv
from oracles import DEVICE, assert_near, compute_loss
from stand_ins import define_in_module
from torch import nn
from torch.nn.modules.utils import _pair
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import apply_lean
from sbp_mmdet.ops.max_pool import PoolSettings, PoolTensors, max_pool
from sbp_mmdet.plan.memory import saved_bytes

POOLS = {
    'halves': dict(kernel_size=2, stride=2),
    'halves, up': dict(kernel_size=2, stride=2, ceil_mode=True),
    'stem': dict(kernel_size=3, stride=2, padding=1),
    'SPP': dict(kernel_size=5, stride=1, padding=2),
    'largest': dict(kernel_size=15, stride=4, padding=7),
    'uneven': dict(kernel_size=(2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1)),
}


def random_tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def run_step(module, *inputs):
    outs = module(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    leaves = {f'input {i}': x for i, x in enumerate(inputs)} | {
        n: p for n, p in module.named_parameters() if p.requires_grad
    }
    gradients = torch.autograd.grad(compute_loss(outs), [*leaves.values()])
    return {f'output {i}': o.detach() for i, o in enumerate(outs)} | dict(zip(leaves, gradients, strict=True))


def assert_exact(module, *inputs):
    """Assert that a changed copy of a module is exact; return its report and the ratio of stored bytes."""
    module.double().to(DEVICE).train()
    lean = copy.deepcopy(module)
    report = apply_lean(lean, verify=False)
    assert_near(run_step(lean, *inputs), run_step(module, *inputs), 1e-11)
    fixed = [*module.parameters(), *lean.parameters(), *module.buffers(), *lean.buffers()]
    stored = [saved_bytes(lambda m=m: m(*(x * 1 for x in inputs)), exclude=fixed) for m in (lean, module)]
    return report, stored[0] / stored[1]


class Sequence(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, *args):
        return self.held(*args)


class Attends(Held):
    def forward(self, x):
        return self.held(x, x, x)[0]


@pytest.mark.parametrize('kind', [nn.MaxPool2d, MaxPool2d], ids=['torch', 'mmcv'])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('name', POOLS)
def test_pools_store_a_byte_a_window(name, layout, kind):
    x = random_tensor(2, 3, 17, 22).detach().contiguous(memory_format=layout).requires_grad_()
    pool = Sequence(kind(**POOLS[name]))
    report, _ = assert_exact(pool, x)
    assert [*report.changed] == ['layers.0']
    lean = copy.deepcopy(pool)
    apply_lean(lean, verify=False)
    out = lean(x)
    assert saved_bytes(lambda: lean(x)) == out.numel()


def test_equal_maxima_and_values_that_are_no_numbers_send_gradients_as_torchs():
    x = random_tensor(2, 3, 8, 8).detach().round().contiguous()
    x[0, 0, 0, 0], x[1, 1, 3, 3] = math.nan, math.inf
    plain, lean = Sequence(nn.MaxPool2d(3, 2)), Sequence(nn.MaxPool2d(3, 2))
    apply_lean(lean, verify=False)
    gradients = []
    for model in (plain, lean):
        leaf = x.clone().requires_grad_()
        (
            model(leaf).nan_to_num(0) * torch.linspace(1, 2, 9, dtype=x.dtype, device=x.device).view(3, 3)
        ).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize('pool', [nn.MaxPool2d(16), nn.MaxPool2d(2, return_indices=True)], ids=['large', 'indices'])
def test_other_pools_keep_their_code(pool):
    report = apply_lean(Sequence(nn.Conv2d(3, 4, 3), pool), verify=False)
    assert 'layers.1' in report.left


@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('frozen', [-1, 1])
def test_vgg_stores_half(norm, frozen):
    torch.manual_seed(0)
    vgg = VGG(11, with_bn=norm, out_indices=(1, 3, 4), frozen_stages=frozen, bn_eval=True)
    report, stored = assert_exact(Held(vgg), random_tensor(1, 3, 48, 40))
    assert 'held' in report.changed and not report.left and stored < 0.7


@pytest.mark.parametrize('outs, most', [((22, 34), 0.7), ((3, 8, 34), 0.9)])
def test_ssds_vgg_stores_half(outs, most):
    torch.manual_seed(0)
    backbone = SSDVGG(16, out_feature_indices=outs)
    report, stored = assert_exact(Held(backbone), random_tensor(1, 3, 66, 50))
    assert 'held' in report.changed and not report.left and stored < most


def test_a_layer_of_vgg_with_a_hook_runs_its_own_code():
    torch.manual_seed(0)
    backbone = SSDVGG(11, out_feature_indices=(12, 24))
    backbone.features[4].register_forward_hook(lambda module, args, out: 2 * out)
    report, _ = assert_exact(Held(backbone), random_tensor(1, 3, 40, 50))
    assert 'held' in report.changed


class Conv2dSamePadding(nn.Conv2d):
    """Convolution of EfficientDet by its definition: ceil(size / stride) windows, centred, with an odd row of padding
    at the end."""

    def forward(self, x):
        windows = [-(-n // s) for n, s in zip(x.shape[2:], self.stride, strict=True)]
        sizes = [(n - 1) * s + k for n, s, k in zip(windows, self.stride, self.weight.shape[2:], strict=True)]
        more = [size - n for size, n in zip(sizes, x.shape[2:], strict=True)]
        first = [n // 2 for n in more]
        pads = [first[1], more[1] - first[1], first[0], more[0] - first[0]]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


define_in_module('projects.EfficientDet.efficientdet.utils', Conv2dSamePadding)


@pytest.mark.parametrize(
    'keys',
    [dict(kernel_size=3), dict(kernel_size=3, stride=2), dict(kernel_size=1, stride=2), dict(kernel_size=(5, 2))],
    ids=str,
)
@pytest.mark.parametrize('size', [(8, 9), (7, 12)])
def test_convolutions_of_efficientdet_pad_themselves(keys, size):
    torch.manual_seed(0)
    layers = Sequence(nn.Sequential(Conv2dSamePadding(4, 6, bias=False, **keys), nn.BatchNorm2d(6), nn.SiLU()))
    report, stored = assert_exact(layers, random_tensor(2, 4, *size))
    assert not report.left and stored < 0.9
    assert_exact(Sequence(Conv2dSamePadding(4, 6, groups=2, **keys)), random_tensor(2, 4, *size))


def test_dynamic_convolutions_store_their_inputs():
    torch.manual_seed(0)
    report, stored = assert_exact(
        Held(DynamicConv(16, 8, 16, input_feat_shape=5)), random_tensor(6, 16), random_tensor(6, 16, 5, 5, seed=1)
    )
    assert [*report.changed] == ['held'] and stored < 0.5


@pytest.mark.parametrize('hooks', [contextlib.nullcontext, torch.autograd.graph.save_on_cpu], ids=['', 'hooks'])
def test_attention_of_torch_stores_no_map(hooks):
    torch.manual_seed(0)
    with hooks():  # hooks on saved tensors give back other objects
        report, stored = assert_exact(Attends(nn.MultiheadAttention(16, 4)), random_tensor(40, 2, 16))
    assert [*report.changed] == ['held'] and stored < 0.1


class Indices(TorchDispatchMode):
    """Context manager that records the indices that the backward pass of torch's max pooling writes to."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.max_pool2d_with_indices_backward.default:
            self.found.append(args[7])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('name', POOLS)
def test_gradients_are_written_into_the_map(name):
    """All indices lie inside of the map, also those of windows at the border: torch's kernels do not check them."""
    options = dict(padding=0, stride=1, dilation=1, ceil_mode=False) | POOLS[name]
    pairs = {key: _pair(value) for key, value in options.items() if key not in ('kernel_size', 'ceil_mode')}
    settings = PoolSettings(kernel=_pair(options['kernel_size']), **pairs, ceil_mode=options['ceil_mode'], relu=True)
    x = (-random_tensor(2, 3, 16, 18).detach().abs()).requires_grad_()
    y = max_pool(settings, PoolTensors(x))
    with Indices() as indices:
        (dx,) = torch.autograd.grad(y.sum(), [x])
    assert not dx.any()
    assert all(((0 <= i) & (i < 16 * 18)).all() for i in indices.found) and len(indices.found) == 1
