"""The inputs of a config are read from its train pipeline."""

import pytest
from mmengine.config import Config

from sbp_mmdet.plan.inputs import DEFAULT_SIZE, count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.variants import NotApplicable, find_piece_changes, load_config

# Of the installed mmdet: batch, height, width, masks, semantic map; as their pipelines and authors say. A size is of
# the largest batch, within a twentieth: it may lie either way.
STOCK = {
    'retinanet/retinanet_r50_fpn_1x_coco.py': (2, 800, 1333, False, False),
    'rtmdet/rtmdet_s_8xb32-300e_coco.py': (32, 640, 640, False, False),
    'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py': (2, 1024, 1024, True, False),
    'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py': (2, 800, 1333, True, True),
    'yolox/yolox_s_8xb8-300e_coco.py': (8, 800, 800, False, False),
    'centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco.py': (16, 512, 512, False, False),
}


@pytest.mark.parametrize('name', STOCK)
def test_stock_configs(name):
    inputs = find_training_inputs(load_config(f'mmdet::{name}'))
    batch, height, width, *labels = STOCK[name]
    assert (inputs.batch, inputs.masks, inputs.semantic) == (batch, *labels)
    assert inputs.height * inputs.width == pytest.approx(height * width, rel=0.05)
    assert 'not in the config' not in inputs.source and inputs.usual is not None and inputs.boxes is None


def test_crowded_batches_have_fewer_boxes_an_image_the_larger_they_are():
    boxes = [count_crowded_boxes(2**i) for i in range(12)]
    assert boxes == sorted(boxes, reverse=True) and boxes[1] == 60
    assert boxes[0] <= 93 and boxes[-1] == pytest.approx(7.3, abs=2)  # COCO's largest number, and its mean


def test_what_is_told_counts():
    inputs = find_training_inputs(load_config('mmdet::ssd/ssd300_coco.py'), batch=1, size=(32, 64))
    assert inputs[:3] == (1, 32, 64) and inputs.source == 'as given'
    inputs = find_training_inputs(Config(dict(model={})))
    assert inputs[:3] == (2, *DEFAULT_SIZE) and inputs.source.count('not in the config') == 2


def test_transformers_of_a_detector():
    for name, modules in {
        'dino/dino-4scale_r50_8xb2-12e_coco.py': ['encoder.layers', 'decoder.layers'],
        'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py': [
            'panoptic_head.pixel_decoder.encoder.layers',
            'panoptic_head.transformer_decoder.layers',
        ],
    }.items():
        (hook,) = find_piece_changes(load_config(f'mmdet::{name}'), ['cp-transformer'])['custom_hooks']
        assert hook == dict(type='CheckpointModulesHook', modules=modules)
    stock = load_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    with pytest.raises(NotApplicable, match='cp-transformer: the model has no such modules'):
        find_piece_changes(stock, ['cp-transformer'])
