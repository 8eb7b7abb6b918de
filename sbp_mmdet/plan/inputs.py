"""What a config feeds its detector in training: the largest images of its pipeline, how many, with what annotations."""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mmengine.config import Config

__all__ = ['DEFAULT_BATCH', 'DEFAULT_SIZE', 'Inputs', 'add_inputs', 'inputs_of']

DEFAULT_BATCH = 2
DEFAULT_SIZE = (800, 1333)


class Inputs(NamedTuple):
    """A training batch.

    Attributes:
        batch (int): Images on a GPU.
        height, width (int): Of the largest images, before the detector pads them; the longer side is the width.
        masks (bool): Whether there is a mask for each box.
        semantic (bool): Whether there is a map of semantic classes.
        source (str): Where size and batch come from, for the reader.
    """

    batch: int
    height: int
    width: int
    masks: bool
    semantic: bool
    source: str


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments ``--batch`` and ``--size``, whose defaults are what :func:`inputs_of` reads."""
    parser.add_argument('--batch', type=int, help="images on the GPU (default: the config's own)")
    parser.add_argument('--size', help="of the images, before padding: 800x1333 (default: the pipeline's largest)")


def inputs_of(config: Config, batch: int | None = None, size: tuple[int, int] | None = None) -> Inputs:
    """Reads the train pipeline of a config; nothing is loaded or run.

    Args:
        config (Config): Config of a detector.
        batch (int | None): Images, instead of those of ``train_dataloader``. Default: None.
        size (tuple[int, int] | None): Height and width, instead of the pipeline's. Default: None.

    Returns:
        Inputs: The batch. What the config does not tell is ``DEFAULT_BATCH`` and ``DEFAULT_SIZE``, and ``source`` says
        so.
    """
    loader = config.get('train_dataloader') or {}
    steps = list(_transforms(loader.get('dataset')))
    names = {_name(step) for step in _leaves(steps)}
    masks = any(step.get('with_mask') for step in _leaves(steps)) or 'LoadPanopticAnnotations' in names
    semantic = any(step.get('with_seg') for step in _leaves(steps)) or 'LoadPanopticAnnotations' in names
    notes = []
    if size is None:
        size = _padded(_largest(steps, None), config.model.get('data_preprocessor') or {})
        notes.append('size: the largest of the train pipeline' if size else "size: not told by the config, so COCO's")
    if batch is None:
        batch = loader.get('batch_size', DEFAULT_BATCH)
        known = 'batch_size' in loader
        notes.append('batch: of train_dataloader' if known else f'batch: not told by the config, so {DEFAULT_BATCH}')
    height, width = size or DEFAULT_SIZE
    return Inputs(batch, height, width, masks, semantic, '; '.join(notes) or 'as told')


def _transforms(dataset) -> Iterator[dict]:
    """Transforms in the order in which an image meets them: those of an inner data set first."""
    if not isinstance(dataset, dict):
        return
    inner = dataset.get('datasets') or [dataset.get('dataset')]
    # Parts of a concatenation have the same pipeline, or sizes of their own: all are looked at, the largest counts.
    yield from (
        _transforms(inner[0])
        if len(inner) == 1
        else [dict(type='RandomChoice', transforms=[list(_transforms(part)) for part in inner])]
    )
    yield from dataset.get('pipeline') or []


def _name(step) -> str:
    kind = step.get('type')
    return (kind if isinstance(kind, str) else getattr(kind, '__name__', '')).split('.')[-1]


def _branches(step) -> list[list[dict]]:
    """The alternatives that a transform chooses from, each a list of transforms."""
    choices = step.get('transforms') or []
    if _name(step) == 'RandomChoice':
        return [[choice] if isinstance(choice, dict) else list(choice) for choice in choices]
    if _name(step) in ('RandomApply', 'Compose', 'TransformBroadcaster', 'ProposalBroadcaster'):
        return [[choices] if isinstance(choices, dict) else list(choices)]
    if _name(step) == 'MultiBranch':  # semi-supervised: a pipeline for each kind of image
        named = [value for key, value in step.items() if key not in ('type', 'branch_field')]
        return [list(value) for value in named if isinstance(value, (list, tuple))]
    return []


def _leaves(steps) -> Iterator[dict]:
    for step in steps:
        branches = _branches(step)
        if not branches:
            yield step
        for branch in branches:
            yield from _leaves(branch)


def _largest(steps, size):
    """Largest (height, width) after some transforms; None: as large as the image on disk."""
    for step in steps:
        branches = _branches(step)
        if branches:
            sizes = [_largest(branch, size) for branch in branches]
            size = max((s for s in sizes if s), key=math.prod, default=None)
        elif rule := _RULES.get(_name(step)):
            size = rule(step, size)
    return size


def _pair(value) -> tuple:
    return (value, value) if isinstance(value, (int, float)) else tuple(value)


def _landscape(scale, factor=1.0):
    return tuple(int(side * factor + 0.5) for side in (min(scale), max(scale)))


def _scales(value) -> list[tuple]:
    """One scale or a list of them."""
    return [_pair(v) for v in value] if isinstance(value, (list, tuple)) and not _numbers(value) else [_pair(value)]


def _numbers(value) -> bool:
    return all(isinstance(v, (int, float)) for v in value)


def _resize(step, size):
    scale = step.get('scale') or step.get('scales')
    if scale is None:
        factors = step.get('scale_factor')
        return size and factors and tuple(int(side * f) for side, f in zip(size, _pair(factors), strict=True))
    factor = max(step.get('ratio_range') or [1.0])
    return max((_landscape(_pair(s), factor) for s in _scales(scale)), key=math.prod)


def _shortest_edge(step, size):
    shortest = max(_pair(step['scale']))
    return shortest, int(step.get('max_size') or size and max(size) or shortest)


def _crop(step, size):
    kind, crop = step.get('crop_type', 'absolute'), _pair(step['crop_size'])
    if kind.startswith('relative'):
        return size and tuple(int(side * min(part, 1.0)) for side, part in zip(size, crop, strict=True))
    crop = _landscape(crop)
    return tuple(map(min, size, crop)) if size else crop


def _pad(step, size):
    if step.get('size'):
        return tuple(map(max, size or (0, 0), _landscape(_pair(step['size']))))
    if size and step.get('pad_to_square'):
        return max(size), max(size)
    divisor = step.get('size_divisor')
    return size and divisor and tuple(-(-side // divisor) * divisor for side in size) or size


def _mosaic(step, size):
    return tuple(2 * side for side in _landscape(_pair(step.get('img_scale', (640, 640)))))


def _affine(step, size):
    border = _pair(step.get('border', (0, 0)))
    return size and tuple(side + 2 * more for side, more in zip(size, border, strict=True))


def _center_crop(step, size):
    return _landscape(_pair(step['crop_size'])) if step.get('crop_size') else size


# What a transform makes of the largest size; others leave it.
_RULES: dict[str, Callable] = {
    'Resize': _resize,
    'FixScaleResize': _resize,
    'RandomResize': _resize,
    'RandomChoiceResize': _resize,
    'ResizeShortestEdge': _shortest_edge,
    'RandomCrop': _crop,
    'RandomCenterCropPad': _center_crop,
    'Pad': _pad,
    'Mosaic': _mosaic,
    'CachedMosaic': _mosaic,
    'RandomAffine': _affine,
}


def _padded(size, preprocessor):
    """What the data preprocessor makes of a batch beyond padding to a divisor, which it does to any size."""
    preprocessor = {**preprocessor, **(preprocessor.get('data_preprocessor') or {})}
    for augment in preprocessor.get('batch_augments') or []:
        if _name(augment) == 'BatchFixedSizePad':
            size = tuple(map(max, size or (0, 0), _landscape(_pair(augment['size']))))
        elif _name(augment) == 'BatchSyncRandomResize':
            longest = max(augment['random_size_range'])
            size = tuple(int(side * longest / max(size)) for side in size) if size else (longest, longest)
    return size
