"""Weights that hooks update within the backward pass: gradients are those of the plain model in fp64.

Such a hook runs as soon as autograd has the whole gradient of a parameter, for example an optimizer that steps then and
frees the gradient. From then on, nothing may read the parameter.
"""

import copy
import functools

import pytest
import test_adapters_dino
import test_changes_before_backward
import test_exact_min
import torch
from conv_models import BACKBONES, build_module
from oracles import random_images
from test_adapters_outside import build_fusion, random_tensor
from test_adapters_transformer import LAYERS, randomize
from test_adapters_yolo import RepVGGBlock, blocks
from test_changes_before_backward import Layer
from test_csp_layer import LAYERS as CSP_LAYERS
from test_csp_layer import build_layer
from torch import nn
from unusual_models import MODELS
from verify_models import build_in_training

from sbp_mmdet import apply_lean


class AfterConvolution(nn.Module):
    """A layer of eight channels on a map of the image."""

    def __init__(self, layer):
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 8, 3, 4).double(), layer

    def forward(self, x):
        return self.layer(self.conv(x))


class Fused(nn.Module):
    """Fusion of an image with a text."""

    def __init__(self):
        super().__init__()
        self.conv, self.fusion = nn.Conv2d(3, 16, 3, 4).double(), build_fusion()

    def forward(self, x):
        return self.fusion(self.conv(x).flatten(2).mT, random_tensor(2, 7, 16))


class Mask2Former(nn.Module):
    """Mask2Former on maps of the image."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 32, 3, padding=1), test_adapters_dino.Mask2Former()

    def forward(self, x):
        x = self.conv(x)[:, :, :24, :32]
        return self.head(**{f'm{i}': x[:, : 8 + 8 * i, :: 2**i, :: 2**i].contiguous() for i in range(4)})


def build_mask2former():
    torch.manual_seed(0)
    model = Mask2Former().double()
    with torch.no_grad():
        model(random_images(2, 64, 96))  # makes the masks, which copies share
    return model


def build_csp_layer(name):
    return AfterConvolution(build_layer(**CSP_LAYERS[name])).train()


def build_dense_head(neck, head):
    return test_exact_min._detector(neck, head).train()


def build_in_fp64(name):
    return build_in_training(name).double()


MORE = ['ConvNeXt V2', 'ViTDet', 'encoder', 'encoder with dropout', 'padded attention']
FAMILIES = (
    MODELS
    | {name: functools.partial(build_in_fp64, name) for name in MORE}
    | {'fusion': Fused, 'RepVGG': lambda: AfterConvolution(blocks(RepVGGBlock(8, alpha=True), RepVGGBlock(8)))}
    | {'Mask2Former': build_mask2former}
    | {'heads': test_changes_before_backward.FAMILIES['heads']}
    | {name: functools.partial(build_module, cfg) for name, (cfg, *_) in BACKBONES.items()}
    | {name: functools.partial(lambda name: randomize(Layer(name)), name) for name in LAYERS}
    | {f'CSP layer, {name}': functools.partial(build_csp_layer, name) for name in CSP_LAYERS}
    | {' and '.join(pair): functools.partial(build_dense_head, *pair) for pair in test_exact_min.CASES}
)


pytestmark = pytest.mark.usefixtures('quiet')


def update(p):
    """Write to a parameter, past autograd and then so that it notices: a later read is wrong, or an error."""
    p.data.mul_(-3)
    with torch.no_grad():
        p.add_(0.1)


def compute_gradients(model):
    """Return the gradients of a step in which each parameter is updated as soon as its gradient is known."""
    gradients = {}

    def use_gradient(p, name):
        gradients[name] = p.grad
        update(p)
        p.grad = None

    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(functools.partial(use_gradient, name=name))
    x = random_images(2, 64, 96).requires_grad_()
    torch.manual_seed(3)
    outs = model(x)
    outs = outs if isinstance(outs, (list, tuple)) else [outs]
    outs = [out for out in outs if out.requires_grad]
    sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).cos().view_as(out)).sum() for out in outs).backward()
    return gradients | ({} if x.grad is None else dict(images=x.grad))


@functools.lru_cache(maxsize=1)
def plain_gradients(family):
    plain = FAMILIES[family]()
    return plain, compute_gradients(copy.deepcopy(plain))


@pytest.mark.parametrize('preset', ['exact', 'exact_min'])
@pytest.mark.parametrize('family', FAMILIES)  # the outer loop
def test_gradients(family, preset):
    """Gradients are those of the weights of the forward pass, although the layers behind are updated before."""
    plain, expected = plain_gradients(family)
    lean = copy.deepcopy(plain)
    assert apply_lean(lean, preset, verify=False).changed
    gradients = compute_gradients(lean)
    assert gradients.keys() == expected.keys()
    for name, grad in expected.items():
        assert (gradients[name] - grad).norm() <= 1e-9 * grad.norm().clamp_min(1e-3), name
