"""SBPViT computes torch's encoder, has timm's and DINOv2's parameter names, and returns the right scales."""

import pytest
import torch
import torch.nn.functional as F
from cases import VIT, build, build_on_meta
from oracles import DEVICE, assert_near, compute_gradients, random_images, relative_error
from torch import nn

from sbp_mmdet import SBPViT


@pytest.mark.parametrize('layer_scale', [0.0, 1.0])
def test_the_plain_vit_is_torchs_encoder(layer_scale):
    options = dict(out_type='avg_featmap', layer_scale_init_value=layer_scale, register_tokens=0)
    model, x = build('SBPViT', **options), random_images(2)
    channels, heads, hidden = (VIT['arch'][key] for key in ('embed_dims', 'num_heads', 'feedforward_channels'))
    tokens = F.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=16).flatten(2).mT
    tokens = torch.cat([model.cls_token.expand(2, -1, -1), tokens], 1) + model.pos_embed
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(channels, heads, hidden, 0.0, 'gelu', 1e-6, True, True).double().to(DEVICE)
        first, second = (getattr(scale, 'gamma', x.new_ones(channels)) for scale in (block.ls1, block.ls2))
        pairs = [
            (layer.norm1, block.norm1, None),
            (layer.norm2, block.norm2, None),
            (layer.linear1, block.mlp.fc1, None),
            (layer.linear2, block.mlp.fc2, second),
            (layer.self_attn.out_proj, block.attn.proj, first),
        ]
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(block.attn.qkv.weight)
            layer.self_attn.in_proj_bias.copy_(block.attn.qkv.bias)
            for theirs, ours, scale in pairs:
                theirs.weight.copy_(ours.weight if scale is None else scale[:, None] * ours.weight)
                theirs.bias.copy_(ours.bias if scale is None else scale * ours.bias)
        tokens = layer(tokens)
    norm = F.layer_norm(tokens[:, 1:].mean(1), (channels,), model.norm.weight, model.norm.bias, 1e-6)
    assert relative_error(model(x)[0], norm) < 1e-10


def list_timm_shapes(c, depth, grid=14, **more):
    """Return the names and shapes of timm's parameters, written by hand."""
    block = {
        'norm1.weight': (c,), 'norm1.bias': (c,), 'norm2.weight': (c,), 'norm2.bias': (c,),
        'attn.qkv.weight': (3 * c, c), 'attn.qkv.bias': (3 * c,), 'attn.proj.weight': (c, c), 'attn.proj.bias': (c,),
        'mlp.fc1.weight': (4 * c, c), 'mlp.fc1.bias': (4 * c,), 'mlp.fc2.weight': (c, 4 * c), 'mlp.fc2.bias': (c,),
    }  # fmt: skip
    shapes = {f'blocks.{i}.{name}': shape for i in range(depth) for name, shape in block.items()}
    shapes |= {'norm.weight': (c,), 'norm.bias': (c,), 'cls_token': (1, 1, c), 'pos_embed': (1, 1 + grid**2, c)}
    return shapes | {'patch_embed.proj.weight': (c, 3, 16, 16), 'patch_embed.proj.bias': (c,)} | more


