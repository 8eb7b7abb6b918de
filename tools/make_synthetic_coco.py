"""Make a small instance segmentation set in COCO format: rendered shapes that hide one another.

    python tools/make_synthetic_coco.py --out data/shapes --train 600 --val 100

writes `images/{train,val}/*.jpg` and `annotations/instances_{train,val}.json`. The same arguments give the same
bytes; an image depends on the seed, the split and its number only, so a larger set begins with the smaller one.

Classes differ in shape and, less reliably, in hue: each has one that it scatters around, and backgrounds have any. A
small detector can therefore learn them from scratch in minutes.
"""

import argparse
import colorsys
import json
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
from mmengine.utils import track_iter_progress

__all__ = ['CLASSES', 'encode_polygons', 'make_set', 'render_image']

CLASSES = ('ellipse', 'rectangle', 'triangle', 'star')
SPLITS = ('train', 'val')
MIN_OBJECTS, MAX_OBJECTS = 2, 8
MIN_RADIUS, MAX_RADIUS = 0.1, 0.32  # of the image's side
MIN_VISIBLE = 0.4  # a shape that would leave less than this of any other, or show less of itself, is not drawn
MIN_CONTRAST = 80  # distance in RGB between a shape's mean colour and that of what it covers
HUE_SCATTER = 0.08  # standard deviation; the hues of the classes are a quarter of the circle apart
RECORD = 'made_by_make_synthetic_coco.json'
RENDERING = 1  # raise when the same arguments begin to give other images


def _outline(kind, rng):
    """Corners (P, 2) of one shape, inside of the unit circle."""
    if kind == 'rectangle':
        width, height = np.cos(angle := rng.uniform(0.35, 0.8)), np.sin(angle)
        return np.array([(-width, -height), (width, -height), (width, height), (-width, height)])
    if kind == 'triangle':
        angles, radii = np.arange(3) * 2 * np.pi / 3 + rng.uniform(-0.3, 0.3, 3), np.ones(3)
    elif kind == 'star':
        angles, radii = np.arange(10) * np.pi / 5, np.tile([1.0, rng.uniform(0.38, 0.5)], 5)
    else:
        angles, radii = np.arange(64) * np.pi / 32, np.ones(64)
    outline = np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii[:, None]
    return outline * (1.0, rng.uniform(0.55, 1.0)) if kind == 'ellipse' else outline


def _colour(label, rng):
    """BGR in 0..255, its hue near that of the class."""
    hue = (label / len(CLASSES) + rng.normal(0, HUE_SCATTER)) % 1
    return 255 * np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.5, 1), rng.uniform(0.5, 1)))[::-1]


def _surface(rng, size, colour):
    """A surface, float32 (size, size, 3), with a soft gradient, sometimes stripes, and fine noise."""
    coarse = colour + rng.normal(0, 16, (4, 4, 3))
    pixels = cv2.resize(coarse.astype(np.float32), (size, size), interpolation=cv2.INTER_CUBIC)
    if rng.random() < 0.3:
        y, x = np.mgrid[:size, :size]
        angle, period = rng.uniform(0, np.pi), rng.uniform(0.04, 0.12) * size
        stripes = np.sign(np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period))
        pixels += (rng.uniform(6, 18) * stripes[..., None]).astype(np.float32)
    return pixels + rng.normal(0, 6, (size, size, 3)).astype(np.float32)


