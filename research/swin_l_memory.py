"""Six measured figures of one card, and which batches explain them: mmdet's DINO-5scale with Swin-L, two images a GPU.

    python research/swin_l_memory.py     # counts all six into docs/results/swin_l_memory.json; no GPU
    python research/document_tables.py   # writes the tables of docs/research/zoo_memory.md

The figures stand in mmdet's projects/example_largemodel (pull request 10981), of eight GPUs: with and without mixed
precision, plain, with a checkpointed backbone, and with a checkpointed encoder too. mmengine logs the most that the
tensors of a GPU took so far, so a figure is that of the largest batch until then. Counted are two sizes of images; a
step takes by a line more the more pixels a batch has, and the batch that explains a figure is on that line.
"""

import copy
import logging
import time
import warnings
from collections.abc import Iterable
from unittest import mock

import numpy as np
from isolated import run_apart, sweep
from mmengine.logging import MMLogger
from provenance import CHECKOUT, commit
from tables import markdown_table

from sbp_mmdet.plan import worst_batch
from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import find_training_inputs
from sbp_mmdet.plan.planner import MARGIN, WORKSPACES
from sbp_mmdet.plan.tables import Column, format_table
from sbp_mmdet.plan.variants import load_config, make_plain

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
_ENDS = ('plain', 'backbone and encoder')
GROUPS = {
    'the three in fp32': [name for name in MEASURED if 'amp' not in name],
    'the three in mixed precision': [name for name in MEASURED if 'amp' in name],
    'plain, and backbone and encoder, in both precisions': [n for n in MEASURED if n.removesuffix(', amp') in _ENDS],
    'all six': list(MEASURED),
}
SIZES = (800, 1333), (1112, 1333)  # a usual large batch, and the pipeline's largest
BOXES = 40  # in each image
_SECONDS = 300


def row_of(what: str) -> dict:
    """Count a step, and return the batch size that explains the measured memory.

    Args:
        what (str): Key of ``MEASURED``: the checkpointed parts, and whether precision is mixed.

    Returns:
        dict: ``measured`` in GiB; for both sizes ``peak``, ``peaks`` and ``saved`` bytes, and those that are
        ``logged``; and ``pixels`` of the batch that explains the measurement, relative to the first size.
    """
    start = time.process_time()
    config = copy.deepcopy(make_plain(load_config(CONFIG)))
    config.model.backbone.with_cp = 'backbone' in what
    if 'encoder' in what:
        config.custom_hooks = [dict(type='CheckpointModulesHook', modules=['encoder.layers'])]
    if 'amp' in what:
        config.optim_wrapper.type = 'AmpOptimWrapper'
    result = dict(measured=MEASURED[what])
    for height, width in SIZES:
        row = measure_detector(config, batch=2, height=height, width=width, boxes=BOXES, expandable=False)
        tensors = row['peak'] + row['gradients']  # with the buckets of distributed training
        kept = {key: row[key] for key in ('peak', 'peaks', 'saved')}
        result[f'{height}x{width}'] = dict(kept, logged=int(tensors * (1 + MARGIN) + WORKSPACES))
    first, second = (result[f'{height}x{width}']['logged'] for height, width in SIZES)
    share = (MEASURED[what] * 2**30 - first) / (second - first)
    pixels = 1 + share * (SIZES[1][0] / SIZES[0][0] - 1)
    return dict(result, pixels=pixels, seconds=round(time.process_time() - start, 1), **commit())


def pixels_of_batches() -> np.ndarray:
    """Return the pixels of 100,000 batches of the recipe's pipeline relative to the first size, the largest last."""
    drawn, count = [], worst_batch._count_pixels

    def note(sizes, config):
        drawn.append(count(sizes, config))
        return drawn[-1]

    with mock.patch.object(worst_batch, '_count_pixels', note):
        find_training_inputs(make_plain(load_config(CONFIG)))
    height, width = SIZES[0]
    return np.sort(drawn[0]) / (2 * height * width)


def batch_of(rows: dict[str, dict], names: Iterable[str], rounding: float = 0.0) -> tuple[float, float]:
    """Find the batch whose counts differ least from several measurements.

    Args:
        rows (dict[str, dict]): Rows by what is checkpointed, see :func:`row_of`.
        names (Iterable[str]): Names of the measurements.
        rounding (float): GiB by which a printed measurement may differ from the figure behind it. Default: 0.0.

    Returns:
        tuple[float, float]: Pixels of the batch relative to the first size, and the largest relative error.
    """
    names = list(names)
    measured = np.array([rows[name]['measured'] for name in names])
    first, second = (
        np.array([rows[name][f'{height}x{width}']['logged'] for name in names]) / 2**30 for height, width in SIZES
    )
    pixels = np.arange(0.8, 1.4, 0.001)[:, None]
    counted = first + (second - first) * (pixels - 1) / (SIZES[1][0] / SIZES[0][0] - 1)
    errors = (np.clip(np.abs(counted - measured) - rounding, 0, None) / measured).max(1)
    return float(pixels[errors.argmin(), 0]), float(errors.min())


def report(rows: dict[str, dict]) -> str:
    """Return a table of the batch that explains several measurements at once."""
    columns = [
        Column('measurements', lambda name: name),
        Column('one batch', lambda name: f'{batch_of(rows, GROUPS[name])[0]:.2f}'),
        Column('largest error', lambda name: f'{batch_of(rows, GROUPS[name])[1]:.1%}'),
        Column('beyond rounding', lambda name: f'{batch_of(rows, GROUPS[name], 0.5)[1]:.1%}'),
    ]
    return markdown_table(columns, list(GROUPS))


def main():
    """Count all rows."""
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    pixels = pixels_of_batches()
    more = {str(one_in): pixels[int((1 - 1 / one_in) * (len(pixels) - 1))] for one_in in (10, 100, 1000, 10_000)}
    rows = sweep(RESULTS, MEASURED, lambda what: run_apart(row_of, what, seconds=_SECONDS), pixels_of_one_in=more)
    columns = [
        Column('what is checkpointed', lambda item: item[0]),
        Column('measured, GiB', lambda item: f'{item[1]["measured"]}'),
        *(Column(f'{h} x {w}', lambda item, key=f'{h}x{w}': f'{item[1][key]["logged"] / 2**30:.1f}') for h, w in SIZES),
        Column('explained by', lambda item: f'{item[1]["pixels"]:.2f}'),
        Column('one batch in', lambda item: f'{1 / max((pixels >= item[1]["pixels"]).mean(), 1e-9):,.0f}'),
    ]
    print(format_table(columns, [(name, row) for name, row in rows.items() if 'pixels' in row]))


if __name__ == '__main__':
    main()
