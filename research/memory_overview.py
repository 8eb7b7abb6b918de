"""README's memory: what a GPU needs for five detectors, by preset, and how far a step lifts a process on this machine.

    python research/memory_overview.py count      # adds what is missing to docs/results/memory_overview.json; no GPU
    python research/memory_overview.py measure    # the same for resident sets, one process each; Linux
    python research/memory_overview.py write      # README's two tables and docs/pictures/memory.png from that file

Counts are those of ``sbp-mmdet plan``, with what CUDA and fragmentation need on top. A row is on disk as soon as it is
there. All rows of a run are of one commit.
"""

import argparse
import json
import re
from typing import NamedTuple

from provenance import CHECKOUT, describe_machine, write_json
from resident_memory import measure_lift
from tables import COLOURS, markdown_table, panels, save_picture

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import crowded
from sbp_mmdet.plan.planner import needed
from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import load_config, plain, with_variant
from sbp_mmdet.presets import PRESETS

RESULTS = CHECKOUT / 'docs/results/memory_overview.json'
PICTURE = CHECKOUT / 'docs/pictures/memory.png'
VARIANTS = {'none': 'plain', 'with_cp': 'checkpointing', 'exact': '`exact`', 'exact_min': '`exact_min`'}
VARIANTS |= {'int8': '`int8`'}
CARDS = (8, 12, 16, 24)  # GB
LIFTED = dict(batch=1, size=(480, 640), boxes=15)


class Detector(NamedTuple):
    """A detector of the table.

    Attributes:
        name (str): Its name in the table.
        config (str): Its config.
        batch (int): Images of a batch.
        size (tuple[int, int]): Height and width of the images in pixels.
        precision (str): What the config trains in.
        published (dict[str, float]): GB that the authors of the config measured on a GPU, by variant.
    """

    name: str
    config: str
    batch: int
    size: tuple[int, int]
    precision: str
    published: dict[str, float] = {}


