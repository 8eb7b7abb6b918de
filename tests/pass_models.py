"""A small model, its input and its gradients, for tests of what ends with a forward pass."""

import copy

import torch
from mmcv.cnn import ConvModule
from torch import nn

from sbp_mmdet import apply_lean


def image(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(model, x, run=None):
    model.zero_grad()
    outs = (model if run is None else run)(x)
    outs = [outs] if isinstance(outs, torch.Tensor) else outs
    sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).mul(99).sin().view_as(o)).sum() for o in outs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def convs(number=3, act=None):
    layers = [
        ConvModule(3 if i == 0 else 8, 8, 3, padding=1, norm_cfg=dict(type='BN'), act_cfg=act or dict(type='SiLU'))
        for i in range(number)
    ]
    return nn.Sequential(*layers).double().train()


def lean(model, preset='exact', **keys):
    changed = copy.deepcopy(model)
    apply_lean(changed, preset, **keys)
    return changed
