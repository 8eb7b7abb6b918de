"""Table of model families and presets, and one oracle for all of them, which the generic tests run through.

The oracle is the plain model of the same weights. By hand, its blocks send gradients as the definition says:
``torch.where(kept, f(x), f(x).detach())``, and stochastic depth multiplies each branch by what was drawn for it.
"""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import SwinTransformer
from mmengine.model import BaseModule
from oracles import DEVICE, compute_gradients, random_images
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT, adapter, apply_lean
from sbp_mmdet.adapters import ADAPTERS, LeanModule, add_to_role
from sbp_mmdet.presets import PRESETS

CONVNEXT = dict(
    arch=dict(depths=[1, 2, 2, 1], channels=[8, 12, 16, 20]),
    out_indices=[0, 1, 2, 3],
    gap_before_final_norm=False,
    layer_scale_init_value=1.0,
)
SWIN = dict(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4), window_size=3, mlp_ratio=2)
VIT = dict(
    arch=dict(num_layers=3, embed_dims=12, num_heads=3, feedforward_channels=20),
    img_size=64,
    layer_scale_init_value=1.0,
    register_tokens=2,
)


class EncoderLayer(nn.Module):
    """Block with the attributes that the adapter of mmpretrain's block reads, for machines without mmpretrain."""

    def __init__(self, width, heads, drop_path_rate):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = _Attention(width, heads, DropPath(drop_path_rate))
        drop = dict(type='DropPath', drop_prob=drop_path_rate)
        self.ffn = FFN(width, 2 * width, act_cfg=dict(type='GELU'), dropout_layer=drop, layer_scale_init_value=1.0)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return self.ffn(self.ln2(x), identity=x)


class _Attention(nn.Module):
    def __init__(self, width, heads, drop):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.gamma1, self.out_drop, self.proj_drop = nn.Identity(), drop, nn.Dropout(0.0)
        self.attn_drop, self.v_shortcut, self.input_dims, self.embed_dims = 0.0, False, width, width
        self.scaled_dot_product_attention = None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out_drop(self.gamma1(self.proj_drop(self.proj(out))))


adapter(EncoderLayer)(ADAPTERS['mmpretrain.models.backbones.vision_transformer.TransformerEncoderLayer'])
add_to_role('attention', _Attention)


