"""A small model, its input and its gradients, for tests of what ends with a forward pass."""

import torch
from mmcv.cnn import ConvModule
from torch import nn


def random_images(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def compute_gradients(model, x, run=None):
    model.zero_grad()
    outs = (model if run is None else run)(x)
    outs = [outs] if isinstance(outs, torch.Tensor) else outs
    sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).mul(99).sin().view_as(o)).sum() for o in outs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def build_convs(number=3, act=None):
    layers = [
        ConvModule(3 if i == 0 else 8, 8, 3, padding=1, norm_cfg=dict(type='BN'), act_cfg=act or dict(type='SiLU'))
        for i in range(number)
    ]
    return nn.Sequential(*layers).double().train()
