"""Compares the counted bytes of a training step with the growth of a process's resident set, for ten detectors.

    python research/counted_and_resident.py      # measures what docs/results/counted_and_resident.json lacks; Linux
    python research/document_tables.py           # writes the table of docs/research/zoo_memory.md

Both are of the same step on a CPU, in fp32, with one image of 480 x 640 and 15 boxes. The planner's counter adds up the
tensors of the step. The operating system also sees what kernels allocate inside of an operation, and pages that stay
with the process.
"""

from isolated import read_rows, sweep
from provenance import CHECKOUT, commit
from resident_memory import measure_lift
from tables import markdown_table

from sbp_mmdet.plan.tables import Column

RESULTS = CHECKOUT / 'docs/results/counted_and_resident.json'
DETECTORS = {
    'Mask R-CNN R-50': 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'RetinaNet R-50': 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py',
    'RTMDet-S': 'mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py',
    'YOLOX-S': 'mmdet::yolox/yolox_s_8xb8-300e_coco.py',
    'DINO R-50': 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Deformable DETR R-50': 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'Mask R-CNN Swin-T': 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py',
    'Mask R-CNN ConvNeXt-T': 'configs/sbp_convnext/mask-rcnn_convnext-t_fpn_amp-ms-crop-3x_coco.py',
    'Mask R-CNN ViT-B': 'configs/sbp_vit/mask-rcnn_vit-b_fpn_amp-ms-crop-3x_coco.py',
    'ATSS R-50': 'mmdet::atss/atss_r50_fpn_1x_coco.py',
}
VARIANTS = {'none': 'plain', 'with_cp+targets': 'checkpointing', 'exact': '`exact`', 'int8': '`int8`'}
_CASE = dict(batch=1, size=(480, 640), boxes=15)


def row_of(key: str) -> dict:
    """Count and measure a step of a detector with a preset.

    Args:
        key (str): Detector and preset, separated by '/'.

    Returns:
        dict: ``measured`` and ``counted`` in MB, or ``error`` with the last output of a process that failed.
    """
    name, variant = key.split('/')
    path = DETECTORS[name]
    config = path if '::' in path else str(CHECKOUT / path)
    try:
        measured, counted = (measure_lift(config, variant, **_CASE, counted=counted) for counted in (False, True))
    except RuntimeError as error:
        return dict(error=str(error)[-300:])
    return dict(measured=measured, counted=counted, **commit())


def report(rows: dict[str, dict]) -> str:
    """Return the table: measured memory of the plain step; by preset, counted / measured and the difference."""
    names = [name for name in DETECTORS if all('counted' in rows.get(f'{name}/{v}', {}) for v in VARIANTS)]
    columns = [
        Column('detector', str),
        Column('plain, measured', lambda name: f'{rows[f"{name}/none"]["measured"]:,.0f} MB'),
    ]
    for variant, head in VARIANTS.items():

        def cell(name, variant=variant):
            row = rows[f'{name}/{variant}']
            return f'{row["counted"] / row["measured"]:.2f} ({row["measured"] - row["counted"]:.0f} MB)'

        columns.append(Column(head, cell))
    return markdown_table(columns, names)


def main():
    """Measure the rows that the file lacks."""
    rows = read_rows(RESULTS)
    wanted = [f'{name}/{variant}' for name in DETECTORS for variant in VARIANTS]
    print(report(sweep(RESULTS, [key for key in wanted if key not in rows], row_of)))


if __name__ == '__main__':
    main()
