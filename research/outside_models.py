"""Detectors from outside of mmdet: one training step as it is and with ``LeanHook``, and the memory of a recipe's step.

    python research/outside_models.py FOLDER --json docs/results/outside_models.json
    python research/outside_models.py FOLDER --json docs/results/outside_models.json --report   # runs nothing

FOLDER contains the public sources, which are not part of this project: ``mmdet`` (``projects`` and ``configs`` of
VBTI-development/onedl-mmdetection), ``mmyolo`` (``mmyolo`` and ``configs`` of open-mmlab/mmyolo) and ``mmrotate``
(``mmrotate`` and ``configs`` of open-mmlab/mmrotate, branch 1.x). The configs are the stock ones. Losses and gradients
are compared on small images, in fp64 where a detector knows it; large backbones and transformers have fewer layers for
that. Memory is counted under the rules of CUDA, for two images of the recipe's size, in the recipe's precision. Each
detector runs in a process of its own. Goes on where the results end; --again NAME runs some anew.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from families import compare, count
from isolated import read_rows, run_apart, sweep
from outside_sources import sources
from tables import format_bytes, markdown_table

from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import load_config
from sbp_mmdet.presets import PRESETS

VARIANTS = tuple(name for name in ('none', 'with_cp', 'exact', 'exact_min', 'int8') if name in PRESETS)
IMAGES = 2  # of a counted batch, or those of the recipe if they are fewer
SECONDS = 1800  # of CPU, for a step of a detector, or its count


class Outside(NamedTuple):
    """A detector from outside.

    Attributes:
        config (str): Path of its config in the folder of sources.
        options (dict): Overrides of the config, for what cannot run here. Default: {}.
        shrunk (dict): Further overrides where losses and gradients are compared. Default: {}.
        size (tuple[int, int]): Height and width of the counted images. Default: (800, 1333).
        step (tuple[int, int]): Height and width of the images of a step. Default: (128, 160).
        double (bool): Whether the detector can train in fp64. Default: True.
    """

    config: str
    options: dict = {}
    shrunk: dict = {}
    size: tuple[int, int] = (800, 1333)
    step: tuple[int, int] = (128, 160)
    double: bool = True


def _yolo(path):
    augments = 'model.data_preprocessor.batch_augments'
    options, shrunk = {augments: None}, {}
    if 'ppyoloe' in path:  # its preprocessor needs one, which resizes to a random size
        options, shrunk = ({augments: [dict(_PPYOLOE_RESIZE, random_size_range=(n, n))]} for n in (640, 128))
    return Outside(f'mmyolo/configs/{path}', options, shrunk, size=(640, 640), step=(128, 128))


_PPYOLOE_RESIZE = dict(
    type='PPYOLOEBatchRandomResize', interval=1, size_divisor=32, random_interp=True, keep_ratio=False
)


def _project(path, **keys):
    return Outside(f'mmdet/projects/{path}', **keys)


def _stock(path, **keys):
    return Outside(f'mmdet/configs/{path}', **keys)


def _rotated(path, **keys):
    return Outside(f'mmrotate/configs/{path}', size=(1024, 1024), **keys)


_NO_PADDING = {'model.data_preprocessor.batch_augments': None}  # to 1024 x 1024
_FEW_ROIS = {'model.train_cfg.rcnn.sampler.num': 16}
_SWIN = {'model.backbone.depths': [1, 1, 2, 1]}
TEXT = {'model.language_model': dict(_delete_=True, type='TextStandIn')}
_LAYERS = {'model.encoder.num_layers': 2, 'model.decoder.num_layers': 2}
_QUERIES = {'model.num_queries': 100, **_LAYERS}  # a step's images have too few tokens for 900
_CO_LAYERS = {f'model.query_head.transformer.{part}.num_layers': 2 for part in ('encoder', 'decoder')}
_CO_LAYERS['model.train_cfg.1.rcnn.sampler.num'] = 16
# Dropout draws other numbers where a map is cut into chunks.
_SMALL_TEXT = {'model.language_model.depth': 2, 'model.encoder.fusion_layer_cfg.dropout': 0.0, **_QUERIES}
# mmcv computes the gradient of the IoU of rotated boxes on GPUs alone.
_NO_ROTATED_IOU = {'model.bbox_head.loss_bbox': dict(_delete_=True, type='GDLoss', loss_type='gwd', loss_weight=2.0)}
_CO_DETR = 'CO-DETR/configs/codino/co_dino_5scale'
_EFFICIENT = 'EfficientDet/configs/efficientdet'

MODELS = {
    'Co-DETR R-50': _project(f'{_CO_DETR}_r50_8xb2_1x_coco.py', shrunk=_CO_LAYERS),
    'Co-DETR R-50, LSJ': _project(
        f'{_CO_DETR}_r50_lsj_8xb2_1x_coco.py', shrunk=_NO_PADDING | _CO_LAYERS, size=(1024, 1024)
    ),
    'Co-DETR Swin-L': _project(f'{_CO_DETR}_swin_l_16xb1_1x_coco.py', shrunk=_SWIN | _CO_LAYERS),
    'Grounding DINO Swin-T': _stock(
        'grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco.py', options=TEXT, shrunk=_SMALL_TEXT
    ),
    'Grounding DINO R-50': _stock(
        'grounding_dino/grounding_dino_r50_scratch_8xb2_1x_coco.py', options=TEXT, shrunk=_SMALL_TEXT
    ),
    'MM-Grounding-DINO Swin-T': _stock(
        'mm_grounding_dino/coco/grounding_dino_swin-t_finetune_16xb4_1x_coco.py', options=TEXT, shrunk=_SMALL_TEXT
    ),
    'ViTDet-B': _project(
        'ViTDet/configs/vitdet_mask-rcnn_vit-b-mae_lsj-100e.py',
        shrunk=_NO_PADDING | {'model.backbone.depth': 4},
        size=(1024, 1024),
    ),
    'DiffusionDet R-50': _project(
        'DiffusionDet/configs/diffusiondet_r50_fpn_500-proposals_1-step_crop-ms-480-800-450k_coco.py'
    ),
    'Sparse R-CNN R-50': _stock('sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py'),
    'QueryInst R-50': _stock('queryinst/queryinst_r50_fpn_1x_coco.py'),
    'EfficientDet-B0': _project(f'{_EFFICIENT}_effb0_bifpn_8xb16-crop512-300e_coco.py', size=(512, 512)),
    'EfficientDet-B3': _project(f'{_EFFICIENT}_effb3_bifpn_8xb16-crop896-300e_coco.py', size=(896, 896)),
    'SSD300': _stock('ssd/ssd300_coco.py', size=(300, 300), step=(300, 300)),
    'SSD512': _stock('ssd/ssd512_coco.py', size=(512, 512), step=(512, 512)),
    'SSDLite': _stock('ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py', size=(320, 320), step=(320, 320)),
    'AlignDETR R-50': _project('AlignDETR/configs/align_detr-4scale_r50_8xb2-12e_coco.py', shrunk=_QUERIES),
    'H-DINO R-50': _project('HDINO/h-dino-4scale_r50_8xb2-12e_coco.py', shrunk=_QUERIES),
    'SparseInst R-50': _project('SparseInst/configs/sparseinst_r50_iam_8xb8-ms-270k_coco.py'),
    'YOLOv5-s': _yolo('yolov5/yolov5_s-v61_syncbn_fast_8xb16-300e_coco.py'),
    'YOLOv6-s': _yolo('yolov6/yolov6_s_syncbn_fast_8xb32-400e_coco.py'),
    'YOLOv6 v3-s': _yolo('yolov6/yolov6_v3_s_syncbn_fast_8xb32-300e_coco.py'),
    'YOLOv7-tiny': _yolo('yolov7/yolov7_tiny_syncbn_fast_8x16b-300e_coco.py'),
    'YOLOv7-l': _yolo('yolov7/yolov7_l_syncbn_fast_8x16b-300e_coco.py'),
    'YOLOv8-s': _yolo('yolov8/yolov8_s_syncbn_fast_8xb16-500e_coco.py'),
    'PPYOLOE+-s': _yolo('ppyoloe/ppyoloe_plus_s_fast_8xb8-80e_coco.py'),
    'RTMDet-s, mmyolo': _yolo('rtmdet/rtmdet_s_syncbn_fast_8xb32-300e_coco.py'),
    'YOLOX-s, mmyolo': _yolo('yolox/yolox_s_fast_8xb8-300e_coco.py'),
    'Rotated RetinaNet R-50': _rotated('rotated_retinanet/rotated-retinanet-rbox-le90_r50_fpn_1x_dota.py'),
    'Rotated FCOS R-50, KLD': _rotated('rotated_fcos/rotated-fcos-le90_r50_fpn_kld_1x_dota.py'),
    'RTMDet-R s': _rotated('rotated_rtmdet/rotated_rtmdet_s-3x-dota.py', options=_NO_ROTATED_IOU),
    'Oriented R-CNN R-50': _rotated('oriented_rcnn/oriented-rcnn-le90_r50_fpn_1x_dota.py', shrunk=_FEW_ROIS),
    'RoI Transformer R-50': _rotated('roi_trans/roi-trans-le90_r50_fpn_1x_dota.py'),
    'S2A-Net R-50': _rotated('s2anet/s2anet-le135_r50_fpn_1x_dota.py'),
}


def _computed(compute, folder, name, shrunk, *args):
    """Run a function with a detector's config while its sources can be imported."""
    model = MODELS[name]
    with sources(folder, model.config):
        config = load_config(str(folder / model.config), {**model.options, **(model.shrunk if shrunk else {})})
        return compute(config, *args)


