"""Draw images of a config, which positions are kept with the grid and with object masks, and where the gradient is.

    python tools/analysis_tools/draw_object_masks.py CONFIG --checkpoint work_dirs/x/epoch_12.pth --out objects.png

The gradient is that of the detector's loss at the output of a stage. Its energy is the sum of its squares over the
channels of a position. Above each mask stands the share of the energy at the positions that it keeps.
"""

import argparse

import numpy as np
from draw_masks import dim, show
from mmengine.config import DictAction
from PIL import Image

from sbp_mmdet.analysis.variants import load_config
from sbp_mmdet.masks import mask_generator, object_mask, sample_mask
from sbp_mmdet.reporting import output_file, panels, save_picture
from sbp_mmdet.settings import SBPSettings
from sbp_mmdet.study.gradients import exact_pass
from sbp_mmdet.study.subject import build_model, train_batches

__all__ = ['draw_row', 'energy', 'kept_share', 'to_rgb']

PANEL = 2.6  # inches


def energy(gradient):
    """Sum of squares over channels: (C, H, W) -> numpy (H, W)."""
    return gradient.double().square().sum(0).cpu().numpy()


def kept_share(energy, mask):
    """The share of the energy (H, W) at the positions that a mask (H, W) keeps; nan without any energy."""
    total = energy.sum()
    return float(energy[mask].sum() / total) if total > 0 else float('nan')


def to_rgb(image):
    """An image as the backbone gets it, (3, H, W), as numpy (H, W, 3), uint8, from its darkest to its brightest."""
    image = image.permute(1, 2, 0).cpu().numpy()
    low, high = image.min(), image.max()
    return ((image - low) / max(high - low, 1e-12) * 255).round().astype(np.uint8)


def draw_row(axes, image, boxes, gradient, ratio, share, seed):
    """The image with its boxes, the two masks and the gradient's energy.

    Args:
        axes (Sequence[matplotlib.axes.Axes]): Four panels.
        image (Tensor): (3, H, W).
        boxes (Tensor): (B, 4), x1 y1 x2 y2 in pixels.
        gradient (Tensor): (C, H / stride, W / stride), of the loss.
        ratio (float): Share of kept positions.
        share (float): Share of those next to objects.
        seed (int): Of the masks.
    """
    picture, heat = to_rgb(image), energy(gradient)
    height, width = heat.shape
    stride = image.shape[-1] // width
    generator = mask_generator(seed, 0, 0)
    masks = {
        'grid': sample_mask(height, width, ratio, 'grid', generator),
        'objects': object_mask(boxes.cpu(), height, width, (stride, stride), ratio, share, generator),
    }
    axes[0].imshow(picture)
    for x1, y1, x2, y2 in boxes.tolist():
        axes[0].plot([x1, x2, x2, x1, x1], [y1, y1, y2, y2, y1], color='#f2a541', lw=0.8)
    axes[0].set(xlim=(0, image.shape[-1]), ylim=(image.shape[-2], 0))  # boxes at the border do not widen it
    axes[0].set_title(f'{len(boxes)} objects', fontsize=9)
    extent = (0, image.shape[-1] / stride, image.shape[-2] / stride, 0)
    for panel, (name, mask) in zip(axes[1:3], masks.items(), strict=True):
        mask = mask.numpy()
        title = f'{name}: {kept_share(heat, mask):.0%} of the energy'
        show(panel, dim(picture, mask, stride), mask, title, extent)
    # The brightest hundredth is cut off, or it alone would be seen.
    axes[3].imshow(heat, cmap='magma', vmin=0, vmax=np.quantile(heat, 0.99), interpolation='nearest')
    axes[3].set_title('energy of the gradient', fontsize=9)
    for panel in axes:
        panel.set_axis_off()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='config file, or mmdet::FAMILY/NAME.py')
    parser.add_argument('--checkpoint', help="weights (default: the config's load_from, or its start)")
    parser.add_argument('--out', type=output_file, required=True, help='picture to write')
    parser.add_argument('--images', type=int, default=3, help='one row each (default: 3)')
    parser.add_argument('--stage', type=int, default=2, help='whose output; of those that the neck gets (default: 2)')
    parser.add_argument('--keep-ratio', type=float, default=0.5, help='default: 0.5')
    parser.add_argument('--object-share', type=float, default=0.7, help='default: 0.7')
    parser.add_argument('--seed', type=int, default=0, help='of images and masks (default: 0)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='overrides of the config')
    args = parser.parse_args()
    try:
        if args.images < 1:
            raise ValueError(f'--images {args.images} must be 1 or more')
        config = load_config(args.config, {**(args.cfg_options or {}), 'train_dataloader.batch_size': 1})
        masks = dict(keep_ratio=args.keep_ratio, sampler='objects', object_share=args.object_share)
        SBPSettings.parse(masks, (1,))  # refuses what cannot be drawn
        model = build_model(config, args.checkpoint, seed=args.seed)
        batches = list(train_batches(config, args.images, args.seed))
    except ValueError as error:
        parser.error(str(error))
    figure, grid = panels(len(batches), 4, figsize=(4 * PANEL, len(batches) * (PANEL + 0.3)))
    for row, batch in zip(grid, batches, strict=True):
        exact = exact_pass(model, batch, args.seed)
        gradients = dict(enumerate(exact.output_gradients, 1))
        if (gradient := gradients.get(args.stage)) is None:
            used = [stage for stage, found in gradients.items() if found is not None]
            parser.error(f'--stage {args.stage}: nothing uses such an output; choose from {used}')
        draw_row(row, exact.images[0], exact.boxes[0], gradient[0], args.keep_ratio, args.object_share, args.seed)
    save_picture(figure, args.out)
    with Image.open(args.out) as drawn:  # 256 colours: a quarter of the bytes
        drawn.convert('RGB').quantize().save(args.out, optimize=True)
    print(f'written to {args.out}')


if __name__ == '__main__':
    main()
