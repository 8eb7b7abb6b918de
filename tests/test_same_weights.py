"""Two trainings with one seed end with the same weights, and the memory layout changes no gradient."""

import pytest
import torch
from mmdet.registry import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import apply_lean

BACKBONES = {
    'ResNet': dict(type='ResNet', depth=50, base_channels=8),
    'CSPNeXt': dict(type='CSPNeXt', deepen_factor=0.17, widen_factor=0.125, out_indices=(4,), norm_cfg=dict(type='BN')),
    'Swin': dict(type='SwinTransformer', embed_dims=8, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4), window_size=3),
    'ConvNeXt': dict(
        type='SBPConvNeXt', arch=dict(depths=[1, 2, 1, 1], channels=[8, 12, 16, 20]), gap_before_final_norm=False
    ),
}
PRESETS = {name: ('exact', 'int8') for name in BACKBONES} | dict.fromkeys(
    ('Swin', 'ConvNeXt'), ('exact', 'int8', 'sampled', 'sbp')
)


def build_model(name, preset, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS.build(dict(BACKBONES[name], _scope_='mmdet')).to(dtype)
    model.train()  # mmdet's return nothing
    if preset != 'none':
        apply_lean(model, preset=preset)
    return model


def compute_loss(model, x):
    return sum(out.square().mean() for out in model(x))


def train_weights(name, preset):
    model = build_model(name, preset)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(3):
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        compute_loss(model, x).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(('name', 'preset'), [(n, p) for n, presets in PRESETS.items() for p in presets])
def test_one_seed_gives_the_same_weights(name, preset):
    first, second = train_weights(name, preset), train_weights(name, preset)
    assert all(torch.equal(values, second[key]) for key, values in first.items())


class Copies(TorchDispatchMode):
    """Mode that counts copies of maps into another layout."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ('aten::clone', 'aten::_to_copy', 'aten::copy_'):
            source, result = (args[1], args[0]) if func._schema.name == 'aten::copy_' else (args[0], out)
            if result.dim() == 4 and result.shape[2] * result.shape[3] > 1 and result.shape[1] > 1:
                # A copy of every second row and column has other strides, but dimensions in the same order.
                orders = [sorted(range(x.dim()), key=x.stride, reverse=True) for x in (source, result)]
                self.number += orders[0] != orders[1]
        return out


def run_channels_last(name, preset):
    """Return the gradients of a step in channels-last layout, and the number of copies into another layout."""
    model = build_model(name, preset, torch.float64).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with Copies() as copies:
        compute_loss(model, x).backward()
    return {key: p.grad for key, p in model.named_parameters()} | dict(x=x.grad), copies.number


@pytest.mark.parametrize('name', ['ResNet', 'CSPNeXt', 'ConvNeXt'])
def test_channels_last(name):
    expected, number = run_channels_last(name, 'none')
    actual, own = run_channels_last(name, 'exact')
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert own <= number
