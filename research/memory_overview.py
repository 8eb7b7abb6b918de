"""Memory by detector and preset: needed GPU memory, stored bytes of backbones, and the growth of a process in a step.

    python research/memory_overview.py count      # adds what is missing to docs/results/memory_overview.json; no GPU
    python research/memory_overview.py measure    # the same for resident sets, one process each; Linux
    python research/memory_overview.py write      # tables of README.md and docs/costs.md, and docs/pictures/memory.png

Counts are those of ``sbp-mmdet plan``, including the memory for CUDA and for fragmentation. A row is written to disk as
soon as it is counted, with the commit of its code.
"""

import argparse
import json
from typing import NamedTuple

from detector_bytes import backbone_bytes
from gpu_results import measured_rows, used_bytes, write_tables
from provenance import CHECKOUT, commit, describe_machine, write_json
from resident_memory import measure_lift
from tables import COLOURS, markdown_table, panels, save_picture

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import count_crowded_boxes
from sbp_mmdet.plan.planner import count_needed_bytes
from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import load_config, make_plain, with_variant
from sbp_mmdet.presets import PRESETS

RESULTS = CHECKOUT / 'docs/results/memory_overview.json'
PICTURE = CHECKOUT / 'docs/pictures/memory.png'
VARIANTS = {'none': 'plain', 'with_cp': 'checkpointing', 'exact': '`exact`', 'exact_min': '`exact_min`'}
VARIANTS |= {'int8': '`int8`'}
SBP = {'sbp': '`sbp`'}  # of the detectors whose backbone or encoder it thins
CARDS = (8, 12, 16, 24)  # GB
LIFTED = dict(batch=1, size=(480, 640), boxes=15)


class Detector(NamedTuple):
    """A detector of the tables.

    Attributes:
        name (str): Its name in the tables.
        config (str): Its config.
        batch (int): Images of a batch.
        size (tuple[int, int]): Height and width of the images in pixels.
        precision (str): 'fp16' or 'fp32'.
        backbone (str): Name of the backbone in the table of stored bytes. Without a row there if empty. Default: ''.
        sbp (bool): Whether the preset 'sbp' thins layers of it. Default: False.
        readme (bool): Whether README shows it, and its step is measured. Default: False.
        published (dict[str, float]): GB that the authors of the config measured on a GPU, by variant. Default: {}.
    """

    name: str
    config: str
    batch: int
    size: tuple[int, int]
    precision: str
    backbone: str = ''
    sbp: bool = False
    readme: bool = False
    published: dict[str, float] = {}

    @property
    def head(self) -> str:
        """Name, precision and batch."""
        return f'{self.name}, {self.precision}, {self.batch} x {self.size[0]} x {self.size[1]}'


