"""Draws what a ConvNeXt block stores for the backward pass, by preset.

    python tools/analysis_tools/draw_stored.py --out docs/pictures/stored.png

One unit is a feature map (N, C, H, W) in the precision of the computation. Masks and numbers for each position or
channel (deviations, scales) are left out: they take below 2 % of a unit each.
"""

import argparse
from pathlib import Path

from sbp_mmdet.reporting import output_file

# Tensors of a block in the order of the forward pass, and their channels in units of C.
TENSORS = {
    'input': 1,
    'convolution': 1,
    'norm': 1,
    'hidden layer': 4,
    'GELU': 4,
    'branch': 1,
}
_KEPT = {'input': 1.0} | dict.fromkeys([*TENSORS][1:], 0.5)
# preset: tensor -> share of its bytes that is stored. For the norm, fused blocks store x-hat, without the affine part.
STORED = {
    'none': dict.fromkeys(TENSORS, 1.0),
    'with_cp': {'input': 1.0},
    'reference': _KEPT,
    'fused': {'input': 1.0, 'norm': 0.5, 'hidden layer': 0.5},
    'recompute': {'input': 1.0, 'norm': 0.5},
    'block': {'input': 1.0},
    'nearest': {'input': 1.0, 'norm': 0.5},
    'pool': {'input': 1.0, 'norm': 0.5},
    'exact': {'input': 1.0, 'norm': 1.0},
    'exact-block': {'input': 1.0},
    'int8': {'input': 0.25, 'norm': 0.25},
    'int8-block': {'input': 0.25},
    'nearest-int8': {'input': 0.25, 'norm': 0.125},
}


def units(preset: str) -> float:
    """What a block stores, in feature maps (fp32).

    Args:
        preset (str): A key of ``STORED``.

    Returns:
        float: The sum over its tensors.
    """
    return sum(TENSORS[name] * share for name, share in STORED[preset].items())


def draw(path: Path) -> None:
    """Writes the picture: a row for each preset, a box for each tensor, as wide as it has channels.

    Args:
        path (Path): A PNG file.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    gap, height = 0.35, 0.72
    figure, axes = plt.subplots(figsize=(9.6, 4.6), layout='constrained')
    left = 0.0
    for name, width in TENSORS.items():
        centre = left + width / 2
        channels = 'C' if width == 1 else f'{width} C'
        axes.text(centre, -0.45, f'{name}\n{channels}', ha='center', va='bottom', fontsize=8)
        for row, stored in enumerate(STORED.values()):
            axes.add_patch(Rectangle((left, row), width, height, facecolor='#f2f2f2', edgecolor='#bbbbbb'))
            share = stored.get(name, 0.0)
            axes.add_patch(Rectangle((left, row + height * (1 - share)), width, height * share, facecolor='#1f77b4'))
        left += width + gap
    for row, preset in enumerate(STORED):
        middle = row + height / 2
        axes.text(-0.3, middle, preset, ha='right', va='center', fontsize=9, family='monospace')
        axes.text(left, middle, f'{units(preset):.3g}', ha='left', va='center', fontsize=9)
    axes.text(left, -0.45, 'units', ha='left', va='bottom', fontsize=8)
    axes.set(xlim=(-2.6, left + 0.8), ylim=(len(STORED), -1.5))
    axes.axis('off')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=output_file, required=True, help='a PNG file')
    draw(parser.parse_args().out)


if __name__ == '__main__':
    main()
