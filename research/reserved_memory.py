"""What a GPU reserves over what tensors allocate, for ten detectors whose images change in size, by the model of CUDA's
caching allocator.

    python research/reserved_memory.py       # counts what docs/results/reserved_memory.json lacks; no GPU
    python research/document_tables.py       # writes the table of docs/research/zoo_memory.md

Each row names its commit.
"""

import logging
import time
import warnings

from isolated import read_rows, run_apart, sweep
from mmengine.logging import MMLogger
from provenance import CHECKOUT, commit

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant

RESULTS = CHECKOUT / 'docs/results/reserved_memory.json'
DETECTORS = {
    'Mask R-CNN R-50': 'mask_rcnn/mask-rcnn_r50_fpn_ms-poly-3x_coco.py',
    'RetinaNet R-50': 'retinanet/retinanet_r50_fpn_ms-640-800-3x_coco.py',
    'DETR R-50': 'detr/detr_r50_8xb2-150e_coco.py',
    'Deformable DETR R-50': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'DINO R-50': 'dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Mask R-CNN Swin-T': 'swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py',
    'Mask R-CNN ConvNeXt-T': 'convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py',
    'Sparse R-CNN R-50': 'sparse_rcnn/sparse-rcnn_r50_fpn_ms-480-800-3x_coco.py',
    'SOLOv2 R-50': 'solov2/solov2_r50_fpn_ms-3x_coco.py',
    'YOLOX-S': 'yolox/yolox_s_8xb8-300e_coco.py',
}
VARIANTS = ('none', 'exact')
_SECONDS = 300  # of one core, at most, for a row


def row_of(key: str) -> dict:
    """Count the allocated and the reserved memory of a detector with a preset.

    Args:
        key (str): Detector and preset, separated by '/'.

    Returns:
        dict: ``size`` of the largest and of ``usual`` images; in bytes, ``peak`` of the tensors and the results of
        :func:`sbp_mmdet.plan.reserved.reserved_bytes`.
    """
    start = time.process_time()
    name, variant = key.split('/')
    config = make_plain(load_config(f'mmdet::{DETECTORS[name]}'))
    inputs = find_training_inputs(config)
    options = {} if variant == 'none' else dict(skip_dropped_images=False)
    batch_shape = dict(
        batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=count_crowded_boxes(inputs.batch)
    )
    row = measure_detector(with_variant(config, variant, **options), **batch_shape, usual=inputs.usual)
    result = {key: row[key] for key in ('peak', 'reserved', 'capacity', 'expandable')}
    size = [inputs.batch, inputs.height, inputs.width]
    seconds = round(time.process_time() - start, 1)
    return dict(result, size=size, usual=inputs.usual, seconds=seconds, **commit())


def main():
    """Count the rows that the file lacks."""
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    rows = read_rows(RESULTS)
    wanted = [f'{name}/{variant}' for name in DETECTORS for variant in VARIANTS]
    sweep(RESULTS, [key for key in wanted if key not in rows], lambda key: run_apart(row_of, key, seconds=_SECONDS))


if __name__ == '__main__':
    main()
