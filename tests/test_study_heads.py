"""The study of gradients where a setting changes neck and heads, against SBP by its definition in plain torch."""

import copy
import functools
import json
import sys

import pytest
import torch
from helpers import CONFIGS, TOOLS, make_project
from mmdet.models.dense_heads import RPNHead
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.bbox_heads import Shared2FCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.structures.mask import BitmapMasks
from oracles import where_sbp

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.masks import mask_generator, sample_mask, stage_masks
from sbp_mmdet.study import gradients, measures, report, settings, subject

sys.path[:0] = [str(TOOLS / 'analysis_tools')]
import gradient_study  # noqa: E402

SBP = ['sbp-neck', 'sbp-rpn', 'sbp-masks']
EXACT = ['cp-heads', 'cp-neck', 'cp-rpn', 'targets']
SEED = 3


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp('project')
    make_project(folder)
    return folder


@pytest.fixture(scope='module')
def config(project):
    """A detector of a few layers with stochastic depth, and a data set of eight small images."""
    options = {
        'train_dataloader.dataset.data_root': f'{project}/data/shapes/',
        'model.backbone.drop_path_rate': 0.5,
    }
    return load_config(str(project / 'tiny.py'), options)


@pytest.fixture(scope='module')
def model(config):
    return subject.build_model(config)


@pytest.fixture(scope='module')
def batches(config):
    return list(subject.train_batches(config, 2))


@pytest.fixture(scope='module')
def exact(model, batches):
    return gradients.exact_pass(model, batches[0], SEED)


def by_definition(model, pieces, backbone, stages):
    """A copy whose neck and heads pass gradients of kept positions; ``stages`` are sizes that share one base mask in
    the neck."""
    detector = copy.deepcopy(model)
    detector.backbone = backbone

    def mask_of(size, stages):
        generator = mask_generator(SEED, 0, 0, 0)
        if size in stages:
            return stage_masks(stages, 0.5, 'grid', generator)[stages.index(size)]
        return sample_mask(*size, 0.5, 'grid', generator)

    def thin(f, x, scale=1, stages=()):
        mask = mask_of(tuple(x.shape[2:]), stages)
        if mask.all() or not mask.any():
            return f(x)
        return where_sbp(f, x, mask.repeat_interleave(scale, 0).repeat_interleave(scale, 1))

    rpn, masks = detector.rpn_head, detector.roi_head.mask_head

    def rpn_forward(x):
        def predict(x):
            return torch.cat([rpn.rpn_cls(x.relu()), rpn.rpn_reg(x.relu())], 1)

        return thin(predict, rpn.rpn_conv(x)).split([rpn.rpn_cls.out_channels, rpn.rpn_reg.out_channels], 1)

    def masks_forward(x):
        for conv in masks.convs:
            x = conv(x)
        return thin(lambda x: masks.conv_logits(masks.upsample(x).relu()), x, 2)

    if 'sbp-neck' in pieces:
        for lateral in detector.neck.lateral_convs:
            lateral.conv.forward = functools.partial(thin, lateral.conv.forward, stages=stages)
    if 'sbp-rpn' in pieces:
        rpn.forward_single = rpn_forward
    if 'sbp-masks' in pieces:
        masks.forward = masks_forward
    return detector


@pytest.mark.parametrize(
    'setting, changed',
    [
        (dict(pieces=['sbp-neck']), {'neck', 'backbone'}),
        (dict(pieces=['sbp-rpn']), {'RPN', 'neck', 'backbone'}),
        (dict(pieces=['sbp-masks']), {'mask heads', 'neck', 'backbone'}),
        (dict(keep_ratio=0.5, pieces=SBP), {'mask heads', 'RPN', 'neck', 'backbone'}),
    ],
    ids=lambda value: '+'.join(value['pieces']) if isinstance(value, dict) else '',
)
def test_the_detector_under_a_setting_is_sbp_by_its_definition(setting, changed, config, model, batches, in_fp64):
    model = copy.deepcopy(model).double()
    exact = gradients.exact_pass(model, batches[0], SEED)
    found = gradients.estimate_detector(config, setting, model, exact, batches[0])
    sbp_cfg = dict(keep_ratio=0.5) if 'keep_ratio' in setting else None
    backbone = gradients.backbone_with(config, sbp_cfg, model.backbone)  # tested for itself
    stages = backbone.stage_sizes(*exact.images.shape[2:])[:3] if sbp_cfg else []
    right = gradients.exact_pass(by_definition(model, setting['pieces'], backbone, stages), batches[0], SEED)
    assert found.keys() == right.gradients.keys()
    for name, value in right.gradients.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6 * value.abs().max().item() + 1e-12)
    errors = {part: row['relative_error'] for part, row in measures.compare(exact.gradients, found).items()}
    for part in ('backbone', *measures.HEADS):
        assert errors[part] > 1e-3 if part in changed else errors[part] < 1e-4, part