_PAPER = 'configs/sbp_convnext/cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
DETECTORS = (
    Detector('Cascade Mask R-CNN ConvNeXt-B', _PAPER, 2, (800, 1344), 'fp16', {'none': 17.4}),
    Detector('Mask R-CNN R-50', 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py', 2, (800, 1344), 'fp32'),
    Detector('RTMDet-S', 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py', 32, (640, 640), 'fp32'),
    Detector('DINO R-50', 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 2, (800, 1344), 'fp32'),
    Detector(
        'DINO-5scale Swin-L',
        'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py',
        2,
        (800, 1344),
        'fp32',
        {'none': 49, 'with_cp': 18},
    ),
)


def count(detector: Detector, variant: str) -> dict:
    """Count a training step, by the rules of CUDA.

    Args:
        detector (Detector): Detector of the table.
        variant (str): Preset, with pieces behind it.

    Returns:
        dict: ``peak`` and ``needs`` in bytes.
    """
    config = plain(load_config(detector.config))
    keys = dict(skip_dropped_images=False) if PRESETS[variant].form else {}
    height, width = detector.size
    case = dict(batch=detector.batch, height=height, width=width, boxes=crowded(detector.batch))
    row = measure_detector(with_variant(config, variant, **keys), **case)
    return dict(peak=row['peak'], needs=needed(row))


def measure(detector: Detector, variant: str) -> dict:
    """Measure how far one step lifts the resident set of a process.

    Args:
        detector (Detector): Detector of the table.
        variant (str): Preset, with pieces behind it.

    Returns:
        dict: ``lift`` in MB, or ``failed`` with what the process said last.
    """
    try:
        return dict(lift=measure_lift(detector.config, variant, **LIFTED))
    except RuntimeError as error:
        return dict(failed=str(error)[-300:])


def fill(kind: str, only: str | None = None) -> None:
    """Add the rows of one kind that are missing to the file of results.

    Args:
        kind (str): 'count' or 'measure'.
        only (str | None): Name of one detector. If ``None``, all of them. Default: None.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else dict(runs=[])
    machine = describe_machine()
    run = next((run for run in results['runs'] if run['kind'] == kind), None)
    if run is None:
        results['runs'].append(dict(kind=kind, machine=machine, rows=[]))
    elif run['machine']['commit'] != machine['commit']:
        raise SystemExit(f'{RESULTS.name} has rows of commit {run["machine"]["commit"]}; delete that run to begin anew')
    rows = _rows(results, kind)
    known = {(row['detector'], row['variant']) for row in rows if 'failed' not in row}
    for detector in DETECTORS:
        for variant in VARIANTS:
            if (detector.name, variant) in known or only not in (None, detector.name):
                continue
            row = (count if kind == 'count' else measure)(detector, variant)
            rows.append(dict(detector=detector.name, variant=variant, **row))
            write_json(RESULTS, results)
            print(rows[-1], flush=True)


def _rows(results, kind):
    return next((run['rows'] for run in results['runs'] if run['kind'] == kind), [])


def tables(results: dict) -> dict[str, str]:
    """Return README's tables.

    Args:
        results (dict): Contents of the file of results.

    Returns:
        dict[str, str]: Markdown by 'memory counted' and 'memory measured'. Detectors with all variants have a row.
    """
    found = {}
    for kind, unit, key, form in (('count', 1e9, 'needs', '{:.1f}'), ('measure', 1, 'lift', '{:,.0f}')):
        values = {(row['detector'], row['variant']): row.get(key) for row in _rows(results, kind)}
        there = [d for d in DETECTORS if all(values.get((d.name, variant)) for variant in VARIANTS)]
        columns = [Column('', _head if kind == 'count' else lambda detector: detector.name)]
        for variant, head in VARIANTS.items():

            def cell(detector, variant=variant, values=values, unit=unit, form=form):
                return form.format(values[detector.name, variant] / unit)

            columns.append(Column(head, cell))
        found['memory counted' if kind == 'count' else 'memory measured'] = markdown_table(columns, there)
    return found


def _head(detector):
    height, width = detector.size
    return f'{detector.name}, {detector.precision}, {detector.batch} x {height} x {width}'


def draw(results: dict) -> None:
    """Draw what a GPU needs as bars, with lines at the sizes of cards, and what the authors measured hatched.

    Args:
        results (dict): Contents of the file of results.
    """
    from matplotlib.patches import Patch

    values = {(row['detector'], row['variant']): row['needs'] / 1e9 for row in _rows(results, 'count')}
    figure, grid = panels(figsize=(9.6, 5.2))
    axes, height = grid[0, 0], 0.16
    for place, detector in enumerate(DETECTORS):
        for number, variant in enumerate(VARIANTS):
            y = place + (number - 2) * height
            value = values[detector.name, variant]
            axes.barh(y, value, height * 0.9, color=COLOURS[number])
            right = max(value, detector.published.get(variant, 0))
            note = f' (measured: {detector.published[variant]:g})' if variant in detector.published else ''
            axes.text(right + 0.3, y, f'{value:.1f}{note}', va='center', fontsize=7)
            if variant in detector.published:
                axes.barh(y, detector.published[variant], height * 0.9, color='none', edgecolor='black', hatch='////')
    for card in CARDS:
        axes.axvline(card, color='#888888', linewidth=0.8, linestyle=':', zorder=0)
        axes.text(card, -0.62, f'{card} GB', ha='center', fontsize=8, color='#555555')
    axes.set(ylim=(len(DETECTORS) - 0.5, -0.7), xlim=(0, 1.15 * max(values.values())))
    axes.set_xlabel('GB of GPU memory that a training needs')
    axes.set_yticks(range(len(DETECTORS)), [_head(detector).replace(', ', '\n', 1) for detector in DETECTORS])
    axes.tick_params(axis='y', labelsize=8)
    legend = [
        Patch(color=colour, label=head.strip('`')) for colour, head in zip(COLOURS, VARIANTS.values(), strict=False)
    ]
    legend.append(Patch(facecolor='none', edgecolor='black', hatch='////', label='measured by its authors on a GPU'))
    save_picture(figure, PICTURE, legend=legend, columns=6, dpi=110)


def write() -> None:
    """Write README's tables between their markers, and the picture."""
    results, page = json.loads(RESULTS.read_text()), CHECKOUT / 'README.md'
    text = page.read_text()
    for name, table in tables(results).items():
        block = re.compile(rf'(<!-- results: {name} -->\n).*?(<!-- end -->)', re.DOTALL)
        text, n = block.subn(lambda match, table=table: f'{match[1]}{table}\n{match[2]}', text)
        if not n:
            raise ValueError(f'{page.name} has no marker <!-- results: {name} -->')
    page.write_text(text)
    draw(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('action', choices=['count', 'measure', 'write'])
    parser.add_argument('--only', choices=[detector.name for detector in DETECTORS], help='one detector')
    args = parser.parse_args()
    write() if args.action == 'write' else fill(args.action, args.only)


if __name__ == '__main__':
    main()
