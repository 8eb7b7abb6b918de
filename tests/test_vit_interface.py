"""The ViT backbone's arguments, parameter names, weights of other sources, layer depths; and bad input."""

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from oracles import image, relative_error
from test_vit import ARCH, small

from sbp_mmdet import SBPViT
from sbp_mmdet.analysis.parts import part_of
from sbp_mmdet.families import FAMILIES, Layer, family_of, layer_of
from sbp_mmdet.study import gradients

# timm's names and shapes for patch 16, 224 pixels: {c} channels, {3c} and {4c} times that.
TIMM = {
    'cls_token': '1 1 c',
    'pos_embed': '1 197 c',
    'patch_embed.proj.weight': 'c 3 16 16',
    'patch_embed.proj.bias': 'c',
    'norm.weight': 'c',
    'norm.bias': 'c',
}
BLOCK = {
    'norm1.weight': 'c',
    'norm1.bias': 'c',
    'attn.qkv.weight': '3c c',
    'attn.qkv.bias': '3c',
    'attn.proj.weight': 'c c',
    'attn.proj.bias': 'c',
    'norm2.weight': 'c',
    'norm2.bias': 'c',
    'mlp.fc1.weight': '4c c',
    'mlp.fc1.bias': '4c',
    'mlp.fc2.weight': 'c 4c',
    'mlp.fc2.bias': 'c',
}


def shapes(channels, depth, **more):
    rows = TIMM | {f'blocks.{i}.{name}': row for i in range(depth) for name, row in BLOCK.items()} | more
    size = dict(c=channels)
    size |= {f'{n}c': n * channels for n in (3, 4)}
    return {name: tuple(size.get(word) or int(word) for word in row.split()) for name, row in rows.items()}


