"""What a config feeds its detector in training: the largest batch of its pipeline, with what annotations."""

import argparse
from typing import NamedTuple

from mmengine.config import Config

from .pipeline import data_set_of, samples_of
from .steps import leaves_of, name_of, steps_of
from .worst_batch import Batch, batches_of

__all__ = ['DEFAULT_BATCH', 'DEFAULT_SIZE', 'Inputs', 'add_inputs', 'crowded', 'inputs_of', 'labels_of', 'labels_read']

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
        usual, rare (tuple[int, int] | None): Height and width of the batch in the middle, and those that one batch in a
            thousand reaches; None: the size was told.
        boxes (int | None): In each image of the most crowded batch; None: the annotations are not here.
        channels (int): Of the images.
        truth (list | None): See :class:`.worst_batch.Batch`; None where ``boxes`` is.
        branches (dict[str, Batch] | None): Of a semi-supervised training's batch; None: it has none.
    """

    batch: int
    height: int
    width: int
    masks: bool
    semantic: bool
    source: str
    usual: tuple[int, int] | None = None
    rare: tuple[int, int] | None = None
    boxes: int | None = None
    channels: int = 3
    truth: list | None = None
    branches: dict[str, Batch] | None = None


def add_inputs(parser: argparse.ArgumentParser, largest: bool = False) -> None:
    """Add the arguments ``--batch`` and ``--size``, whose defaults are what :func:`inputs_of` reads.

    Args:
        parser (argparse.ArgumentParser): The parser.
        largest (bool): Whether ``--batch max`` is allowed. Default: False.
    """
    more = "; 'max': the largest that fits" if largest else ''
    parser.add_argument(
        '--batch', type=_images if largest else int, help=f"images on the GPU (default: the config's own){more}"
    )
    parser.add_argument('--size', help="of the images, before padding: 800x1333 (default: the pipeline's largest)")


def _images(text):
    return 'max' if text == 'max' else int(text)


def inputs_of(
    config: Config,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    dataset=None,
    processes: int = 1,
) -> Inputs:
    """Find out what batches a config feeds its detector, by its own transforms on blank images.

    Args:
        config (Config): Config of a detector.
        batch (int | None): Images, instead of those of ``train_dataloader``. Default: None.
        size (tuple[int, int] | None): Height and width; nothing is run then. Default: None.
        dataset: The train data set where it is built already. Default: None.
        processes (int): Of the training. Default: 1.

    Returns:
        Inputs: The batch. What the config does not tell is ``DEFAULT_BATCH`` and ``DEFAULT_SIZE``, and ``source`` says
        so.

    Raises:
        ValueError: If data set or pipeline cannot be run here, naming why.
    """
    loader = config.get('train_dataloader') or {}
    masks, semantic = labels_read(config)
    notes = []
    if batch is None:
        batch = loader.get('batch_size', DEFAULT_BATCH)
        known = 'batch_size' in loader
        notes.append('batch: of train_dataloader' if known else f'batch: not told by the config, so {DEFAULT_BATCH}')
    channels = ((config.model.get('detector') or config.model).get('backbone') or {}).get('in_channels') or 3
    case = Inputs(batch, *(size or DEFAULT_SIZE), masks, semantic, '', channels=channels)
    if size is None and not loader.get('dataset'):
        notes.append("size: not told by the config, so COCO's")
    elif size is None:
        case, note = _of_pipeline(config, case, dataset, processes)
        notes.append(note)
    return case._replace(source='; '.join(reversed(notes)) or 'as told')


def _of_pipeline(config, case, dataset, processes):
    """Return the inputs with what the pipeline gives, and a note on where the sizes of images are from."""
    whose = 'those of the annotations'
    if dataset is None:
        dataset, whose = data_set_of(config)
    samples = [samples_of(dataset, config, step, case.batch) for step in [None, *_later(config)]]
    first, *later = [batches_of(one, config, case.batch, processes) for one in samples]
    most = max([first, *later], key=lambda found: found.main.height * found.main.width)
    main = most.main
    boxes = max(found.main.boxes for found in (first, *later)) if samples[0].groups else None
    case = case._replace(
        height=main.height, width=main.width, usual=first.usual, rare=first.rare, boxes=boxes,
        channels=samples[0].channels,
        truth=main.truth if samples[0].groups else None, branches=None if '' in most.largest else most.largest,
    )  # fmt: skip
    return case, f'size: of the pipeline; sizes of images: {whose}'


def _later(config):
    """Pipelines that hooks put in the place of the first one in the last epochs."""
    hooks = [hook for hook in config.get('custom_hooks') or [] if isinstance(hook, dict)]
    return [list(hook['switch_pipeline']) for hook in hooks if hook.get('switch_pipeline')]


def labels_read(config: Config) -> tuple[bool, bool]:
    """Return whether a config's pipeline reads a mask for each box, and a map of semantic classes.

    Args:
        config (Config): Config of a detector.
    """
    steps = list(leaves_of(steps_of((config.get('train_dataloader') or {}).get('dataset'))))
    panoptic = 'LoadPanopticAnnotations' in map(name_of, steps)
    masks, semantic = (panoptic or any(step.get(key) for step in steps) for key in ('with_mask', 'with_seg'))
    return bool(masks), bool(semantic)


def labels_of(config: Config) -> tuple[int, bool]:
    """Return the number of classes of a config's model, and whether the model is trained with a mask for each box."""
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
