"""Counts of whole training steps agree with sums worked out by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import CONFIGS
from mmcv.ops import nms, roi_align
from mmdet.models.task_modules.assigners import MaxIoUAssigner
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.structures import InstanceData
from torch import nn

from sbp_mmdet.plan import skip_arithmetic
from sbp_mmdet.plan.batch import at_the_first_step, build_batch
from sbp_mmdet.plan.cuda_rules import autocast, cuda_kernels
from sbp_mmdet.plan.detector import assignment_on_cpu, build_detector, measure_detector
from sbp_mmdet.plan.eight_bit import AdamW8bitStates
from sbp_mmdet.plan.memory import LiveBytes, SavedByPart
from sbp_mmdet.plan.variants import NotApplicable, find_presets, load_config, make_plain, with_variant

FLOAT = 4
STOCK = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
pytestmark = pytest.mark.usefixtures('without_replay')
THINNING = {'sbp', 'reference'}
SMALL = dict(batch=2, height=96, width=100, boxes=4)


@MODELS.register_module()
class TwoLayers(BaseModel):
    """Network of two layers on 10 rows: backbone 16 to 32, ReLU, head 32 to 8; its loss is the sum of squares."""

    def __init__(self, **unused):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.bbox_head = nn.Linear(32, 8)

    def forward(self, inputs, data_samples=None, mode='loss'):
        x = torch.ones(10, 16)
        return dict(loss=self.bbox_head(self.backbone(x)).square().sum())


MODEL = dict(type='TwoLayers', data_preprocessor=dict(type='BaseDataPreprocessor'))
ADAMW = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3))
TWO_LAYERS = Config(dict(model=MODEL, optim_wrapper=ADAMW))


@pytest.fixture(scope='module')
def atto():
    """Return the quick start's config with a tiny backbone and mixed precision."""
    config = load_config(str(CONFIGS / 'sbp_convnext/mask-rcnn_sbp-convnext-atto_fpn_quickstart_shapes.py'))
    config.model.backbone.arch = dict(depths=[1, 1, 2, 1], channels=[8, 16, 32, 64])
    config.model.neck.in_channels = [8, 16, 32, 64]
    config.optim_wrapper.type = 'AmpOptimWrapper'
    return make_plain(config)


@pytest.fixture(scope='module')
def unchanged(atto):
    """Return the counts of a step of ``atto`` without a preset."""
    return measure_detector(with_variant(atto, 'none'), **SMALL)


@pytest.fixture(scope='module')
def proposals(atto):
    """Return the part of ``atto`` that makes proposals, for tests of what its backbone stores."""
    config = copy.deepcopy(atto)
    config.model.type = 'RPN'
    config.model.data_preprocessor.pad_mask = False
    del config.model.roi_head
    return config


@pytest.fixture(scope='module')
def stock():
    """Return a config that is not ours, with narrow layers."""
    config = make_plain(load_config(STOCK))
    config.model.backbone.base_channels = 16
    config.model.neck.in_channels = [64, 128, 256, 512]
    config.model.roi_head.bbox_head.fc_out_channels = 64
    config.model.train_cfg.rcnn.sampler.num = 64
    return config


def test_live_bytes():
    old = torch.zeros(1000)
    with LiveBytes() as counter:
        counter.phase = 'first'
        a = old[:50] + 1  # 200 bytes
        b = a.view(5, 10) * 2  # 200 more
        del a
        counter.phase = 'second'
        c = torch.ones(75)  # 300
        with counter.paused():
            d = torch.ones(10**6)
    assert (counter.live, counter.peak, counter.peak_phase) == (500, 500, 'second')
    del b, c, d
    assert (counter.live, counter.peak) == (0, 500)


def test_saved_by_part_counts_for_whoever_saved_first():
    part = 'a'
    saved = SavedByPart(lambda: part)
    x = torch.ones(10, requires_grad=True)
    with saved.hooks():
        y = x.exp()  # saves its output
        part = 'b'
        z = y * torch.ones(10)  # saves the other factor
        w = z.sin() * y  # saves z, its own sine, and y, which 'a' has saved
    assert saved.count() == {'a': 40, 'b': 120}
    w.sum().backward()
    del w, z, y
    assert saved.count() == {}


