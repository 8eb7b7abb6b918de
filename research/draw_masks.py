"""Draw keep masks over an image: the base mask and those of stages 1 to 3, dropped positions dimmed.

    python research/draw_masks.py --image a.jpg --out a.png --sampler grid --steps 3
    python research/draw_masks.py --image a.jpg --out a.png --sampler grid random --steps 5 --base-only

With --base-only the base masks of successive steps stand side by side, one row for each sampler (the paper's figure of
five iterations, in its appendix), with the share of positions that were kept in any step so far.
"""

import argparse
import sys
from pathlib import Path

import mmcv
import numpy as np
from tables import panels, save_picture

from sbp_mmdet.masks import SAMPLERS, mask_generator, stage_masks
from sbp_mmdet.plan.tables import output_file

STRIDES = (4, 8, 16)  # of stages 1 to 3
TONES = np.array([(245, 245, 245), (70, 110, 160)], np.uint8)  # of the base mask: dropped, kept


def dim(image, mask, stride):
    """An image with dropped positions faded, and rows and columns that no position covers."""
    kept = np.zeros(image.shape[:2], bool)
    covered = mask.repeat(stride, axis=0).repeat(stride, axis=1)
    kept[: covered.shape[0], : covered.shape[1]] = covered
    return np.where(kept[..., None], image, 0.25 * image + 0.75 * 245).round().astype(np.uint8)


def show(axes, picture, mask, title, stride=None):
    """A picture with lines between the positions of a mask, where these are few enough."""
    height, width = mask.shape
    sides = (picture.shape[1] / stride, picture.shape[0] / stride) if stride else (width, height)
    axes.imshow(picture, interpolation='nearest', extent=(0, sides[0], sides[1], 0))
    if max(mask.shape) <= 80:
        axes.hlines(range(height + 1), 0, width, color='black', lw=0.25)
        axes.vlines(range(width + 1), 0, height, color='black', lw=0.25)
    axes.set_title(title, fontsize=9)


def draw_masks(image, out, keep_ratio=0.5, samplers=('grid',), steps=1, base_only=False):
    """Writes a picture: one row for each step and sampler, or with ``base_only`` for each sampler."""
    height, width = image.shape[:2]
    draws = [(step, sampler) for step in range(steps) for sampler in samplers]
    shape = (len(samplers), steps) if base_only else (len(draws), 2 + len(STRIDES))
    figure, grid = panels(*shape, figsize=(2.2 * shape[1], (2.2 * height / width + 0.3) * shape[0]))
    visited = dict.fromkeys(samplers, False)
    sizes = [(height // stride, width // stride) for stride in STRIDES]
    for number, (step, sampler) in enumerate(draws):
        masks = [mask.numpy() for mask in stage_masks(sizes, keep_ratio, sampler, mask_generator(0, 0, step))]
        base = masks[0][:: STRIDES[-1] // STRIDES[0], :: STRIDES[-1] // STRIDES[0]]
        visited[sampler] = visited[sampler] | base
        name = f'{sampler}, step {step + 1}'
        if base_only:
            title = f'{name}: {visited[sampler].mean():.0%} visited'
            show(grid[samplers.index(sampler), step], TONES[base.astype(int)], base, title)
            continue
        row = grid[number]
        row[0].imshow(image)
        row[0].set_title(name, fontsize=9)
        show(row[1], TONES[base.astype(int)], base, f'base mask, {base.mean():.0%} kept')
        for stage, (axes, mask, stride) in enumerate(zip(row[2:], masks, STRIDES, strict=True), 1):
            show(axes, dim(image, mask, stride), mask, f'stage {stage}: {mask.shape[0]} x {mask.shape[1]}', stride)
    for axes in grid.flat:
        axes.set_axis_off()
    save_picture(figure, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--image', required=True, help='image to draw over')
    parser.add_argument('--out', type=output_file, required=True, help='picture to write')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='default: 0.5')
    parser.add_argument('--sampler', choices=SAMPLERS, nargs='+', default=['grid'], help='one or both (default: grid)')
    parser.add_argument('--steps', type=int, default=1, help='training steps (default: 1)')
    parser.add_argument('--base-only', action='store_true', help='base masks side by side, one row for each sampler')
    args = parser.parse_args()
    image = mmcv.imread(args.image, channel_order='rgb') if Path(args.image).is_file() else None
    if image is None or min(image.shape[:2]) < 32 or args.steps < 1:
        sys.exit(f'error: --image {args.image} must be an image of 32 x 32 pixels or more, --steps 1 or more')
    draw_masks(image, args.out, args.keep_ratio, args.sampler, args.steps, args.base_only)


if __name__ == '__main__':
    main()
