"""Heads of RoIs that run in chunks have the outputs and gradients of their own code in fp64."""

import copy

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.registry import init_default_scope
from torch import nn

from sbp_mmdet import apply_lean, chunked_heads
from sbp_mmdet.checkpointed_parts import CheckpointedInChunks, CheckpointedPart
from sbp_mmdet.ops.roi_chunks import ROIS
from sbp_mmdet.plan.memory import LiveBytes, SavedByPart
from sbp_mmdet.plan.parts import PartTracker
from sbp_mmdet.surgery import mix_in

GN = dict(type='GN', num_groups=4)
MASK = dict(type='FCNMaskHead', num_convs=2, in_channels=16, conv_out_channels=16, num_classes=3)
BOX = dict(type='Shared4Conv1FCBBoxHead', in_channels=16, conv_out_channels=16, fc_out_channels=24, num_classes=3)
BOX |= dict(bbox_coder=dict(type='DeltaXYWHBBoxCoder'), norm_cfg=GN)
HEADS = {
    'mask': MASK,
    'mask, group norm': dict(MASK, norm_cfg=GN),
    'box': BOX,
    'box, scores alone': dict(BOX, with_reg=False),
    'box, boxes alone': dict(BOX, with_cls=False),
    'shared': dict(type='ResLayer', depth=18, stage=1),
}
NUMBER = 150  # two chunks and a part of one


def build_head(name):
    init_default_scope('mmdet')
    torch.manual_seed(0)
    head = MODELS.build(HEADS[name])
    for p in head.parameters():
        nn.init.normal_(p, std=0.1)
    for module in head.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.2), module.running_var.uniform_(0.5, 2)
    head.double().train()  # mmdet's shared head returns nothing here
    return head


def random_maps(name, number=NUMBER):
    shape = dict(box=(16, 7, 7), shared=(64, 2, 2)).get(name.split(',')[0], (16, 6, 6))
    return torch.randn(number, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def as_list(outs):
    return [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]


def run_step(head, x, needs_x=True):
    x = x.clone().requires_grad_(needs_x)
    head.zero_grad()
    outs = as_list(head(x))
    sum(out.sin().sum() for out in outs).backward()
    gradients = {name: p.grad for name, p in head.named_parameters()}
    return [out.detach() for out in outs], gradients | dict(x=x.grad)


def sum_over_chunks(head, x):
    """Return what :func:`run_step` does, of the head's own code on chunks of RoIs."""
    steps = [run_step(head, part) for part in x.split(ROIS)]
    outs = [torch.cat(parts) for parts in zip(*(outs for outs, _ in steps), strict=True)]
    gradients = {name: sum(own[name] for _, own in steps) for name in steps[0][1] if name != 'x'}
    return outs, gradients | dict(x=torch.cat([own['x'] for _, own in steps]))


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-11)
    assert actual[1].keys() == expected[1].keys()
    for name, own in expected[1].items():
        assert (actual[1][name] is None) == (own is None), name
        if own is not None:
            assert (actual[1][name] - own).norm() <= 1e-11 * own.norm().clamp_min(1), name


def make_chunked_copy(head):
    lean = copy.deepcopy(head)
    mix_in(lean, CheckpointedInChunks)
    return lean


@pytest.mark.parametrize('name', HEADS)
@pytest.mark.parametrize('needs_x', [True, False])
def test_gradients_are_those_of_the_heads_own_code(name, needs_x):
    plain = build_head(name)
    assert chunked_heads.computes_rois_one_by_one(plain)
    lean = make_chunked_copy(plain)
    assert_same(run_step(lean, random_maps(name), needs_x), run_step(plain, random_maps(name), needs_x))
    for model in (plain, lean):  # frozen in part
        [*model.parameters()][0].requires_grad_(False)
    assert_same(run_step(lean, random_maps(name), needs_x), run_step(plain, random_maps(name), needs_x))
    assert_same(run_step(lean, random_maps(name, 5)), run_step(plain, random_maps(name, 5)))


