"""Compares counted with measured memory of a training step, for all configs of mmdet with a figure in their metafile.

    python research/zoo_memory.py                    # counts what docs/results/zoo_memory.json lacks, and goes on there
    python research/zoo_memory.py --only rtmdet dino # of configs whose names contain one of these
    python research/zoo_memory.py --report           # counts nothing: the table, docs/pictures/zoo_memory.png

"Training Memory (GB)" in ``metafile.yml`` is ``torch.cuda.max_memory_allocated`` of a whole training run in GiB, and so
that of its largest batch, on GPUs of OpenMMLab. The count is for the largest batch of the plain config.
"""

import argparse
import contextlib
import logging
import re
import time
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import mmdet
import numpy as np
import torch
import torch.nn.functional as F
import yaml
from isolated import read_rows, run_apart, sweep
from mmengine.config import Config
from mmengine.logging import MMLogger
from tables import markdown_table, panels, save_picture

from sbp_mmdet.plan.detector import measure_detector
from sbp_mmdet.plan.inputs import count_crowded_boxes, find_training_inputs
from sbp_mmdet.plan.planner import MARGIN, WORKSPACES
from sbp_mmdet.plan.tables import Column
from sbp_mmdet.plan.variants import load_config, make_plain

_HERE = Path(__file__).resolve().parents[1]
RESULTS = _HERE / 'docs/results/zoo_memory.json'
PICTURE = _HERE / 'docs/pictures/zoo_memory.png'
_SECONDS = 200  # at most, for one config
# Height and width of families whose pipeline needs a package that is not installed, as with `--size 800x1333`.
_SIZES = {'instaboost': (800, 1333)}


def read_published() -> dict[str, float]:
    """Return configs with a published figure: the first of each family, then the second ones, and so on."""
    root = Path(mmdet.__file__).parent / '.mim'
    families = []
    for file in sorted(root.glob('configs/*/metafile.yml')):
        models = yaml.load(file.read_text(), getattr(yaml, 'CSafeLoader', yaml.SafeLoader))
        figures = {}
        for model in models if isinstance(models, list) else models.get('Models') or []:
            memory = (model.get('Metadata') or {}).get('Training Memory (GB)')
            if memory and (root / model['Config']).exists():
                figures[model['Config'].removeprefix('configs/')] = float(memory)
        families.append(list(figures.items()))
    longest = max(map(len, families))
    return dict(family[i] for i in range(longest) for family in families if i < len(family))


def count(name: str) -> dict:
    """Return the bytes that the planner counts for a config."""
    start = time.process_time()
    config = with_sampler_of_then(make_plain(load_config(f'mmdet::{name}')))
    inputs = find_training_inputs(config, size=_SIZES.get(name.split('/')[0]))
    case = dict(batch=inputs.batch, height=inputs.height, width=inputs.width, boxes=count_crowded_boxes(inputs.batch))
    row = measure_detector(config, **case)
    keys = ('parameters', 'optimizer', 'gradients', 'saved', 'forward', 'peak', 'peak_phase', 'peaks')
    result = {key: row[key] for key in keys}
    reason = find_reason(name)
    if reason and reason.counted:
        as_measured = dict(case, batch=reason.batch or case['batch'], boxes=reason.boxes or case['boxes'])
        with torch_of_then() if reason.then else contextlib.nullcontext():
            result['explained'] = measure_detector(config, **as_measured)['peak']
    result.update(size=[inputs.batch, inputs.height, inputs.width], amp='Amp' in str(config.optim_wrapper.type))
    return dict(result, seconds=round(time.process_time() - start, 1))


def with_sampler_of_then(config: Config) -> Config:
    """Make batches contain images of one orientation only, as the sampler of mmdet 2 did.

    Most published figures were measured with mmdet 2, which filled each group of images up with images of the group. In
    mmdet 3, the images that remain of both groups at the end of an epoch share a batch, which is larger than any other.

    Args:
        config (Config): A config, changed in place.
    """
    if sampler := config.train_dataloader.get('batch_sampler'):
        sampler.drop_last = True
    return config


