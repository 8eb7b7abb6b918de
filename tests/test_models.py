"""The backbones' arguments, parameter names, checkpoints, layer depths and outputs, and their refusals of bad input."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import CONVNEXT, FAMILIES, OWN, SWIN, VIT, build, build_on_meta
from mmdet.engine.optimizers import LearningRateDecayOptimizerConstructor
from mmdet.models.backbones import SwinTransformer
from mmdet.registry import MODELS
from mmengine.model import BaseModel
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from oracles import DEVICE, assert_near, compute_gradients, random_images, relative_error, run_convnext_oracle
from torch import nn

from sbp_mmdet import SBPConvNeXt, SBPSwinTransformer, SBPViT
from sbp_mmdet.models.convnext import build_norm
from sbp_mmdet.models.layers import GRN, LayerNorm2d

ROWS = [row.split() for row in Path(__file__).with_name('mmpretrain_state_dict.txt').read_text().splitlines()[2:]]
SHAPES = {name: tuple(map(int, shape.split('x'))) for name, shape, _ in ROWS}
# arch: blocks of the third stage, of each other, channels of the first
ARCHS = {
    'atto': (6, 2, 40),
    'femto': (6, 2, 48),
    'pico': (6, 2, 64),
    'nano': (8, 2, 80),
    'tiny': (9, 3, 96),
    'small': (27, 3, 96),
    'base': (27, 3, 128),
    'large': (27, 3, 192),
    'xlarge': (27, 3, 256),
    'huge': (27, 3, 352),
}
LEAN = dict(preset='sbp')


# ConvNeXt.


@pytest.mark.parametrize('options', [{}, dict(linear_pw_conv=False), dict(layer_scale_init_value=0.0)], ids=str)
def test_the_plain_convnext_is_convnext(options):
    model, x = build('SBPConvNeXt', **options), random_images(2, 70, 93)
    state = dict(model.named_parameters())
    expected = compute_gradients(model, x, lambda x: run_convnext_oracle(state, x, model.depths, {}))
    assert_near(compute_gradients(model, x), expected, 1e-10)


@pytest.mark.parametrize('arch', ARCHS)
def test_archs(arch):
    third, other, channels = ARCHS[arch]
    backbone = build_on_meta(SBPConvNeXt, arch, sbp_cfg=LEAN)
    assert [len(stage) for stage in backbone.stages] == [other, other, third, other]
    assert [stage[0].gamma.numel() for stage in backbone.stages] == [channels * 2**i for i in range(4)]
    assert backbone.norm3.weight.numel() == 8 * channels


def test_state_dict_is_mmpretrains():
    backbone = build_on_meta(SBPConvNeXt, 'tiny', out_indices=[0, 1, 2, 3], sbp_cfg=LEAN)
    assert {name: tuple(t.shape) for name, t in backbone.state_dict().items()} == SHAPES


def test_layer_depths_are_mmpretrains():
    tiny, base = build_on_meta(SBPConvNeXt, 'tiny'), build_on_meta(SBPConvNeXt, 'base')
    for prefix in ('', 'backbone.'):
        for name, _, depth in ROWS:
            assert tiny.get_layer_depth(prefix + name, prefix) == (int(depth), 8), name
    assert tiny.get_layer_depth('bbox_head.stages.0.0.gamma', 'backbone.') == (7, 8)
    assert base.get_layer_depth('downsample_layers.3.1.weight') == (12, 14)
    assert base.get_layer_depth('stages.2.26.gamma') == (11, 14)
    assert base.get_layer_depth('norm3.weight') == (13, 14)


class Detector(nn.Module):
    """Detector of a backbone and one further layer, for the optimizer constructor."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.bbox_head = backbone, nn.Linear(4, 2)


@pytest.mark.parametrize('frozen_stages', [0, 2])
def test_layer_wise_decay_is_that_of_convnext(frozen_stages):
    """mmdet's constructor recognises the name of the class and those of the parameters."""
    sbp = build_on_meta(SBPConvNeXt, 'tiny', out_indices=[0, 1, 2, 3], sbp_cfg=LEAN, frozen_stages=frozen_stages)
    twin = type('ConvNeXt', (nn.Module,), {})()
    for name, child in sbp.named_children():
        twin.add_module(name, child)

    def groups(backbone):
        constructor = LearningRateDecayOptimizerConstructor(
            dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05)),
            dict(decay_rate=0.5, decay_type='layer_wise', num_layers=6),
        )
        found = constructor(Detector(backbone)).optimizer.param_groups
        return {name: (group['lr'], group['weight_decay']) for group in found for name in group['param_names']}

    actual = groups(sbp)
    assert actual == groups(twin)
    for name, shape, depth in ROWS:
        if f'backbone.{name}' in actual:
            assert actual[f'backbone.{name}'] == (0.5 ** (7 - int(depth)), 0.05 if 'x' in shape else 0.0)
    assert len(actual) == sum(p.requires_grad for p in Detector(sbp).parameters())


