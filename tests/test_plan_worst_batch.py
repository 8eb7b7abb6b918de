"""The worst batch, against mmdet's own transforms: run many times on images of extreme shapes, none is larger."""

import itertools
import random

import numpy as np
import pytest
import torch
from mmcv.transforms import Compose
from mmdet.registry import MODELS
from mmdet.structures.bbox import HorizontalBoxes
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import init_default_scope

from sbp_mmdet.plan.variants import load_config
from sbp_mmdet.plan.worst_batch import usual_batch, worst_batch

# Tenths of the sizes that recipes have, for the transforms are really run.
SHAPES = [(48, 64), (43, 64), (30, 100), (12, 160), (64, 48), (64, 43), (100, 30), (160, 12), (64, 64), (140, 155)]
SCALES = [(side, 133) for side in range(48, 81, 4)]
CHOICE = dict(type='RandomChoiceResize', scales=SCALES, keep_ratio=True)
TURNING = dict(type='RandomCrop', crop_type='absolute_range', crop_size=(38, 60), allow_negative_crop=True)
LARGER = dict(type='RandomChoiceResize', scales=[(40, 420), (50, 420), (60, 420)], keep_ratio=True)
RESIZE = dict(type='Resize', scale=(133, 80), keep_ratio=True)


def crop(*size, kind='absolute'):
    return dict(type='RandomCrop', crop_size=size, crop_type=kind, allow_negative_crop=True)


# Transforms, the worst batch of two images that share an orientation on disk, and the worst of one image.
CASES = {
    'resize': ([RESIZE], (80, 133), (80, 133)),
    'fixed': ([dict(type='Resize', scale=(50, 70), keep_ratio=False)], (70, 50), (70, 50)),
    'choice': ([CHOICE], (80, 133), (80, 133)),
    'crop that turns': (
        [dict(type='RandomChoice', transforms=[[CHOICE], [LARGER, TURNING, CHOICE]])], (126, 133), (80, 133)),
    'sides drawn': ([dict(type='RandomResize', scale=[(133, 48), (133, 80)], keep_ratio=True)], (80, 133), (80, 133)),
    'jitter': (
        [dict(type='RandomResize', scale=(64, 64), ratio_range=(0.1, 2.0), keep_ratio=True), crop(64, 64)],
        (64, 64), (64, 64)),
    'jitter, padded': (
        [dict(type='RandomResize', scale=(64, 64), ratio_range=(0.5, 1.5), keep_ratio=True), crop(64, 64),
         dict(type='Pad', size=(80, 70))], (70, 80), (70, 80)),
    'shortest edge': (
        [dict(type='ResizeShortestEdge', scale=(48, 64), max_size=90, keep_ratio=True)], (48, 90), (48, 90)),
    'half': ([RESIZE, crop(0.5, 0.5, kind='relative')], (40, 67), (40, 67)),
    'half or more': ([RESIZE, crop(0.5, 0.5, kind='relative_range')], (80, 133), (80, 133)),
    'divisor': ([RESIZE, dict(type='Pad', size_divisor=32)], (96, 160), (96, 160)),
    'square': ([RESIZE, dict(type='Pad', pad_to_square=True)], (133, 133), (133, 133)),
    'crop by overlap': (
        [dict(type='Expand', ratio_range=(1, 4)), dict(type='MinIoURandomCrop', min_crop_size=0.3), RESIZE],
        (133, 133), (80, 133)),
    'centre': (
        [dict(type='RandomCenterCropPad', crop_size=(50, 40), ratios=(0.6, 1.4), mean=[0] * 3, std=[1] * 3,
              to_rgb=True, test_mode=False, test_pad_mode=None)], (56, 70), (56, 70)),
    'rotation': ([RESIZE, dict(type='Rotate', prob=1.0), dict(type='RandomFlip', prob=0.5)], (80, 133), (80, 133)),
    'mosaic': (
        [dict(type='Mosaic', img_scale=(50, 40)), dict(type='RandomAffine', border=(-25, -20)),
         dict(type='Resize', scale=(60, 60), keep_ratio=True), dict(type='Pad', pad_to_square=True)],
        (60, 60), (60, 60)),
}  # fmt: skip


def config_of(steps, grouped=True, **preprocessor):
    sampler = dict(type='AspectRatioBatchSampler') if grouped else None
    loader = dict(batch_size=2, batch_sampler=sampler, dataset=dict(type='A', pipeline=steps))
    return Config(dict(model=dict(data_preprocessor=preprocessor), train_dataloader=loader))


def image(shape):
    height, width = shape
    box = HorizontalBoxes(torch.tensor([[0.0, 0.0, width, height], [width * 0.4, height * 0.4, width, height]]))
    return dict(
        img=np.zeros((height, width, 3), np.float32),
        img_shape=shape,
        gt_bboxes=box,
        gt_bboxes_labels=np.zeros(2, np.int64),
        gt_ignore_flags=np.zeros(2, bool),
    )