@pytest.mark.parametrize(
    ('arch', 'channels', 'depth', 'millions'),
    [('tiny', 192, 12, 5.5), ('small', 384, 12, 21.7), ('base', 768, 12, 85.8), ('large', 1024, 24, 303.3)],
)
def test_state_dict_is_timms(arch, channels, depth, millions):
    backbone = build_on_meta(SBPViT, arch, out_type='cls_token', sbp_cfg=dict(preset='sbp'))
    assert {name: tuple(p.shape) for name, p in backbone.state_dict().items()} == list_timm_shapes(channels, depth)
    assert sum(p.numel() for p in backbone.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert backbone.keep_ratios().keys() == {(0, i) for i in range(depth // 3, depth)}  # the paper's 8 of 12
    assert not list(backbone.buffers())


def test_registers_and_layer_scale_have_dinov2s_names():
    backbone = build_on_meta(SBPViT, 'tiny', register_tokens=4, layer_scale_init_value=1e-5, out_indices=(2,))
    more = {f'blocks.{i}.ls{j}.gamma': (192,) for i in range(12) for j in (1, 2)}
    shapes = {name: tuple(p.shape) for name, p in backbone.state_dict().items()}
    assert shapes == list_timm_shapes(192, 12, reg_token=(1, 4, 192), **more)


def test_position_embeddings_of_other_sizes():
    source, other = build('SBPViT', img_size=64), build('SBPViT', img_size=96, seed=1)
    other.load_state_dict(source.state_dict())
    assert torch.equal(other.pos_embed[:, 0], source.pos_embed[:, 0])
    x = random_images(1, 96, 96)
    for got, want in zip(other(x), source(x), strict=True):  # interpolated once, when loaded or when used
        assert relative_error(got, want) < 1e-12
    state = source.state_dict()
    state['pos_embed'] = state['pos_embed'][:, 1:]  # timm's models with registers: no position of the class token
    other.load_state_dict(state)
    assert not other.pos_embed[:, 0].any() and other.pos_embed.shape[1] == 37
    state['pos_embed'] = state['pos_embed'][:, :-1]
    with pytest.raises(RuntimeError, match='size mismatch for pos_embed'):
        other.load_state_dict(state)


def test_scales_of_vit():
    outs = build('SBPViT', dict(preset='sbp'))(random_images(2, 70, 93))  # 5 x 6 patches
    assert [tuple(out.shape) for out in outs] == [(2, 3, 20, 24), (2, 6, 10, 12), (2, 12, 5, 6), (2, 12, 3, 3)]
    outs = build('SBPViT', dict(preset='sbp'), out_indices=(1, 3))(random_images(1, 64, 64))
    assert [tuple(out.shape) for out in outs] == [(1, 6, 8, 8), (1, 12, 2, 2)]


@pytest.mark.parametrize('preset', ['exact', 'sbp', 'reference'])
@pytest.mark.parametrize(
    'options',
    [
        dict(with_cls_token=False, register_tokens=0),
        dict(register_tokens=3, qkv_bias=False),
        dict(layer_scale_init_value=0.0, patch_size=14),
        dict(out_type='cls_token'),
        dict(out_type='avg_featmap'),
        dict(out_indices=(2,)),
    ],
    ids=str,
)
def test_forms_of_vit(preset, options):
    lean, plain, x = (
        build('SBPViT', dict(preset=preset), **options),
        build('SBPViT', **options),
        random_images(2, 64, 70),
    )
    for a, b in zip(lean(x), plain(x), strict=True):
        assert relative_error(a, b) < 1e-12
    actual, expected = compute_gradients(lean, x), compute_gradients(plain, x)
    last = 'norm.weight', 'norm.bias'  # which come before what is dropped
    chosen = expected if preset == 'exact' else last
    assert_near({n: actual[n] for n in chosen}, {n: expected[n] for n in chosen}, 1e-10)


def test_layer_depths_of_vit():
    backbone = build('SBPViT', out_indices=(0, 2))
    depth = {name: backbone.get_layer_depth(f'backbone.{name}', 'backbone.') for name in backbone.state_dict()}
    assert {last for _, last in depth.values()} == {5}
    for name, (layer, _) in depth.items():
        block = int(name.split('.')[1]) if name.startswith('blocks.') else None
        embedding = name.startswith(('patch_embed', 'pos_embed', 'cls_token', 'reg_token'))
        assert layer == (0 if embedding else 4 if block is None else block + 1)
    assert backbone.get_layer_depth('neck.weight', 'backbone.') == (4, 5)


def wide(height, width, **options):
    torch.manual_seed(0)
    arch = dict(num_layers=1, embed_dims=8, num_heads=2)
    return SBPViT(arch, img_size=(4 * height, 4 * width), patch_size=4, **options)


def test_positions_that_are_no_square():
    """A file with 8 x 32 patches has as many as one with 16 x 16."""
    source, patches = wide(8, 32), torch.randn(1, 256, 8)
    state = dict(source.state_dict(), pos_embed=patches)  # without a position of the class token
    source.load_state_dict(state)
    assert torch.equal(source.pos_embed[:, 1:], patches) and not source.pos_embed[:, 0].any()
    larger = wide(16, 64)
    both = r'pretrained_grid=\(16, 16\) or pretrained_grid=\(8, 32\)'
    with pytest.raises(ValueError, match=both):
        larger.load_state_dict(state)
    for grid in ((8, 32), (16, 16)):
        larger = wide(16, 64, pretrained_grid=grid)
        larger.load_state_dict(dict(state))
        expected = F.interpolate(patches.mT.view(1, 8, *grid), (16, 64), mode='bicubic').flatten(2).mT
        torch.testing.assert_close(larger.pos_embed[:, 1:].detach(), expected)
    with pytest.raises(RuntimeError, match='size mismatch for pos_embed'):
        wide(16, 64, pretrained_grid=(8, 16)).load_state_dict(dict(state))
