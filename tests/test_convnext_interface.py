"""The backbone as mmpretrain's ConvNeXt: arguments, parameter names, checkpoints, layer-wise decay; and bad input."""

from pathlib import Path

import pytest
import torch
from mmdet.engine.optimizers import LearningRateDecayOptimizerConstructor
from mmdet.registry import MODELS
from oracles import SMALL, image, relative_error, small_backbone
from torch import nn

from sbp_mmdet import SBPConvNeXt

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
OPTIONS = [
    dict(),
    dict(gap_before_final_norm=False, out_indices=[0, 1, 2, 3]),
    dict(linear_pw_conv=False, layer_scale_init_value=0.0),
    dict(use_grn=True, layer_scale_init_value=0.0),
    dict(stem_patch_size=2, in_channels=1, drop_path_rate=0.1, out_indices=(1, -1)),
]


@pytest.mark.parametrize('arch', ARCHS)
def test_archs(arch):
    third, other, channels = ARCHS[arch]
    with torch.device('meta'):
        backbone = SBPConvNeXt(arch, sbp_cfg=dict())
    assert [len(stage) for stage in backbone.stages] == [other, other, third, other]
    assert [norm.weight.numel() for norm in backbone.modules() if type(norm).__name__ == 'LayerNorm2d'][
        -1
    ] == 8 * channels
    assert [stage[0].gamma.numel() for stage in backbone.stages] == [channels * 2**i for i in range(4)]


def test_state_dict_is_mmpretrains():
    with torch.device('meta'):
        backbone = SBPConvNeXt('tiny', out_indices=[0, 1, 2, 3], sbp_cfg=dict())
    assert {name: tuple(t.shape) for name, t in backbone.state_dict().items()} == SHAPES


def test_layer_depths_are_mmpretrains():
    with torch.device('meta'):
        tiny, base = SBPConvNeXt('tiny'), SBPConvNeXt('base')
    for prefix in ('', 'backbone.'):
        for name, _, depth in ROWS:
            assert tiny.get_layer_depth(prefix + name, prefix) == (int(depth), 8), name
    assert tiny.get_layer_depth('bbox_head.stages.0.0.gamma', 'backbone.') == (7, 8)
    assert base.get_layer_depth('downsample_layers.3.1.weight') == (12, 14)
    assert base.get_layer_depth('stages.2.26.gamma') == (11, 14)
    assert base.get_layer_depth('norm3.weight') == (13, 14)


