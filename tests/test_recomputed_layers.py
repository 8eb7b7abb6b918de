"""What ``exact_min`` recomputes and saves in transformers."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers import needs_bf16_attention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.layers.transformer import DeformableDetrTransformerEncoder
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from stand_ins import define_in_module
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sbp_mmdet import apply_lean
from sbp_mmdet.models.vit import SBPViT
from sbp_mmdet.plan.memory import SavedByPart

KEYS = dict(depths=(2, 2, 1, 1), num_heads=(2, 2, 4, 4), window_size=4, pretrain_img_size=32, drop_path_rate=0.0)
ARCH = dict(num_layers=3, embed_dims=32, num_heads=2, feedforward_channels=128)


def _backbone(name):
    init_default_scope('mmdet')
    torch.manual_seed(0)
    if name == 'Swin':
        model = MODELS.build(dict(type='SwinTransformer', embed_dims=32, **KEYS))
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    else:
        model = SBPViT(ARCH, img_size=64, patch_size=8, layer_scale_init_value=0.5, drop_path_rate=0.0)
    model.train()  # a backbone of mmdet returns nothing here
    return model, torch.randn(2, 3, 64, 64)


_COUNTS = getattr(flop_counter, 'flop_registry', None) or flop_counter.flop_mapping


def _count(operator, args, kwargs, out):
    if hasattr(flop_counter, 'flop_registry'):
        return _COUNTS[operator](*args, **kwargs, out_val=out)
    args, kwargs, shape = tree_map(flop_counter.get_shape, (args, kwargs, out))  # torch 2.1
    return _COUNTS[operator](*args, **kwargs, out_shape=shape)


class _Products(TorchDispatchMode):
    """Mode that counts matrix products, and separately the operators that compute attention."""

    def __init__(self):
        super().__init__()
        self.number, self.attentions = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        self.attentions += 'attention' in name and 'backward' not in name
        if 'attention' not in name and func._overloadpacket in _COUNTS:
            self.number += _count(func._overloadpacket, args, kwargs or {}, out)
        elif name == 'addmm_':
            self.number += 2 * args[1].numel() * args[2].shape[1]
        return out


def _gradients(model, images, autocast=False):
    with torch.autocast('cpu', torch.bfloat16) if autocast else nullcontext():
        outs = model(images)
    sum(out.float().square().sum() for out in outs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('name', ['Swin', 'ViT'])
def test_a_recomputed_block_is_not_recomputed_twice(name):
    model, images = _backbone(name)
    found = {}
    for preset in ('none', 'with_cp', 'exact', 'exact_min'):
        changed = copy.deepcopy(model)
        if preset != 'none':
            apply_lean(changed, preset, verify=False)
        with _Products() as found[preset]:
            _gradients(changed, images)
    more = {preset: products.number - found['none'].number for preset, products in found.items()}
    # A checkpoint adds a whole forward pass. exact recomputes part of that anyway; attention once more is added to it.
    assert more['exact_min'] - more['exact'] < 0.4 * more['with_cp']
    assert found['exact_min'].attentions <= found['with_cp'].attentions


@pytest.mark.parametrize('name', ['Swin', pytest.param('ViT', marks=needs_bf16_attention)])
def test_mixed_precision_is_that_of_exact(name):
    model, images = _backbone(name)
    exact, least = copy.deepcopy(model), copy.deepcopy(model)
    apply_lean(exact, 'exact', verify=False), apply_lean(least, 'exact_min', verify=False)
    expected, actual = _gradients(exact, images, True), _gradients(least, images, True)
    assert actual.keys() == expected.keys()
    for key, own in expected.items():
        assert (actual[key] - own).norm() <= 0.01 * own.norm() + 1e-6, key


LAYERS, TOKENS, WIDTH = 4, 20, 16


class _EncoderAndAttention(nn.Module):
    """Encoder, and attention of some queries to its output, as in a decoder."""

    def __init__(self):
        super().__init__()
        keys = dict(embed_dims=WIDTH, num_heads=2, num_levels=2, batch_first=True)
        layers = dict(self_attn_cfg=dict(keys, dropout=0.0))
        layers |= dict(ffn_cfg=dict(embed_dims=WIDTH, feedforward_channels=32, ffn_drop=0.0))
        self.encoder = DeformableDetrTransformerEncoder(LAYERS, layers)
        self.cross_attn = MultiScaleDeformableAttention(**keys, dropout=0.0)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, query, maps):
        memory = self.encoder(query, None, None, valid_ratios=query.new_ones(2, 2, 2), **maps)
        points = query.new_full((2, 3, 2, 2), 0.4)
        return self.cross_attn(query[:, :3], value=memory, reference_points=points, **maps).square().sum()


define_in_module('mmdet.test', _EncoderAndAttention)  # code of a known library hands maps on


def test_layers_of_an_encoder_save_one_map_each_and_its_output_is_saved_once():
    init_default_scope('mmdet')
    torch.manual_seed(0)
    plain = _EncoderAndAttention().double().train()
    least = copy.deepcopy(plain)
    apply_lean(least, 'exact_min', verify=False)
    maps = dict(spatial_shapes=torch.tensor([[4, 4], [2, 2]]), level_start_index=torch.tensor([0, 16]))
    query, actual = torch.randn(2, TOKENS, WIDTH).double(), []
    for model in (plain, least):
        saved, own = SavedByPart(lambda: ''), query.clone().requires_grad_()
        with saved.hooks():
            loss = model(own, maps)
        stored = sum(saved.count([*model.parameters()]).values())
        loss.backward()
        actual.append(({name: p.grad for name, p in model.named_parameters()} | dict(query=own.grad), stored))
    (expected, _), (gradients, stored) = actual
    for name, own in expected.items():
        torch.testing.assert_close(gradients[name], own, rtol=1e-11, atol=1e-11)
    one = query.numel() * 8  # the input, the sum of each layer; then what three queries save, less than a map
    assert (LAYERS + 1) * one <= stored < (LAYERS + 2) * one
