"""Draw the keep masks of stages 1 to 3 over an image; where the gradient is dropped, the image is dimmed.

python tools/analysis_tools/draw_masks.py --image photo.jpg --out masks.png --sampler grid --steps 3
"""

import argparse
import sys
from pathlib import Path

import matplotlib
import mmcv
import numpy as np

from sbp_mmdet.masks import SAMPLERS, mask_generator, stage_masks

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

__all__ = ['dim', 'draw_masks', 'stage_sizes']

STRIDES = (4, 8, 16)  # of stages 1 to 3
MIN_SIDE = 32  # total stride of the backbone
MAX_LINES = 80  # with more positions a side than this, lines between them would cover the picture


def stage_sizes(height, width):
    """Height and width of the feature maps of stages 1 to 3 for an image; ConvNeXt's 4x4/4 and 2x2/2 layers floor."""
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


def draw_masks(image, out, keep_ratio=0.5, sampler='grid', seed=0, steps=1):
    """Write a picture: one row per training step; the image, then the masks of stages 1, 2, 3.

    Args:
        image (numpy.ndarray): RGB, uint8, (H, W, 3).
        out (str | Path): picture to write.
        keep_ratio (float): share of kept positions. Defaults to 0.5.
        sampler (str): 'grid' or 'random'. Defaults to 'grid'.
        seed (int): seed of the masks. Defaults to 0.
        steps (int): number of successive training steps. Defaults to 1.

    Raises:
        ValueError: for an image smaller than the total stride, or a ratio or sampler that masks.py refuses.
    """
    height, width = image.shape[:2]
    if min(height, width) < MIN_SIDE:
        raise ValueError(f'image of {height} x {width} pixels: both sides must be {MIN_SIDE} or more')
    if steps < 1:
        raise ValueError(f'steps={steps}: must be 1 or more')
    shape = (steps, 1 + len(STRIDES))
    panel = 2.6
    size = (panel * shape[1], (panel * height / width + 0.3) * steps)
    figure, grid = plt.subplots(*shape, figsize=size, squeeze=False)
    for step, row in enumerate(grid):
        masks = stage_masks(stage_sizes(height, width), keep_ratio, sampler, mask_generator(seed, 0, step))
        row[0].imshow(image)
        row[0].set_title('image' if steps == 1 else f'step {step + 1}', fontsize=9)
        for stage, (axes, mask, stride) in enumerate(zip(row[1:], masks, STRIDES, strict=True), 1):
            mask = mask.numpy()
            # In units of positions, so that the lines between them show how large a position of the stage is.
            extent = (0, width / stride, height / stride, 0)
            axes.imshow(dim(image, mask, stride), interpolation='nearest', extent=extent)
            if max(mask.shape) <= MAX_LINES:
                axes.hlines(range(mask.shape[0] + 1), 0, mask.shape[1], color='black', lw=0.25)
                axes.vlines(range(mask.shape[1] + 1), 0, mask.shape[0], color='black', lw=0.25)
            axes.set_title(f'stage {stage}: {mask.shape[0]} x {mask.shape[1]}, {mask.mean():.0%} kept', fontsize=9)
        for axes in row:
            axes.set_axis_off()
    figure.tight_layout(pad=0.6)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--image', required=True, help='image to draw over')
    parser.add_argument('--out', required=True, help='picture to write')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='default 0.5')
    parser.add_argument('--sampler', choices=SAMPLERS, default='grid', help='default grid')
    parser.add_argument('--seed', type=int, default=0, help='default 0')
    parser.add_argument('--steps', type=int, default=1, help='training steps, one row each (default 1)')
    args = parser.parse_args()
    if not Path(args.image).is_file():
        sys.exit(f'error: --image {args.image}: no such file')
    image = mmcv.imread(args.image, channel_order='rgb')
    if image is None:
        sys.exit(f'error: --image {args.image}: not an image that OpenCV reads')
    try:
        draw_masks(image, args.out, args.keep_ratio, args.sampler, args.seed, args.steps)
    except ValueError as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()