def seen(steps, times=25):
    """Shapes that the transforms put out, landscape and portrait images apart."""
    init_default_scope('mmdet')
    random.seed(0), np.random.seed(0)
    pipeline = Compose(steps)
    found = {True: set(), False: set()}
    for shape, _ in itertools.product(SHAPES, range(times)):
        mixed = [image(random.choice(SHAPES)) for _ in range(3)]
        if (out := pipeline(dict(image(shape), mix_results=mixed))) is not None:
            found[shape[1] >= shape[0]].add(out['img'].shape[:2])
    return found


@pytest.mark.parametrize('name', CASES)
def test_no_batch_is_larger(name):
    steps, of_two, of_one = CASES[name]
    rules = [worst_batch(config_of(steps), batch) for batch in (2, 1)]
    # Which side is the longer one is the same to memory, nearly.
    assert [sorted(rule[:2]) for rule in rules] == [sorted(of_two), sorted(of_one)], rules
    shapes = seen(steps)
    for group in shapes.values():
        height, width = (max(sides) for sides in zip(*group, strict=True))
        assert height * width <= np.prod(rules[0][:2]), (name, height, width)
    largest = max(height * width for group in shapes.values() for height, width in group)
    assert largest <= np.prod(rules[1][:2])
    assert largest >= 0.7 * np.prod(rules[1][:2]), 'the rule says more than there is'


def test_the_crop_is_named_that_turns_images():
    steps, *_ = CASES['crop that turns']
    cause = worst_batch(config_of(steps), 2).cause
    assert 'RandomCrop(crop_size=(38, 60), crop_type=absolute_range) turns images, so 126 x 80 meets' in cause
    assert 'turns' not in worst_batch(config_of(steps), 1).cause


def test_without_the_sampler_orientations_meet():
    found = worst_batch(config_of([RESIZE], grouped=False), 2)
    assert found[:2] == (133, 133) and 'landscape and portrait images share batches' in found.cause
    assert worst_batch(config_of([RESIZE], grouped=False), 1)[1] * 80 == 133 * 80


def test_usual_is_in_the_middle():
    assert usual_batch(config_of([RESIZE]))[:2] == (80, 107)
    assert usual_batch(config_of([CHOICE]))[:2] == (64, 85)
    assert usual_batch(config_of([])) is not None and worst_batch(config_of([dict(type='RandomFlip')]), 2) is None


def test_what_the_preprocessor_makes_of_batches():
    init_default_scope('mmdet')
    sync = dict(type='BatchSyncRandomResize', random_size_range=(64, 160), size_divisor=32, interval=1)
    rule = worst_batch(config_of([RESIZE], batch_augments=[sync]), 2)
    assert rule[:2] == (160, 256) and usual_batch(config_of([RESIZE], batch_augments=[sync])).height == 96
    augment, hub = MODELS.build(sync), MessageHub.get_current_instance()
    before = hub.runtime_info.get('iter')
    hub.update_info('iter', 0)
    inputs, most = torch.zeros(2, 3, 80, 133), [0, 0]
    for _ in range(60):
        sizes = augment(inputs, [])[0].shape[-2:]
        most = [max(pair) for pair in zip(most, sizes, strict=True)]
    hub.runtime_info.pop('iter') if before is None else hub.update_info('iter', before)
    assert most == [160, 256]
    pad = dict(type='BatchFixedSizePad', size=(100, 100))
    assert worst_batch(config_of([RESIZE], batch_augments=[pad]), 2)[:2] == (100, 133)
    assert MODELS.build(dict(pad, img_pad_value=0))(inputs, None)[0].shape[-2:] == (100, 133)
    resize = dict(type='BatchResize', scale=(160, 96), pad_size_divisor=32)
    assert worst_batch(config_of([RESIZE], batch_augments=[resize]), 2)[:2] == (96, 160)
    assert MODELS.build(resize)(inputs, None)[0].shape[-2:] == (96, 160)


@pytest.mark.parametrize(
    ('name', 'two', 'usual'),
    [
        ('swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py', (1250, 1333), (608, 811)),
        ('mask_rcnn/mask-rcnn_r50_fpn_ms-poly-3x_coco.py', (800, 1333), (720, 960)),
        ('rtmdet/rtmdet_s_8xb32-300e_coco.py', (640, 640), (640, 640)),
        ('yolox/yolox_s_8xb8-300e_coco.py', (800, 800), (640, 640)),
        ('mask2former/mask2former_r50_8xb2-lsj-50e_coco.py', (1024, 1024), (1024, 1024)),
        ('ssd/ssd300_coco.py', (300, 300), (300, 300)),
        ('centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco.py', (512, 512), (512, 512)),
        ('soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py', (1200, 1333), None),
    ],
)
def test_recipes_of_mmdet(name, two, usual):
    config = load_config(f'mmdet::{name}')
    assert sorted(worst_batch(config, 2)[:2]) == sorted(two)
    assert usual is None or usual_batch(config)[:2] == usual
