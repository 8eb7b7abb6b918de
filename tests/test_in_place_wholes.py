"""What is changed in place in models that are put together: students and teachers, wrapped and frozen backbones, heads
beside a backbone that is changed too."""

import pytest
import torch
from mmdet.models.backbones import SwinTransformer
from oracles import assert_near, image
from test_apply import SMALL, Mean, assert_alike, small_swin
from test_apply import gradients as of_backbone
from test_models_heads import HALF, MODULES, RANDOM, SIZE, Detector, gradients
from torch import nn

from sbp_mmdet import SBPSwinTransformer, apply_sbp
from sbp_mmdet.apply import Thin, remove_sbp
from sbp_mmdet.masks import mask_generator, stage_masks
from sbp_mmdet.models.heads import sbp_modules


def test_backbones_of_student_and_teacher():
    pair = nn.ModuleDict(dict(student=Mean(small_swin()), teacher=Mean(small_swin())))
    alone, x = small_swin(), image(2, 37, 52)
    expected = apply_sbp(alone)
    report = apply_sbp(pair)
    assert report.changed == {
        f'{who}.{name}': done for who in ('student', 'teacher') for name, done in expected.changed.items()
    }
    expected = of_backbone(alone, x)
    for backbone in (pair['student'].backbone, pair['teacher'].backbone):
        assert_alike(of_backbone(backbone, x), expected)
    remove_sbp(pair)
    assert not isinstance(pair['teacher'].backbone.stages[0].blocks[0], Thin)


def test_a_backbone_inside_of_another():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_swin()

        def forward(self, x):
            return self.inner(x=x)

    model, alone, x = Mean(Wrapped()), small_swin(), image(2, 37, 52)
    assert apply_sbp(model).changed == apply_sbp(alone).changed
    assert_alike(of_backbone(model.backbone.inner, x), of_backbone(alone, x))
    found, expected = of_backbone(model.backbone, x), of_backbone(alone, x)  # which names its images
    assert_alike((found[0], {n.removeprefix('inner.'): g for n, g in found[1].items()}), expected)


def test_frozen_stages_are_named():
    """mmdet freezes when training begins, which is after the hook has said what it did."""
    report = apply_sbp(SwinTransformer(**SMALL | dict(frozen_stages=3)))
    frozen = [name for name, reason in report.left.items() if reason == 'frozen']
    assert {'patch_embed', 'stages.0.blocks.0', 'stages.1.blocks.0', 'stages.2.blocks.1'} <= {*frozen}
    assert not any('gradients' in done for done in report.changed.values())
    report = apply_sbp(SwinTransformer(**SMALL | dict(frozen_stages=1)))
    assert 'patch_embed' in report.left and report.changed['stages.1.blocks.0'].startswith('gradients from 0.5')


@pytest.mark.parametrize('first', ['backbone', 'neck'])
def test_lateral_convolutions_follow_a_backbone_that_is_changed_in_place(first, iteration):
    iteration(3)

    def swin(**options):
        sizes = dict(embed_dims=3, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), window_size=3, mlp_ratio=2)
        return options.pop('kind', SwinTransformer)(**sizes, drop_path_rate=0, **options).double()

    kept = []
    for backbone in (swin(kind=SBPSwinTransformer, sbp_cfg=dict(HALF)), swin()):
        model = Detector()
        model.backbone = backbone
        model.train()
        if kept and first == 'backbone':
            apply_sbp(model, dict(HALF))
        sbp_modules(model, MODULES, **HALF)
        if kept and first == 'neck':
            apply_sbp(model, dict(HALF))
        backbone(image(1, *SIZE))
        draws = model.neck.lateral_convs[0].conv._sbp_draws
        kept.append([draws.of(torch.empty(1, 1, *size), as_backbone=True).keep for size in ((18, 26), (9, 13))])
    stage1 = stage_masks([(18, 26), (9, 13), (5, 7)], *HALF.values(), mask_generator(torch.initial_seed(), 0, 3))[0]
    assert torch.equal(kept[0][0], stage1.flatten().nonzero().flatten())
    for own, in_place in zip(*kept, strict=True):
        assert torch.equal(own, in_place)


def test_heads_of_student_and_teacher(iteration):
    """Each draws by the passes of its own backbone; masks that no pass has begun are an error."""
    iteration(3)
    pair = nn.ModuleDict(dict(student=Detector(dict(HALF)), teacher=Detector(dict(HALF))))
    alone, x = Detector(dict(HALF)), image(1, *SIZE)
    names = ['student.rpn_head', 'teacher.rpn_head']
    assert sbp_modules(pair, names, **RANDOM) == names
    sbp_modules(alone, ['rpn_head'], **RANDOM)
    expected = gradients(alone, x)
    for model in pair.values():
        assert_near(gradients(model, x), expected, 1e-12)
    other = Detector()
    sbp_modules(other, ['rpn_head'])
    with pytest.raises(ValueError, match='no pass of SBPConvNeXt has begun.*call the backbone itself'):
        other.neck(other.backbone.forward(x)) and other.rpn_head([torch.ones(1, 6, 4, 4).double()])
