"""Draw predictions beside ground truth, for any mmdet config whose validation set is in COCO format.

python tools/analysis_tools/show_predictions.py CONFIG CHECKPOINT [CHECKPOINT ...] --out predictions.png
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import mmcv
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.patches import Patch, Rectangle
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import DATASETS
from pycocotools import mask as mask_utils

from sbp_mmdet.analysis.device import check_device
from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.reporting import output_file, panels, save_picture

sys.path[:0] = [str(Path(__file__).parents[1])]
from checkpoints import check_checkpoint  # noqa: E402
from preflight import check_config  # noqa: E402

__all__ = ['draw_objects', 'ground_truth', 'predictions', 'show_predictions']


def ground_truth(info):
    """Objects of one image as the data set describes them.

    Args:
        info (dict): what `CocoDataset.get_data_info` returns.

    Returns:
        list[tuple]: `(label, box, mask or None, score or None)`; box x1, y1, x2, y2.
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


def predictions(sample, threshold):
    """Predicted objects at or above a score, in the form of `ground_truth`.

    Args:
        sample (DetDataSample): what `inference_detector` returns.
        threshold (float): lowest score.
    """
    found = sample.pred_instances[sample.pred_instances.scores >= threshold].cpu().numpy()
    masks = found.masks if 'masks' in found else [None] * len(found)
    return list(zip(found.labels, found.bboxes, masks, found.scores, strict=True))


def draw_objects(axes, image, objects, colours):
    """Draw masks, boxes and, where there are any, scores over an image.

    Args:
        axes (matplotlib.axes.Axes): where to draw.
        image (numpy.ndarray): RGB, (H, W, 3).
        objects (list[tuple]): as `ground_truth` returns them.
        colours (numpy.ndarray): one RGB colour in 0..1 per class.
    """
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
    axes.set_axis_off()


def show_predictions(config, checkpoints, out, num=6, threshold=0.5, device='cpu'):
    """Write a picture: `num` validation images, for each the ground truth and the prediction of each checkpoint.

    Args:
        config (Config): of mmdet.
        checkpoints (dict[str, str]): title to checkpoint; one, or several models side by side.
        out (str | Path): picture to write.
        num (int): number of images, spread over the set. Defaults to 6.
        threshold (float): lowest score that is drawn. Defaults to 0.5.
        device (str): where the model runs. Defaults to 'cpu'.
    """
    models = [init_detector(config, checkpoint, device=device) for checkpoint in checkpoints.values()]
    titles = ('ground truth', *checkpoints)
    dataset = DATASETS.build(dict(config.val_dataloader.dataset, test_mode=True))
    names = dataset.metainfo['classes']
    colours = matplotlib.colormaps['tab10' if len(names) <= 10 else 'gist_rainbow']
    colours = np.array([colours(i if len(names) <= 10 else i / len(names))[:3] for i in range(len(names))])
    num = min(num, len(dataset))
    columns = 2 if num > 1 else 1  # images side by side
    rows = -(-num // columns)
    width = len(titles)
    figure, grid = panels(rows, width * columns, figsize=(2.5 * width * columns, 2.6 * rows))
    shown = set()
    indices = np.linspace(0, len(dataset) - 1, num).round().astype(int).tolist()
    for group, index in zip(grid.reshape(-1, width), indices, strict=False):
        info = dataset.get_data_info(index)
        image = mmcv.imread(info['img_path'], channel_order='rgb')
        found = [predictions(inference_detector(model, info['img_path']), threshold) for model in models]
        for axes, objects, title in zip(group, (ground_truth(info), *found), titles, strict=True):
            draw_objects(axes, image, objects, colours)
            if group[0].get_subplotspec().is_first_row():
                axes.set_title(title, fontsize=9)
            shown.update(int(label) for label, *_ in objects)
    for axes in grid.flat:
        axes.set_axis_off()
    handles = [Patch(color=colours[label], label=names[label]) for label in sorted(shown)[:20]]
    save_picture(figure, out, legend=handles, columns=10, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help='several are drawn side by side')
    parser.add_argument('--out', type=output_file, required=True, help='picture to write')
    parser.add_argument('--num', type=int, default=6, help='number of validation images (default 6)')
    parser.add_argument('--score-thr', type=float, default=0.5, help='lowest score that is drawn (default 0.5)')
    parser.add_argument('--device', type=check_device, default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args()
    if args.num < 1:
        parser.error(f'--num {args.num} must be 1 or more')
    try:
        config = load_config(args.config)
        check_config(config, ('val',))
        for checkpoint in args.checkpoints:
            check_checkpoint(checkpoint, 'CHECKPOINT', config, all_weights=True)
    except ValueError as error:
        parser.error(str(error))
    names = [Path(path).parent.name for path in args.checkpoints] if args.checkpoints[1:] else ['prediction']
    if len(set(names)) < len(names):
        parser.error(f'the folders of the checkpoints must have different names, not {names}')
    checkpoints = dict(zip(names, args.checkpoints, strict=True))
    show_predictions(config, checkpoints, args.out, args.num, args.score_thr, args.device)


if __name__ == '__main__':
    main()
