"""The inputs of a config's training: the largest batch of its pipeline, and the annotations that it reads."""

import argparse
from typing import NamedTuple

from mmdet.engine.hooks import YOLOXModeSwitchHook
from mmdet.registry import HOOKS
from mmengine.config import Config

from ..surgery import hook_arguments, hook_class
from .arguments import parse_count
from .channels import find_channel_mismatch, loaded_channels
from .pipeline import OF_ANNOTATIONS, CannotRun, build_train_dataset, sample_pipeline
from .transforms import channels_of, innermost_of, name_of, transforms_of
from .worst_batch import Batch, draw_batches

__all__ = [
    'DEFAULT_BATCH',
    'DEFAULT_SIZE',
    'Inputs',
    'add_inputs',
    'count_crowded_boxes',
    'find_annotations',
    'find_classes',
    'find_training_inputs',
]

DEFAULT_BATCH = 2
DEFAULT_SIZE = (800, 1333)
# COCO's images have 7.3 boxes on average and 93 at most. The mean of a crowded batch exceeds the average by a number
# that falls with the root of its images. It is 60 for two images, which the planner's margin was fitted with, so 82 for
# one and 20 for 32.
_MEAN_BOXES, _CROWDED = 7.3, 74.5


def count_crowded_boxes(batch: int) -> int:
    """Return the number of boxes of each image in a crowded batch of COCO.

    Args:
        batch (int): Number of images.
    """
    return round(_MEAN_BOXES + _CROWDED / batch**0.5)