@pytest.mark.parametrize(
    ('out_indices', 'stages'), [(-1, [3]), (0, [0]), ([0, 2], [0, 2]), ((-3, -1), [1, 3]), ([0, 1, 2, 3], [0, 1, 2, 3])]
)
def test_out_indices(out_indices, stages):
    before = list(out_indices) if isinstance(out_indices, list) else None
    backbone = build('SBPConvNeXt', LEAN, out_indices=out_indices)
    assert before is None or out_indices == before  # a config's list stays what it is
    outs = backbone(random_images(2, 64, 96))
    channels = CONVNEXT['arch']['channels']
    assert isinstance(outs, tuple)
    assert [out.shape for out in outs] == [(2, channels[i], 16 // 2**i, 24 // 2**i) for i in stages]
    norms = {name for name in backbone.state_dict() if name.startswith('norm')}
    assert norms == {f'norm{i}.{part}' for i in stages for part in ('weight', 'bias')}


@pytest.mark.parametrize('preset', [None, 'exact', 'sbp', 'reference'])
def test_classification_with_convnext(preset):
    """With gap_before_final_norm, the average over all positions comes before the norm."""
    backbone = build('SBPConvNeXt', preset and dict(preset=preset), gap_before_final_norm=True, out_indices=-1)
    inner = []
    backbone.stages[3].register_forward_hook(lambda module, args, out: inner.append(out))
    (out,) = backbone(random_images(2))
    norm = F.layer_norm(inner[0].mean((2, 3)), (20,), backbone.norm3.weight, backbone.norm3.bias, 1e-6)
    assert out.shape == (2, 20) and relative_error(out, norm) < 1e-12


@pytest.mark.parametrize('frozen_stages', [0, 1, 4])
def test_frozen_stages_of_convnext(frozen_stages):
    backbone = build('SBPConvNeXt', LEAN, frozen_stages=frozen_stages, drop_path_rate=0.5)
    assert backbone.train() is backbone
    for i in range(4):
        for module in (backbone.downsample_layers[i], backbone.stages[i]):
            assert all(part.training == (i >= frozen_stages) for part in module.modules())
            assert all(p.requires_grad == (i >= frozen_stages) for p in module.parameters())
    assert backbone.norm0.weight.requires_grad
    assert not any(module.training for module in backbone.eval().modules())


@pytest.mark.parametrize('preset', ['exact', 'int8'])
@pytest.mark.parametrize(
    'options',
    [
        dict(act_cfg=dict(type='GELU', approximate='tanh')),
        dict(norm_cfg=dict(type='LN2d', eps=0.1)),
        dict(norm_cfg=dict(type='LN', elementwise_affine=False)),
        dict(norm_cfg=dict(type='LN2d', requires_grad=False)),
        dict(linear_pw_conv=False),
        dict(layer_scale_init_value=0.0),
        dict(use_grn=True, layer_scale_init_value=0.0),
        dict(stem_patch_size=2),
    ],
    ids=str,
)
def test_forms_of_convnext(preset, options):
    lean, plain, x = (
        build('SBPConvNeXt', dict(preset=preset), **options),
        build('SBPConvNeXt', **options),
        random_images(2),
    )
    for a, b in zip(lean(x), plain(x), strict=True):
        assert relative_error(a, b) < 1e-12
    assert_near(compute_gradients(lean, x), compute_gradients(plain, x), 1e-10 if preset == 'exact' else 0.2)


def test_grn_is_its_formula():
    grn, x = GRN(6).double(), torch.randn(2, 4, 5, 6, dtype=torch.float64)
    nn.init.normal_(grn.gamma), nn.init.normal_(grn.beta)
    response = x.square().sum((1, 2), keepdim=True).sqrt()
    expected = grn.gamma * x * response / (response.mean(3, keepdim=True) + 1e-6) + grn.beta + x
    assert relative_error(grn(x), expected) < 1e-12


def test_build_norm():
    norm = build_norm(dict(type='LN2d', eps=1e-6), 8)
    assert isinstance(norm, LayerNorm2d) and norm.eps == 1e-6 and norm.weight.requires_grad
    assert not build_norm(dict(type='LN', requires_grad=False), 8).weight.requires_grad
    cfg = dict(type='LN2d')
    build_norm(cfg, 8)
    assert cfg == dict(type='LN2d')  # a config stays what it is


# Swin.


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(qkv_bias=False, qk_scale=0.5),
        dict(patch_norm=False),
        dict(out_indices=(1, 3)),
        dict(frozen_stages=0),
        dict(use_abs_pos_embed=True, pretrain_img_size=(48, 48)),
    ],
    ids=str,
)
@pytest.mark.parametrize('preset', [None, 'exact', 'reference'])
@pytest.mark.parametrize('size', [(48, 48), (37, 52), (20, 9)])  # whole windows, padded ones, less than a window
def test_swin_is_mmdets(options, preset, size):
    if 'use_abs_pos_embed' in options:
        size = (48, 48)
    keys = {} if preset is None else dict(blocks=[0] * 4, downsample=False) if preset == 'reference' else {}
    ours = build('SBPSwinTransformer', preset and dict(preset=preset, **keys), **options)
    stock, x = SwinTransformer(**SWIN | dict(drop_path_rate=0.0) | options), random_images(2, *size)
    stock.double().to(DEVICE).load_state_dict(ours.state_dict())
    stock.train()
    assert_near(compute_gradients(ours, x), compute_gradients(stock, x), 1e-10)
    assert list(stock.state_dict()) == list(ours.state_dict())