class Reason(NamedTuple):
    """Reason why the published figure of a family cannot be compared with the count.

    Attributes:
        text (str): Text for the reader.
        boxes (int | None): Number of boxes of its crowded images, if the data set is not COCO. Default: None.
        then (bool): Whether it was measured with a torch whose functions stored more, see :func:`torch_of_then`.
            Default: False.
        batch (int | None): Number of images that it was measured with, if the config has another one. Default: None.
    """

    text: str
    boxes: int | None = None
    then: bool = False
    batch: int | None = None

    @property
    def counted(self) -> bool:
        """Whether the step can be counted as it was measured."""
        return bool(self.boxes or self.then or self.batch)


_SOFTMAX = Reason('torch of that time stored the input of softmax, too', then=True)
_GROUP_NORM = Reason('torch of that time (early 2020) made group norm of batch norm and stored another map', then=True)
_BENCHMARK = Reason("measured with cudnn_benchmark=True: the workspaces of cuDNN's trials are not counted")
_TWO_IMAGES = Reason('likely measured with two images: twice as much as the same detector with R-50 and two', batch=2)
_OF_ANOTHER = Reason('the figure is larger than that of the whole SOLOv2 with larger images')
_SAME_MODEL = Reason('the figure of another model: its 1x config has the same one, and 9.2')
# Families, and single configs, that no margin is fitted on.
REASONS = {
    'condinst': Reason('a mask head for each box: fewer boxes than planned for', boxes=15),
    'empirical_attention': _SOFTMAX,
    'faster_rcnn/faster-rcnn_r50_fpn_amp-1x_coco.py': Reason('likely measured with the mixed precision of mmdet 2'),
    'fpg/retinanet_r50_fpg-chn128_crop640_50e_coco.py': _BENCHMARK,
    'fpg/retinanet_r50_fpg_crop640_50e_coco.py': _BENCHMARK,
    'foveabox/fovea_r101_fpn_4xb4-2x_coco.py': _SAME_MODEL,
    'gn': _GROUP_NORM,
    'gn+ws': _GROUP_NORM,
    'htc/htc_x101-32x4d_fpn_16xb1-20e_coco.py': _TWO_IMAGES,
    'htc/htc_x101-64x4d_fpn_16xb1-20e_coco.py': _TWO_IMAGES,
    'nas_fpn': _BENCHMARK,
    'objects365': Reason('likely: images with some 450 boxes, all compared with all anchors', boxes=450),
    'openimages/ssd300_32xb8-36e_openimages.py': _BENCHMARK,
    'openimages': Reason('likely: images with some 650 boxes, all compared with all anchors', boxes=650),
    'pvt': _SOFTMAX,
    'rtmdet/rtmdet-ins_x_8xb16-300e_coco.py': Reason('its name says 16 images a GPU, and it has 32'),
    'solov2/solov2-light_r18_fpn_ms-3x_coco.py': _OF_ANOTHER,
    'solov2/solov2-light_r50_fpn_ms-3x_coco.py': _OF_ANOTHER,
    'ssd': _BENCHMARK,
}


# Families whose weights with group norm are of March 2020 or older, by the names of their files.
_EARLY_2020 = ('fcos', 'foveabox', 'grid_rcnn', 'reppoints')


def find_reason(name: str) -> Reason | None:
    """Return why the figure of a config cannot be compared with the count, or None."""
    family, _, file = name.partition('/')
    normed = family in _EARLY_2020 and re.search('[-_]gn[-_]', file)
    return REASONS.get(name) or REASONS.get(family) or (_GROUP_NORM if normed else None)


@contextlib.contextmanager
def torch_of_then():
    """Make softmax store its input, and group norm the normalised map, as before torch 1.11, within the context."""

    def keeping(function, kept):
        def run(x, *args, **kwargs):
            result = function(x, *args, **kwargs)
            if result.grad_fn is not None:
                result.grad_fn.metadata['kept'] = kept(x)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for owner, name in ((F, 'softmax'), (torch, 'softmax'), (torch.Tensor, 'softmax'), (F, 'group_norm')):
            kept = torch.empty_like if name == 'group_norm' else lambda x: x
            stack.enter_context(mock.patch.object(owner, name, keeping(getattr(owner, name), kept)))
        yield