def test_a_step_of_two_layers():
    row = measure_detector(TWO_LAYERS, batch=1, height=32, width=32, boxes=1)
    parameters = (16 * 32 + 32 + 32 * 8 + 8) * FLOAT
    assert (row['parameters'], row['gradients'], row['optimizer']) == (parameters, parameters, 2 * parameters)
    # x for the weight's gradient, the ReLU's output; the head's input is that, and square needs the head's output.
    assert row['saved'] == {'backbone': 10 * (16 + 32) * FLOAT, 'other': 10 * 8 * FLOAT}
    loss = 3 * FLOAT  # the sum, the mean of it that is logged, and their total
    assert row['forward'] == 3 * parameters + 10 * (16 + 32 + 8) * FLOAT + loss
    assert row['peak'] >= 4 * parameters and row['peak_phase'] in ('backward', 'optimizer step')


def test_what_detectors_ask_for_beside_images():
    (first, _) = build_batch(2, 96, 128, 4, 3, False, proposals=50)['data_samples']
    boxes = first.proposals.bboxes
    assert boxes.shape == (50, 4) and boxes.dtype == torch.float32
    near = (boxes[:25, None] - first.gt_instances.bboxes.tensor).abs().amax(-1).amin(1)
    assert (near < 0.06 * 128).all()
    told = MessageHub.get_current_instance().runtime_info
    told.update(iter=7)
    before = dict(told)
    with at_the_first_step():
        assert told['iter'] == 7 and told['epoch'] == before.get('epoch', 0)
    assert dict(told) == before
    told.pop('iter')
    with at_the_first_step():
        assert told['iter'] == 0
    assert 'iter' not in told


def state_bytes(kind):
    """Return the bytes of the states of parameters with 4095, 4096 and 5000 entries, each and shared."""
    weights = [nn.Parameter(torch.zeros(n)) for n in (4095, 4096, 5000)]
    optimizer = kind(weights, lr=1e-3, weight_decay=0.1)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    optimizer.step()
    states = [{k: v for k, v in optimizer.state[w].items() if isinstance(v, torch.Tensor)} for w in weights]
    own = [sum(v.nbytes for k, v in state.items() if not k.startswith('qmap')) for state in states]
    shared = {v.data_ptr(): v.nbytes for state in states for k, v in state.items() if k.startswith('qmap')}
    return own, sum(shared.values())


EIGHT_BIT = [2 * 4095 * FLOAT, 2 * (4096 + 16 * FLOAT), 2 * (5000 + 20 * FLOAT)], 2 * 256 * FLOAT


def test_eight_bit_states():
    assert state_bytes(AdamW8bitStates) == EIGHT_BIT


def test_bitsandbytes_makes_these_states():
    bitsandbytes = pytest.importorskip('bitsandbytes')
    assert state_bytes(bitsandbytes.optim.AdamW8bit) == EIGHT_BIT


def test_static_memory_is_that_of_the_parameters(atto, unchanged):
    parameters = list(MODELS.build(dict(atto.model, data_preprocessor=None)).parameters())
    numbers, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    row = unchanged
    assert 0 <= row['parameters'] - numbers * FLOAT < 1000  # and the mean and deviation of the pixels
    assert (row['gradients'], row['optimizer']) == (trained * FLOAT, 2 * trained * FLOAT)
    eight = measure_detector(with_variant(atto, 'none+adamw8bit'), **SMALL)
    assert trained * 2 < eight['optimizer'] < trained * 3
    assert (eight['saved'], eight['gradients']) == (row['saved'], row['gradients'])


