"""What is told of a large batch from two smaller ones is what a whole count of it finds."""

import pytest

from sbp_mmdet.plan.detector import counted, measure_detector
from sbp_mmdet.plan.variants import load_config, plain, with_variant

STOCK = {
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco.py',
    'RTMDet-s': 'rtmdet/rtmdet_s_8xb32-300e_coco.py',
    'DETR': 'detr/detr_r50_8xb2-150e_coco.py',
    'Mask R-CNN, ConvNeXt-T': 'convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py',
}
# Share of the whole: operations on few numbers are computed, and lay out their results in another way now and then.
TOLERANCE = 4e-3
BYTE_EXACT = 0


@pytest.mark.parametrize(
    ('detector', 'variant', 'tolerance'),
    [
        ('Faster R-CNN', 'none', TOLERANCE),
        ('Faster R-CNN', 'exact', BYTE_EXACT),
        ('Faster R-CNN', 'with_cp', BYTE_EXACT),
        ('Faster R-CNN', 'exact+cp-heads+cp-neck', BYTE_EXACT),
        ('RetinaNet', 'with_cp', TOLERANCE),
        ('RTMDet-s', 'none', TOLERANCE),
        ('RTMDet-s', 'exact', TOLERANCE),
        ('DETR', 'none', TOLERANCE),
        ('DETR', 'exact+cp-transformer', BYTE_EXACT),
        ('Mask R-CNN, ConvNeXt-T', 'none', BYTE_EXACT),
        ('Mask R-CNN, ConvNeXt-T', 'exact', TOLERANCE),
    ],
)
def test_sums_are_whole_counts(detector, variant, tolerance):
    config = with_variant(plain(load_config(f'mmdet::{STOCK[detector]}')), variant)
    case = dict(batch=12, height=96, width=128, boxes=5)
    told = measure_detector(config, **case)
    whole, _ = counted(config, alike=True, **case)
    for key in ('parameters', 'optimizer', 'gradients'):
        assert told[key] == whole[key], key
    assert {**told['peaks'], 'end': told['forward']} == pytest.approx(
        {**whole['peaks'], 'end': whole['forward']}, rel=tolerance, abs=0
    )
    assert sum(told['saved'].values()) == pytest.approx(sum(whole['saved'].values()), rel=tolerance, abs=0)
    assert told['peak'] == max(told['peaks'].values()) == told['peaks'][told['peak_phase']]