def margin(rows: dict[str, dict]) -> tuple[float, float]:
    """Fit the margin: the share and the constant, in bytes, that minimise the median relative error of the counts.

    It is fitted on families with even numbers. Kernels use workspaces, some of constant size and some as large as maps.
    """
    counted, published = _pairs(rows, fitted=True)
    grid = ((share / 100, add * 2**20) for share in range(0, 21) for add in range(0, 1025, 32))
    return min(grid, key=lambda m: np.mean(np.abs((counted * (1 + m[0]) + m[1]) / published - 1)))


def _pairs(rows, fitted):
    """Return counted and measured bytes of the families that the margin is fitted on (``fitted``) or of the others."""
    families = sorted({name.split('/')[0] for name in read_published()})
    chosen = [
        (row['peak'], row['measured'] * 2**30)
        for name, row in rows.items()
        if 'peak' in row and not find_reason(name)
        if (families.index(name.split('/')[0]) % 2 == 0) == fitted
    ]
    return np.array(chosen, float).T


_TICKS = [2, 4, 8, 16, 32, 64]  # of the picture, GiB


CARDS = (8, 12, 16, 24)  # GiB


def leading(rows: dict[str, dict]) -> list[str]:
    """Format the main results: the median error, and how many configs would wrongly be said to fit a card.

    Counts include the margin. The planner also adds CUDA's context and gaps between tensors, which published figures
    lack.
    """
    lines = []
    rows = {name: row for name, row in rows.items() if 'peak' in row}
    as_measured = {name: dict(row, peak=row.get('explained', row['peak'])) for name, row in rows.items()}
    for name, chosen in (
        ('all, as the planner counts them', list(rows.values())),
        ('all, counted as they were measured', list(as_measured.values())),
        (
            'the same without those measured with `cudnn_benchmark=True`, which the planner turns off',
            [row for key, row in as_measured.items() if find_reason(key) is not _BENCHMARK],
        ),
        ('without a reason below', [row for key, row in rows.items() if not find_reason(key)]),
    ):
        counted = np.array([row['peak'] * (1 + MARGIN) + WORKSPACES for row in chosen]) / 2**30
        published = np.array([row['measured'] for row in chosen])
        error = np.abs(counted / published - 1)
        wrong = [np.mean((counted <= card) & (published > card)) for card in CARDS]
        lines.append(
            f'- {len(chosen)} configs, {name}: median error {np.median(error):.1%}, within 15 %: '
            f'{np.mean(error <= 0.15):.0%}. Predicted to fit although they do not: '
            + ', '.join(f'{share:.1%} at {card} GiB' for card, share in zip(CARDS, wrong, strict=True))
            + '.'
        )
    return lines


def report(rows: dict[str, dict]) -> str:
    """Format the table of families, with the errors of the counts including the margin."""
    share, add = MARGIN, WORKSPACES

    def ratios(members, key):
        return [(row[key] * (1 + share) + add) / row['measured'] / 2**30 for row in members if key in row]

    best, more = margin(rows)
    lines = [
        f'Margin of the planner: {share:.0%} and {add / 2**20:.0f} MiB, fitted on every second family; by the results '
        f'as they stand it would be {best:.0%} and {more / 2**20:.0f} MiB.',
        '',
    ]
    for fitted, name in ((True, 'fitted'), (False, 'not fitted')):
        counted, published = _pairs(rows, fitted)
        error = (counted * (1 + share) + add) / published - 1
        lines.append(
            f'- families {name}: {len(error)} configs, median error {np.median(np.abs(error)):.1%}, '
            f'within 15 %: {np.mean(np.abs(error) <= 0.15):.0%}, below 0.85: {np.sum(error < -0.15)}'
        )
    families = {}
    for name, row in rows.items():
        families.setdefault(name.split('/')[0], {})[name] = row
    records = []
    for family, members in sorted(families.items()):
        notes = sorted({row['error'] for row in members.values() if 'error' in row})
        if reason := REASONS.get(family):
            with_it = ratios(members.values(), 'explained')
            notes.insert(0, reason.text + (f'; with that {np.median(with_it):.2f}' if with_it else ''))
        notes += [f'{Path(name).stem}: {REASONS[name].text}' for name in members if name in REASONS]
        members = members.values()
        records.append(dict(family=family, n=len(members), ratios=ratios(members, 'peak'), note='; '.join(notes)))
    columns = [
        Column('family', lambda r: r['family']),
        Column('configs', lambda r: str(r['n'])),
        Column('counted / measured, median', lambda r: f'{np.median(r["ratios"]):.2f}' if r['ratios'] else None),
        Column('least', lambda r: f'{min(r["ratios"]):.2f}' if r['ratios'] else None),
        Column('most', lambda r: f'{max(r["ratios"]):.2f}' if r['ratios'] else None),
        Column('', lambda r: r['note']),
    ]
    return '\n'.join([*lines, '', markdown_table(columns, records)])