def test_parts_add_up(unchanged):
    row = unchanged
    assert set(row['saved']) - {'RoI', 'other'} == {
        *('stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4', 'output norms'),
        *('neck', 'RPN', 'box heads', 'mask heads'),
    }
    assert row['parameters'] + row['optimizer'] + sum(row['saved'].values()) <= row['forward'] <= row['peak']
    assert row['peak'] == max(row['peaks'].values()) == row['peaks'][row['peak_phase']]


def test_the_preprocessor_pads_batches_itself(proposals):
    """The preprocessor's padding to its divisor is counted, although no transform of the pipeline pads."""
    config = with_variant(proposals, 'none')
    small, large = (measure_detector(config, **SMALL | size)['saved'] for size in ({}, dict(height=128, width=128)))
    config = copy.deepcopy(config)
    config.model.data_preprocessor.pad_size_divisor = 64
    padded = measure_detector(config, **SMALL)['saved']
    assert padded['stage 1'] == large['stage 1'] and padded['neck'] == large['neck'] != small['neck']


@pytest.mark.parametrize('variant', ['none', 'with_cp', 'sbp', 'exact+cp-neck', 'int8+cp-heads+cp-rpn+cp-neck'])
def test_without_arithmetic_the_bytes_are_the_same(atto, variant, monkeypatch):
    """Norms of neck and mask head are group norms; only lean layers compute their gradients in reduced precision."""
    monkeypatch.setattr(skip_arithmetic, '_LARGE', 2**14)
    config = with_variant(atto, variant)
    case = dict(SMALL, height=160, width=200)  # large enough that something is skipped, and that the peak is a map's
    found = []
    for compute in (False, True):
        found.append(measure_detector(config, **case, compute=compute))
    skipped, computed = found
    rois = 20_000  # a kernel that refuses bf16 keeps its boxes in fp32
    for part, nbytes in computed['saved'].items():
        assert abs(skipped['saved'][part] - nbytes) <= rois, part
    assert skipped['peak_phase'] == computed['peak_phase']
    for key in ('parameters', 'optimizer', 'gradients'):
        assert skipped[key] == computed[key]
    assert skipped['forward'] == pytest.approx(computed['forward'], rel=2e-3)
    assert skipped['peaks'] == pytest.approx(computed['peaks'], rel=2e-3)


@pytest.mark.parametrize(
    ('kind', 'keys', 'size'),
    [
        ('SBPConvNeXt', dict(preset='sbp', sampler='random', keep_ratio=0.3), (128, 256)),  # map 1: 2**11 positions
        ('SBPConvNeXt', dict(preset='sampled'), (128, 256)),
        ('SwinTransformer', dict(preset='sbp'), (128, 256)),
        ('SwinTransformer', dict(preset='sbp', sampler='random'), (96, 100)),
        ('SwinTransformer', dict(preset='exact', skip_dropped_images=True), (96, 100)),
    ],
)
def test_what_is_drawn_is_computed(proposals, kind, keys, size, monkeypatch):
    """Masks, and the images that stochastic depth drops, determine how many rows are stored."""
    monkeypatch.setattr(skip_arithmetic, '_LARGE', 2**11)  # by default, the first large maps have 1024 x 2048 pixels
    config = copy.deepcopy(proposals)
    if kind == 'SwinTransformer':
        config.model.backbone = ConfigDict(
            type=kind, embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratio=2
        )
    config.model.backbone.drop_path_rate = 0.6 if 'skip_dropped_images' in keys else 0.0
    config.custom_hooks = [dict(type='LeanHook', **keys)]
    case = dict(batch=4 if config.model.backbone.drop_path_rate else 1, height=size[0], width=size[1], boxes=4)
    saved = []
    for compute in (False, True):
        saved.append(measure_detector(config, **case, compute=compute)['saved'])
    for part in ('stem', 'stage 1', 'stage 2', 'stage 3', 'stage 4'):
        assert saved[0].get(part) == saved[1].get(part), part