_OURS = 'configs/sbp_convnext/'
_CONVNEXT_B = _OURS + 'cascade-mask-rcnn_convnext-b_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
_CONVNEXT_T = _OURS + 'mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py'
_SWIN_T = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
_VIT_B = 'configs/sbp_vit/mask-rcnn_vit-b_fpn_amp-ms-crop-3x_coco.py'
_R50 = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
_RTMDET_S = 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py'
_DINO = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
_DINO_SWIN_L = 'mmdet::dino/dino-5scale_swin-l_8xb2-12e_coco.py'
_MASK2FORMER = 'mmdet::mask2former/mask2former_'
_LARGE, _SQUARE, _SMALL = (800, 1344), (1024, 1024), (640, 640)
_MEASURED_B, _MEASURED_L = {'none': 17.4}, {'none': 52.6, 'with_cp': 19.3}  # the paper; mmdet's authors, 49 and 18 GiB
DETECTORS = (
    Detector('Cascade Mask R-CNN ConvNeXt-B', _CONVNEXT_B, 2, _LARGE, 'fp16', 'ConvNeXt-B', True, True, _MEASURED_B),
    Detector('Mask R-CNN R-50', _R50, 2, _LARGE, 'fp32', 'ResNet-50', readme=True),
    Detector('RTMDet-S', _RTMDET_S, 32, _SMALL, 'fp32', 'CSPNeXt-S', readme=True),
    Detector('DINO R-50', _DINO, 2, _LARGE, 'fp32', sbp=True, readme=True),
    Detector('DINO-5scale Swin-L', _DINO_SWIN_L, 2, _LARGE, 'fp32', 'Swin-L', readme=True, published=_MEASURED_L),
    Detector('Mask R-CNN ConvNeXt-T', _CONVNEXT_T, 2, _LARGE, 'fp16', 'ConvNeXt-T', True),
    Detector('Mask R-CNN ConvNeXt-T', _CONVNEXT_T, 2, _LARGE, 'fp32', 'ConvNeXt-T', True),
    Detector('Mask R-CNN Swin-T', _SWIN_T, 2, _LARGE, 'fp16', 'Swin-T', True),
    Detector('Mask R-CNN ViT-B', _VIT_B, 2, _SQUARE, 'fp16', 'ViT-B', True),
    Detector('Mask R-CNN ViT-B', _VIT_B, 2, _SQUARE, 'fp32', 'ViT-B', True),
    Detector('Mask R-CNN R-50', _R50, 2, _LARGE, 'fp16', 'ResNet-50'),
    Detector('RTMDet-S', _RTMDET_S, 32, _SMALL, 'fp16', 'CSPNeXt-S'),
    Detector('RTMDet-Ins-L', 'mmdet::rtmdet/rtmdet-ins_l_8xb32-300e_coco.py', 32, _SMALL, 'fp32', 'CSPNeXt-L'),
    Detector('YOLOX-L', 'mmdet::yolox/yolox_l_8xb8-300e_coco.py', 8, _SMALL, 'fp32', 'CSPDarknet-L'),
    Detector('DINO R-50', _DINO, 2, _LARGE, 'fp16', sbp=True),
    Detector('Deformable DETR R-50', 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py', 2, _LARGE, 'fp32'),
    Detector('Mask2Former R-50', _MASK2FORMER + 'r50_8xb2-lsj-50e_coco.py', 2, _SQUARE, 'fp32'),
    Detector('MaskFormer R-50', 'mmdet::maskformer/maskformer_r50_ms-16xb1-75e_coco.py', 1, _LARGE, 'fp32'),
    Detector(
        'Mask2Former Swin-L',
        _MASK2FORMER + 'swin-l-p4-w12-384-in21k_16xb1-lsj-100e_coco-panoptic.py',
        1,
        _SQUARE,
        'fp32',
    ),
)
_WRAPPERS = {'fp16': 'AmpOptimWrapper', 'fp32': 'OptimWrapper'}


def count(detector: Detector, variant: str) -> dict:
    """Count a training step by the rules of CUDA.

    Args:
        detector (Detector): Detector of the tables.
        variant (str): Preset and pieces.

    Returns:
        dict: ``backbone`` (bytes that it stores for the backward pass), ``peak`` and ``needs``, in bytes.
    """
    config = make_plain(load_config(detector.config, {'optim_wrapper.type': _WRAPPERS[detector.precision]}))
    keys = dict(skip_dropped_images=False) if PRESETS[variant].form else {}
    height, width = detector.size
    batch_shape = dict(batch=detector.batch, height=height, width=width, boxes=count_crowded_boxes(detector.batch))
    row = measure_detector(with_variant(config, variant, **keys), **batch_shape)
    return dict(backbone=backbone_bytes(row), peak=row['peak'], needs=count_needed_bytes(row))


def measure(detector: Detector, variant: str) -> dict:
    """Measure how much one step raises the resident set of a process.

    Args:
        detector (Detector): Detector of the tables.
        variant (str): Preset and pieces.

    Returns:
        dict: ``lift`` in MB, or ``failed`` with the last output of the process.
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
    run = next((run for run in results['runs'] if run['kind'] == kind), None)
    if run is None:
        results['runs'].append(run := dict(kind=kind, rows=[]))
    run['machine'] = describe_machine()
    rows = run['rows']
    known = {(row['detector'], row['variant']) for row in rows if 'failed' not in row}
    for detector in DETECTORS:
        name = detector.head if kind == 'count' else detector.name
        if only not in (None, detector.name) or kind == 'measure' and not detector.readme:
            continue
        for variant in VARIANTS | (SBP if detector.sbp and kind == 'count' else {}):
            if (name, variant) in known:
                continue
            row = (count if kind == 'count' else measure)(detector, variant)
            rows.append(dict(detector=name, variant=variant, **row, commit=commit()))
            write_json(RESULTS, results)
            print(rows[-1], flush=True)


def _rows(results, kind):
    return next((run['rows'] for run in results['runs'] if run['kind'] == kind), [])


def tables(results: dict) -> dict[tuple[str, str], str]:
    """Return the tables of the pages.

    Args:
        results (dict): Contents of the file of results.

    Returns:
        dict[tuple[str, str], str]: Markdown by page and marker. Detectors with all variants have a row.
    """
    shown = [detector for detector in DETECTORS if detector.readme]
    backbones = [detector for detector in DETECTORS if detector.backbone]
    counts, lifts = dict(_by_case(results, 'count')), dict(_by_case(results, 'measure'))
    measured = measured_rows('step')

    def on_a_gpu(detector, variant):
        row = measured.get((detector.head, variant))
        return used_bytes(row) if row else _Calculated(needs(detector, variant))

    def needs(detector, variant):
        return counts.get((detector.head, variant), {}).get('needs')

    def stored(detector, variant):
        return counts.get((detector.head, variant), {}).get('backbone')

    def lift(detector, variant):
        return lifts.get((detector.name, variant), {}).get('lift')

    def backbone(detector):
        return f'{detector.backbone}, {detector.head.split(", ", 1)[1]}'

    return {
        ('README.md', 'memory on a GPU'): _table(shown, VARIANTS, on_a_gpu, _gigabytes),
        ('README.md', 'memory measured'): _table(shown, VARIANTS, lift, _megabytes, name=lambda d: d.name),
        ('docs/costs.md', 'memory counted'): _table(DETECTORS, VARIANTS | SBP, needs, _gigabytes),
        ('docs/costs.md', 'stored'): _table(backbones, VARIANTS | SBP, stored, _relative, name=backbone),
    }


def _by_case(results, kind):
    """Yield each row of a kind with its detector and variant."""
    return (((row['detector'], row['variant']), row) for row in _rows(results, kind))


class _Calculated(float):
    """Figure that was not measured."""


def _gigabytes(value, plain):
    return f'*{value / 1e9:.1f}*' if isinstance(value, _Calculated) else f'{value / 1e9:.1f}'


def counted_needs() -> dict[tuple[str, str], float]:
    """Return the bytes that the planner counts, by detector and preset."""
    rows = _by_case(json.loads(RESULTS.read_text()), 'count')
    return {key: row['needs'] for key, row in rows}


def _megabytes(value, plain):
    return f'{value:,.0f}'


def _relative(value, plain):
    return f'{value / 1e9:.2f} GB' if value == plain else f'{value / plain:.3f}'


def _table(detectors, variants, value, form, name=lambda detector: detector.head):
    """Return a table with a column for each variant, and a row for each detector that has figures for all of them.

    ``value`` returns the figure of a detector and a variant, or ``None``.
    """
    there = [detector for detector in detectors if all(value(detector, variant) for variant in VARIANTS)]
    columns = [Column('', name)]
    for variant, head in variants.items():

        def cell(detector, variant=variant):
            figure = value(detector, variant)
            return form(figure, value(detector, 'none')) if figure else ''

        columns.append(Column(head, cell))
    return markdown_table(columns, there)


def draw(results: dict) -> None:
    """Draw a bar chart of GPU memory, with lines at the sizes of cards and measured bars hatched.

    Args:
        results (dict): Contents of the file of results.
    """
    from matplotlib.patches import Patch

    shown = [detector for detector in DETECTORS if detector.readme]
    values, ours = {key: row['needs'] / 1e9 for key, row in _by_case(results, 'count')}, measured_rows('step')
    figure, grid = panels(figsize=(9.6, 5.2))
    axes, height, longest = grid[0, 0], 0.16, 0
    for place, detector in enumerate(shown):
        for number, variant in enumerate(VARIANTS):
            y = place + (number - 2) * height
            row, published = ours.get((detector.head, variant)), detector.published.get(variant)
            value = used_bytes(row) / 1e9 if row else values[detector.head, variant]
            axes.barh(y, value, height * 0.9, color=COLOURS[number], edgecolor='white', hatch='////' if row else None)
            right = max(value, published or 0)
            longest = max(longest, right)
            note = f' (by its authors: {published:g})' if published else ''
            axes.text(right + 0.3, y, f'{value:.1f}{note}', va='center', fontsize=7)
            if published:
                axes.barh(y, published, height * 0.9, color='none', edgecolor='black')
    for card in CARDS:
        axes.axvline(card, color='#888888', linewidth=0.8, linestyle=':', zorder=0)
        axes.text(card, -0.62, f'{card} GB', ha='center', fontsize=8, color='#555555')
    axes.set(ylim=(len(shown) - 0.5, -0.7), xlim=(0, 1.15 * longest))
    axes.set_xlabel('GB of GPU memory that a training needs')
    axes.set_yticks(range(len(shown)), [detector.head.replace(', ', '\n', 1) for detector in shown])
    axes.tick_params(axis='y', labelsize=8)
    legend = [
        Patch(color=colour, label=head.strip('`')) for colour, head in zip(COLOURS, VARIANTS.values(), strict=False)
    ]
    legend.append(Patch(facecolor='#999999', edgecolor='white', hatch='////', label='measured on an H100'))
    legend.append(Patch(facecolor='none', edgecolor='black', label='measured by its authors'))
    save_picture(figure, PICTURE, legend=legend, columns=7, dpi=110)


def write() -> None:
    """Write the tables between their markers, and the picture."""
    results = json.loads(RESULTS.read_text())
    write_tables(tables(results))
    draw(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('action', choices=['count', 'measure', 'write'])
    parser.add_argument('--only', choices=sorted({detector.name for detector in DETECTORS}), help='one detector')
    args = parser.parse_args()
    write() if args.action == 'write' else fill(args.action, args.only)


if __name__ == '__main__':
    main()
