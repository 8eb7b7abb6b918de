"""What a config feeds its detector, read from the train pipeline."""

import pytest
from mmengine.config import Config

from sbp_mmdet.plan.inputs import DEFAULT_SIZE, inputs_of
from sbp_mmdet.plan.variants import NotApplicable, load_config, piece_change

# Of the installed mmdet: batch, height, width, masks, semantic map; as their pipelines and authors say.
STOCK = {
    'convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py': (2, 800, 1333, True, False),
    'rtmdet/rtmdet_l_convnext_b_4xb32-100e_coco.py': (32, 640, 640, False, False),
    'rtmdet/rtmdet-ins_l_8xb32-300e_coco.py': (32, 640, 640, True, False),
    'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py': (2, 1024, 1024, True, False),
    'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py': (2, 800, 1333, True, True),
    'yolox/yolox_s_8xb8-300e_coco.py': (8, 800, 800, False, False),
    'ssd/ssd300_coco.py': (8, 300, 300, False, False),
    'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py': (5, 1200, 1333, False, False),
}


@pytest.mark.parametrize('name', STOCK)
def test_stock_configs(name):
    found = inputs_of(load_config(f'mmdet::{name}'))
    assert found[:5] == STOCK[name]
    assert found.source == 'size: the largest of the train pipeline; batch: of train_dataloader'


def config(*pipeline, **preprocessor) -> Config:
    loader = dict(batch_size=4, dataset=dict(type='A', pipeline=list(pipeline)))
    return Config(dict(model=dict(data_preprocessor=preprocessor), train_dataloader=loader))


@pytest.mark.parametrize(
    ('pipeline', 'size'),
    [
        ([dict(type='Resize', scale=(1200, 800), keep_ratio=True)], (800, 1200)),
        ([dict(type='RandomResize', scale=(1000, 600), ratio_range=(0.5, 1.5))], (900, 1500)),
        ([dict(type='RandomChoiceResize', scales=[(480, 1300), (800, 1300)])], (800, 1300)),
        ([dict(type='ResizeShortestEdge', scale=[640, 700], max_size=1200)], (700, 1200)),
        ([dict(type='RandomCrop', crop_size=(300, 400))], (300, 400)),
        ([dict(type='Resize', scale=640), dict(type='RandomCrop', crop_size=0.5, crop_type='relative')], (320, 320)),
        ([dict(type='Resize', scale=(90, 50)), dict(type='Pad', size_divisor=32)], (64, 96)),
        ([dict(type='Resize', scale=(90, 50)), dict(type='Pad', pad_to_square=True)], (90, 90)),
        ([dict(type='Mosaic', img_scale=(64, 64)), dict(type='RandomAffine', border=(-32, -32))], (64, 64)),
        ([dict(type='RandomChoice', transforms=[[dict(type='Resize', scale=64)], [dict(type='Resize', scale=96)]])],
         (96, 96)),
        ([dict(type='RandomFlip')], DEFAULT_SIZE),
    ],
)  # fmt: skip
def test_sizes_of_transforms(pipeline, size):
    found = inputs_of(config(*pipeline))
    assert (found.height, found.width) == size and found.batch == 4
    assert ('not told' in found.source) == (size == DEFAULT_SIZE)


def test_batch_augments_of_the_preprocessor():
    resize = dict(type='Resize', scale=(640, 480))
    pad = dict(type='BatchFixedSizePad', size=(512, 512))
    sync = dict(type='BatchSyncRandomResize', random_size_range=(480, 800))
    assert inputs_of(config(resize, batch_augments=[pad]))[1:3] == (512, 640)
    assert inputs_of(config(resize, batch_augments=[sync]))[1:3] == (600, 800)


def test_what_is_told_counts():
    found = inputs_of(config(dict(type='Resize', scale=640)), batch=1, size=(32, 64))
    assert found[:3] == (1, 32, 64) and found.source == 'as told'
    found = inputs_of(Config(dict(model={})))
    assert found[:3] == (2, *DEFAULT_SIZE) and found.source.count('not told') == 2


def test_transformers_of_a_detector():
    for name, modules in {
        'dino/dino-4scale_r50_8xb2-12e_coco.py': ['encoder.layers', 'decoder.layers'],
        'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py': [
            'panoptic_head.pixel_decoder.encoder.layers',
            'panoptic_head.transformer_decoder.layers',
        ],
    }.items():
        (hook,) = piece_change(load_config(f'mmdet::{name}'), ['cp-transformer'])['custom_hooks']
        assert hook == dict(type='CheckpointModulesHook', modules=modules)
    stock = load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    with pytest.raises(NotApplicable, match='cp-transformer: the model has none'):
        piece_change(stock, ['cp-transformer'])