class StockViT(BaseModule):
    """Vision transformer of mmpretrain's blocks behind patches and a class token."""

    prefix = 1

    def __init__(self, drop_path_rate=0.0):
        super().__init__()
        self.patch_embed = nn.ModuleDict(dict(projection=nn.Conv2d(3, 12, 16, stride=16)))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 12))
        self.layers = nn.ModuleList(EncoderLayer(12, 3, drop_path_rate * i / 2) for i in range(3))

    def forward(self, x):
        x = F.pad(x, (0, -x.shape[3] % 16, 0, -x.shape[2] % 16))
        x = self.patch_embed['projection'](x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return (x,)


def get_builder(kind, **fixed):
    """Return a function that builds a user's model and changes it with :func:`sbp_mmdet.apply_lean`."""

    def make(sbp_cfg=None, **options):
        model = kind(**fixed | options)
        if sbp_cfg is not None:
            apply_lean(model, **sbp_cfg)
        return model

    return make


def make_lean_copy(model: nn.Module, preset: str = 'exact', **keys) -> nn.Module:
    """Return a copy of a model after :func:`sbp_mmdet.apply_lean`, without verification unless ``verify`` is given."""
    lean = copy.deepcopy(model)
    apply_lean(lean, preset, **dict(verify=False) | keys)
    return lean


# Functions that build a small model, by family. The backbones of this package take sbp_cfg themselves.
FAMILIES = {
    'SBPConvNeXt': lambda sbp_cfg=None, **options: SBPConvNeXt(sbp_cfg=sbp_cfg, **CONVNEXT | options),
    'SBPSwinTransformer': lambda sbp_cfg=None, **options: SBPSwinTransformer(
        sbp_cfg=sbp_cfg, **SWIN | dict(drop_path_rate=0.0) | options
    ),
    'SBPViT': lambda sbp_cfg=None, **options: SBPViT(sbp_cfg=sbp_cfg, **VIT | options),
    'stock ConvNeXt': get_builder(SBPConvNeXt, **CONVNEXT),
    'stock Swin': get_builder(SwinTransformer, **SWIN | dict(drop_path_rate=0.0)),
    'stock ViT': get_builder(StockViT),
}
OWN = [name for name in FAMILIES if name.startswith('SBP')]
LEAN = [name for name, preset in PRESETS.items() if preset.form is not None]
THIN = [name for name, preset in PRESETS.items() if preset.thins]


def build(family: str, sbp_cfg: dict | None = None, *, dtype=torch.float64, seed=0, **options) -> nn.Module:
    """Return a small model in training mode with random values in all parameters."""
    model = FAMILIES[family](sbp_cfg, **options).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            wide = p.dim() > 1 and not name.endswith(('_token', 'pos_embed'))
            p.copy_(noise / p[0].numel() ** 0.5 if wide else 0.6 + 0.2 * noise)
    model.train()  # mmdet's returns None
    return model.to(DEVICE)


@functools.cache
def run_plain(family: str, size: tuple, **options) -> tuple:
    """Return the outputs of the plain model on random images, and the state of the random numbers after it."""
    model = build(family, **options)
    torch.manual_seed(3)
    return model(random_images(*size)), torch.get_rng_state()


@functools.cache
def compute_plain_gradients(family: str, size: tuple, **options) -> dict:
    """Return the gradients of the step of :func:`run_plain`."""
    model = build(family, **options)
    torch.manual_seed(3)
    return compute_gradients(model, random_images(*size))


@functools.cache
def compute_smooth_gradients(family: str) -> tuple:
    """Return smooth images, as photographs are, and the gradients of the plain model."""
    x = F.interpolate(random_images(2, 8, 12), (64, 96), mode='bicubic')
    return x, compute_gradients(build(family), x)


def get_draws(model: nn.Module):
    """Return the draws of a changed model's passes."""
    return next(m._lean.draws for m in model.modules() if isinstance(m, LeanModule) and m._lean.draws is not None)


def get_kept_masks(model: nn.Module, x) -> dict:
    """Return the mask (height, width) of each layer in the latest pass of the model."""
    draws, masks = get_draws(model), {}
    with draws.latest_pass() if draws.stages.any_random() else contextlib.nullcontext():
        for layer in draws.stages.keep_ratios():
            size = draws.stages.sizes(*x.shape[-2:], layer[0])[-1]
            masks[layer] = torch.zeros(size, dtype=torch.bool)
            masks[layer].view(-1)[draws.positions(layer, masks[layer].numel()).keep.cpu()] = True
    return masks


def count_stored_bytes(run, known) -> int:
    """Return the bytes that autograd saves in a forward pass, without known tensors such as parameters and images."""
    if DEVICE != 'cpu':
        pytest.skip('bytes are counted on a CPU')
    seen = {t.untyped_storage().data_ptr() for t in known}
    nbytes = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            nbytes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    del out
    return sum(nbytes.values())


def count_model_bytes(model, *args, **kwargs) -> int:
    """Return the bytes that a model saves in a forward pass, without its inputs, parameters and buffers."""
    inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    return count_stored_bytes(lambda: model(*args, **kwargs), [*inputs, *model.parameters(), *model.buffers()])


class Largest(TorchDispatchMode):
    """Mode that records the size of the largest tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(t.nbytes for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor))])
        return out


def build_oracle(family: str, lean: nn.Module, x, **options) -> nn.Module:
    """Return the plain model with these weights, which sends the gradients that the last pass of ``lean`` should send.

    Args:
        family (str): Key of ``FAMILIES``.
        lean (nn.Module): The changed model, after a forward pass.
        x (Tensor): The images of this pass.
        **options: Arguments with which the model was built.
    """
    plain = build(family, dtype=next(lean.parameters()).dtype, **options)
    plain.load_state_dict(lean.state_dict())
    names = {id(module): name for name, module in lean.named_modules()}
    draws, prefix = get_draws(lean), getattr(lean, 'prefix', 0)
    rates, ratios = draws.stages.rates(), draws.stages.keep_ratios()
    sizes = draws.stages.sizes(*x.shape[-2:], 3)
    settings = draws.stages.settings
    with draws.latest_pass() if draws.stages.any_random() else contextlib.nullcontext():
        for layer, module in draws.stages.layers.items():
            twin, kept = plain.get_submodule(names[id(module)]), None
            if layer in ratios:
                height, width = sizes[layer[0]]
                positions = draws.positions(layer, height * width + prefix, bool(prefix))
                kept = _Kept(positions, (height, width), prefix)
            for name, binding in module.bindings().items():
                if binding.drop is not None:
                    factor = None
                    if (*layer, name) in rates:
                        factor = draws.images((*layer, name), len(x)).to(x) / (1 - rates[(*layer, name)])
                    by_heads = binding.by_heads and settings.attention == 'head'
                    mask = kept if kept and binding.thinned and not by_heads else None
                    _end_branch(plain.get_submodule(names[id(binding.drop)]), factor, mask)
                if kept and binding.by_heads:
                    heads = draws.heads(layer) if settings.attention == 'head' else None
                    _attend(twin, plain.get_submodule(names[id(binding.proj)]), kept, settings.attention, heads)
            if kept and layer[1] == 'downsample':
                _shrink(twin, kept)
    return plain


def compute_expected_gradients(family, lean, x, **options):
    """Return the gradients of the oracle, after the lean model has run."""
    return compute_gradients(build_oracle(family, lean, x, **options), x)


def compute_lean_and_expected(family, sbp_cfg, x=None, **options):
    """Return the gradients of a lean model, and those of its oracle."""
    x = random_images(3, 64, 96) if x is None else x
    lean = build(family, sbp_cfg, **options)
    actual = compute_gradients(lean, x)
    return actual, compute_expected_gradients(family, lean, x, **options)


class _Kept:
    """Mask of the kept positions of a layer."""

    def __init__(self, positions, size, prefix):
        keep, self.size = positions.keep, size
        self.mask = torch.zeros(size[0] * size[1] + prefix, dtype=torch.bool, device=keep.device)
        self.mask[keep] = True

    def where(self, y):
        """Detach the dropped positions of tokens (N, L, C) or feature maps (N, C, H, W)."""
        mask = self.mask.view(self.size) if y.dim() == 4 else self.mask[:, None]
        return torch.where(mask, y, y.detach())


def _end_branch(drop, factor, kept):
    """Multiply a branch by its stochastic depth factor, and detach its dropped positions."""
    inner = drop.forward if factor is None else lambda y: y * factor.view(-1, *[1] * (y.dim() - 1))
    drop.forward = inner if kept is None else lambda y: inner(kept.where(y))


def _attend(block, proj, kept, mode, heads):
    """Detach dropped entries of the attention map, or dropped heads, as in the appendix of the paper."""

    def attend(q, k, v, **_):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mode == 'qkv':
            scores = torch.where(kept.mask, scores, scores.detach())
            v = torch.where(kept.mask[:, None], v, v.detach())
        return scores.softmax(-1) @ v

    inner = block.forward

    def forward(x):
        with mock.patch.object(F, 'scaled_dot_product_attention', attend):
            return inner(x)

    block.forward = forward
    if mode == 'head':
        number = getattr(block, 'num_heads', None) or block.attn.num_heads
        scale = block.ls1 if hasattr(block, 'ls1') else block.attn.gamma1
        scaled, silent = scale.forward, []

        def project(y):
            sends = torch.isin(torch.arange(number, device=y.device), heads).repeat_interleave(y.shape[-1] // number)
            silent.append(F.linear(y * ~sends, proj.weight))
            return F.linear(y * sends, proj.weight, proj.bias)

        proj.forward = project
        scale.forward = lambda y: scaled(y) + scaled(silent.pop()).detach()


def _shrink(layer, kept):
    """Detach the dropped positions of a downsampling layer's output."""
    inner = layer.forward

    def of_map(x):
        return kept.where(inner(x))

    def of_tokens(x, size):
        out, size = inner(x, size)
        return kept.where(out), size

    layer.forward = of_tokens if hasattr(layer, 'reduction') else of_map


def build_on_meta(kind, *args, **options):
    """Build a module on the device 'meta', without memory for its parameters."""
    with torch.device('meta'):
        return kind(*args, **options)
