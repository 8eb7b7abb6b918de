"""Skipping arithmetic changes no count, and every count is of a whole step with all images."""

import copy
import functools

import pytest

from sbp_mmdet.plan import skip_arithmetic
from sbp_mmdet.plan.counts import count_variants
from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant

CONFIGS = dict(
    faster='faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    retina='retinanet/retinanet_r50_fpn_1x_coco.py',
    rtmdet='rtmdet/rtmdet_s_8xb32-300e_coco.py',
    detr='detr/detr_r50_8xb2-150e_coco.py',
    dino='dino/dino-4scale_r50_8xb2-12e_coco.py',
    maskformer='maskformer/maskformer_r50_ms-16xb1-75e_coco.py',
    convnext='convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py',
)
CASE = dict(batch=2, height=96, width=128, boxes=5)
PIECES = '+cp-heads+cp-neck'


@functools.cache
def load(name):
    return make_plain(load_config(f'mmdet::{CONFIGS[name]}'))


def small(name):
    """Return a config with few and narrow layers."""
    config = copy.deepcopy(load(name))
    if name == 'faster':
        config.model.roi_head.bbox_head.fc_out_channels = 64
        config.model.neck.in_channels = [64, 128, 256, 512]
    if name in ('retina', 'detr', 'dino', 'maskformer'):
        config.model.backbone.depth = 18
    if config.model.backbone.type == 'ResNet':
        config.model.backbone.base_channels = 16
    if name == 'retina':
        config.model.neck.in_channels = [16, 32, 64, 128]
        config.model.bbox_head.stacked_convs = 2
    if name == 'detr':
        config.model.neck.in_channels = [128]
    if name == 'dino':
        config.model.num_queries = 100  # of 255 places
        config.model.neck.in_channels = [32, 64, 128]
    if name in ('detr', 'dino'):
        for part in (config.model.encoder, config.model.decoder):
            part.layer_cfg.ffn_cfg.feedforward_channels = 256
        config.model.encoder.num_layers = config.model.decoder.num_layers = 2
    if name == 'maskformer':
        head = config.model.panoptic_head
        head.in_channels = [16, 32, 64, 128]
        head.pixel_decoder.encoder.num_layers = head.transformer_decoder.num_layers = 2
    if name == 'rtmdet':
        config.model.backbone.deepen_factor = 0.167
    if name == 'convnext':
        config.model.backbone.arch = dict(depths=[1, 1, 1, 1], channels=[16, 32, 64, 128])
        # bf16 is slow on many CPUs, so all convolutions are narrow
        heads = config.model.roi_head
        config.model.neck.update(in_channels=[16, 32, 64, 128], out_channels=32)
        config.model.rpn_head.update(in_channels=32, feat_channels=32)
        heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = 32
        heads.bbox_head.update(in_channels=32, fc_out_channels=64)
        heads.mask_head.update(in_channels=32, num_convs=1, conv_out_channels=16)
        config.model.train_cfg.rcnn.sampler.num = 32
    return config


@pytest.mark.parametrize(
    ('name', 'variant'),
    [
        *(('faster', v) for v in ('none', 'with_cp' + PIECES)),
        ('retina', 'exact+cp-neck'),
        *(('rtmdet', v) for v in ('exact' + PIECES, 'int8')),
        ('convnext', 'int8' + PIECES),  # others of its variants are in test_plan_detector.py
        ('detr', 'none+cp-transformer'),
        ('dino', 'none'),
        ('dino', 'exact'),
        ('maskformer', 'exact'),
    ],
)
@pytest.mark.usefixtures('without_replay')
def test_what_is_left_out_changes_nothing(name, variant, monkeypatch):
    monkeypatch.setattr(skip_arithmetic, '_LARGE', 2**12)  # images are small here
    config, rows = with_variant(small(name), variant), []
    for compute in (False, True):
        rows.append(measure_detector(config, **CASE, compute=compute))
    left_out, whole = rows
    # What a norm in evaluation mode keeps on CUDA, two numbers a channel, a CPU's does not.
    channels = dict(faster=6_640, retina=1_200, detr=1_200, dino=1_200, maskformer=1_200)
    norms = 8 * channels.get(name, 0) if 'exact' not in variant else 0
    rest = 12_000 if name in ('convnext', 'rtmdet') else 0  # boxes in fp32; positives by overlaps of predictions
    for key in ('parameters', 'optimizer', 'gradients'):
        assert left_out[key] == whole[key]
    assert abs(left_out['forward'] - whole['forward']) <= norms + rest
    for key in ('saved', 'peaks'):
        assert left_out[key].keys() == whole[key].keys()
        for part, nbytes in whole[key].items():
            assert abs(left_out[key][part] - nbytes) <= norms + rest, (key, part)


def test_where_nothing_fits_every_variant_is_counted():
    """All presets are counted, also 'sbp' with everything checkpointed, which is refused in an encoder."""
    config = small('dino')
    config.model.encoder.num_layers = config.model.decoder.num_layers = 1
    rows = count_variants(config, 1, CASE)
    presets = [row.variant.split('+')[0] for row in rows if '+amp' not in row.variant]
    assert presets == ['none', 'with_cp', 'exact', 'exact_min', 'int8', 'sbp']
    assert not any(row.fits for row in rows)