def test_images_that_are_left_out_are_not_stored(proposals):
    config = copy.deepcopy(proposals)
    config.model.backbone.drop_path_rate = 0.6
    kept, left = (with_variant(config, 'exact', skip_dropped_images=skip) for skip in (False, True))
    kept, left = (measure_detector(config, **dict(SMALL, batch=4))['saved'] for config in (kept, left))
    assert left['stage 4'] < kept['stage 4']


def test_more_boxes_need_more_and_presets_are_in_order(atto, proposals):
    roomy = copy.deepcopy(atto)
    roomy.model.train_cfg.rcnn.sampler.num = 128  # of which a quarter may be positive
    few, many = (measure_detector(roomy, **dict(SMALL, boxes=n)) for n in (1, 12))
    assert many['saved']['mask heads'] > 1.5 * few['saved']['mask heads']

    def blocks(variant):
        saved = measure_detector(with_variant(proposals, variant), **SMALL)['saved']
        return sum(nbytes for part, nbytes in saved.items() if part.startswith('stage'))

    none, reference, exact, int8, paper = map(blocks, ('none', 'reference', 'exact', 'int8', 'sbp'))
    assert none > reference > exact > int8 and none > reference > paper


def test_the_piece_targets_is_what_a_preset_does_anyway(atto):
    case = dict(batch=1, height=256, width=256, boxes=60)  # enough masks for the targets to be the peak
    none, pieces, exact, both = (
        measure_detector(with_variant(atto, variant), **case)
        for variant in ('none', 'none+targets', 'exact', 'exact+targets')
    )
    assert pieces['saved'] == none['saved'] and both['peaks'] == exact['peaks']
    assert pieces['peaks']['forward'] < none['peaks']['forward']


@pytest.mark.slow
def test_a_config_that_is_not_ours(stock):
    rows = {name: measure_detector(with_variant(stock, name), **SMALL) for name in ('none', 'with_cp', 'exact')}
    for name, share in (('with_cp', 0.6), ('exact', 0.8)):
        assert rows[name]['saved']['stage 3'] < share * rows['none']['saved']['stage 3']
    assert rows['none']['optimizer'] == rows['none']['gradients']  # SGD with momentum
    with pytest.raises(NotApplicable, match='adamw8bit: the optimizer is SGD'):
        with_variant(stock, 'none+adamw8bit')


def test_plain_is_the_detector_without_this_package():
    config = load_config('mmdet::convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py')
    config.custom_hooks = [dict(type='EMAHook'), dict(type='LeanHook', preset='sbp')]
    changed = make_plain(config)
    assert (changed.model.backbone.type, changed.model.backbone.arch) == ('SBPConvNeXt', 'tiny')
    assert changed.custom_hooks == [dict(type='EMAHook')] and len(config.custom_hooks) == 2
    config = load_config(STOCK)
    config.model.backbone.with_cp = True
    assert make_plain(config).model.backbone.with_cp is False and config.model.backbone.with_cp is True


def test_presets_that_apply_are_tried_on_the_model(atto, stock):
    """The model's classes, hooks and parameters are unchanged afterwards."""

    def look(model):
        modules = [(n, type(m), len(m._forward_pre_hooks), '_lean' in vars(m)) for n, m in model.named_modules()]
        return modules, [(n, p.shape, p.requires_grad) for n, p in model.named_parameters()]

    for config, thinned in ((atto, True), (stock, False)):
        model, _ = build_detector(config, 'cpu')
        before = look(model)
        reasons = find_presets(model)
        assert look(model) == before
        assert {name for name, reason in reasons.items() if reason} == (set() if thinned else {*THINNING, 'sampled'})
        assert thinned or 'drops positions' in reasons['sbp']


