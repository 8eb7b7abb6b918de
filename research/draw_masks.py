"""Draw the base mask and the keep masks of stages 1 to 3 over an image; where the gradient is dropped, it is dimmed.

    python tools/analysis_tools/draw_masks.py --image a.jpg --out a.png --sampler grid --steps 3
    python tools/analysis_tools/draw_masks.py --image a.jpg --out a.png --sampler grid random --steps 5 --base-only

With --base-only the base masks of successive steps stand side by side, one row for each sampler (the paper's figure of
five iterations, in its appendix), with the share of positions that were kept in any step so far.
"""

import argparse
import sys
from pathlib import Path

import mmcv
import numpy as np
from PIL import Image
from sbp_mmdet.reporting import output_file, panels, save_picture

from sbp_mmdet.masks import SAMPLERS, mask_generator, stage_masks

__all__ = ['base_mask', 'dim', 'draw_masks', 'show', 'stage_sizes']

STRIDES = (4, 8, 16)  # of stages 1 to 3
MIN_SIDE = 32  # total stride of the backbone
PANEL = 2.2  # inches
TONES = np.array([(245, 245, 245), (70, 110, 160)], np.uint8)  # of the base mask: dropped, kept
MAX_LINES = 80  # with more positions a side than this, lines between them would cover the picture


def stage_sizes(height, width):
    """Height and width of the feature maps of stages 1 to 3 for an image; 4x4/4 and 2x2/2 layers floor."""
    return [(height // stride, width // stride) for stride in STRIDES]


def dim(image, mask, stride):
    """Fade the dropped positions.

    Args:
        image (numpy.ndarray): uint8, (H, W, 3).
        mask (numpy.ndarray): bool, (H // stride, W // stride), True where the gradient is kept.
        stride (int): side in pixels of what a position covers.

    Returns:
        numpy.ndarray: uint8, (H, W, 3). Rows and columns that no position covers are faded as well.
    """
    kept = np.zeros(image.shape[:2], bool)
    covered = mask.repeat(stride, axis=0).repeat(stride, axis=1)
    kept[: covered.shape[0], : covered.shape[1]] = covered
    return np.where(kept[..., None], image, 0.25 * image + 0.75 * 245).round().astype(np.uint8)


def base_mask(masks):
    """The mask that those of the stages are enlarged from; stage 1 shows all of it, one position in a 4 x 4 block."""
    step = STRIDES[-1] // STRIDES[0]
    return masks[0][::step, ::step]


def show(axes, picture, mask, title, extent=None):
    """Draw a picture with lines between the positions of a mask.

    Args:
        axes (matplotlib.axes.Axes): where to draw.
        picture (numpy.ndarray): RGB.
        mask (numpy.ndarray): (H, W).
        title (str): above it.
        extent (tuple | None): left, right, bottom and top of the picture in positions. Defaults to those of the mask.
    """
    height, width = mask.shape
    axes.imshow(picture, interpolation='nearest', extent=extent or (0, width, height, 0))
    if max(mask.shape) <= MAX_LINES:
        axes.hlines(range(height + 1), 0, width, color='black', lw=0.25)
        axes.vlines(range(width + 1), 0, height, color='black', lw=0.25)
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()


def draw_masks(image, out, keep_ratio=0.5, samplers=('grid',), seed=0, steps=1, base_only=False):
    """Write a picture: one row per step and sampler; the image, the base mask, the masks of stages 1 to 3.

    Args:
        image (numpy.ndarray): RGB, uint8, (H, W, 3).
        out (str | Path): picture to write.
        keep_ratio (float): share of kept positions. Defaults to 0.5.
        samplers (tuple[str]): 'grid', 'random'. Defaults to ('grid',).
        seed (int): seed of the masks. Defaults to 0.
        steps (int): number of successive training steps. Defaults to 1.
        base_only (bool): the base masks only, one row per sampler, one column per step. Defaults to False.

    Raises:
        ValueError: for an image smaller than the total stride, or a ratio or sampler that masks.py refuses.
    """
    height, width = image.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise ValueError(f'image of {height} x {width} pixels: both sides must be {MIN_SIDE} or more')
    if steps < 1:
        raise ValueError(f'steps={steps}: must be 1 or more')
    draws = [(step, sampler) for step in range(steps) for sampler in samplers]
    shape = (len(samplers), steps) if base_only else (len(draws), 2 + len(STRIDES))
    size = (PANEL * shape[1], (PANEL * height / width + 0.3) * shape[0])
    figure, grid = panels(*shape, figsize=size)
    visited = dict.fromkeys(samplers, False)
    for number, (step, sampler) in enumerate(draws):
        masks = stage_masks(stage_sizes(height, width), keep_ratio, sampler, mask_generator(seed, 0, step))
        masks = [mask.numpy() for mask in masks]
        base = base_mask(masks)
        visited[sampler] = visited[sampler] | base
        name = f'{sampler}, step {step + 1}'
        if base_only:
            axes = grid[samplers.index(sampler), step]
            show(axes, TONES[base.astype(int)], base, f'{name}: {visited[sampler].mean():.0%} visited')
            continue
        row = grid[number]
        row[0].imshow(image)
        row[0].set_title(name, fontsize=9)
        row[0].set_axis_off()
        show(row[1], TONES[base.astype(int)], base, f'base mask, {base.mean():.0%} kept')
        for stage, (axes, mask, stride) in enumerate(zip(row[2:], masks, STRIDES, strict=True), 1):
            title = f'stage {stage}: {mask.shape[0]} x {mask.shape[1]}'
            show(axes, dim(image, mask, stride), mask, title, (0, width / stride, height / stride, 0))
    save_picture(figure, out)
    if Path(out).suffix == '.png':  # 256 colours: a quarter of the bytes
        with Image.open(out) as drawn:
            drawn.convert('RGB').quantize().save(out, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--image', required=True, help='image to draw over')
    parser.add_argument('--out', type=output_file, required=True, help='picture to write')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='default 0.5')
    parser.add_argument('--sampler', choices=SAMPLERS, nargs='+', default=['grid'], help='one or both (default grid)')
    parser.add_argument('--seed', type=int, default=0, help='default 0')
    parser.add_argument('--steps', type=int, default=1, help='training steps, one row each (default 1)')
    parser.add_argument('--base-only', action='store_true', help='base masks side by side, one row for each sampler')
    args = parser.parse_args()
    if not Path(args.image).is_file():
        sys.exit(f'error: --image {args.image}: no such file')
    image = mmcv.imread(args.image, channel_order='rgb')
    if image is None:
        sys.exit(f'error: --image {args.image}: not an image that OpenCV reads')
    try:
        draw_masks(image, args.out, args.keep_ratio, args.sampler, args.seed, args.steps, args.base_only)
    except ValueError as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()
