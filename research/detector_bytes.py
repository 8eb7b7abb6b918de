"""Counts the bytes of a detector's training step without a GPU, part by part, for presets and pieces.

    python research/detector_bytes.py mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py --size 800x1344
    python research/detector_bytes.py CONFIG --variants none with_cp exact exact+cp-heads+cp-neck --json FILE

Tensors are allocated by CUDA's rules of mixed precision. Rounding, fragmentation and the workspaces of kernels are not
counted. The counted step is one in which stochastic depth drops no image.
"""

import argparse

from mmengine.config import DictAction
from provenance import describe_machine, output_file, write_json
from tables import format_bytes

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import add_inputs, count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.planner import parse_size
from sbp_mmdet.plan.tables import Column, format_table
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant
from sbp_mmdet.presets import PRESETS

OUTSIDE = ('neck', 'RPN', 'RoI', 'head', 'coder', 'quer', 'memory', 'other')


def backbone_bytes(row: dict) -> int:
    """Return the bytes that the backbone stores, from a row of ``measure_detector``."""
    return sum(n for part, n in row['saved'].items() if not any(word in part for word in OUTSIDE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--variants', nargs='+', default=['none', 'with_cp', 'exact', 'int8', 'sbp'])
    add_inputs(parser)
    parser.add_argument('--boxes', type=int, help='boxes in each image (default: those of a crowded batch of COCO)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    parser.add_argument('--json', type=output_file, help='write the results here as well')
    args = parser.parse_args()
    config = load_config(args.config, args.cfg_options)
    inputs = find_training_inputs(config, args.batch, parse_size(args.size) if args.size else None)
    batch_shape = dict(
        batch=inputs.batch,
        height=inputs.height,
        width=inputs.width,
        boxes=args.boxes or count_crowded_boxes(inputs.batch),
    )
    batch_shape['channels'] = inputs.channels
    rows, base = [], make_plain(config)
    for variant in args.variants:
        keys = dict(skip_dropped_images=False) if PRESETS[variant.split('+')[0]].form else {}
        row = measure_detector(with_variant(base, variant, **keys), **batch_shape)
        rows.append(dict(variant=variant, backbone=backbone_bytes(row), **row))
    columns = [Column('variant', lambda row: row['variant'])]
    for key in ('backbone', 'peak'):
        columns.append(Column(key, lambda row, key=key: format_bytes(row[key])))
        columns.append(Column('ratio', lambda row, key=key: f'{row[key] / rows[0][key]:.3f}'))
    print(format_table(columns, rows))
    if args.json:
        write_json(args.json, dict(machine=describe_machine(), case=dict(config=args.config, **batch_shape), rows=rows))


if __name__ == '__main__':
    main()