def run(folder: Path, name: str, before: dict) -> dict:
    """Return the row of a detector: how far apart the two steps are, and the memory of its recipe.

    Args:
        folder (Path): The sources.
        name (str): A key of ``MODELS``.
        before (dict): What was found before.
    """
    model, plan = MODELS[name], before.get('plan', {})
    row = before if 'loss_error' in before else {}
    if 'peaks' not in plan:
        plan = run_apart(_computed, count, folder, name, False, VARIANTS, model.size, IMAGES, seconds=SECONDS)
    if 'loss_error' not in row:
        for double in (True, False) if model.double else (False,):
            why = row.get('untried') or row.get('error')
            row = run_apart(_computed, compare, folder, name, True, double, model.step, seconds=SECONDS)
            if why and not double:
                row['no_fp64'] = why
            if 'loss_error' in row:
                break
    return dict(row, config=model.config, plan=plan)


def report(rows: dict[str, dict]) -> str:
    """Return the table of all detectors."""

    def share(key, variant):
        def cell(row):
            values = row.get('plan', {}).get(key, {})
            return f'{values[variant] / values["none"]:.2f}' if variant in values else None

        return cell

    def error(key):
        return lambda row: f'{row[key]:.0e}' if key in row else None

    others = VARIANTS[1:]
    columns = [
        Column('model', lambda row: row['name']),
        Column('precision', lambda row: ('fp64' if row['fp64'] else 'fp32') if 'fp64' in row else None),
        Column('loss, error', error('loss_error')),
        Column('gradients, error', error('gradient_error')),
        Column('plain peak', lambda row: _bytes(row, 'peaks')),
        *(Column(f'`{variant}`', share('peaks', variant)) for variant in others),
        Column('plain stored', lambda row: _bytes(row, 'stored')),
        *(Column(f'`{variant}` ', share('stored', variant)) for variant in others),
        Column('what stopped it here', _obstacle),
    ]
    return markdown_table(columns, [dict(rows[name], name=name) for name in MODELS if name in rows])


def _obstacle(row):
    return (row.get('untried') or row.get('error') or row.get('plan', {}).get('error') or '')[:90]


def _bytes(row, key):
    values = row.get('plan', {}).get(key, {})
    return format_bytes(values['none']) if 'none' in values else None


def main():
    """Run what is missing in the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='the sources')
    parser.add_argument('--json', type=Path, required=True, help='file of results; existing ones are kept')
    parser.add_argument('--again', nargs='+', default=[], metavar='NAME', help='repeat these')
    parser.add_argument('--only', nargs='+', metavar='NAME', help='run no others')
    parser.add_argument('--report', action='store_true', help='run nothing, print the table')
    args = parser.parse_args()
    rows = read_rows(args.json)
    if not args.report:
        before = {name: row for name, row in rows.items() if name not in args.again}
        chosen = [n for n in args.only or MODELS if 'peaks' not in before.get(n, {}).get('plan', {})]
        rows = sweep(args.json, chosen, lambda name: run(args.folder, name, before.get(name, {})))
    print(report(rows))


if __name__ == '__main__':
    main()
