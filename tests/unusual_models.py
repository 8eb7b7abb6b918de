"""Modules of users, models that contain them, and the comparison of a changed model with the plain one."""

import functools

import torch
import torch.nn.functional as F
from cases import build
from conv_models import randomize_norms
from mmcv.cnn import ConvModule
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN, MultiheadAttention
from mmdet.models.backbones import ResNet, ResNetV1d
from mmdet.models.backbones.resnet import Bottleneck
from mmdet.models.backbones.swin import SwinBlock
from mmdet.models.layers import CSPLayer
from mmdet.models.necks import FPN
from test_adapters_transformer import LAYERS
from torch import nn

from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.models.convnext import ConvNeXtBlock
from sbp_mmdet.models.layers import LayerNorm2d

CALLS = []  # of code of users


# Modules and code of users.


class LoRA(nn.Module):
    """A module that replaces a linear layer or a convolution, and shows its weight and bias."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        kind = nn.Linear if isinstance(inner, nn.Linear) else functools.partial(nn.Conv2d, kernel_size=1)
        wide, narrow = inner.weight.shape[:2]
        self.down, self.up = (kind(*sizes, bias=False).to(inner.weight) for sizes in ((narrow, 2), (2, wide)))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__('inner'), name)

    def forward(self, x):
        CALLS.append('LoRA')
        return self.inner(x) + self.up(self.down(x))


class Doubling(nn.Module):
    """A parametrization that doubles a parameter."""

    def forward(self, weight):
        return 2 * weight


class DoubledWeight(nn.Parameter):
    """Parameter that counts twice as a weight, like an adapter or quantised tensor that computes another product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.linear, F.conv2d, torch.conv2d):
            x, weight, *others = (a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args)
            return function(x, 2 * weight, *others, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class StochasticDepth(nn.Module):
    """Stochastic depth like torchvision's, whose rate has another name."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        CALLS.append('depth')
        return x * torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype).bernoulli_(1 - self.p).div_(1 - self.p)


class UnscaledDropPath(DropPath):
    """Stochastic depth like timm's with ``scale_by_keep=False``."""

    def forward(self, x):
        return super().forward(x) * (1 - self.drop_prob)


class DoubledNorm(nn.LayerNorm):
    def forward(self, x):
        CALLS.append('norm')
        return 2 * super().forward(x)


class DoubledNorm2d(LayerNorm2d):
    def tokens(self, x):
        CALLS.append('norm')
        return 2 * super().tokens(x)


class ShiftedGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) + 1


class SteepGELU(nn.GELU):
    def forward(self, x):
        CALLS.append('act')
        return super().forward(1.5 * x)


class SteepReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(1.5 * x - 0.1)


class DoubledBlock(ConvNeXtBlock):
    def forward(self, x):
        CALLS.append('block')
        return 2 * super().forward(x)


class BlockWithOtherHelper(ConvNeXtBlock):
    def _forward(self, x):
        return 3 * super()._forward(x)


class DoubledSwinBlock(SwinBlock):
    def forward(self, x, hw_shape):
        return 2 * super().forward(x, hw_shape)


class PaddedBottleneck(Bottleneck):
    @property
    def norm2(self):
        return nn.Sequential(super().norm2, nn.Softplus())


class Deep(ResNetV1d):
    """A ResNet with a deep stem and one more layer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.auxiliary = nn.Conv2d(3, 4, 1)


def note_call(*args):
    CALLS.append('hook')


def doubled(module, args, out):
    CALLS.append('hook')
    return 2 * out


# Models, small, in fp64, with their inputs.


def random_images(size=64):
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


TWO_STAGES = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))


def build_resnet(**options):
    """Return the first two stages of a ResNet-50, with two and three bottlenecks."""
    model = ResNet(50, base_channels=8, norm_eval=False, **TWO_STAGES, **options)
    del model.layer1[2:], model.layer2[3:]
    return randomize_norms(model)


def deep():
    return randomize_norms(Deep(depth=18, stem_channels=8, base_channels=8, **TWO_STAGES))


def conv_module(**options):
    options = dict(padding=1, norm_cfg=dict(type='GN', num_groups=2), act_cfg=dict(type='SiLU')) | options
    return randomize_norms(nn.Sequential(ConvModule(3, 8, 3, **options), ConvModule(8, 8, 3, **options)))


def csp_layer():
    return randomize_norms(nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), CSPLayer(16, 16, 0.5, 2, channel_attention=True)))


class Pyramid(nn.Module):
    """A feature pyramid on three maps of the image."""

    def __init__(self):
        super().__init__()
        self.neck = FPN([3, 3, 3], 4, 3)

    def forward(self, x):
        return self.neck(tuple(x[..., ::step, ::step].contiguous() for step in (1, 2, 4)))


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Tokens(nn.Module):
    """Modules that run on tokens one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = tokens(2, 6, 8) + x.mean()
        for layer in self.layers:
            x = layer(x)
        return x


def ffn(**options):
    return Tokens(*(FFN(8, 16, **options) for _ in range(2))).double().train()


def attention():
    return Tokens(*(MultiheadAttention(8, 2, batch_first=True) for _ in range(2))).double().train()


class Deformable(nn.Module):
    """An encoder layer of Deformable DETR."""

    def __init__(self):
        super().__init__()
        make, self._inputs = LAYERS['deformable encoder']
        self.layer = make()

    def forward(self, x):
        torch.manual_seed(0)
        return self.layer(**self._inputs())


def deformable():
    return randomize_norms(Deformable())


MODELS = {
    # Two stages have all operations: downsampling, and of Swin, blocks with and without shifted windows.
    'Swin': lambda: build('stock Swin', depths=(1, 2), num_heads=(1, 2), strides=(4, 2), out_indices=(0, 1)),
    'ConvNeXt': lambda: build('stock ConvNeXt', arch=dict(depths=[1, 2], channels=[8, 12]), out_indices=[0, 1]),
    'ViT': lambda: build('SBPViT'),
    'ViT of mmpretrain': lambda: build('stock ViT'),
    'ResNet': build_resnet,
    'deep stem': deep,
    'ConvModule': conv_module,
    'CSP layer': csp_layer,
    'FPN': lambda: randomize_norms(Pyramid()),
    'FFN': ffn,
    'attention': attention,
    'deformable': deformable,
}


# The comparison.


def run_step(model, x):
    """Return outputs, gradients of images and parameters, and how often the user's code ran."""
    CALLS.clear()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    outs = model(x)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view_as(out)).sum() for out in outs)
    wanted = dict(images=x, **{name: p for name, p in model.named_parameters() if p.requires_grad})
    gradients = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return [out.detach() for out in outs], dict(zip(wanted, gradients, strict=True)), sorted(CALLS), buffers


def assert_same(lean, plain, x):
    assert_same_step(run_step(lean, x), run_step(plain, x))


def assert_same_step(actual, expected):
    """Assert that two results of :func:`run_step` are the same, apart from rounding."""
    outs, grads, calls, buffers = actual
    for a, b in zip(outs, expected[0], strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm().clamp_min(1e-9)
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (grads[name] is None) == (grad is None), name
        assert grad is None or (grads[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name
    assert calls == expected[2]
    for name, values in expected[3].items():
        torch.testing.assert_close(buffers[name], values, rtol=1e-9, atol=1e-9)


def find_lean_modules(model):
    return [name for name, module in model.named_modules() if isinstance(module, LeanModule)]
