"""mmcv's transformer layers with deformable attention, with either order of dimensions, train like their own code."""

import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import BaseTransformerLayer
from mmcv.ops import MultiScaleDeformableAttention
from oracles import DEVICE, assert_near
from torch import nn

from sbp_mmdet import apply_lean

SIZES = torch.tensor([[6, 8], [3, 4]])
TOKENS, CHANNELS = 60, 32


def encoder_layer(batch_first, dropout=0.0):
    torch.manual_seed(0)
    attention = dict(type='MultiScaleDeformableAttention', embed_dims=CHANNELS, num_heads=4, num_levels=2)
    layer = BaseTransformerLayer(
        dict(attention, dropout=dropout, batch_first=batch_first),
        dict(type='FFN', embed_dims=CHANNELS, feedforward_channels=64, ffn_drop=dropout),
        operation_order=('self_attn', 'norm', 'ffn', 'norm'),
        batch_first=batch_first,
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer.double().to(DEVICE).train()


def inputs(batch_first):
    generator = torch.Generator().manual_seed(1)
    query, pos = (torch.randn(2, TOKENS, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2))
    places = torch.rand(2, TOKENS, 2, 2, generator=generator, dtype=torch.float64)
    if not batch_first:
        query, pos = query.transpose(0, 1).contiguous(), pos.transpose(0, 1).contiguous()
    return query.to(DEVICE).requires_grad_(), pos.to(DEVICE).requires_grad_(), places.to(DEVICE)


def gradients(layer, batch_first, **options):
    query, pos, places = inputs(batch_first)
    starts = torch.tensor([0, 48]).to(DEVICE)
    options |= dict(reference_points=places, spatial_shapes=SIZES.to(DEVICE), level_start_index=starts)
    torch.manual_seed(2)
    out = layer(query, query_pos=pos, **options)
    (out * torch.linspace(-1, 1, out.numel()).to(out).mul(99).sin().view_as(out)).sum().backward()
    return dict(out=out.detach(), query=query.grad, pos=pos.grad) | {n: p.grad for n, p in layer.named_parameters()}


@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('masked', [False, True])
def test_an_encoder_layer(batch_first, masked):
    plain = encoder_layer(batch_first)
    lean = copy.deepcopy(plain)
    report = apply_lean(nn.ModuleList([lean]), verify=False)
    assert [*report.changed] == ['0']
    mask = torch.arange(TOKENS).remainder(7).eq(0).expand(2, -1).to(DEVICE)
    options = dict(query_key_padding_mask=mask) if masked else {}
    assert_near(gradients(lean, batch_first, **options), gradients(plain, batch_first, **options), 1e-11)


def test_with_dropout_and_tokens_in_front_the_parts_draw_as_the_layer_does():
    plain = encoder_layer(False, dropout=0.3)
    lean = copy.deepcopy(plain)
    report = apply_lean(nn.ModuleList([lean]), verify=False)
    assert '0' not in report.changed and '0.attentions.0' in report.changed
    assert_near(gradients(lean, False), gradients(plain, False), 1e-11)


@pytest.mark.parametrize('batch_first', [True, False])
def test_attention_alone(batch_first):
    torch.manual_seed(0)
    plain = MultiScaleDeformableAttention(CHANNELS, 4, 2, dropout=0.0, batch_first=batch_first)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    plain.double().to(DEVICE).train()
    lean = copy.deepcopy(plain)
    assert [*apply_lean(nn.ModuleList([lean]), verify=False).changed] == ['0']
    assert_near(gradients(lean, batch_first), gradients(plain, batch_first), 1e-11)
