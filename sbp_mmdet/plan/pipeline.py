"""What a train pipeline makes of images: its own transforms are run, on blank images as large as those of the data.

Files of images are not read where the annotations tell their sizes. Everything else is the config's: data sets and
their wrappers, transforms, also those that mmdet does not know.
"""

import contextlib
import copy
import io
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from mmdet.registry import DATASETS
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import init_default_scope
from mmengine.utils import import_modules_from_strings

from .blank_images import NO_BOXES, as_array, blank_copy, rectangle
from .steps import name_of

__all__ = ['CannotRun', 'Samples', 'data_set_of', 'samples_of']

# Width, height and share of COCO's images, roughly; with the most elongated ones.
COCO_SIZES = (
    (640, 480, 330), (480, 640, 120), (640, 427, 220), (427, 640, 80), (640, 425, 40), (425, 640, 15), (500, 375, 60),
    (375, 500, 30), (640, 360, 30), (360, 640, 8), (640, 640, 20), (612, 612, 20), (640, 524, 20), (500, 333, 20),
    (640, 300, 10), (300, 640, 5), (640, 200, 3), (200, 640, 2), (640, 120, 1), (120, 640, 1),
)  # fmt: skip
COCO_IMAGES = 118287
# Samples are added until the largest do not change: round by round up to so many.
_ROUNDS = (64, 256, 1024, 2048)
# What is known to be larger, or more crowded, than the others is run so often.
_TIMES = 8
_SECONDS, _SECONDS_PER_IMAGE = 40, 10


class CannotRun(ValueError):
    """The pipeline of a config cannot be run here."""


class Samples(NamedTuple):
    """Images as a pipeline puts them out, one entry a sample and, where sizes are, a branch.

    Attributes:
        branches (tuple[str, ...]): Names of the branches of a semi-supervised pipeline; one, '', of an ordinary one.
        sizes (np.ndarray): (samples, branches, 2): height and width; 0: the sample has nothing for this branch.
        boxes (np.ndarray): (samples, branches): boxes that are not ignored.
        truth (list): For each sample, its boxes by branch as shares of width and height, (boxes, 4).
        channels (int): Of the images.
        images (np.ndarray): Which image of the data set it was.
        portrait (np.ndarray): Whether that is higher than wide.
        source (np.ndarray): Which data set of a concatenation it is from.
        weight (np.ndarray): How often it comes, as a share.
        total (int): Images of the data set.
        groups (tuple[int, int] | None): How many of them are landscape and portrait; None: not known.
    """

    branches: tuple[str, ...]
    sizes: np.ndarray
    boxes: np.ndarray
    truth: list
    channels: int
    images: np.ndarray
    portrait: np.ndarray
    source: np.ndarray
    weight: np.ndarray
    total: int
    groups: tuple[int, int] | None


def data_set_of(config: Config) -> tuple[object, str]:
    """Build the train data set of a config; from COCO's sizes where its annotations are not here.

    Args:
        config (Config): Config of a detector.

    Returns:
        tuple: The data set, and whose sizes it has, for the reader.

    Raises:
        CannotRun: Naming what cannot be built.
    """
    register_all_modules(init_default_scope=False)
    if imports := config.get('custom_imports'):
        with contextlib.suppress(ImportError):  # of models; a transform that is missing is named below
            import_modules_from_strings(**imports)
    init_default_scope(config.get('default_scope') or 'mmdet')
    cfg = copy.deepcopy(config.train_dataloader.dataset)
    with _quiet():
        try:
            dataset = DATASETS.build(cfg)
            dataset.full_init()
            return dataset, 'those of the annotations'
        except (OSError, ImportError):  # not here: ImportError is of packages that read other data sets than COCO
            pass
        except Exception as error:
            raise CannotRun(_line('its train data set cannot be built', error)) from error
        try:
            return _with_photographs(cfg), "COCO's, for the annotations are not here"
        except Exception as error:
            raise CannotRun(_line('its train pipeline cannot be built', error)) from error