def test_swin_on_meta():
    backbone = build_on_meta(SBPSwinTransformer, sbp_cfg=LEAN)
    assert backbone.patch_embed.projection.weight.is_meta and len(backbone.keep_ratios()) == 2 + 2 + 6 + 2


# All.


@pytest.mark.parametrize('family', OWN)
def test_checkpoints_load_across_settings(family, tmp_path):
    """A checkpoint with SBP loads into a model without it, and vice versa."""
    trained, plain, x = build(family, LEAN), build(family, seed=1), random_images(1)
    torch.save(trained.state_dict(), tmp_path / 'checkpoint.pth')
    assert relative_error(plain(x)[0], trained(x)[0]) > 0.1
    plain.load_state_dict(torch.load(tmp_path / 'checkpoint.pth'))
    assert relative_error(plain(x)[0], trained(x)[0]) < 1e-12


@pytest.mark.parametrize(
    ('kind', 'options'), [('SBPConvNeXt', CONVNEXT), ('SBPSwinTransformer', SWIN), ('SBPViT', VIT)]
)
def test_registered(kind, options):
    backbone = MODELS.build(dict(type=kind, sbp_cfg=dict(preset='sbp', keep_ratio=0.25), **options))
    assert type(backbone).__name__ == kind and set(backbone.keep_ratios().values()) == {0.25}


def test_initialisation():
    block = SBPConvNeXt(CONVNEXT['arch'], sbp_cfg=LEAN)
    block.init_weights()
    block = block.stages[2][0]
    assert 0.015 < block.pointwise_conv1.weight.std() < 0.025 and not block.pointwise_conv1.bias.any()
    assert (block.norm.weight == 1).all() and (block.gamma == 1e-6).all()
    vit = SBPViT(VIT['arch'], sbp_cfg=LEAN)
    vit.init_weights()
    block = vit.blocks[2]
    assert 0.015 < block.attn.qkv.weight.std() < 0.025 and not block.mlp.fc1.bias.any()
    assert (block.norm2.weight == 1).all() and 0.01 < vit.pos_embed.std() < 0.03


@pytest.mark.parametrize('cfg', [None, LEAN], ids=str)
def test_images_that_are_too_small(cfg):
    for size in ((31, 64), (64, 31), (8, 8)):
        with pytest.raises(ValueError, match=f'{size[0]} x {size[1]}.*total stride 32.*resize or pad'):
            build('SBPConvNeXt', cfg)(random_images(1, *size))
    for size in ((15, 64), (64, 8)):
        with pytest.raises(ValueError, match=f'{size[0]} x {size[1]} pixels.*patch of 16.*resize or pad'):
            build('SBPViT', cfg)(random_images(1, *size))


