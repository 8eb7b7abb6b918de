"""Six measured figures of one card, and which batch explains them: mmdet's DINO-5scale with Swin-L, two images a GPU.

    python research/swin_l_memory.py                 # counts all six into docs/results/swin_l_memory.json; no GPU
    python research/swin_l_memory.py --size 800x1067 # images of another size

The figures stand in mmdet's projects/example_largemodel (pull request 10981), of eight GPUs: with and without mixed
precision, plain, with a checkpointed backbone, and with a checkpointed encoder too. What is said is what the planner
says: the least memory within which the allocator goes on, with the buckets of distributed training.
"""

import argparse
import copy
import logging
import time
import warnings

from isolated import apart, sweep
from mmengine.logging import MMLogger
from provenance import CHECKOUT

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.planner import needed, parse_size
from sbp_mmdet.plan.tables import Column, text_table
from sbp_mmdet.plan.variants import load_config, plain

RESULTS = CHECKOUT / 'docs/results/swin_l_memory.json'
CONFIG = 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'
MEASURED = {
    'plain': 49,
    'backbone': 33,
    'backbone and encoder': 18,
    'plain, amp': 39,
    'backbone, amp': 25,
    'backbone and encoder, amp': 13,
}  # GB, as mmengine's log says them: GiB
_SECONDS = 300


def row_of(what: str, size: tuple[int, int], boxes: int) -> dict:
    """Return what a step needs.

    Args:
        what (str): Key of ``MEASURED``: what is checkpointed, and whether precision is mixed.
        size (tuple[int, int]): Height and width of the two images.
        boxes (int): Boxes in each.
    """
    start = time.process_time()
    config = copy.deepcopy(plain(load_config(CONFIG)))
    config.model.backbone.with_cp = 'backbone' in what
    if 'encoder' in what:
        config.custom_hooks = [dict(type='CheckpointModulesHook', modules=['encoder.layers'])]
    if 'amp' in what:
        config.optim_wrapper.type = 'AmpOptimWrapper'
    row = measure_detector(config, batch=2, height=size[0], width=size[1], boxes=boxes)
    found = dict(measured=MEASURED[what], peak=row['peak'], peaks=row['peaks'], saved=row['saved'])
    return dict(found, needs=needed(row, ddp=True), seconds=round(time.process_time() - start, 1))


def main():
    """Count all rows of a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', default='800x1333', help='of the images (default: 800x1333)')
    parser.add_argument('--boxes', type=int, default=40, help='in each image (default: 40)')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    size = parse_size(args.size)
    names = {f'{args.size}, {args.boxes} boxes, {what}': what for what in MEASURED}
    rows = sweep(RESULTS, names, lambda name: apart(row_of, names[name], size, args.boxes, seconds=_SECONDS))
    columns = [
        Column('batch', lambda item: item[0]),
        Column('measured, GiB', lambda item: f'{item[1]["measured"]}'),
        Column('counted', lambda item: f'{item[1]["peak"] / 2**30:.1f}'),
        Column('needs', lambda item: f'{item[1]["needs"] / 2**30:.1f}'),
        Column('error', lambda item: f'{item[1]["needs"] / 2**30 / item[1]["measured"] - 1:+.1%}'),
    ]
    print(text_table(columns, [(name, row) for name, row in rows.items() if 'peak' in row]))


if __name__ == '__main__':
    main()