class Inputs(NamedTuple):
    """A training batch.

    Attributes:
        batch (int): Number of images on a GPU.
        height, width (int): Size of the largest batch, before it is padded to the preprocessor's divisor.
        masks (bool): Whether there is a mask for each box.
        semantic (bool): Whether there is a map of semantic classes.
        source (str): Where size and batch come from, as a text for the reader.
        usual, rare (tuple[int, int] | None): Height and width of the median batch, and those that one batch in a
            thousand reaches. ``None`` if the size was given. Default: None.
        boxes (int | None): Number of boxes in each image of the most crowded batch. ``None`` if the annotations are not
            available. Default: None.
        channels (int): Number of channels of the images. Default: 3.
        truth (list | None): See :class:`.worst_batch.Batch`. ``None`` if ``boxes`` is. Default: None.
        branches (dict[str, Batch] | None): Branches of the batch of a semi-supervised training. Default: None.
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
    """Add the arguments ``--batch`` and ``--size`` to a parser; :func:`find_training_inputs` finds their defaults.

    Args:
        parser (argparse.ArgumentParser): The parser.
        largest (bool): Whether ``--batch max`` is allowed. Default: False.
    """
    more = "; 'max': the largest that fits" if largest else ''
    kind = _parse_images if largest else parse_count
    parser.add_argument('--batch', type=kind, help=f"images on the GPU (default: the config's own){more}")
    parser.add_argument('--size', help="of the images, before padding: 800x1333 (default: the pipeline's largest)")


def _parse_images(text):
    if text == 'max':
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of images; give one, or 'max'") from None


def find_training_inputs(
    config: Config,
    batch: int | None = None,
    size: tuple[int, int] | None = None,
    dataset=None,
    processes: int = 1,
    count_boxes: bool = False,
) -> Inputs:
    """Find the largest batch of a config's training, by running its own transforms on blank images.

    Args:
        config (Config): Config of a detector.
        batch (int | None): Number of images. If ``None``, that of ``train_dataloader``. Default: None.
        size (tuple[int, int] | None): Height and width. If ``None``, the pipeline is run to find them. Default: None.
        dataset: Train data set. If ``None``, it is built. Default: None.
        processes (int): Number of processes of the training. Default: 1.
        count_boxes (bool): Whether the boxes of the annotations are counted even if ``size`` is given. Default: False.

    Returns:
        Inputs: The batch. If the config lacks them, the values are ``DEFAULT_BATCH`` and ``DEFAULT_SIZE``, which
        ``source`` says.

    Raises:
        ValueError: If the data set cannot be built or the pipeline cannot be run, or if its images have other channels
            than the model takes.
    """
    loader = config.get('train_dataloader') or {}
    masks, semantic = find_annotations(config)
    notes = []
    if batch is None:
        batch = loader.get('batch_size', DEFAULT_BATCH)
        known = 'batch_size' in loader
        notes.append('batch: of train_dataloader' if known else f'batch: not in the config, so {DEFAULT_BATCH}')
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(
            f'batch size {batch!r} must be a whole number of 1 or more; set --batch or train_dataloader.batch_size'
        )
    channels = loaded_channels(config) or channels_of(config)
    inputs = Inputs(batch, *(size or DEFAULT_SIZE), masks, semantic, '', channels=channels)
    if size is None and not loader.get('dataset'):
        notes.append("size: not in the config, so COCO's")
    elif size is None:
        inputs, note = _run_pipeline(config, inputs, dataset, processes)
        notes.append(note)
    elif count_boxes and loader.get('dataset'):
        inputs = inputs._replace(boxes=_count_boxes(config, inputs, processes))
    if problem := find_channel_mismatch(config, inputs.channels):
        raise CannotRun(problem)
    return inputs._replace(source='; '.join(reversed(notes)) or 'as given')


def _run_pipeline(config, inputs, dataset, processes):
    """Return the inputs with the sizes and boxes that the pipeline gives, and a note on the source of the sizes."""
    whose = OF_ANNOTATIONS
    if dataset is None:
        dataset, whose = build_train_dataset(config)
    samples = [
        sample_pipeline(dataset, config, step, inputs.batch, skip)
        for step, skip in [(None, ()), *_find_later_changes(config)]
    ]
    batches = [draw_batches(one, config, dataset, inputs.batch, processes) for one in samples]
    first, most_pixels = batches[0], max(batches, key=lambda one: one.main.height * one.main.width)
    main, branches = most_pixels.main, most_pixels.largest
    boxes = max(one.main.boxes for one in batches) if samples[0].groups else None
    batch = main.images if '' in branches else inputs.batch  # a batch sampler may take its own number
    inputs = inputs._replace(
        batch=batch, height=main.height, width=main.width, usual=first.usual, rare=first.rare, boxes=boxes,
        channels=samples[0].channels,
        truth=main.truth if samples[0].groups else None, branches=None if '' in branches else branches,
    )  # fmt: skip
    return inputs, f'size: of the pipeline; sizes of images: {whose}'


def _count_boxes(config, inputs, processes):
    """Return the number of boxes in an image of the most crowded batch, as the pipeline leaves them.

    It is ``None`` if there are no annotations, or the pipeline cannot be run.
    """
    try:
        dataset, source = build_train_dataset(config)
        if source != OF_ANNOTATIONS:
            return None
        return _run_pipeline(config, inputs, dataset, processes)[0].boxes
    except Exception:  # noqa: BLE001  whatever a data set raises; it may be the reason why the size was given
        return None


def _find_later_changes(config):
    """Return what hooks change in the last epochs: a pipeline in the place of the first, or transforms to skip."""
    changes = []
    for hook in config.get('custom_hooks') or []:
        kind = hook_class(hook)
        if hook.get('switch_pipeline'):
            changes.append((list(hook['switch_pipeline']), ()))
        elif isinstance(kind, type) and issubclass(kind, YOLOXModeSwitchHook):
            own = HOOKS.build(dict(hook_arguments(hook), type=hook['type']))
            changes.append((None, own.skip_type_keys))
    return changes


def find_annotations(config: Config) -> tuple[bool, bool]:
    """Return whether a config's pipeline reads a mask for each box, and a map of semantic classes.

    Args:
        config (Config): Config of a detector.
    """
    steps = list(innermost_of(transforms_of((config.get('train_dataloader') or {}).get('dataset'))))
    panoptic = 'LoadPanopticAnnotations' in map(name_of, steps)
    masks, semantic = (panoptic or any(step.get(key) for step in steps) for key in ('with_mask', 'with_seg'))
    return bool(masks), bool(semantic)


def find_classes(config: Config) -> tuple[int, bool]:
    """Return the smallest number of classes of a model's heads, and whether it is trained with a mask for each box.

    Args:
        config (Config): Config of a detector.
    """
    numbers = []

    def collect(node):
        if isinstance(node, dict):
            if isinstance(node.get('num_classes'), int):
                numbers.append(node['num_classes'])
            node = list(node.values())
        if isinstance(node, (list, tuple)):
            for item in node:
                collect(item)

    model = config.get('model') or {}  # a runner of objects has no config
    collect(model)
    roi_head = model.get('roi_head')
    masks = (roi_head.get('mask_head') if isinstance(roi_head, dict) else None) or model.get('mask_head')
    masks = masks or (model.get('data_preprocessor') or {}).get('pad_mask')
    return min(numbers, default=1), bool(masks)