def test_bad_input_is_named(atto, tmp_path):
    for text, message in (
        (None, 'config.py does not exist'),
        ('a = 1', 'no model'),
        ('a = 1 / 0', 'ZeroDivisionError'),
        ("model = optim_wrapper = dict(a=1)\ncustom_imports = dict(imports='nowhere')", 'nowhere cannot be imported'),
    ):
        if text:
            (tmp_path / 'config.py').write_text(text)
        with pytest.raises(ValueError, match=message):
            load_config(str(tmp_path / 'config.py'))
    with pytest.raises(ValueError, match=r'did you mean mmdet::retinanet/retinanet_r50_fpn_1x_coco\.py\?'):
        load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coc.py')
    with pytest.raises(ValueError, match='package nowhere is not installed; install it'):
        load_config('nowhere::faster_rcnn/x.py')
    for variant, word in (('fast', 'fast'), ('none+magic', 'magic'), ('fused', 'fused')):
        with pytest.raises(ValueError, match=word):
            with_variant(atto, variant)
    for case, message in ((dict(batch=0), 'batch=0 must be 1'), (dict(boxes=-1), 'boxes=-1 must be 0')):
        with pytest.raises(ValueError, match=message):
            measure_detector(atto, **{**SMALL, **case})


def test_what_is_assigned_on_the_cpu_is_not_the_devices():
    gt = InstanceData(bboxes=torch.rand(20, 4).cumsum(1), labels=torch.zeros(20, dtype=torch.long))
    priors = InstanceData(priors=torch.rand(5000, 4).cumsum(1))
    peaks = {}
    for threshold in (-1, 19, 20):
        with LiveBytes() as counter, assignment_on_cpu(counter):
            result = MaxIoUAssigner(0.5, 0.5, gpu_assign_thr=threshold).assign(priors, gt)
        peaks[threshold] = counter.peak
    ious = 20 * 5000 * FLOAT
    assert peaks[-1] == peaks[20] > 2 * ious  # mmdet's threshold is to be exceeded
    assert peaks[19] == 5000 * (8 + FLOAT + 8)  # index of the box, overlap, label
    assert result.gt_inds.shape == (5000,)


def test_autocast_follows_cudas_rules():
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16)
    weight = torch.randn(8, 8, 1, 1)
    with autocast('cpu', torch.bfloat16):
        assert F.conv2d(x.float(), weight).dtype == torch.bfloat16
        for full in (
            F.layer_norm(x, (4,)),
            F.group_norm(x, 2),
            F.interpolate(x, scale_factor=2),
            F.cross_entropy(x[:, :, 0, 0], torch.tensor([1, 2])),
            F.binary_cross_entropy_with_logits(x, x.float().sigmoid()),
            x.exp(),
            x.sum(),
            x.softmax(1),
            F.softmax(x - x.max(1, keepdim=True)[0], dim=1),
            F.softmax(x, 1, dtype=None),
        ):
            assert full.dtype == torch.float32
        assert torch.softmax(x, 1, torch.float64).dtype == torch.float64
        assert F.relu(x).dtype == (x + x).dtype == x.sigmoid().dtype == torch.bfloat16
    with autocast('cpu', None):
        assert x.exp().dtype == torch.bfloat16


def test_kernels_that_refuse_reduced_precision_on_a_cpu():
    torch.manual_seed(0)
    features = torch.randn(1, 4, 16, 16).bfloat16()
    boxes = torch.tensor([[0.0, 1, 1, 9, 9], [0, 2, 2, 12, 8]])
    gradients = []
    for x, rois in ((features.float(), boxes), (features, boxes.bfloat16())):
        x = x.clone().requires_grad_()
        with LiveBytes() as counter, cuda_kernels(counter, compute=True):
            out = roi_align(x, rois, (7, 7))
            out.float().square().sum().backward()
            kept, _ = nms(boxes[:, 1:].to(x.dtype), torch.tensor([0.9, 0.8], dtype=x.dtype), 0.1)
        assert out.dtype == x.grad.dtype == kept.dtype == x.dtype and len(kept) == 1
        gradients.append(x.grad.float())
    torch.testing.assert_close(*gradients, rtol=0.05, atol=0.05)
    # In bf16, without what was made in fp32 on the way: output, square's input, two gradients, the boxes.
    assert counter.peak < 4 * (4 * 7 * 7 * 2 * FLOAT) + 4 * 16 * 16 * 2 + 1000
