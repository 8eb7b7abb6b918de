"""Draws what a ConvNeXt block stores for the backward pass, by preset: python research/draw_stored.py PICTURE.png

One unit is a feature map (N, C, H, W) in the precision of the computation. Masks and numbers for each position or
channel (deviations, scales) are left out: they take below 2 % of a unit each.
"""

import sys
from pathlib import Path

from tables import panels, save_picture

# Tensors of a block in the order of the forward pass, and their channels in units of C.
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


def units(preset: str) -> float:
    """Return what a block stores, in feature maps (fp32)."""
    return sum(TENSORS[name] * share for name, share in STORED[preset].items())


def draw(path: Path) -> None:
    """Write the picture: a row for each preset, a box for each tensor, as wide as it has channels."""
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


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]))