def samples_of(dataset, config: Config, step=None, batch: int = 1) -> Samples:
    """Run a data set's pipeline on many of its images, blank where that is possible. The same ones in each call.

    Args:
        dataset: Of mmengine's kind, as a runner or :func:`data_set_of` builds it; it is not changed.
        config (Config): Config of the detector.
        step (list | None): Pipeline that a hook puts in the place of the data set's own. Default: None.
        batch (int): Images of a batch: the most crowded ones are among the samples. Default: 1.

    Returns:
        Samples: What came out.

    Raises:
        CannotRun: Naming the transform's error.
    """
    backbone = (config.model.get('detector') or config.model).get('backbone') or {}
    channels = backbone.get('in_channels') or 3
    with _own_draws(), _quiet():
        try:
            return _run(blank_copy(dataset, channels, step, blank=True), batch)
        except Exception as error:  # a transform that looks at the pictures: it gets them if they are there
            with contextlib.suppress(Exception):
                return _run(blank_copy(dataset, channels, step, blank=False), batch)
            raise CannotRun(_line('its train pipeline cannot be run', error)) from error


def _line(what, error):
    text = ' '.join(str(error).split())[:200]
    if isinstance(error, ValueError) and 'at least one array' in text:  # mmengine's, of a list of no images
        return f'{what} here: it has no image; look at ann_file, at the classes in metainfo and at filter_cfg'
    return f'{what} here ({type(error).__name__}: {text}); say the size of the images: --size 800x1333'


# --- Without the data -------------------------------------------------------------------------------------------------