def live(**kwargs):
    return pytest.importorskip('mmpretrain.models.backbones').ConvNeXt(**kwargs)


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_checkpoints_of_mmpretrain_load_and_back(options):
    """Same outputs from the same checkpoint, in both directions, where mmpretrain is installed."""
    options = options | dict(out_indices=list(options.get('out_indices', [-1])))  # mmpretrain changes it in place
    theirs = live(arch=SMALL, **options).double()
    theirs.eval()  # returns None
    ours = SBPConvNeXt(SMALL, sbp_cfg=None if 'use_grn' in options else dict(), **options).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = image(2, 64, 70)[:, : options.get('in_channels', 3)]
    ours.load_state_dict(theirs.state_dict())
    for got, want in zip(ours(x), theirs(x), strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-12
    theirs.load_state_dict(ours.state_dict())
    for name in SHAPES:
        assert ours.get_layer_depth(name) == theirs.get_layer_depth(name)


def test_checkpoints_load_across_settings(tmp_path):
    """A checkpoint of a run with SBP loads in one without, and the other way round."""
    trained = small_backbone(dict(recompute=True))
    torch.save(trained.state_dict(), tmp_path / 'checkpoint.pth')
    plain = small_backbone(seed=1)
    x = image(1)
    assert relative_error(plain(x)[0], trained(x)[0]) > 0.1
    plain.load_state_dict(torch.load(tmp_path / 'checkpoint.pth'))
    assert relative_error(plain(x)[0], trained(x)[0]) < 1e-12
    assert not list(trained.buffers())


class Detector(nn.Module):
    """What the optimizer constructor sees: a backbone, and something behind it."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.bbox_head = backbone, nn.Linear(4, 2)


@pytest.mark.parametrize('frozen_stages', [0, 2])
def test_layer_wise_decay_is_that_of_convnext(frozen_stages):
    """mmdet's constructor goes by the name of the class and those of the parameters."""
    with torch.device('meta'):
        sbp = SBPConvNeXt('tiny', out_indices=[0, 1, 2, 3], sbp_cfg=dict(), frozen_stages=frozen_stages)
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


def test_registered():
    backbone = MODELS.build(dict(type='SBPConvNeXt', arch=SMALL, sbp_cfg=dict(keep_ratio=0.25)))
    assert isinstance(backbone, SBPConvNeXt)


@pytest.mark.parametrize(
    ('out_indices', 'stages'), [(-1, [3]), (0, [0]), ([0, 2], [0, 2]), ((-3, -1), [1, 3]), ([0, 1, 2, 3], [0, 1, 2, 3])]
)
def test_out_indices(out_indices, stages):
    before = list(out_indices) if isinstance(out_indices, list) else None
    backbone = small_backbone(dict(), out_indices=out_indices)
    assert before is None or out_indices == before  # a config's list stays what it is
    outs = backbone(image(2, 64, 96))
    assert isinstance(outs, tuple)
    assert [out.shape for out in outs] == [(2, SMALL['channels'][i], 16 // 2**i, 24 // 2**i) for i in stages]
    assert {name for name in backbone.state_dict() if name.startswith('norm')} == {
        f'norm{i}.{part}' for i in stages for part in ('weight', 'bias')
    }


@pytest.mark.parametrize('sbp_cfg', [None, dict(), dict(implementation='reference')], ids=str)
def test_classification(sbp_cfg):
    """gap_before_final_norm: the average over all positions, then the norm."""
    backbone = small_backbone(sbp_cfg, gap_before_final_norm=True, out_indices=-1)
    inner = {}
    backbone.stages[3].register_forward_hook(lambda _, args, out: inner.update(out=out))
    backbone.stages[3][-1].register_forward_hook(lambda _, args, out: inner.update(out=out))
    (out,) = backbone(image(2))
    mean = inner['out'].mean((2, 3))
    norm = nn.functional.layer_norm(mean, (20,), backbone.norm3.weight, backbone.norm3.bias, 1e-6)
    assert out.shape == (2, 20) and relative_error(out, norm) < 1e-12


@pytest.mark.parametrize('frozen_stages', [0, 1, 4])
def test_frozen_stages(frozen_stages):
    backbone = small_backbone(dict(), frozen_stages=frozen_stages, drop_path_rate=0.5)
    assert backbone.train() is backbone
    for i in range(4):
        for module in (backbone.downsample_layers[i], backbone.stages[i]):
            assert all(part.training == (i >= frozen_stages) for part in module.modules())
            assert all(p.requires_grad == (i >= frozen_stages) for p in module.parameters())
    assert backbone.norm0.weight.requires_grad
    assert not any(module.training for module in backbone.eval().modules())


def test_initialisation():
    backbone = SBPConvNeXt(SMALL, sbp_cfg=dict())
    backbone.init_weights()
    block = backbone.stages[2][0]
    assert 0.015 < block.pointwise_conv1.weight.std() < 0.025
    assert not block.pointwise_conv1.bias.any()
    assert (block.norm.weight == 1).all() and (block.gamma == 1e-6).all()


def test_grn():
    """Works without SBP, cannot with it, whatever the implementation; tests/test_ops_grn.py has the exact form."""
    kwargs = dict(use_grn=True, layer_scale_init_value=0.0)
    backbone = small_backbone(None, **kwargs)
    block = backbone.stages[0][0]
    assert {'grn.gamma', 'grn.beta'} <= set(block.state_dict()) and 'gamma' not in block.state_dict()
    assert all(out.isfinite().all() for out in backbone(image(1)))
    for implementation in ('fused', 'reference'):
        with pytest.raises(ValueError, match='use_grn=True cannot be used with sbp_cfg that drops positions'):
            small_backbone(dict(implementation=implementation), **kwargs)


@pytest.mark.parametrize('size', [(31, 64), (64, 31), (8, 8)], ids=str)
@pytest.mark.parametrize('sbp_cfg', [None, dict()], ids=str)
def test_image_too_small(sbp_cfg, size):
    with pytest.raises(ValueError, match=f'{size[0]} x {size[1]}.*total stride 32.*resize or pad'):
        small_backbone(sbp_cfg)(image(1, *size))


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(arch='giant'), "arch='giant'.*'tiny'.*depths and channels"),
        (dict(arch=dict(depths=[1, 1])), 'arch=.*"channels"'),
        (dict(arch=dict(depths=[1, 1], channels=[8])), 'one number per stage'),
        (dict(out_indices=4), 'out_indices=4.*from 0 to 3'),
        (dict(out_indices='3'), "out_indices='3'.*number of a stage"),
        (dict(out_indices=None), 'out_indices=None'),
        (dict(out_indices=[]), r'out_indices=\[\]'),
        (dict(out_indices=[0, '1']), 'there is no stage 1'),
        (dict(frozen_stages=1.5), 'frozen_stages=1.5.*whole number from 0 to 4'),
        (dict(out_indices=[0, -5]), r'out_indices=\[0, -5\].*from 0 to 3'),
        (dict(norm_cfg=dict(type='BN')), "'BN'.*'LN2d'"),
        (dict(sbp_cfg=dict(keep_ratio=0)), 'keep_ratio=0'),
        (dict(sbp_cfg=dict(blocks=(1, 2, 3, 0))), r'blocks\[2\]=3'),
        (dict(sbp_cfg=dict(), act_cfg=dict(type='ReLU')), "ReLU.*type='GELU'.*implementation='reference'"),
    ],
    ids=str,
)
def test_bad_values(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SBPConvNeXt(**dict(arch=SMALL) | kwargs)


def test_any_activation_with_the_reference():
    backbone = small_backbone(dict(implementation='reference'), act_cfg=dict(type='ReLU'))
    plain = small_backbone(None, act_cfg=dict(type='ReLU'))
    assert relative_error(backbone(image(1))[3], plain(image(1))[3]) < 1e-12
