"""``preset='exact_min'`` recomputes neck and heads, too, with the gradients of the plain model."""

import copy
import types

import pytest
import torch
from mmdet.models.layers.transformer import DeformableDetrTransformerEncoder
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from stand_ins import define_in_module
from torch import nn

from sbp_mmdet import apply_lean, remove_lean
from sbp_mmdet.adapters import LeanModule
from sbp_mmdet.models.vit import SBPViT
from sbp_mmdet.plan.memory import SavedByPart
from sbp_mmdet.plan.variants import load_config, name_full_checkpointing
from sbp_mmdet.verify.checks import verify_modules

CHANNELS, NUMBER = [8, 16, 32], 3
NECKS = {
    'FPN': dict(type='FPN', in_channels=CHANNELS, out_channels=8, num_outs=3),
    'PAFPN': dict(type='PAFPN', in_channels=CHANNELS, out_channels=8, num_outs=3, norm_cfg=dict(type='BN')),
    'CSPNeXtPAFPN': dict(type='CSPNeXtPAFPN', in_channels=CHANNELS, out_channels=8, num_csp_blocks=1),
}
ANCHORS = dict(type='AnchorGenerator', ratios=[1.0], octave_base_scale=4, scales_per_octave=1, strides=[8, 16, 32])
POINTS = dict(type='MlvlPointGenerator', offset=0, strides=[8, 16, 32])
HEADS = {
    'RPNHead': dict(num_convs=2, anchor_generator=dict(ANCHORS, scales=[8], octave_base_scale=None)),
    'ATSSHead': dict(num_classes=2, stacked_convs=2, norm_cfg=dict(type='GN', num_groups=4), anchor_generator=ANCHORS),
    'FCOSHead': dict(num_classes=2, stacked_convs=2, norm_cfg=dict(type='BN'), strides=[8, 16, 32]),
    'YOLOXHead': dict(num_classes=2, stacked_convs=2),
    'RTMDetSepBNHead': dict(num_classes=2, stacked_convs=1, anchor_generator=POINTS, with_objectness=False),
}


class _Detector(nn.Module):
    """Detector with a feature pyramid, a neck and a dense head, whose loss is the sum of squares of the outputs."""

    def __init__(self, neck, head):
        super().__init__()
        init_default_scope('mmdet')
        self.backbone = nn.ModuleList(nn.Conv2d(3, n, 3, 2**i, padding=1) for i, n in enumerate(CHANNELS))
        self.neck = MODELS.build(NECKS[neck])
        keys = {key: value for key, value in HEADS[head].items() if value is not None}
        self.bbox_head = MODELS.build(dict(type=head, in_channels=8, feat_channels=8, **keys))

    def forward(self, images):
        maps = self.neck(tuple(conv(images) for conv in self.backbone))
        return sum(out.square().sum() for outs in self.bbox_head(maps) if outs[0] is not None for out in outs)


def _detector(neck, head):
    torch.manual_seed(0)
    model = _Detector(neck, head).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def _step(model):
    """Return stored bytes, gradients and buffers after a step."""
    saved = SavedByPart(lambda: '')
    with saved.hooks():
        loss = model(torch.linspace(-1, 1, 2 * 3 * 32 * 48, dtype=torch.float64).view(2, 3, 32, 48))
    stored = sum(saved.count([*model.parameters(), *model.buffers()]).values())
    loss.backward()
    return stored, {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())


def _compare(actual, expected):
    for ours, own in zip(actual, expected, strict=True):
        assert ours.keys() == own.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: n + text)


CASES = [('FPN', head) for head in HEADS] + [(neck, 'ATSSHead') for neck in NECKS if neck != 'FPN']


@pytest.mark.parametrize(('neck', 'head'), CASES)
def test_gradients_are_plain_and_less_is_stored(neck, head):
    model = _detector(neck, head)
    plain, exact, least = (copy.deepcopy(model) for _ in range(3))
    apply_lean(exact, 'exact', modules=['neck', 'bbox_head'])
    report = apply_lean(least, 'exact_min', modules=['neck', 'bbox_head'])
    assert report.changed.keys() & {'neck', 'bbox_head'}
    (_, *expected), (stored, *_), (least_stored, *actual) = map(_step, (plain, exact, least))
    _compare(actual, expected)
    assert least_stored < stored
    remove_lean(least)
    assert [type(m) for m in least.modules()] == [type(m) for m in plain.modules()]


