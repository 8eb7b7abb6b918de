"""Oracles of SBP in plain torch, small inputs, and comparisons, which the tests of the core share."""

import os

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sbp_mmdet import SBPConvNeXt

DEVICE = os.environ.get('SBP_TEST_DEVICE', 'cpu')  # device of backbones, images and operations, see conftest.py
SMALL = dict(depths=[1, 2, 2, 1], channels=[8, 12, 16, 20])


def build_backbone(sbp_cfg=None, *, dtype=torch.float64, seed=0, arch=SMALL, **kwargs):
    """Return a backbone of four stages in training mode with random values in all parameters."""
    kwargs = dict(out_indices=[0, 1, 2, 3], gap_before_final_norm=False, layer_scale_init_value=1.0) | kwargs
    backbone = SBPConvNeXt(arch, sbp_cfg=sbp_cfg, **kwargs).to(dtype).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backbone.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 0.6 + 0.2 * noise)
    return backbone.to(DEVICE)


def randomize(module):
    """Fill the parameters of a module with random values; return it in fp64 and training mode, on ``DEVICE``."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            ordinary = 0.3 * noise if name.endswith('bias') else 0.7 + 0.2 * noise
            p.copy_(noise / p[0].numel() ** 0.5 if p.dim() > 1 else ordinary)
    module.double().to(DEVICE).train()  # mmdet's `train` may return nothing
    return module


def random_images(n=2, height=64, width=64, *, dtype=torch.float64, seed=0):
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        DEVICE, dtype
    )


def move_to_device(tree):
    """Move tensors in nested tuples to ``DEVICE``."""
    if isinstance(tree, torch.Tensor):
        return tree.to(DEVICE)
    return type(tree)(*map(move_to_device, tree)) if hasattr(tree, '_fields') else tree


def apply_sbp(f, x, mask):
    """Compute SBP by its definition: the values of f, with gradients where the mask, broadcast to f(x), is true."""
    y = f(x)
    return torch.where(mask, y, y.detach())


def run_convnext_oracle(state, x, depths, masks, *, drop_path_rate=0.0, images=None):
    """Run ConvNeXt with SBP by its definition, in plain torch. Under autocast, norms run in fp32 as on CUDA.

    Args:
        state (dict): Parameters by mmpretrain's names. A stage is returned if it has a norm.
        x (Tensor): Images.
        depths (Sequence[int]): Number of blocks in each stage.
        masks (dict): Masks (height, width) by (stage, block) or (stage, 'downsample'). Other layers are exact.
        drop_path_rate (float): Stochastic depth rate of the last block.
        images (dict | None): Images that stochastic depth keeps, by (stage, block). If ``None``, they are drawn.
    """

    def norm(x, name):  # (..., C)
        with torch.autocast(x.device.type, enabled=False):
            x = x if x.dtype == torch.float64 else x.float()
            return F.layer_norm(x, x.shape[-1:], state[f'{name}.weight'], state[f'{name}.bias'], 1e-6)

    def norm2d(x, name):
        return norm(x.permute(0, 2, 3, 1), name).permute(0, 3, 1, 2)

    def linear(x, name):
        return F.linear(x, state[f'{name}.weight'].flatten(1), state[f'{name}.bias'])

    def mlp(x, name):
        x = norm(x.permute(0, 2, 3, 1), f'{name}.norm')
        x = linear(F.gelu(linear(x, f'{name}.pointwise_conv1')), f'{name}.pointwise_conv2')
        return (x * state[f'{name}.gamma'] if f'{name}.gamma' in state else x).permute(0, 3, 1, 2)

    def convolve(x, name, **kwargs):
        return F.conv2d(x, state[f'{name}.weight'], state[f'{name}.bias'], **kwargs)

    def layer(f, x, key):
        return apply_sbp(f, x, masks[key]) if key in masks else f(x)

    outs = []
    rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
    for i, depth in enumerate(depths):
        down = f'downsample_layers.{i}'
        if i == 0:
            x = norm2d(convolve(x, f'{down}.0', stride=4), f'{down}.1')
        else:
            x = layer(lambda x: convolve(norm2d(x, f'{down}.0'), f'{down}.1', stride=2), x, (i, 'downsample'))  # noqa: B023
        for j in range(depth):
            name, rate = f'stages.{i}.{j}', next(rates)
            inner = convolve(x, f'{name}.depthwise_conv', padding=3, groups=x.shape[1])
            branch = layer(lambda x: mlp(x, name), inner, (i, j))  # noqa: B023
            if rate:
                kept = torch.rand(len(x), dtype=x.dtype, device=x.device) >= rate if images is None else images[i, j]
                kept = kept.to(x.device)  # images are drawn on the CPU
                branch = branch * kept.view(-1, 1, 1, 1) / (1 - rate)
            x = x + branch
        if f'norm{i}.weight' in state:
            outs.append(norm2d(x, f'norm{i}'))
    return outs


def compute_loss(outs):
    """Return a loss with a different weight for each entry of each output."""
    weights = [torch.arange(out.numel(), dtype=torch.float64).mul(1.7).cos().view(out.shape) for out in outs]
    return sum((out * weight.to(out)).sum() for out, weight in zip(outs, weights, strict=True))


def compute_gradients(backbone, x, forward=None):
    """Return the gradients of all trainable parameters and of the image by name, after one pass."""
    x = x.detach().requires_grad_()
    parameters = {name: p for name, p in backbone.named_parameters() if p.requires_grad} | {'image': x}
    loss = compute_loss(backbone(x) if forward is None else forward(x))
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def relative_error(actual, expected):
    """Return the largest deviation relative to the largest entry."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    difference, largest = (actual.double() - expected.double()).abs().max(), expected.double().abs().max()
    return (difference / largest.clamp_min(1e-300)).item()


def assert_equal_statistics(actual, expected, tolerance=1e-12):
    """Assert that two dicts of buffers in fp64 are bitwise the same, on a GPU except for rounding.

    There, a map that lies elsewhere in memory may get another kernel, which sums in another order.
    """
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        if values.is_cuda and values.is_floating_point():
            torch.testing.assert_close(actual[name], values, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(actual[name], values), name


class OperationNames(TorchDispatchMode):
    """Context manager that records the names of the operations that run within it.

    Args:
        ignores (Callable): Returns whether a call is left out, given the operation's name and arguments. Default: none
            is.

    Attributes:
        names (set[str]): The names, such as 'mm'.
    """

    def __init__(self, ignores=lambda name, args: False):
        super().__init__()
        self.ignores, self.names = ignores, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not self.ignores(name, args):
            self.names.add(name)
        return function(*args, **(kwargs or {}))


def assert_near(actual, expected, tolerance):
    """Assert that two dicts of tensors agree; ``None`` agrees with ``None`` only."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            error = relative_error(actual[name], value)
            assert error <= tolerance, f'{name}: {error:.3g} of the largest entry'