@pytest.mark.parametrize(
    ('arch', 'channels', 'depth', 'millions'),
    [('tiny', 192, 12, 5.5), ('small', 384, 12, 21.7), ('base', 768, 12, 85.8), ('large', 1024, 24, 303.3)],
)
def test_names_and_shapes_are_timms(arch, channels, depth, millions):
    with torch.device('meta'):
        backbone = SBPViT(arch, out_type='cls_token', sbp_cfg=dict())
    found = {name: tuple(p.shape) for name, p in backbone.state_dict().items()}
    assert found == shapes(channels, depth)
    assert sum(p.numel() for p in backbone.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)
    assert backbone.sbp.blocks == (depth * 2 // 3,)  # the paper's 8 of 12
    assert backbone.keep_ratios().keys() == {(0, i) for i in range(depth // 3, depth)}
    assert not list(backbone.buffers())


def test_registers_and_layer_scale_have_dinov2s_names():
    with torch.device('meta'):
        backbone = SBPViT('tiny', register_tokens=4, layer_scale_init_value=1e-5, out_indices=(2,))
    more = {f'blocks.{i}.ls{j}.gamma': 'c' for i in range(12) for j in (1, 2)}
    found = {name: tuple(p.shape) for name, p in backbone.state_dict().items()}
    assert found == shapes(192, 12, reg_token='1 4 c', **more)


OTHER = dict(
    timm=lambda name: name,
    mae=lambda name: 'model.' + name,
    mmpretrain=lambda name: (
        {'patch_embed.proj': 'patch_embed.projection', 'norm': 'ln1'}.get(
            name.rpartition('.')[0], name.rpartition('.')[0]
        )
        .replace('blocks.', 'layers.')
        .replace('.norm', '.ln')
        .replace('mlp.fc1', 'ffn.layers.0.0')
        .replace('mlp.fc2', 'ffn.layers.1')
        + '.'
        + name.rpartition('.')[2]
        if '.' in name
        else name
    ),
)


@pytest.mark.parametrize('names', OTHER)
def test_weights_of_other_sources(names):
    options = dict(out_type='cls_token', layer_scale_init_value=0.0)
    source, other, x = small(seed=0, **options), small(seed=1, **options), image(1)
    state = {OTHER[names](name): value.clone() for name, value in source.state_dict().items()}
    assert relative_error(other(x)[0], source(x)[0]) > 0.1
    other.load_state_dict(state)
    assert relative_error(other(x)[0], source(x)[0]) == 0


def test_position_embeddings_of_other_sizes():
    source, other = small(img_size=64), small(img_size=96, seed=1)
    other.load_state_dict(source.state_dict())
    assert torch.equal(other.pos_embed[:, 0], source.pos_embed[:, 0])
    x = image(1, 96, 96)
    for got, want in zip(other(x), source(x), strict=True):  # interpolated once, when loaded or when used
        assert relative_error(got, want) < 1e-12
    state = source.state_dict()
    state['pos_embed'] = state['pos_embed'][:, 1:]  # timm's models with registers: no position of the class token
    other.load_state_dict(state)
    assert not other.pos_embed[:, 0].any() and other.pos_embed.shape[1] == 37
    state['pos_embed'] = state['pos_embed'][:, :-1]
    with pytest.raises(RuntimeError, match='size mismatch for pos_embed'):
        other.load_state_dict(state)


def test_scales():
    backbone = small(dict())
    outs = backbone(image(2, 70, 93))  # 5 x 6 patches
    assert [tuple(out.shape) for out in outs] == [(2, 3, 20, 24), (2, 6, 10, 12), (2, 12, 5, 6), (2, 12, 3, 3)]
    outs = small(dict(), out_indices=(1, 3))(image(1, 64, 64))
    assert [tuple(out.shape) for out in outs] == [(1, 6, 8, 8), (1, 12, 2, 2)]
    assert backbone.stage_sizes(70, 93) == [(5, 6)]


@pytest.mark.parametrize('out_type', ['cls_token', 'avg_featmap'])
def test_classification(out_type):
    assert [out.shape for out in small(dict(), out_type=out_type)(image(2))] == [(2, 12)]


def test_layer_depths():
    backbone = small(out_indices=(0, 2))
    depth = {name: backbone.get_layer_depth(f'backbone.{name}', 'backbone.') for name in backbone.state_dict()}
    assert {last for _, last in depth.values()} == {5}
    for name, (layer, _) in depth.items():
        block = int(name.split('.')[1]) if name.startswith('blocks.') else None
        embedding = name.startswith(('patch_embed', 'pos_embed', 'cls_token'))
        assert layer == (0 if embedding else 4 if block is None else block + 1)
    assert backbone.get_layer_depth('neck.weight', 'backbone.') == (4, 5)


def test_initialisation():
    backbone = SBPViT(ARCH, sbp_cfg=dict())
    backbone.init_weights()
    block = backbone.blocks[2]
    assert 0.015 < block.attn.qkv.weight.std() < 0.025 and not block.mlp.fc1.bias.any()
    assert (block.norm2.weight == 1).all() and 0.01 < backbone.pos_embed.std() < 0.03


def test_evaluation_draws_nothing():
    backbone, plain = small(dict(), drop_path_rate=0.5).eval(), small().eval()
    before = torch.get_rng_state()
    assert relative_error(backbone(image())[0], plain(image())[0]) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_are_drawn_anew_and_heads_for_each_block():
    backbone = small(dict(attention='head', blocks=[3], keep_ratio=0.34, sampler='random'))
    draws = [backbone.draw(image(2, 128, 128)) for _ in range(8)]
    assert all(len(heads) == 1 for drawn in draws for heads in drawn.heads.values())
    assert len({tuple(int(drawn.heads[0, i]) for i in range(3)) for drawn in draws}) > 3
    assert len({tuple(drawn.positions[0, 0].keep.tolist()) for drawn in draws}) == 8
    assert all(drawn.positions[0, 0] is drawn.positions[0, 2] for drawn in draws)
    again = backbone.draw(image(2, 128, 128), again=True)
    assert all(torch.equal(again.heads[key], draws[-1].heads[key]) for key in again.heads)


def test_record():
    family = FAMILIES['ViT']
    assert family_of(MODELS.build(dict(type='SBPViT', arch=ARCH))) is family
    parts = {name: part_of(f'backbone.{name}', family) for name, _ in small().named_parameters()}
    assert set(parts.values()) == {'stem', 'stage 1', 'output norms'}
    assert layer_of('blocks.7.attn.qkv') == Layer(0, 7, 'QKV') and layer_of('blocks.7.norm1') is None


@pytest.mark.parametrize('size', [(15, 64), (64, 8)], ids=str)
def test_image_too_small(size):
    with pytest.raises(ValueError, match=f'{size[0]} x {size[1]} pixels.*patch of 16.*resize or pad'):
        small()(image(1, *size))


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(arch='giant'), "arch='giant'.*'tiny'.*num_layers"),
        (dict(arch=dict(num_layers=2)), 'arch=.*embed_dims'),
        (dict(arch=dict(num_layers=2, embed_dims=10, num_heads=3)), 'num_heads=3 must divide embed_dims=10'),
        (dict(drop_rate=0.1), r'drop_rate=0\.1.*no dropout.*drop_path_rate'),
        (dict(attn_drop_rate=0.1), r'attn_drop_rate=0\.1.*no dropout'),
        (dict(out_type='raw'), "out_type='raw'.*'featmap'"),
        (dict(out_indices=(0, 4)), r'out_indices=\(0, 4\).*from 0 to 3'),
        (dict(out_indices=()), r'out_indices=\(\)'),
        (dict(frozen_blocks=4), 'frozen_blocks=4.*from 0 to 3'),
        (dict(frozen_blocks='1'), "frozen_blocks='1'.*whole number"),
        (dict(out_indices=2), 'out_indices=2 must be a list'),
        (dict(img_size=4), 'img_size=4 holds no patch of patch_size='),
        (dict(sbp_cfg=dict(attention='all')), "attention='all'.*'qkv'"),
        (dict(sbp_cfg=dict(blocks=[4])), r'blocks\[0\]=4'),
        (dict(sbp_cfg=dict(implementation='reference', dropped='pool')), "dropped='zero'.*'pool'.*use 'fused'"),
        (dict(sbp_cfg=dict(downsample=False)), 'downsample=False means nothing for this backbone; leave it out'),
    ],
    ids=str,
)
def test_bad_values(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small(**kwargs)


def test_a_convnext_has_no_attention():
    with pytest.raises(ValueError, match="attention='query' means nothing for this backbone"):
        MODELS.build(dict(type='SBPConvNeXt', sbp_cfg=dict(attention='query')))


def test_parameters_without_images_get_zero_gradients():
    """Stochastic depth that leaves out every image of a batch: distributed training asks for all gradients."""
    backbone = small(dict(skip_dropped_images=True), drop_path_rate=0.9, out_type='cls_token')
    for seed in range(20):
        torch.manual_seed(seed)
        backbone.zero_grad()
        backbone(image(1))[0].sum().backward()
        missing = [n for n, p in backbone.named_parameters() if p.grad is None and not n.startswith('scale')]
        assert not missing


def test_the_study_of_gradients_takes_outputs_that_are_made_of_each_other():
    """The four scales of a ViT are made of one map, which is the third of them."""
    vit = dict(type='SBPViT', arch=dict(num_layers=2, embed_dims=16, num_heads=2), img_size=64)
    config = Config(dict(model=dict(backbone=vit)))
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.backbone = MODELS.build(vit).double().train()
    weights = [torch.randn(1, c, s, s).double() for c, s in ((4, 16), (8, 8), (16, 4), (16, 2))]
    model.data_preprocessor = lambda batch, training: batch
    model.parse_losses = lambda loss: (loss, {})
    model.forward = lambda inputs, data_samples, mode: sum(
        (weight * out).sum() for weight, out in zip(weights, model.backbone(inputs), strict=True)
    )
    exact = gradients.exact_pass(model, dict(inputs=torch.randn(1, 3, 64, 64).double(), data_samples=[]), 0)
    for weight, grad in zip(weights, exact.output_gradients, strict=True):
        assert torch.equal(grad, weight)
    found = gradients.estimate(gradients.backbone_with(config, dict(keep_ratio=1.0), model.backbone), exact)
    for name, value in exact.gradients.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f'{name}: {text}')