RECIPES = (
    'mask2former/mask2former_swin-s-p4-w7-224_8xb2-lsj-50e_coco-panoptic',
    'rtmdet/rtmdet_tiny_8xb32-300e_coco',
    'rtmdet/rtmdet_s_8xb32-300e_coco',
    'rtmdet/rtmdet_l_8xb32-300e_coco',
    'yolox/yolox_s_8xb8-300e_coco',
    'yolox/yolox_l_8xb8-300e_coco',
    'swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco',
    'swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco',
    'swin/mask-rcnn_swin-s-p4-w7_fpn_amp-ms-crop-3x_coco',
    'convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco',
    'convnext/cascade-mask-rcnn_convnext-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco',
    'convnext/cascade-mask-rcnn_convnext-s-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco',
)  # the recipes that users take most


def report_recipes(rows: dict[str, dict]) -> str:
    """Format the table of some recipes: measured, counted, and the ratio with the margin."""

    def ratio(name):
        row = rows[f'{name}.py']
        return f'{(row["peak"] * (1 + MARGIN) + WORKSPACES) / 2**30 / row["measured"]:.2f}'

    columns = [
        Column('config', lambda name: name.partition('/')[2]),
        Column('measured, GB', lambda name: str(rows[f'{name}.py']['measured'])),
        Column('counted, GiB', lambda name: f'{rows[f"{name}.py"]["peak"] / 2**30:.2f}'),
        Column('counted with the margin / measured', ratio),
    ]
    return markdown_table(columns, RECIPES)


def picture(rows: dict[str, dict], file: Path) -> None:
    """Draw counts including the margin against measurements, one dot for each config."""
    share, add = MARGIN, WORKSPACES
    figure, ((axes,),) = panels(figsize=(5, 5))
    for fitted, colour, label in ((True, '#1f77b4', 'fitted'), (False, '#d95f02', 'not fitted')):
        counted, published = _pairs(rows, fitted) / 2**30
        axes.loglog(published, counted * (1 + share) + add / 2**30, '.', color=colour, label=f'families {label}')
    ends = np.array([1.5, 80])
    axes.plot(ends, ends, color='#444444', linewidth=1)
    axes.fill_between(ends, ends * 0.85, ends * 1.15, color='#444444', alpha=0.1)
    axes.set(xlabel='measured, GiB', ylabel='counted, GiB')
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(_TICKS, map(str, _TICKS))
        axis.set_ticks([], minor=True)
    axes.legend()
    save_picture(figure, file, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', help='count configs whose names contain one of these')
    parser.add_argument('--again', action='store_true', help='repeat existing counts, too')
    parser.add_argument('--report', action='store_true', help='count nothing, write table and picture')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    MMLogger.get_current_instance().setLevel(logging.ERROR)
    rows, figures = read_rows(RESULTS), read_published()
    chosen = [name for name in figures if not args.only or any(word in name for word in args.only)]
    if not args.report:
        chosen = [name for name in chosen if args.again or name not in rows]
        rows = sweep(
            RESULTS, chosen, lambda name: dict(measured=figures[name], **run_apart(count, name, seconds=_SECONDS))
        )
    print(*leading(rows), '', report(rows), sep='\n')
    picture(rows, PICTURE)


if __name__ == '__main__':
    main()
