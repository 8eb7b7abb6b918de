"""Make a small instance segmentation dataset in COCO format: coloured shapes that hide one another.

    python tools/make_synthetic_coco.py --out data/shapes --train 600 --val 100

writes `images/{train,val}/*.jpg` and `annotations/instances_{train,val}.json`. The same arguments give the same
bytes; an image depends on the seed, the split and its number only, so a larger set begins with the smaller one.
"""

import argparse
import json
import sys
from pathlib import Path

import cv2
import numpy as np
from pycocotools import mask as mask_utils

__all__ = ['CLASSES', 'make_dataset', 'render_image']

CLASSES = ('ellipse', 'rectangle', 'triangle', 'star')
SPLITS = ('train', 'val')


def _outline(label, rng):
    """Return the corners (P, 2) of a shape inside the unit circle."""
    corners = (64, 4, 3, 10)[label]
    radii = np.tile([1.0, 0.45], 5) if CLASSES[label] == 'star' else np.ones(corners)
    angles = np.arange(corners) * 2 * np.pi / corners + rng.uniform(0, 2 * np.pi)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii[:, None] * (1.0, rng.uniform(0.6, 1.0))


def render_image(rng: np.random.Generator, size: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Draw one image from back to front. A shape that would hide most of another one is omitted.

    Returns:
        tuple: The image, uint8 BGR (size, size, 3), and for each object its index into ``CLASSES`` and its visible
        pixels, bool (size, size).
    """
    image = rng.uniform(30, 225, 3) + rng.normal(0, 8, (size, size, 3))
    owner = np.full((size, size), -1)  # which object a pixel shows
    labels, areas = [], []
    for _ in range(rng.integers(3, 9)):
        label, radius = int(rng.integers(len(CLASSES))), size * rng.uniform(0.1, 0.3)
        outline = _outline(label, rng) * radius + rng.uniform(0.15, 0.85, 2) * size
        covered = cv2.fillPoly(np.zeros((size, size), np.uint8), [outline.round().astype(np.int32)], 1).astype(bool)
        after = np.where(covered, len(labels), owner)
        shown = np.bincount(after[after >= 0], minlength=len(labels) + 1)
        if (shown >= 0.4 * np.array([*areas, covered.sum()])).all():
            owner = after
            labels.append(label)
            areas.append(covered.sum())
            image[covered] = rng.uniform(0, 255, 3) + rng.normal(0, 8, (covered.sum(), 3))
    return image.clip(0, 255).astype(np.uint8), [(label, owner == i) for i, label in enumerate(labels)]


def _make_split(split, count, out, size, seed):
    """Render one split, write its images, and return its COCO dictionary."""
    images, annotations = [], []
    folder = out / 'images' / split
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, objects = render_image(np.random.default_rng([seed, SPLITS.index(split), number]), size)
        name = f'{number:06d}.jpg'
        if not cv2.imwrite(str(folder / name), image, [cv2.IMWRITE_JPEG_QUALITY, 95]):
            raise OSError(f'could not write {folder / name}')
        images.append(dict(id=number + 1, file_name=name, width=size, height=size))
        for label, visible in objects:
            code = mask_utils.encode(np.asfortranarray(visible.astype(np.uint8)))
            own = dict(id=len(annotations) + 1, image_id=number + 1, category_id=label + 1, iscrowd=0)
            own.update(area=int(visible.sum()), bbox=mask_utils.toBbox(code).tolist())
            annotations.append(dict(own, segmentation=dict(code, counts=code['counts'].decode())))
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CLASSES)]
    return dict(images=images, annotations=annotations, categories=categories)


def make_dataset(out: str | Path, train: int = 600, val: int = 100, size: int = 192, seed: int = 0) -> None:
    """Write images of coloured shapes, with annotations in COCO format.

    Args:
        out (str | Path): Folder to write to. Other files in it are left unchanged.
        train (int): Number of training images. Default: 600.
        val (int): Number of validation images. Default: 100.
        size (int): Height and width of the images, in pixels. Default: 192.
        seed (int): Seed of the shapes. Default: 0.
    """
    out = Path(out)
    (out / 'annotations').mkdir(parents=True, exist_ok=True)
    for split, count in zip(SPLITS, (train, val), strict=True):
        coco = _make_split(split, count, out, size, seed)
        (out / 'annotations' / f'instances_{split}.json').write_text(json.dumps(coco))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder to write')
    parser.add_argument('--train', type=int, default=600, metavar='N', help='training images (default: 600)')
    parser.add_argument('--val', type=int, default=100, metavar='N', help='validation images (default: 100)')
    parser.add_argument('--size', type=int, default=192, help='side of the square images in pixels (default: 192)')
    parser.add_argument('--seed', type=int, default=0, help='default: 0')
    args = parser.parse_args()
    for name, least in (('train', 1), ('val', 0), ('size', 32), ('seed', 0)):
        if getattr(args, name) < least:
            parser.error(f'--{name} {getattr(args, name)} must be {least} or more')
    try:
        make_dataset(**vars(args))
    except OSError as error:
        sys.exit(f'error: --out {args.out} cannot be written: {error}; give another folder')


if __name__ == '__main__':
    main()
