"""Draws the pictures of the documents that no measurement of its own draws.

    python research/pictures.py            all of them, into docs/pictures
    python research/pictures.py masks      one of them: losses, masks, stored

``memory.png`` and ``zoo_memory.png`` come with their figures: research/memory_overview.py and research/zoo_memory.py.
"""

import json
import sys
from pathlib import Path

import numpy as np
from provenance import CHECKOUT
from tables import COLOURS, panels, save_picture

from sbp_mmdet.stochastic_backprop.masks import mask_generator, stage_masks

sys.path.insert(0, str(CHECKOUT / 'tools'))  # as the scripts there do
from make_synthetic_coco import render_image  # noqa: E402

PICTURES = CHECKOUT / 'docs/pictures'

# Tensors of a ConvNeXt block in the order of the forward pass, and their channels in units of C.
TENSORS = {'input': 1, 'convolution': 1, 'norm': 1, 'hidden layer': 4, 'GELU': 4, 'branch': 1}
# preset: tensor -> share of its bytes that is stored (fp32).
STORED = {
    'none': dict.fromkeys(TENSORS, 1.0),
    'with_cp': {'input': 1.0},
    'exact': {'input': 1.0},
    'int8': {'input': 0.25},
    'sbp': {'input': 1.0, 'norm': 0.5},
    'reference': {'input': 1.0, **dict.fromkeys([*TENSORS][1:], 0.5)},
}

_STRIDES = (4, 8, 16)  # pixels to a position, in stages 1 to 3


def units(preset: str) -> float:
    """Return the tensors that a ConvNeXt block stores for the backward pass, in feature maps (N, C, H, W).

    Masks and numbers for each position or channel (deviations, scales) are omitted; each takes less than 2 % of a map.
    """
    return sum(TENSORS[name] * share for name, share in STORED[preset].items())


def draw_stored(path: Path) -> None:
    """Draw the stored tensors of a ConvNeXt block: a row per preset, a box per tensor, as wide as its number of
    channels."""
    from matplotlib.patches import Rectangle

    gap, height = 0.35, 0.72
    figure, grid = panels(figsize=(9.6, 2.9))
    axes, left = grid[0, 0], 0.0
    for name, width in TENSORS.items():
        channels = 'C' if width == 1 else f'{width} C'
        axes.text(left + width / 2, -0.45, f'{name}\n{channels}', ha='center', va='bottom', fontsize=8)
        for row, stored in enumerate(STORED.values()):
            axes.add_patch(Rectangle((left, row), width, height, facecolor='#f2f2f2', edgecolor='#bbbbbb'))
            share = stored.get(name, 0.0)
            axes.add_patch(Rectangle((left, row + height * (1 - share)), width, height * share, facecolor='#1f77b4'))
        left += width + gap
    for row, preset in enumerate(STORED):
        axes.text(-0.3, row + height / 2, preset, ha='right', va='center', fontsize=9, family='monospace')
        axes.text(left, row + height / 2, f'{units(preset):.3g}', ha='left', va='center', fontsize=9)
    axes.text(left, -0.45, 'units', ha='left', va='bottom', fontsize=8)
    axes.set(xlim=(-2.6, left + 0.8), ylim=(len(STORED), -1.5))
    axes.axis('off')
    save_picture(figure, path, dpi=110)


def draw_masks(path: Path) -> None:
    """Draw an image, and the positions of stages 1 to 3 that keep their gradient: the grid in two steps, random in one.

    Masks are those that a training with seed 0 draws, see :func:`sbp_mmdet.stochastic_backprop.masks.stage_masks`.
    """
    from matplotlib.patches import Patch

    image, _ = render_image(np.random.default_rng(3), 192)
    sizes = [(image.shape[0] // stride, image.shape[1] // stride) for stride in _STRIDES]
    draws = (('grid', 0), ('grid', 2), ('random', 0))
    figure, grid = panels(len(draws), 1 + len(sizes), figsize=(9.6, 7.6))
    for row, (sampler, step) in zip(grid, draws, strict=True):
        row[0].imshow(image)
        row[0].set_title(f'{sampler}, step {step + 1}', fontsize=9)
        masks = stage_masks(sizes, 0.5, sampler, mask_generator(0, 0, step))
        for stage, (axes, mask, stride) in enumerate(zip(row[1:], masks, _STRIDES, strict=True), 1):
            kept = mask.numpy().repeat(stride, 0).repeat(stride, 1)[..., None]
            height, width = mask.shape
            axes.imshow(np.where(kept, image, image // 5 + 200), extent=(0, width, height, 0))
            axes.hlines(range(height + 1), 0, width, color='black', lw=0.2)
            axes.vlines(range(width + 1), 0, height, color='black', lw=0.2)
            axes.set_title(f'stage {stage}: {height} x {width} positions', fontsize=9)
    for axes in grid.flat:
        axes.set_axis_off()
    colour = image.mean((0, 1)) / 255
    kept = Patch(facecolor=tuple(colour), label='kept: saved for the backward pass')
    dropped = Patch(facecolor=tuple(colour / 5 + 200 / 255), label='dropped: forward pass only')
    save_picture(figure, path, legend=[kept, dropped], dpi=110)


def draw_losses(path: Path) -> None:
    """Draw the losses of a small DINO on nuclei with different presets, and their distances from the plain losses."""
    losses = json.loads((CHECKOUT / 'docs/results/dino_losses_nuclei.json').read_text())['losses']
    plain = np.array(losses['none'])
    figure, grid = panels(1, 2, figsize=(9.6, 3.2))
    handles = []
    for colour, (name, values) in zip(COLOURS, losses.items(), strict=False):
        values = np.array(values)
        smooth = np.convolve(values, np.ones(20) / 20, 'valid')
        handles += grid[0, 0].plot(smooth, color=colour, lw=1, label=name)
        if name != 'none':
            grid[0, 1].semilogy(np.maximum(abs(values / plain - 1), 1e-8), color=colour, lw=0.6)
    grid[0, 0].set(title='loss, mean of 20 steps', xlabel='step')
    grid[0, 1].set(title='distance from the plain loss, relative', xlabel='step')
    save_picture(figure, path, legend=handles, dpi=110)


DRAW = dict(losses=draw_losses, masks=draw_masks, stored=draw_stored)


def main(names: list[str]) -> None:
    """Draw the named pictures, or all of them."""
    unknown = sorted(set(names) - set(DRAW))
    if unknown:
        sys.exit(f'error: there is no picture {unknown[0]!r}; choose from {", ".join(DRAW)}')
    for name in names or DRAW:
        DRAW[name](PICTURES / f'{name}.png')
        print(f'docs/pictures/{name}.png')


if __name__ == '__main__':
    main(sys.argv[1:])