def render_image(rng: np.random.Generator, size: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Draws one image, back to front. A shape that would be hidden too much, hide another too much, or hardly stand out
    is left out of the picture, not only out of the annotations.

    Returns:
        tuple: The image, uint8 BGR (size, size, 3), and for each object its index into ``CLASSES`` and its visible
        pixels, bool (size, size).
    """
    image = _surface(rng, size, rng.uniform(30, 225, 3))
    owner = np.full((size, size), -1)  # which object a pixel shows
    labels, areas = [], []
    wanted = rng.integers(MIN_OBJECTS, MAX_OBJECTS + 1)
    for _ in range(4 * wanted):
        if len(labels) == wanted:
            break
        label = int(rng.integers(len(CLASSES)))
        radius = size * np.exp(rng.uniform(np.log(MIN_RADIUS), np.log(MAX_RADIUS)))
        turn, centre = rng.uniform(0, 2 * np.pi), rng.uniform(0.05, 0.95, 2) * size
        rotation = np.array([(np.cos(turn), -np.sin(turn)), (np.sin(turn), np.cos(turn))])
        outline = _outline(CLASSES[label], rng) @ rotation.T * radius
        texture = _surface(rng, size, _colour(label, rng))

        # Drawn on a canvas of three sides by three, so that the part outside the image counts as hidden.
        canvas = np.zeros((3 * size, 3 * size), np.uint8)
        cv2.fillPoly(canvas, [np.round(outline + centre + size).astype(np.int32)], 1)
        covered = canvas[size : 2 * size, size : 2 * size].astype(bool)
        after = np.where(covered, len(labels), owner)
        shown = np.bincount(after[after >= 0], minlength=len(labels) + 1)
        hides_too_much = (shown < MIN_VISIBLE * np.array([*areas, canvas.sum()])).any()
        if hides_too_much or np.linalg.norm(texture[covered].mean(0) - image[covered].mean(0)) < MIN_CONTRAST:
            continue
        owner = after
        labels.append(label)
        areas.append(int(canvas.sum()))
        image[covered] = texture[covered]
    image = cv2.GaussianBlur(image, (3, 3), 0)
    return image.clip(0, 255).astype(np.uint8), [(label, owner == i) for i, label in enumerate(labels)]


def encode_polygons(visible: np.ndarray) -> list[list[int]]:
    """A mask, bool (H, W), as COCO polygons that follow pixel edges, so that pycocotools decodes them to the same
    pixels. A polygon cannot have a hole: a mask with holes is cut through one of them, and the sides encoded apart."""
    # Contours run through pixel centres; on the doubled mask, halving and rounding up moves them to pixel edges.
    doubled = visible.astype(np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    contours, tree = cv2.findContours(doubled, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    for contour, (_, _, _, parent) in zip(contours, [] if tree is None else tree[0], strict=True):
        if parent >= 0:
            # A hole's contour runs along the pixels around it; its middle column belongs to the hole.
            columns = contour[:, 0, 0]
            left = np.arange(visible.shape[1]) < (int(columns.min()) + int(columns.max())) // 4
            return encode_polygons(visible & left) + encode_polygons(visible & ~left)
    return [((contour[:, 0] + 1) // 2).ravel().tolist() for contour in contours]


def _make_split(split, count, out, size, seed):
    """Renders one split, writes its images, and returns its COCO dictionary."""
    images, annotations = [], []
    folder = out / 'images' / split
    folder.mkdir(parents=True)
    for number in track_iter_progress(list(range(count))):
        image, objects = render_image(np.random.default_rng([seed, SPLITS.index(split), number]), size)
        name = f'{number:06d}.jpg'
        if not cv2.imwrite(str(folder / name), image, [cv2.IMWRITE_JPEG_QUALITY, 95]):
            raise OSError(f'could not write {folder / name}')
        images.append(dict(id=number + 1, file_name=name, width=size, height=size))
        for label, visible in objects:
            ys, xs = np.nonzero(visible)
            left, top, right, bottom = int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1
            own = dict(id=len(annotations) + 1, image_id=number + 1, category_id=label + 1, iscrowd=0)
            box = dict(area=len(xs), bbox=[left, top, right - left, bottom - top])
            annotations.append(dict(own, **box, segmentation=encode_polygons(visible)))
    categories = [dict(id=i + 1, name=name) for i, name in enumerate(CLASSES)]
    return dict(images=images, annotations=annotations, categories=categories)


def make_set(out: str | Path, train: int = 600, val: int = 100, size: int = 192, seed: int = 0) -> bool:
    """Makes the set, or finds that it is there. A record of the arguments stands in the folder: unfinished while images
    are written, finished at the end.

    Returns:
        bool: Whether anything was written.

    Raises:
        ValueError: For an argument out of range.
        FileExistsError: If ``out`` holds something else.
    """
    for name, value, least in (('train', train, 1), ('val', val, 1), ('size', size, 32), ('seed', seed, 0)):
        if value < least:
            raise ValueError(f'--{name} {value}: must be {least} or more')
    out = Path(out)
    record = out / RECORD
    arguments = dict(train=train, val=val, size=size, seed=seed, rendering=RENDERING)
    if record.exists():
        if json.loads(record.read_text()) == dict(arguments, finished=True):
            return False
        for name in ('images', 'annotations'):
            shutil.rmtree(out / name, ignore_errors=True)
    elif out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f'--out {out}: not empty, and not made by this script; name a new or an empty folder')
    (out / 'annotations').mkdir(parents=True)
    record.write_text(json.dumps(dict(arguments, finished=False)))
    for split, count in zip(SPLITS, (train, val), strict=True):
        coco = _make_split(split, count, out, size, seed)
        (out / 'annotations' / f'instances_{split}.json').write_text(json.dumps(coco))
    record.write_text(json.dumps(dict(arguments, finished=True)))
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder to write; new, empty, or made by this script')
    parser.add_argument('--train', type=int, default=600, metavar='N', help='training images (default: 600)')
    parser.add_argument('--val', type=int, default=100, metavar='N', help='validation images (default: 100)')
    parser.add_argument('--size', type=int, default=192, help='side of the square images in pixels (default: 192)')
    parser.add_argument('--seed', type=int, default=0, help='default: 0')
    args = parser.parse_args()
    try:
        written = make_set(**vars(args))
    except (ValueError, OSError) as error:
        sys.exit(f'error: {error}')
    print(f'\n{args.out}: written' if written else f'{args.out}: already there, made with the same arguments')


if __name__ == '__main__':
    main()
