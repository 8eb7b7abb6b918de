"""Finds the largest batch of five detectors on four sizes of cards, by preset, with ``sbp-mmdet plan --batch max``.

    python research/largest_batches.py                 # counts what docs/results/largest_batches.json lacks; no GPU
    python research/largest_batches.py --only R-50/    # rows whose names contain one of these

A row belongs to a detector with a preset. It has the needed bytes by number of images, from which the answers follow.
It is written to disk as soon as it is counted, with its commit.
"""

import argparse
import logging
import time
import warnings

from isolated import read_rows, run_apart, sweep
from mmengine.logging import MMLogger
from provenance import CHECKOUT, commit

from sbp_mmdet.plan.batch_size import find_largest_batch, learning_rate
from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.planner import count_needed_bytes
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant
from sbp_mmdet.presets import PRESETS

RESULTS = CHECKOUT / 'docs/results/largest_batches.json'
_CONVNEXT_B = 'configs/sbp_convnext/cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
DETECTORS = {
    'Mask R-CNN R-50': 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'Mask R-CNN Swin-T': 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py',
    'RTMDet-S': 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py',
    'DINO R-50': 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Cascade Mask R-CNN ConvNeXt-B': _CONVNEXT_B,
}
VARIANTS = ('none', 'with_cp+targets', 'exact', 'exact_min', 'int8')
CARDS = (8, 11, 16, 24)  # GiB
_SECONDS = 900  # of one core, at most, for a row


def row_of(key: str) -> dict:
    """Return the largest batches of a detector with a preset.

    Args:
        key (str): Detector and preset, '/' between them.

    Returns:
        dict: ``size`` of the largest images, ``needs`` (images to bytes), and by card in GiB ``images`` and the
        ``learning_rate`` of ``--auto-scale-lr``.
    """
    start = time.process_time()
    name, variant = key.split('/')
    path = DETECTORS[name]
    config = make_plain(load_config(path if '::' in path else str(CHECKOUT / path)))
    inputs, counted = find_training_inputs(config), {}
    options = dict(skip_dropped_images=False) if PRESETS[variant.split('+')[0]].form else {}
    changed = with_variant(config, variant, **options)

    def need(images):
        batch_shape = dict(batch=images, height=inputs.height, width=inputs.width, usual=inputs.usual, expandable=False)
        return count_needed_bytes(measure_detector(changed, **batch_shape, boxes=count_crowded_boxes(images)))

    # From the largest card on: the others' answers lie on lines between counts.
    images = {card: find_largest_batch(need, card * 2**30, counted)[0] for card in sorted(CARDS, reverse=True)}
    rates = {card: learning_rate(config, images[card]) for card in CARDS}
    return dict(
        size=[inputs.height, inputs.width],
        images={card: images[card] for card in CARDS},
        learning_rate=rates,
        needs=dict(sorted(counted.items())),
        seconds=round(time.process_time() - start, 1),
        **commit(),
    )


def main():
    """Count the rows that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', default=[''], help='count rows whose names contain one of these')
    only = parser.parse_args().only
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    wanted = [f'{name}/{variant}' for variant in VARIANTS for name in DETECTORS]
    rows = read_rows(RESULTS)
    chosen = [key for key in wanted if key not in rows and any(word in key for word in only)]
    sweep(RESULTS, chosen, lambda key: run_apart(row_of, key, seconds=_SECONDS))


if __name__ == '__main__':
    main()