def test_the_first_step_counts_what_recomputed_parts_save():
    """Changed or not, what lies outside of neck and head saves the same."""
    outside, found = set(), []
    for preset in ('exact', 'exact_min'):
        model = _detector('FPN', 'RPNHead')
        plain_bytes = _step(copy.deepcopy(model))[0]
        changed = apply_lean(model, preset, modules=['neck', 'bbox_head'], verify=False).changed
        lean_bytes = _step(copy.deepcopy(model))[0]
        images = torch.ones(2, 3, 32, 48, dtype=torch.float64)
        names = [name for name in changed if isinstance(model.get_submodule(name), LeanModule)]
        found.append(verify_modules(model, names, lambda model, images=images: model(images)).stored)
        outside |= {plain_bytes - found[-1]['before'], lean_bytes - found[-1]['now']}
    assert len(outside) == 1
    assert found[1]['now'] < found[0]['now'] < found[0]['before']


def test_necks_of_several_parts_are_recomputed_part_by_part():
    init_default_scope('mmdet')
    torch.manual_seed(0)
    detector = _Detector('FPN', 'ATSSHead')
    necks = [dict(NECKS['FPN'], out_channels=16), dict(type='DyHead', in_channels=16, out_channels=16, num_blocks=2)]
    detector.neck, detector.bbox_head = MODELS.build(necks), nn.Identity()
    plain = detector.double()
    for p in plain.parameters():
        nn.init.normal_(p, std=0.3)
    least = copy.deepcopy(plain)
    changed = apply_lean(least, 'exact_min').changed
    assert {'neck.1.dyhead_blocks.0', 'neck.1.dyhead_blocks.1'} < changed.keys() and 'neck' not in changed
    (stored, *expected), (least_stored, *actual) = _step(plain), _step(least)
    _compare(actual, expected)
    assert least_stored < 0.3 * stored