@pytest.mark.parametrize(
    ('kind', 'options', 'message'),
    [
        (SBPConvNeXt, dict(arch='giant'), "arch='giant'.*'tiny'.*depths and channels"),
        (SBPConvNeXt, dict(arch=None), 'arch=None must have "depths"'),
        (SBPConvNeXt, dict(arch=dict(depths=[1, 1])), 'arch=.*"channels"'),
        (SBPConvNeXt, dict(arch=dict(depths=[1, 1], channels=[8])), 'one number per stage'),
        (SBPConvNeXt, dict(out_indices=4), 'out_indices=4.*from 0 to 3'),
        (SBPConvNeXt, dict(out_indices='3'), "out_indices='3'.*number of a stage"),
        (SBPConvNeXt, dict(out_indices=None), 'out_indices=None'),
        (SBPConvNeXt, dict(out_indices=[]), r'out_indices=\[\]'),
        (SBPConvNeXt, dict(out_indices=[0, '1']), 'there is no stage 1'),
        (SBPConvNeXt, dict(out_indices=[0, -5]), r'out_indices=\[0, -5\].*from 0 to 3'),
        (SBPConvNeXt, dict(frozen_stages=1.5), 'frozen_stages=1.5.*whole number from 0 to 4'),
        (SBPConvNeXt, dict(frozen_stages=9), 'frozen_stages=9 must be a whole number from 0 to 4'),
        (SBPConvNeXt, dict(norm_cfg=dict(type='BN')), "'BN'.*'LN2d'"),
        (SBPConvNeXt, dict(norm_cfg=dict(eps=1e-6)), "type=None is unsupported.*'LN2d'"),
        (SBPViT, dict(arch='giant'), "arch='giant'.*'tiny'.*num_layers"),
        (SBPViT, dict(arch=dict(num_layers=2)), 'arch=.*embed_dims'),
        (SBPViT, dict(arch=dict(num_layers=2, embed_dims=10, num_heads=3)), 'num_heads=3 must divide embed_dims=10'),
        (SBPViT, dict(drop_rate=0.1), r'drop_rate=0\.1.*no dropout.*drop_path_rate'),
        (SBPViT, dict(attn_drop_rate=0.1), r'attn_drop_rate=0\.1.*no dropout'),
        (SBPViT, dict(out_type='raw'), "out_type='raw'.*'featmap'"),
        (SBPViT, dict(out_indices=(0, 4)), r'out_indices=\(0, 4\).*from 0 to 3'),
        (SBPViT, dict(out_indices=()), r'out_indices=\(\)'),
        (SBPViT, dict(out_indices=2), 'out_indices=2 must be a list'),
        (SBPViT, dict(frozen_blocks=4), 'frozen_blocks=4.*from 0 to 3'),
        (SBPViT, dict(frozen_blocks='1'), "frozen_blocks='1'.*whole number"),
        (SBPViT, dict(img_size=4), 'img_size=4 holds no patch of patch_size='),
    ],
    ids=str,
)
def test_bad_values(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**(CONVNEXT if kind is SBPConvNeXt else VIT) | options)


class Classifier(BaseModel):
    """Classifier that trains like mmpretrain's ImageClassifier, without its augmentations."""

    def __init__(self, backbone, channels, classes):
        super().__init__()
        self.backbone, self.head = MODELS.build(backbone), nn.Linear(channels, classes)

    def forward(self, inputs, labels, mode='tensor'):
        scores = self.head(self.backbone(inputs)[-1])
        return dict(loss=F.cross_entropy(scores, labels)) if mode == 'loss' else scores


def render_squares(number=64, size=32):
    """Return images of squares in three colours on a noisy background."""
    generator = torch.Generator().manual_seed(0)
    images = 0.3 * torch.randn(number, 3, size, size, generator=generator)
    labels = torch.arange(number) % 3
    for picture, label in zip(images, labels, strict=True):
        picture[label, 8:24, 8:24] += 1.5
    return list(zip(images, labels, strict=True))


@pytest.mark.parametrize(
    ('backbone', 'preset'),
    [
        (dict(type='SBPViT', arch=dict(num_layers=3, embed_dims=24, num_heads=3), img_size=32, patch_size=8), 'sbp'),
        (dict(type='SBPConvNeXt', arch=dict(depths=[1, 1], channels=[16, 24]), layer_scale_init_value=1.0), 'int8'),
    ],
    ids=['vit', 'convnext'],
)
def test_a_classifier_learns_in_mmengines_runner(backbone, preset, tmp_path):
    init_default_scope('mmdet')
    more = dict(out_type='cls_token') if backbone['type'] == 'SBPViT' else {}
    model = Classifier(backbone | dict(sbp_cfg=dict(preset=preset), drop_path_rate=0.1, **more), 24, 3)
    model.init_weights()
    data = dict(type='DefaultSampler', shuffle=True), dict(type='default_collate')
    runner = Runner(
        model,
        str(tmp_path),
        train_dataloader=dict(batch_size=16, sampler=data[0], collate_fn=data[1], dataset=render_squares()),
        train_cfg=dict(by_epoch=True, max_epochs=10),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=3e-3)),
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=100)),
        experiment_name=f'{backbone["type"]}-{tmp_path.name}',
        log_level='ERROR',
        default_scope='mmdet',
    )
    runner.train()
    model.eval()
    device = next(model.parameters()).device  # of the runner
    inputs, labels = (torch.stack(part).to(device) for part in zip(*render_squares(), strict=True))
    with torch.no_grad():
        assert (model(inputs, labels).argmax(1) == labels).float().mean() > 0.8


@pytest.mark.parametrize('preset', ['none', 'exact', 'sbp'])
@pytest.mark.parametrize('family', FAMILIES)
def test_maps_of_one_image_are_contiguous(family, preset):
    """mmcv's RoIAlign silently reads any map as contiguous; the tokens of one image look contiguous."""
    model = build(family, dict(preset=preset))
    for _ in range(2):
        assert all(out.is_contiguous() for out in model(random_images(1, 64, 96)))
        model.eval()