@pytest.mark.parametrize('trained', ['fc_cls', 'fc_reg'])
def test_an_output_behind_frozen_layers_has_no_gradient(trained):
    """An output whose layers and input are frozen has no gradient, as in fine-tuning of the other output's layers."""
    steps, losses = [], []
    for plain in (True, False):
        head = build_head('box').requires_grad_(False)
        getattr(head, trained).requires_grad_(True)
        head = head if plain else make_chunked_copy(head)
        outs = dict(zip(('fc_cls', 'fc_reg'), head(random_maps('box')), strict=True))
        assert {name for name, out in outs.items() if out.requires_grad} == {trained}
        losses.append(sum(out.sin().sum() for out in outs.values()))
        losses[-1].backward()
        steps.append({name: p.grad for name, p in head.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*steps)


@pytest.mark.parametrize(
    ('preset', 'classes', 'chunked'),
    [('exact_min', 3, ['bbox', 'mask']), ('int8', 3, ['bbox']), ('int8', 1203, ['bbox', 'mask'])],
)
def test_what_presets_run_in_chunks(preset, classes, chunked):
    """With int8, a single mask head of few classes stores its maps in eight bits, since they are freed first."""
    init_default_scope('mmdet')
    detector = nn.Module()
    detector.backbone = nn.Conv2d(3, 16, 3)
    roi = dict(type='StandardRoIHead', bbox_head=BOX, mask_head=dict(MASK, num_classes=classes))
    roi |= {f'{kind}_roi_extractor': _extractor(size) for kind, size in (('bbox', 7), ('mask', 14))}
    detector.roi_head = MODELS.build(roi)
    apply_lean(detector, preset)
    heads = {kind: getattr(detector.roi_head, f'{kind}_head') for kind in ('bbox', 'mask')}
    assert [kind for kind, head in heads.items() if isinstance(head, CheckpointedInChunks)] == chunked


def test_heads_with_hooks_inside_run_whole_but_for_those_of_the_planner():
    detector = nn.Module()
    detector.mask_head, x = build_head('mask'), random_maps('mask')
    PartTracker(detector)
    assert chunked_heads.runs_in_chunks(detector.mask_head, x)
    detector.mask_head.convs[0].register_forward_hook(lambda *args: None)
    assert not chunked_heads.runs_in_chunks(detector.mask_head, x)


def _extractor(size):
    layer = dict(type='RoIAlign', output_size=size, sampling_ratio=0)
    return dict(type='SingleRoIExtractor', roi_layer=layer, out_channels=16, featmap_strides=[4])


@pytest.mark.parametrize(('name', 'missing'), [('box, scores alone', 1), ('box, boxes alone', 0)])
def test_missing_outputs_keep_their_place(name, missing):
    outs = make_chunked_copy(build_head(name))(random_maps(name))
    assert len(outs) == 2 and outs[missing] is None and len(outs[1 - missing]) == NUMBER


def test_a_batch_norm_that_trains_sees_all_rois():
    plain = build_head('shared')
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    lean = make_chunked_copy(plain)
    assert_same(run_step(lean, random_maps('shared')), run_step(plain, random_maps('shared')))
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, lean.get_buffer(name)), name


class _Other(nn.ReLU):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize('layer', [nn.Dropout(), _Other()], ids=['dropout', 'a subclass'])
def test_layers_that_are_unknown_or_see_all_rois_are_left_out(layer):
    head = build_head('mask')
    head.convs.append(layer)
    assert not chunked_heads.computes_rois_one_by_one(head)


def test_box_heads_without_convolutions_stay_whole():
    init_default_scope('mmdet')
    head = MODELS.build({**BOX, 'type': 'Shared2FCBBoxHead', 'norm_cfg': None, 'conv_out_channels': 16})
    assert not chunked_heads.computes_rois_one_by_one(head)


def test_autocast_gives_gradients_of_the_same_precision():
    """Gradients are sums of those that the own code computes for each chunk.

    They are not compared with those of all RoIs at once, which CPUs sum differently in bfloat16.
    """
    plain, name = build_head('mask').float(), 'mask'
    lean, x = make_chunked_copy(plain), random_maps(name).float()
    with torch.autocast('cpu', torch.bfloat16):
        (expected, own), (actual, ours) = sum_over_chunks(plain, x), run_step(lean, x)
    assert [out.dtype for out in actual] == [out.dtype for out in expected]
    for key, gradient in own.items():
        assert ours[key].dtype == gradient.dtype
        assert (ours[key] - gradient).norm() < 1e-4 * gradient.norm(), key
    with torch.autocast('cpu', torch.bfloat16):  # the cache of weights was not filled without gradients
        assert all(g is not None for g in run_step(lean, x)[1].values())


def test_stored_and_peak():
    plain, x = build_head('mask').float(), random_maps('mask', 1024).float().requires_grad_()
    checkpointed = copy.deepcopy(plain)
    mix_in(checkpointed, CheckpointedPart)
    peaks = {}
    for kind, model in dict(own=checkpointed, chunks=make_chunked_copy(plain)).items():
        saved = SavedByPart()
        with LiveBytes() as counter:
            with saved.hooks():
                out = model(x)
            out.sum().backward()
        peaks[kind] = counter.peak
    assert peaks['chunks'] < 0.6 * peaks['own']
