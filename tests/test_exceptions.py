"""After errors at random places of a training, a changed model goes on like the plain one."""

import copy
import gc
import random

import pytest
import torch
from mmcv.cnn import ConvModule
from torch import nn

from sbp_mmdet import SBPConvNeXt, apply_lean

STEPS = 104  # an error in the last one would leave tensors behind until the next, of a plain model as well


class Stumbles(nn.Module):
    """Module that raises an error in its forward or backward pass on request."""

    where = None

    def forward(self, x):
        if self.where == 'forward':
            raise KeyboardInterrupt
        if self.where == 'backward' and x.requires_grad:
            x = x.clone()
            x.register_hook(self.stumble)
        return x

    def stumble(self, grad):
        raise MemoryError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        arch = dict(depths=[1, 1, 1, 1], channels=[4, 6, 8, 10])
        self.backbone = SBPConvNeXt(arch, out_indices=[1, 3], gap_before_final_norm=False, layer_scale_init_value=1.0)
        self.stumbles = Stumbles()
        self.necks = nn.ModuleList(ConvModule(width, 4, 1, norm_cfg=dict(type='BN')) for width in (6, 10))

    def forward(self, x):
        low, high = self.backbone(x)
        low = self.necks[0](low)
        return low.square().mean() + self.necks[1](self.stumbles(high)).square().mean()


def count_live_tensors():
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())


def count_hooks(model):
    kinds = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def train(model):
    """Train a model; return its parameters, and how many tensors and hooks were left behind."""
    rng, optimizer = random.Random(0), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    counts = None
    for step in range(STEPS):
        where = rng.choice(['forward', 'backward', 'optimizer', 'batch', None, None]) if step > 1 else None
        model.stumbles.where = where
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        try:
            optimizer.zero_grad()
            model(x if where != 'batch' else x[:, :2]).backward()
            if where == 'optimizer':
                raise ZeroDivisionError
            optimizer.step()
        except (KeyboardInterrupt, MemoryError, ZeroDivisionError, RuntimeError):
            assert where is not None
        if step == 1:
            counts = count_live_tensors(), count_hooks(model)
    model.stumbles.where = None
    optimizer.zero_grad()
    return dict(model.named_parameters()), (count_live_tensors() - counts[0], count_hooks(model) - counts[1])


@pytest.fixture(scope='module')
def plain():
    """Return a plain model and the result of its training."""
    torch.manual_seed(0)
    model = Net().double().train()
    return model, *train(copy.deepcopy(model))


@pytest.mark.parametrize('preset', ['exact', 'int8', 'sbp'])
def test_nothing_stays_behind(preset, plain):
    model, expected, counts = plain
    lean = copy.deepcopy(model)
    apply_lean(lean, preset)
    actual, changed_counts = train(lean)
    assert changed_counts == counts
    if preset == 'exact':
        for name, parameter in actual.items():  # absolutely: in front of a batch norm, gradients of biases are rounding
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-9, msg=name)