@pytest.mark.parametrize(('neck', 'head'), CASES)
def test_removal_leaves_no_attribute_behind(neck, head):
    model = _detector(neck, head)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    apply_lean(model, 'exact_min', modules=['neck', 'bbox_head'])
    _step(model)
    assert any(set(vars(module)) - before[name] for name, module in model.named_modules())
    remove_lean(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize('kind', ['CSPNeXt', 'CSPDarknet'])
def test_the_stem_of_a_csp_network_is_recomputed(kind):
    """No map of the stem is stored, and its batch norms count a step once."""
    model = _detector('FPN', 'ATSSHead')
    torch.manual_seed(1)
    model.backbone = MODELS.build(dict(type=kind, deepen_factor=0.167, widen_factor=0.125, out_indices=(2, 3, 4)))
    model.neck = MODELS.build(dict(NECKS['FPN'], in_channels=[32, 64, 128]))
    model.forward = types.MethodType(_run_from_the_backbone, model)
    plain, least = model.double(), copy.deepcopy(model)
    least.forward = types.MethodType(_run_from_the_backbone, least)
    assert 'backbone.stem' in apply_lean(least, 'exact_min').changed
    _compare(_step(least)[1:], _step(plain)[1:])
    saved, x = SavedByPart(), torch.randn(2, 3, 32, 48).double()
    with saved.hooks():
        out = least.backbone.stem(x)
    assert out.requires_grad
    assert sum(saved.count([x, *least.parameters(), *least.buffers()]).values()) == 0


GC = dict(cfg=dict(type='ContextBlock', ratio=1 / 4), stages=(True, True, True, True), position='after_conv3')
R50 = dict(type='ResNet', depth=50, base_channels=8, frozen_stages=-1, norm_eval=False)
UNCHAINED = {
    'context block': dict(R50, plugins=[GC]),
    'adaptive weight standardisation': dict(R50, conv_cfg=dict(type='ConvAWS'), norm_cfg=dict(type='GN', num_groups=4)),
    'Res2Net, context block': dict(
        type='Res2Net', depth=50, scales=2, base_width=4, base_channels=8, frozen_stages=-1, plugins=[GC]
    ),
}


@pytest.mark.parametrize('name', UNCHAINED)
def test_blocks_that_are_no_part_of_a_chain_are_recomputed(name):
    model = _detector('FPN', 'ATSSHead')
    torch.manual_seed(1)
    model.backbone = MODELS.build(dict(UNCHAINED[name], out_indices=(1, 2, 3)))
    with torch.no_grad():
        widths = [out.shape[1] for out in model.backbone(torch.zeros(2, 3, 64, 64))]
    model.neck = MODELS.build(dict(NECKS['FPN'], in_channels=widths))
    plain = model.double().train()
    exact, least = copy.deepcopy(plain), copy.deepcopy(plain)
    for detector in (plain, exact, least):
        detector.forward = types.MethodType(_run_from_the_backbone, detector)
    apply_lean(exact, 'exact')
    changed = apply_lean(least, 'exact_min').changed
    assert changed['backbone.layer3.1'] == 'exact, recomputed in the backward pass'
    (_, *expected), (stored, *_), (least_stored, *actual) = map(_step, (plain, exact, least))
    _compare(actual, expected)
    assert least_stored < 0.7 * stored
    for detector in (plain, least):  # a hook that comes later runs once
        detector.backbone.layer3[1].conv1.register_forward_hook(lambda module, args, out: out * 0.5)
        detector.zero_grad()
    _compare(_step(least)[1:], _step(plain)[1:])


@pytest.mark.parametrize('name', UNCHAINED)
def test_int8_recomputes_blocks_with_code_of_their_own(name):
    """A plugin saves maps as floats. Layers of other blocks save them in eight bits, which is less than an input in
    floats."""
    model = nn.Module()
    model.backbone = MODELS.build(UNCHAINED[name])
    changed = apply_lean(model.double().train(), 'int8').changed
    recomputed = {name for name, meaning in changed.items() if 'recomputed' in meaning}
    blocks = {name for name, module in model.named_modules() if hasattr(module, 'with_plugins')}
    assert recomputed == (blocks if 'context block' in name else set())


def _run_from_the_backbone(model, images):
    maps = model.neck(model.backbone(images))
    return sum(out.square().sum() for outs in model.bbox_head(maps) if outs[0] is not None for out in outs)


def test_a_hook_runs_once_whenever_it_comes():
    model = _detector('PAFPN', 'ATSSHead')
    plain = copy.deepcopy(model)
    apply_lean(model, 'exact_min')
    _step(model), _step(plain)
    calls = []
    for place in ('neck.lateral_convs.0', 'bbox_head.cls_convs.0'):
        model.get_submodule(place).register_forward_hook(lambda module, inputs, output: calls.append(module))
    model.zero_grad(), plain.zero_grad()
    _compare(_step(model)[1:], _step(plain)[1:])
    assert len(calls) == 1 + NUMBER  # the lateral convolution once, the tower once for each level


def test_a_head_of_ones_own_is_left_alone():
    model = _detector('FPN', 'FCOSHead')

    class Head(type(model.bbox_head)):
        def forward_single(self, x, scale, stride):
            return super().forward_single(2 * x, scale, stride)

    define_in_module('my_project', Head)
    model.bbox_head.__class__ = Head
    plain = copy.deepcopy(model)
    assert 'bbox_head' not in apply_lean(model, 'exact_min').changed
    _compare(_step(model)[1:], _step(plain)[1:])


def _swin():
    kwargs = dict(depths=(1, 2, 1, 1), num_heads=(1, 1, 2, 2), window_size=4, pretrain_img_size=32)
    model = MODELS.build(dict(type='SwinTransformer', embed_dims=8, drop_path_rate=0.0, **kwargs))
    return model, dict(x=torch.randn(4, 3, 32, 48).double())


def _vit():
    arch = dict(num_layers=2, embed_dims=16, num_heads=2, feedforward_channels=32)
    model = SBPViT(arch, img_size=32, patch_size=8, layer_scale_init_value=0.5)
    return model, dict(x=torch.randn(2, 3, 32, 32).double())


def _deformable():
    attention = dict(embed_dims=16, num_heads=2, num_levels=2, dropout=0.3, batch_first=True)
    layers = dict(self_attn_cfg=attention, ffn_cfg=dict(embed_dims=16, feedforward_channels=32, ffn_drop=0.3))
    maps = dict(spatial_shapes=torch.tensor([[4, 4], [2, 2]]), level_start_index=torch.tensor([0, 16]))
    query, pos = torch.randn(2, 2, 20, 16).double()
    inputs = dict(query=query, query_pos=pos, key_padding_mask=None, valid_ratios=torch.ones(2, 2, 2).double(), **maps)
    return DeformableDetrTransformerEncoder(2, layers), inputs


TRANSFORMERS = {
    'Swin': _swin,
    'ViT': _vit,
    'Deformable DETR, encoder': _deformable,
}


class _WithLoss(nn.Module):
    """Module around a part, which returns the sum of squares of the part's outputs as a loss."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, inputs):
        outs = self.part(**inputs)
        return sum(out.square().sum() for out in ([outs] if isinstance(outs, torch.Tensor) else outs))


def _run(model, inputs):
    saved = SavedByPart(lambda: '')
    torch.manual_seed(1)  # the same dropout
    with saved.hooks():
        loss = model({name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})
    stored = sum(saved.count([*model.parameters(), *model.buffers()]).values())
    loss.backward()
    return stored, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize('name', TRANSFORMERS)
def test_layers_of_transformers_store_their_input(name):
    init_default_scope('mmdet')
    torch.manual_seed(0)
    part, inputs = TRANSFORMERS[name]()
    model = _WithLoss(part).double().train()
    exact, least = copy.deepcopy(model), copy.deepcopy(model)
    apply_lean(exact, 'exact'), apply_lean(least, 'exact_min')
    (_, expected), (stored, _), (least_stored, actual) = (_run(m, inputs) for m in (model, exact, least))
    _compare([actual], [expected])
    assert least_stored < stored


@pytest.mark.parametrize('name', ['Swin', 'ViT'])
@pytest.mark.parametrize('trainable', ['ffn|mlp', 'norm2', 'attn', 'bias', '1'])
def test_layers_that_are_frozen_in_part(name, trainable):
    """The first parameter that needs a gradient may stand in the middle of a layer."""
    init_default_scope('mmdet')
    torch.manual_seed(0)
    part, inputs = TRANSFORMERS[name]()
    model = _WithLoss(part).double().train()
    for key, p in model.named_parameters():
        p.requires_grad_(any(word in key for word in trainable.split('|')))
    least = copy.deepcopy(model)
    apply_lean(least, 'exact_min')
    expected, actual = ({k: g for k, g in _run(m, inputs)[1].items() if g is not None} for m in (model, least))
    assert 0 < len(expected) < len([*model.parameters()])
    _compare([actual], [expected])


def test_layers_drop_the_same_images_again():
    init_default_scope('mmdet')
    torch.manual_seed(0)
    part, inputs = _swin()
    for block in part.modules():
        if hasattr(block, 'drop_prob'):
            block.drop_prob = 0.5
    model = _WithLoss(part).double().train()
    exact, least = copy.deepcopy(model), copy.deepcopy(model)
    apply_lean(exact, 'exact'), apply_lean(least, 'exact_min')
    for _ in range(2):
        _compare([_run(least, inputs)[1]], [_run(exact, inputs)[1]])


def test_only_what_modules_names():
    model = _detector('PAFPN', 'ATSSHead')
    changed = apply_lean(model, 'exact_min', modules=['bbox_head']).changed
    assert 'bbox_head' in changed and not any(name.startswith('neck') for name in changed)


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        ('retinanet/retinanet_r50_fpn_1x_coco.py', 'with_cp+targets+cp-heads+cp-neck'),
        ('mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', 'with_cp+targets+cp-heads+cp-rpn+cp-neck'),
        ('rpn/rpn_r50_fpn_1x_coco.py', 'with_cp+targets+cp-rpn+cp-neck'),
        ('detr/detr_r50_8xb2-150e_coco.py', 'with_cp+targets+cp-heads+cp-neck+cp-transformer'),
    ],
)
def test_what_checkpoints_of_everything_are(config, expected):
    assert name_full_checkpointing(load_config(f'mmdet::{config}')) == expected


def test_blocks_that_run_their_own_code_are_recomputed():
    """DetectoRS' bottlenecks run their own code, so they save their inputs as with ``with_cp``."""
    init_default_scope('mmdet')
    torch.manual_seed(0)
    keys = dict(depth=50, base_channels=4, stem_channels=8, num_stages=2, strides=(1, 2), dilations=(1, 1))
    plain = MODELS.build(dict(type='DetectoRS_ResNet', out_indices=(0, 1), frozen_stages=-1, norm_eval=False, **keys))
    plain.double().train()
    stored, expected = {}, None
    for preset in ('none', 'with_cp', 'exact_min'):
        model = copy.deepcopy(plain)
        report = apply_lean(model, preset) if preset != 'none' else None
        saved = SavedByPart(lambda: '')
        with saved.hooks():
            loss = sum(
                out.square().sum() for out in model(torch.linspace(-1, 1, 2 * 3 * 64 * 64).double().view(2, 3, 64, 64))
            )
        stored[preset] = sum(saved.count([*model.parameters(), *model.buffers()]).values())
        loss.backward()
        actual = {name: p.grad for name, p in model.named_parameters()}, dict(model.named_buffers())
        expected = expected or actual
        _compare(actual, expected)
    assert report.changed['layer1.1'] == 'exact, recomputed in the backward pass' and 'layer1.1' not in report.left
    assert stored['exact_min'] <= stored['with_cp'] < 0.6 * stored['none']


def test_a_neck_that_holds_a_backbone_is_recomputed_block_by_block():
    """DetectoRS' neck contains a second backbone. If it were recomputed as a whole, all of its maps would exist at
    once."""
    detector = _Detector('FPN', 'ATSSHead')
    backbone = dict(depth=50, base_channels=4, stem_channels=8, frozen_stages=-1, rfp_inplanes=8)
    neck = dict(in_channels=[16, 32, 64, 128], out_channels=8, num_outs=5, rfp_steps=2, aspp_out_channels=2)
    detector.neck = MODELS.build(dict(type='RFP', rfp_backbone=dict(type='DetectoRS_ResNet', **backbone), **neck))
    changed = apply_lean(detector, 'exact_min').changed
    assert 'neck' not in changed and changed['neck.rfp_modules.0.layer2.1'] == 'exact, recomputed in the backward pass'
