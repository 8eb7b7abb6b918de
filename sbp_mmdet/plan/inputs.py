"""What a config feeds its detector in training: the largest batch of its pipeline, with what annotations."""

import argparse
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mmengine.config import Config

from .worst_batch import Batch, name_of, steps_of, substeps, usual_batch, worst_batch

__all__ = ['DEFAULT_BATCH', 'DEFAULT_SIZE', 'Inputs', 'add_inputs', 'crowded', 'inputs_of', 'labels_of']

DEFAULT_BATCH = 2
DEFAULT_SIZE = (800, 1333)
# COCO's images have 7.3 boxes in the mean, 93 at most. How far a crowded batch's mean lies above falls with the root of
# its images. 60 for two, which the planner's margin was fitted with, makes 82 for one and 20 for 32.
_MEAN_BOXES, _CROWDED = 7.3, 74.5


def crowded(batch: int) -> int:
    """Boxes an image in a crowded batch of COCO.

    Args:
        batch (int): Images.
    """
    return round(_MEAN_BOXES + _CROWDED / batch**0.5)


class Inputs(NamedTuple):
    """A training batch.

    Attributes:
        batch (int): Images on a GPU.
        height, width (int): What the largest batch is padded to, before the preprocessor's divisor.
        masks (bool): Whether there is a mask for each box.
        semantic (bool): Whether there is a map of semantic classes.
        source (str): Where size and batch come from, for the reader.
        usual (tuple[int, int] | None): Height and width of a usual photograph, see :func:`.worst_batch.usual_batch`.
    """

    batch: int
    height: int
    width: int
    masks: bool
    semantic: bool
    source: str
    usual: tuple[int, int] | None = None


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments ``--batch`` and ``--size``, whose defaults are what :func:`inputs_of` reads."""
    parser.add_argument('--batch', type=_images, help="images on the GPU (default: the config's own); plan takes 'max'")
    parser.add_argument('--size', help="of the images, before padding: 800x1333 (default: the pipeline's largest)")


def _images(text):
    return 'max' if text == 'max' else int(text)


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
    steps = list(_leaves(steps_of(loader.get('dataset'))))
    panoptic = 'LoadPanopticAnnotations' in map(name_of, steps)
    masks, semantic = (panoptic or any(step.get(key) for step in steps) for key in ('with_mask', 'with_seg'))
    notes = []
    if batch is None:
        batch = loader.get('batch_size', DEFAULT_BATCH)
        known = 'batch_size' in loader
        notes.append('batch: of train_dataloader' if known else f'batch: not told by the config, so {DEFAULT_BATCH}')
    if size is None:
        found = worst_batch(config, batch)
        notes.append(f'size: {found.cause}' if found else "size: not told by the config, so COCO's")
        worst, usual = found or Batch(*DEFAULT_SIZE, ''), usual_batch(config)
    else:
        worst, usual = Batch(*size, ''), None
    source = '; '.join(reversed(notes)) or 'as told'
    return Inputs(batch, worst.height, worst.width, bool(masks), bool(semantic), source, usual and usual[:2])


def _leaves(steps: Iterable[dict]) -> Iterator[dict]:
    for step in steps:
        branches = substeps(step)
        if not branches:
            yield step
        for branch in branches:
            yield from _leaves(branch)


def labels_of(config: Config) -> tuple[int, bool]:
    """Number of classes of a config's model, and whether it has a mask for each box."""
    found = []

    def look(node):
        if isinstance(node, dict):
            if isinstance(node.get('num_classes'), int):
                found.append(node['num_classes'])
            node = list(node.values())
        if isinstance(node, (list, tuple)):
            for item in node:
                look(item)

    look(config.model)
    roi_head = config.model.get('roi_head')
    masks = (roi_head.get('mask_head') if isinstance(roi_head, dict) else None) or config.model.get('mask_head')
    masks = masks or (config.model.get('data_preprocessor') or {}).get('pad_mask')
    return min(found, default=1), bool(masks)