class _Photographs(BaseDataset):
    """Images of COCO's sizes, with boxes."""

    def load_data_list(self):
        rng = np.random.default_rng(0)
        share = np.array([size[2] for size in COCO_SIZES])
        sizes = [size[:2] for size, times in zip(COCO_SIZES, -(-share // 5), strict=True) for _ in range(times)]
        return [self._info(rng, i, *size) for i, size in enumerate(sizes)]

    def _info(self, rng, i, width, height):
        corner, sides = rng.uniform(0, 0.6, (7, 2)), rng.uniform(0.05, 0.4, (7, 2))
        boxes = np.concatenate([corner, corner + sides], 1) * (width, height, width, height)
        instances = [
            dict(bbox=box, bbox_label=0, ignore_flag=0, mask=rectangle(box)) for box in np.round(boxes, 1).tolist()
        ]
        told = dict(img_id=i, img_path=f'{i}.jpg', seg_map_path=None, segments_info=[], instances=instances)
        return dict(told, height=height, width=width)

    def get_cat_ids(self, idx):
        return [0]


def _with_photographs(cfg):
    """Build a data set with its wrappers around photographs."""
    if parts := cfg.get('datasets'):
        return DATASETS.build(dict(cfg, datasets=[_with_photographs(part) for part in parts]))
    if inner := cfg.get('dataset'):
        return DATASETS.build(dict(cfg, dataset=_with_photographs(inner)))
    return _Photographs(pipeline=[_readable(step) for step in cfg.get('pipeline') or [] if not _is_of_files(step)])


def _is_of_files(step):
    return name_of(step) == 'LoadProposals'


def _readable(step):
    """Panoptic annotations are read by a package that need not be here."""
    if name_of(step) != 'LoadPanopticAnnotations':
        return step
    return dict(type='LoadAnnotations', **{key: step.get(key, True) for key in ('with_bbox', 'with_mask', 'with_seg')})


# --- Running it -------------------------------------------------------------------------------------------------------


def _run(dataset, batch) -> Samples:
    total, rng = len(dataset), np.random.default_rng(0)
    told = [_told(dataset, i) for i in range(total)]
    order = np.concatenate([rng.permutation(total) for _ in range(-(-_ROUNDS[-1] // total))])
    items, seen, done, begun = [], None, 0, time.monotonic()
    for end in _ROUNDS:
        for i in order[done:end]:
            items.append(_item(dataset, int(i)))
            _show(len(items), _ROUNDS[-1])
            if time.monotonic() - begun > _SECONDS:
                break
        done = len(items)
        sizes = np.array([size[:2] for item in items for _, size in sorted(item.items())])
        bounds = _bounds(items, [told[i] for i in order[:done]])
        if done < end or bounds == seen and done >= min(total, _ROUNDS[1]) or _is_one(sizes):
            break
        seen = bounds
    # Not all images were among them, perhaps not the largest ones; where all sizes are one, these are asked once.
    times = 1 if _is_one(sizes) else _TIMES
    extreme = [i for i in _extremes(told, batch) for _ in range(times)] if done < total else []
    items += [_item(dataset, i) for i in extreme]
    _show(0, 0)
    images = np.concatenate([order[:done], np.array(extreme, int)])[: len(items)]
    weight = np.where(np.arange(len(items)) < done, 1 / done, 1 / times / total)
    branches = tuple(sorted({branch for item in items for branch in item}))
    truth = [[_shares(*item[branch]) if branch in item else NO_BOXES for branch in branches] for item in items]
    facts = np.array([[(*item.get(branch, (0, 0, 0))[:3],) for branch in branches] for item in items])
    boxes = np.array([[len(one) for one in row] for row in truth])
    high = sum(width < height for height, width, *_ in told)
    made, told = _is_made(dataset), np.array([told[i] for i in images])
    return Samples(
        branches, facts[..., :2], boxes, truth, int(facts[..., 2].max()), images,
        told[:, 1] < told[:, 0], told[:, 3], weight / weight.sum(), COCO_IMAGES if made else total,
        None if made else (total - high, high),
    )  # fmt: skip


def _shares(height, width, _, boxes):
    """Boxes as shares of the image; those that are no rectangles have none."""
    return boxes / (width, height, width, height) if boxes.shape[1] == 4 else NO_BOXES


def _is_one(sizes):
    return (sizes == sizes[0]).all()


def _is_made(dataset):
    while inner := getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None):
        dataset = inner[0] if isinstance(inner, list) else inner
    return isinstance(dataset, _Photographs)


def _told(dataset, i):
    """Height, width, boxes and source of an image, by its annotations; a size that they do not tell is 0."""
    info = dataset.get_data_info(i)
    info = info if isinstance(info, dict) else {}
    starts = getattr(dataset, 'cumulative_sizes', ())
    return (
        info.get('height') or 0,
        info.get('width') or 0,
        len(info.get('instances') or ()),
        sum(i >= start for start in starts),
    )


def _bounds(items, told):
    """Return the largest height and width of each branch, source and orientation (landscape or portrait)."""
    most = {}
    for item, (height, width, _, source) in zip(items, told, strict=True):
        for branch, (h, w, *_) in item.items():
            key = branch, source, width < height
            most[key] = tuple(map(max, most.get(key, (0, 0)), (h, w)))
    return most


def _extremes(told, batch):
    """Images that are the largest or the most elongated of their group, and the most crowded ones."""
    told = np.array(told, float)
    height, width, boxes, source = told.T
    found = list(np.argsort(-boxes, kind='stable')[: min(batch, 32)])
    for group in {*zip(source, width < height, strict=True)}:
        inside = np.flatnonzero((source == group[0]) & ((width < height) == group[1]))
        h, w = height[inside], np.maximum(width[inside], 1)
        found += [inside[score.argmax()] for score in (h, w, h * w, h / w, w / np.maximum(h, 1))]
    return [int(i) for i in dict.fromkeys(found)]


def _item(dataset, i):
    """Height, width, channels and boxes of each branch of a sample."""
    with _time_limit(i):
        data = dataset[i]
    if not isinstance(data, dict) or 'inputs' not in data:
        raise ValueError(f'the pipeline gives {type(data).__name__} without inputs')
    inputs, samples = data['inputs'], data.get('data_samples')
    many = inputs if isinstance(inputs, dict) else {'': inputs}
    others = samples if isinstance(inputs, dict) else {'': samples}
    return {branch: _facts(value, others[branch]) for branch, value in many.items() if value is not None}


def _facts(inputs, sample):
    if isinstance(inputs, torch.Tensor):  # packed by a transform of one's own
        channels, height, width = inputs.shape[-3:]
        truth = getattr(getattr(sample, 'gt_instances', None), 'bboxes', ())
        return height, width, channels, as_array(truth)
    return (*inputs, sample)


@contextlib.contextmanager
def _time_limit(i) -> Iterator[None]:
    """End a transform that draws again and again and finds nothing."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, 'setitimer'):
        yield
        return

    def stop(*_):
        raise TimeoutError(f'it has no result for image {i} after {_SECONDS_PER_IMAGE} s')

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, _SECONDS_PER_IMAGE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _own_draws() -> Iterator[None]:
    """Context with random numbers of its own, the same in each call; restores those of the caller."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0), np.random.seed(0), torch.random.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context that discards what pycocotools prints when it loads annotations."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _show(done, of):
    if sys.stderr.isatty() and (not of or done % 16 == 0):
        share = round(20 * done / of) if of else 0
        text = f'[{"#" * share}{"." * (20 - share)}] sizes of images, by the pipeline' if of else ' ' * 82
        print(f'\r{text}', end='' if of else '\r', file=sys.stderr, flush=True)
