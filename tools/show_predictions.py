"""Draw predictions beside ground truth, for any mmdet config whose validation set is in COCO format.

python tools/show_predictions.py CONFIG CHECKPOINT [CHECKPOINT ...] --out predictions.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use('Agg')

import matplotlib.pyplot as plt  # noqa: E402
import mmcv  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from checkpoints import check_checkpoint  # noqa: E402
from matplotlib import patheffects  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402
from mmdet.apis import inference_detector, init_detector  # noqa: E402
from mmdet.registry import DATASETS  # noqa: E402
from preflight import check_config, load_config  # noqa: E402
from pycocotools import mask as mask_utils  # noqa: E402

__all__ = ['ground_truth', 'show_predictions']


def ground_truth(info: dict) -> list[tuple]:
    """Objects of one image as the data set describes them.

    Returns:
        list[tuple]: (label, box, mask or None, score or None); box x1, y1, x2, y2.
    """
    objects = []
    for instance in info['instances']:
        mask = instance.get('mask')
        if isinstance(mask, list):  # polygons
            mask = mask_utils.merge(mask_utils.frPyObjects(mask, info['height'], info['width']))
        elif mask is not None and isinstance(mask['counts'], list):  # run lengths, not compressed
            mask = mask_utils.frPyObjects(mask, info['height'], info['width'])
        mask = None if mask is None else mask_utils.decode(mask).astype(bool)
        objects.append((instance['bbox_label'], instance['bbox'], mask, None))
    return objects


def _predictions(sample, threshold):
    found = sample.pred_instances[sample.pred_instances.scores >= threshold].cpu().numpy()
    masks = found.masks if 'masks' in found else [None] * len(found)
    return list(zip(found.labels, found.bboxes, masks, found.scores, strict=True))


def _draw(axes, image, objects, colours):
    """Masks, boxes and, where there are any, scores over an RGB image."""
    picture = image / 255
    for label, _, mask, _ in objects:
        if mask is not None:
            picture[mask] = 0.5 * picture[mask] + 0.5 * colours[label]
    axes.imshow(picture)
    rim = [patheffects.withStroke(linewidth=2.4, foreground='white')]  # any colour stands out on any image
    for label, (x1, y1, x2, y2), _, score in objects:
        box = Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1, y2 - y1, fill=False, color=colours[label], lw=1.2)
        axes.add_patch(box).set_path_effects(rim)
        if score is not None:
            tag = dict(facecolor=colours[label], edgecolor='none', pad=0.6)
            axes.text(x1, y1, f'{score:.2f}', fontsize=6, color='white', va='bottom', bbox=tag)


def show_predictions(config, checkpoints: dict[str, str], out: Path, num=6, threshold=0.5, device='cpu') -> None:
    """Writes a picture: for some validation images the ground truth and the prediction of each checkpoint."""
    models = [init_detector(config, checkpoint, device=device) for checkpoint in checkpoints.values()]
    dataset = DATASETS.build(dict(config.val_dataloader.dataset, test_mode=True))
    names = dataset.metainfo['classes']
    tones = matplotlib.colormaps['tab10' if len(names) <= 10 else 'gist_rainbow']
    colours = np.array([tones(i if len(names) <= 10 else i / len(names))[:3] for i in range(len(names))])
    num, width = min(num, len(dataset)), 1 + len(models)
    columns = 2 if num > 1 else 1  # images side by side
    size = 2.5 * width * columns, 2.6 * -(-num // columns)
    figure, grid = plt.subplots(-(-num // columns), width * columns, squeeze=False, figsize=size, layout='constrained')
    shown = set()
    indices = np.linspace(0, len(dataset) - 1, num).round().astype(int).tolist()
    for group, index in zip(grid.reshape(-1, width), indices, strict=False):
        info = dataset.get_data_info(index)
        image = mmcv.imread(info['img_path'], channel_order='rgb')
        found = [_predictions(inference_detector(model, info['img_path']), threshold) for model in models]
        titles = ('ground truth', *checkpoints) if group[0].get_subplotspec().is_first_row() else [''] * width
        for axes, objects, title in zip(group, (ground_truth(info), *found), titles, strict=True):
            _draw(axes, image, objects, colours)
            axes.set_title(title, fontsize=9)
            shown.update(int(label) for label, *_ in objects)
    for axes in grid.flat:
        axes.set_axis_off()
    handles = [Patch(color=colours[label], label=names[label]) for label in sorted(shown)[:20]]
    if handles:
        figure.legend(handles=handles, loc='outside lower center', ncols=10, fontsize=8, frameon=False)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help='several are drawn side by side')
    parser.add_argument('--out', type=Path, required=True, help='picture to write')
    parser.add_argument('--num', type=int, default=6, help='number of validation images (default: 6)')
    parser.add_argument('--score-thr', type=float, default=0.5, help='lowest score that is drawn (default: 0.5)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    try:
        config = load_config(args.config)
        check_config(config, ('val',))
        for checkpoint in args.checkpoints:
            check_checkpoint(checkpoint, 'CHECKPOINT', config, all_weights=True)
        names = [Path(path).parent.name for path in args.checkpoints] if args.checkpoints[1:] else ['prediction']
        if args.num < 1 or len(set(names)) < len(names):
            raise ValueError(f'--num {args.num} must be 1 or more, and folders of checkpoints differ in name: {names}')
    except ValueError as error:
        parser.error(str(error))
    checkpoints = dict(zip(names, args.checkpoints, strict=True))
    show_predictions(config, checkpoints, args.out, args.num, args.score_thr, args.device)


if __name__ == '__main__':
    main()