def test_exact_pieces_run_and_change_no_gradient(config, model, batches, exact, monkeypatch):
    runs = []
    for kind in (FPN, RPNHead, Shared2FCBBoxHead, FCNMaskHead):
        forward = kind.forward
        monkeypatch.setattr(
            kind, 'forward', lambda *args, forward=forward, kind=kind: runs.append(kind) or forward(*args)
        )
    crops, kinds = BitmapMasks.crop_and_resize, [type(module) for module in model.modules()]
    found = gradients.estimate_detector(config, dict(pieces=EXACT), model, exact, batches[0])
    assert all(runs.count(kind) == 2 for kind in (FPN, RPNHead, Shared2FCBBoxHead, FCNMaskHead))  # again, backwards
    assert found.keys() == exact.gradients.keys()
    assert all(torch.equal(found[name], value) for name, value in exact.gradients.items())
    # Nothing is left of it.
    assert BitmapMasks.crop_and_resize is crops and kinds == [type(module) for module in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def test_another_forward_pass_is_refused(config, model, batches, exact):
    for other, batch in ((exact, batches[1]), (exact._replace(seed=SEED + 1), batches[0])):
        with pytest.raises(ValueError, match='the loss is .* sampled RoIs are others'):
            gradients.estimate_detector(config, dict(pieces=['cp-neck']), model, other, batch)
        assert all(p.grad is None for p in model.parameters())


def test_study(config, model, batches):
    ticks = []
    cases = {
        'half': dict(keep_ratio=0.5),
        'masks': dict(pieces=['sbp-masks']),
        'both': dict(keep_ratio=0.5, pieces=['sbp-masks']),
    }
    found = gradients.study(config, cases, batches, SEED, lambda: ticks.append(1), model=model)
    assert len(ticks) == 2 * (1 + 3) and list(found) == list(cases)

    def errors(label, part):
        return found[label][part]['relative_error']['values']

    for part in ('box heads', 'RPN'):
        assert all(errors(label, part) == pytest.approx([0, 0], abs=1e-4) for label in cases)
    assert errors('half', 'mask heads') == [0, 0] != errors('masks', 'mask heads')
    assert errors('both', 'mask heads') == pytest.approx(errors('masks', 'mask heads'), rel=1e-3)
    # The gradient of the last stage comes from above; the stages below lose more to SBP of their own.
    assert errors('half', 'stage 4') == pytest.approx([0, 0], abs=1e-4)
    assert errors('both', 'stage 4') == pytest.approx(errors('masks', 'stage 4'), rel=1e-3)
    by_hand = []
    for i, batch in enumerate(batches):
        exact = gradients.exact_pass(model, batch, SEED + i)
        estimate = gradients.estimate_detector(config, cases['masks'], model, exact, batch)
        names = [name for name in exact.gradients if name.startswith('roi_head.mask_head.')]
        e, s = (torch.cat([d[name].flatten() for name in names]) for d in (exact.gradients, estimate))
        by_hand.append(((s - e).norm() / e.norm()).item())
    assert errors('masks', 'mask heads') == pytest.approx(by_hand, rel=1e-4) and by_hand[0] != by_hand[1]


def test_skipping_dropped_images_is_refused(config, model, batches):
    """It draws which ones, so that there is no exact pass with the same stochastic depth."""
    for pieces in ([], ['cp-neck']):
        setting = dict(keep_ratio=1.0, skip_dropped_images=True, pieces=pieces)
        with pytest.raises(ValueError, match='skip_dropped_images draws .*leave it out'):
            gradients.study(config, {'x': setting}, batches[:1], SEED, model=model)


def test_study_names_a_bad_piece_first(config):
    for piece in ('sbp-head', 'adamw8bit', 'skip'):
        with pytest.raises(ValueError, match=f"setting 'x': piece '{piece}' is none of neck and heads; .*'cp-rpn'"):
            gradients.study(config, {'x': dict(pieces=['targets', piece])}, batches=None)
    boxes = copy.deepcopy(config)
    boxes.model.roi_head.mask_head = None
    with pytest.raises(ValueError, match="setting 'x': sbp-masks: the model has none"):
        gradients.study(boxes, {'x': dict(pieces=['sbp-masks'])}, batches=None)


def test_the_exact_pass_is_exact_where_the_config_has_sbp_in_heads(config, model, batches, exact):
    config = copy.deepcopy(config)
    config.custom_hooks = [
        dict(type='SBPModulesHook', modules=['roi_head.mask_head']),
        dict(type='CheckpointModulesHook', modules=['neck']),
    ]
    own = subject.build_model(config)
    assert type(own.neck) is not FPN and type(own.roi_head.mask_head) is FCNMaskHead
    own.load_state_dict(model.state_dict())
    found = gradients.exact_pass(own, batches[0], SEED).gradients
    assert all(torch.equal(found[name], value) for name, value in exact.gradients.items())


def test_compare_heads_by_hand():
    e, s = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    names = {
        'mask heads': 'roi_head.mask_head.convs.0.conv.weight',
        'box heads': 'roi_head.bbox_head.1.fc_cls.bias',
        'RPN': 'rpn_head.rpn_conv.weight',
        'neck': 'neck.lateral_convs.0.conv.weight',
    }
    for part, name in names.items():
        exact = {**dict.fromkeys(names.values(), e), 'backbone.norm0.weight': e, 'bbox_head.conv.weight': e}
        found = measures.compare(exact, {**exact, name: s})
        assert set(found) == {'network', 'backbone', 'stage 1', 'norm0', 'mean layer', *names}
        expected = dict(cosine=0.6, relative_error=0.8, norm_ratio=0.6)
        assert found[part] == pytest.approx(expected), part
        assert all(found[other]['relative_error'] == 0 for other in {*names, 'backbone', 'mean layer'} - {part})
        assert found['network']['relative_error'] == pytest.approx((16 / 150) ** 0.5)


def test_ready_made_settings():
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-t_fpn_amp-ms-crop-3x_coco.py'))
    config.model.backbone.sbp_cfg = dict(keep_ratio=0.3, recompute=True)
    half = dict(keep_ratio=0.5, recompute=True)
    assert settings.group('heads', config) == {
        'sbp-neck': dict(pieces=['sbp-neck']),
        'sbp-rpn': dict(pieces=['sbp-rpn']),
        'sbp-masks': dict(pieces=['sbp-masks']),
        'sbp-neck+sbp-rpn+sbp-masks': dict(pieces=SBP),
        'backbone 0.5': half,
        'backbone 0.5+sbp-neck+sbp-rpn+sbp-masks': dict(half, pieces=SBP),
        'cp-heads+cp-neck+cp-rpn+targets': dict(pieces=EXACT),
    }
    config.model.roi_head.mask_head = None
    assert list(settings.group('heads', config))[:3] == ['sbp-neck', 'sbp-rpn', 'sbp-neck+sbp-rpn']
    config.model.update(neck=None, rpn_head=None)
    with pytest.raises(ValueError, match="group 'heads': .* name another"):
        settings.group('heads', config)


def test_settings_as_text():
    parse = settings.parse_setting
    assert parse('x: recompute=True pieces=cp-rpn,targets')[1] == dict(recompute=True, pieces=['cp-rpn', 'targets'])
    assert parse('y: pieces=sbp-neck') == ('y', dict(pieces=['sbp-neck']))
    for text in ('z: pieces=5', 'z: pieces=None', 'z: pieces=sbp-neck,5'):
        with pytest.raises(ValueError, match="setting 'z: pieces=.* must be names, such as pieces=sbp-neck,sbp-rpn"):
            parse(text)


def test_table_by_hand():
    def row(*means):
        return dict(zip(measures.MEASURES, (dict(mean=mean, std=0.25) for mean in means), strict=True))

    results = {'x': dict(network=row(0.5, 1, 2), neck=row(None, 0, 0.125)), 'y': dict(network=row(1, 0, 1))}
    expected = """\
| setting | measure | network | neck | backbone | mean layer |
|---|---|---|---|---|---|
| x | cosine similarity | 0.500 ± 0.250 | - | - | - |
|  | relative error | 1.000 ± 0.250 | 0.000 ± 0.250 | - | - |
|  | norm ratio | 2.000 ± 0.250 | 0.125 ± 0.250 | - | - |
| y | cosine similarity | 1.000 ± 0.250 | - | - | - |
|  | relative error | 0.000 ± 0.250 | - | - | - |
|  | norm ratio | 1.000 ± 0.250 | - | - | - |"""
    study = dict(settings={'x': dict(pieces=['sbp-neck']), 'y': {}}, results=results, kept={})
    assert report.study_table(study) == expected


def test_tool(project, tmp_path, monkeypatch, capsys):
    words = ['--settings', 'heads', '--setting', 'mine: pieces=cp-rpn', '--batches', '1', '--device', 'cpu']
    file = tmp_path / 'x.json'
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, 'argv', [gradient_study.__file__, 'tiny.py', *words, '--json', str(file)])
    gradient_study.main()
    found = json.loads(file.read_text())
    assert report.study_table(found) in capsys.readouterr().out
    assert list(found['results'])[:3] == SBP and found['settings']['mine'] == dict(pieces=['cp-rpn'])
    assert list(found['kept']) == ['backbone 0.5']
    for label in ('mine', 'cp-heads+cp-neck+cp-rpn+targets'):
        assert all(row['relative_error']['mean'] in (0, None) for row in found['results'][label].values())
    assert len(found['results']['sbp-masks']['mask heads']['cosine']['values']) == 1
