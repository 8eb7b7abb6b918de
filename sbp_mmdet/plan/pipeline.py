"""The sizes and boxes of images behind a train pipeline, found by running its own transforms on blank images.

Image files are not read if the annotations have their sizes. Everything else is that of the config: data sets and their
wrappers, and transforms, including the user's own.
"""

import contextlib
import copy
import io
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from mmdet.registry import DATASETS
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import init_default_scope
from mmengine.utils import import_modules_from_strings

from ..verify.dry_run import restored_random_states
from .blank_images import NO_BOXES, as_array, blank_copy, make_polygon
from .config_keys import describe_mistake, scope_of
from .errors import describe_data_error
from .transforms import channels_of, name_of

__all__ = [
    'OF_ANNOTATIONS',
    'CannotRun',
    'Samples',
    'build_train_dataset',
    'read_info',
    'sample_pipeline',
    'seeded_generators',
]

# Widths, heights and approximate frequencies of COCO's images, including the most elongated ones.
COCO_SIZES = (
    (640, 480, 330), (480, 640, 120), (640, 427, 220), (427, 640, 80), (640, 425, 40), (425, 640, 15), (500, 375, 60),
    (375, 500, 30), (640, 360, 30), (360, 640, 8), (640, 640, 20), (612, 612, 20), (640, 524, 20), (500, 333, 20),
    (640, 300, 10), (300, 640, 5), (640, 200, 3), (200, 640, 2), (640, 120, 1), (120, 640, 1),
)  # fmt: skip
COCO_IMAGES = 118287
OF_ANNOTATIONS = 'those of the annotations'  # source of the sizes, as a text for the reader
# Numbers of samples after which is checked whether the largest sizes have changed.
_ROUNDS = (64, 256, 1024, 2048)
# How often each of the largest and most crowded images is run.
_TIMES = 8
# Time limits: of all samples, in seconds of the process, and of one sample, in seconds of the clock.
_SECONDS, _SECONDS_PER_IMAGE = 40, 60


class CannotRun(ValueError):
    """Error of a data set or a pipeline that cannot be run here.

    Args:
        message (str): What cannot be run, and why.
        elsewhere (bool): Whether it may run on another machine, which has the data or the package that this one lacks.
            Here, a size that the user gives takes its place. Default: False.
    """

    def __init__(self, message: str, elsewhere: bool = False):
        super().__init__(message)
        self.elsewhere = elsewhere


class Samples(NamedTuple):
    """Outputs of a pipeline for a number of samples.

    Attributes:
        branches (tuple[str, ...]): Names of the branches of a semi-supervised pipeline; a single '' otherwise.
        sizes (np.ndarray): Height and width of each sample and branch, shape (samples, branches, 2); 0 if the sample
            has no image for the branch.
        boxes (np.ndarray): Number of boxes that are not ignored, shape (samples, branches).
        truth (list): For each sample, its boxes by branch as shares of width and height, shape (boxes, 4).
        channels (int): Number of channels of the images.
        images (np.ndarray): Index of each sample's image in the data set.
        portrait (np.ndarray): Whether the image in the data set is higher than wide.
        source (np.ndarray): Index of the image's data set in a concatenation.
        weight (np.ndarray): Probability of each sample.
        total (int): Number of images of the data set.
        groups (tuple[int, int] | None): Number of landscape and portrait images, or ``None`` if unknown.
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


def build_train_dataset(config: Config) -> tuple[object, str]:
    """Build the train data set of a config. If its annotations are missing, its images have the sizes of COCO's.

    Args:
        config (Config): Config of a detector.

    Returns:
        tuple[object, str]: The data set, and the source of the sizes as a text for the reader.

    Raises:
        CannotRun: If data set or pipeline cannot be built.
    """
    register_all_modules(init_default_scope=False)
    if imports := config.get('custom_imports'):
        with contextlib.suppress(ImportError):  # modules of models may be missing; a missing transform raises below
            import_modules_from_strings(**imports)
    init_default_scope(scope_of(config))
    cfg = copy.deepcopy(config.train_dataloader.dataset)
    with _discard_output():
        try:
            dataset = DATASETS.build(cfg)
            if hasattr(dataset, 'full_init'):
                dataset.full_init()
            return dataset, OF_ANNOTATIONS
        except (OSError, ImportError):  # files are missing, or a package that reads other data sets than COCO
            pass
        except Exception as error:
            reason = describe_data_error('its train data set cannot be built', error, config)
            # mmdet's transforms raise a RuntimeError where a package is missing.
            raise CannotRun(reason, elsewhere=isinstance(error, RuntimeError)) from error
        try:
            dataset = DATASETS.build(_with_coco_sized_images(cfg))
            return dataset, "COCO's, because the annotations are not on this machine"
        except Exception as error:
            reason = describe_data_error('its train pipeline cannot be built', error, config)
            raise CannotRun(reason, elsewhere=describe_mistake(config, error) is None) from error


def sample_pipeline(dataset, config: Config, step=None, batch: int = 1, skip: Sequence[str] = ()) -> Samples:
    """Run a data set's pipeline on many of its images, which are blank if possible. Each call takes the same images.

    Args:
        dataset: Data set of mmengine, as a runner or :func:`build_train_dataset` builds it. It is not changed.
        config (Config): Config of the detector.
        step (list | None): Pipeline that a hook switches to. If ``None``, the data set's own. Default: None.
        batch (int): Number of images of a batch; as many of the most crowded images are among the samples. Default: 1.
        skip (Sequence[str]): Transforms that a hook lets the data set skip. Default: none.

    Returns:
        Samples: The outputs.

    Raises:
        CannotRun: If a transform raises an error.
    """
    channels = channels_of(config)

    def copied(blank):
        blanks = blank_copy(dataset, channels, step, blank)
        if skip and hasattr(blanks, 'update_skip_type_keys'):
            blanks.update_skip_type_keys(skip)
        return blanks

    with seeded_generators(), _discard_output():
        try:
            return _run_on_samples(copied(blank=True), batch)
        except Exception as error:  # a transform may need the pictures: they are read if they are on this machine
            try:
                return _run_on_samples(copied(blank=False), batch)
            except Exception as second:
                missing = isinstance(second, OSError) or _is_without_data(dataset)
            reason = describe_data_error('its train pipeline cannot be run', error, config)
            raise CannotRun(reason, elsewhere=missing) from error


# --- Without the data -------------------------------------------------------------------------------------------------


class _CocoSizedImages(BaseDataset):
    """Data set of images of COCO's sizes, with boxes."""

    def load_data_list(self):
        rng = np.random.default_rng(0)
        share = np.array([size[2] for size in COCO_SIZES])
        sizes = [size[:2] for size, times in zip(COCO_SIZES, -(-share // 5), strict=True) for _ in range(times)]
        return [self._info(rng, i, *size) for i, size in enumerate(sizes)]

    def _info(self, rng, i, width, height):
        corner, sides = rng.uniform(0, 0.6, (7, 2)), rng.uniform(0.05, 0.4, (7, 2))
        boxes = np.concatenate([corner, corner + sides], 1) * (width, height, width, height)
        instances = [
            dict(bbox=box, bbox_label=0, ignore_flag=0, mask=make_polygon(box)) for box in np.round(boxes, 1).tolist()
        ]
        info = dict(img_id=i, img_path=f'{i}.jpg', seg_map_path=None, segments_info=[], instances=instances)
        return dict(info, height=height, width=width)

    def get_cat_ids(self, idx):
        return [0]


def _with_coco_sized_images(cfg):
    """Return the config of a data set, wrappers included, with blank images of COCO's sizes."""
    if parts := cfg.get('datasets'):
        return dict(cfg, datasets=[_with_coco_sized_images(part) for part in parts])
    if inner := cfg.get('dataset'):
        return dict(cfg, dataset=_with_coco_sized_images(inner))
    steps = [_make_readable(step) for step in cfg.get('pipeline') or [] if not _is_of_files(step)]
    return dict(type=_CocoSizedImages, pipeline=steps)


def _is_of_files(step):
    return name_of(step) == 'LoadProposals'


def _make_readable(step):
    """Replace the loading of panoptic annotations, which needs a package that may not be installed."""
    if name_of(step) != 'LoadPanopticAnnotations':
        return step
    return dict(type='LoadAnnotations', **{key: step.get(key, True) for key in ('with_bbox', 'with_mask', 'with_seg')})


# --- Running it -------------------------------------------------------------------------------------------------------


def _run_on_samples(dataset, batch) -> Samples:
    total, rng = len(dataset), np.random.default_rng(0)
    infos = [read_info(dataset, i) for i in range(total)]
    order = np.concatenate([rng.permutation(total) for _ in range(-(-_ROUNDS[-1] // total))])
    items, seen, done, begun = [], None, 0, time.process_time()
    for end in _ROUNDS:
        for i in order[done:end]:
            items.append(_run_on_image(dataset, int(i)))
            _show_progress(len(items), _ROUNDS[-1])
            if time.process_time() - begun > _SECONDS:  # of its own time: the answer is the same on a busy machine
                break
        done = len(items)
        sizes = np.array([size[:2] for item in items for _, size in sorted(item.items())])
        bounds = _find_largest_sizes(items, [infos[i] for i in order[:done]])
        if done < end or bounds == seen and done >= min(total, _ROUNDS[1]) or _are_equal(sizes):
            break
        seen = bounds
    # The largest images may not be among the samples, so they are added; once, if all sizes are the same.
    times = 1 if _are_equal(sizes) else _TIMES
    extreme = [i for i in _find_extremes(infos, batch) for _ in range(times)] if done < total else []
    items += [_run_on_image(dataset, i) for i in extreme]
    _show_progress(0, 0)
    images = np.concatenate([order[:done], np.array(extreme, int)])[: len(items)]
    weight = np.where(np.arange(len(items)) < done, 1 / done, 1 / times / total)
    branches = tuple(sorted({branch for item in items for branch in item}))
    truth = [[_to_shares(*item[branch]) if branch in item else NO_BOXES for branch in branches] for item in items]
    shapes = np.array([[(*item.get(branch, (0, 0, 0))[:3],) for branch in branches] for item in items])
    boxes = np.array([[len(one) for one in row] for row in truth])
    high = sum(width < height for height, width, *_ in infos)
    without_data, sampled = _is_without_data(dataset), np.array([infos[i] for i in images])
    return Samples(
        branches, shapes[..., :2], boxes, truth, int(shapes[..., 2].max()), images,
        sampled[:, 1] < sampled[:, 0], sampled[:, 3], weight / weight.sum(), COCO_IMAGES if without_data else total,
        None if without_data else (total - high, high),
    )  # fmt: skip


def _to_shares(height, width, _, boxes):
    """Return boxes as shares of the image, or none if the boxes are no rectangles."""
    return boxes / (width, height, width, height) if boxes.shape[1] == 4 else NO_BOXES


def _are_equal(sizes):
    return (sizes == sizes[0]).all()


def _is_without_data(dataset):
    while inner := getattr(dataset, 'datasets', None) or getattr(dataset, 'dataset', None):
        dataset = inner[0] if isinstance(inner, list) else inner
    return isinstance(dataset, _CocoSizedImages)


def read_info(dataset, i):
    """Return height, width, number of boxes and source of an image by its annotations; unknown sizes are 0.

    Args:
        dataset: A data set, or a wrapper of data sets.
        i (int): Index of the image.
    """
    info = dataset.get_data_info(i) if hasattr(dataset, 'get_data_info') else {}
    info = info if isinstance(info, dict) else {}
    starts = getattr(dataset, 'cumulative_sizes', ())
    return (
        info.get('height') or 0,
        info.get('width') or 0,
        len(info.get('instances') or ()),
        sum(i >= start for start in starts),
    )


def _find_largest_sizes(items, infos):
    """Return the largest height and width of each branch, source and orientation (landscape or portrait)."""
    most = {}
    for item, (height, width, _, source) in zip(items, infos, strict=True):
        for branch, (h, w, *_) in item.items():
            key = branch, source, width < height
            most[key] = tuple(map(max, most.get(key, (0, 0)), (h, w)))
    return most


def _find_extremes(infos, batch):
    """Return the indices of the largest and most elongated images of each group, and of the most crowded images."""
    height, width, boxes, source = np.array(infos, float).T
    chosen = list(np.argsort(-boxes, kind='stable')[: min(batch, 32)])
    for group in {*zip(source, width < height, strict=True)}:
        inside = np.flatnonzero((source == group[0]) & ((width < height) == group[1]))
        h, w = height[inside], np.maximum(width[inside], 1)
        chosen += [inside[score.argmax()] for score in (h, w, h * w, h / w, w / np.maximum(h, 1))]
    return [int(i) for i in dict.fromkeys(chosen)]


def _run_on_image(dataset, i):
    """Run the pipeline on an image; return height, width, channels and boxes of each branch."""
    with _time_limit(i):
        data = dataset[i]
    if not isinstance(data, dict) or 'inputs' not in data:
        raise ValueError(f'the pipeline returns {type(data).__name__} without inputs; end it with PackDetInputs')
    inputs, samples = data['inputs'], data.get('data_samples')
    if not isinstance(inputs, dict):  # no branches, as semi-supervised training has them
        inputs, samples = {'': inputs}, {'': samples}
    return {branch: _shape_and_boxes(one, samples[branch]) for branch, one in inputs.items() if one is not None}


def _shape_and_boxes(inputs, sample):
    if isinstance(inputs, torch.Tensor):  # packed by the user's own transform
        channels, height, width = inputs.shape[-3:]
        frames = getattr(sample, 'video_data_samples', [sample])  # of a clip
        truth = [getattr(getattr(frame, 'gt_instances', None), 'bboxes', ()) for frame in frames]
        return height, width, channels, as_array(max(truth, key=len))
    return (*inputs, sample)


@contextlib.contextmanager
def _time_limit(i) -> Iterator[None]:
    """Raise an error if a transform takes too long, for example because it redraws without success."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, 'setitimer'):
        yield
        return

    def stop(*_):
        raise TimeoutError(
            f'no result for image {i} after {_SECONDS_PER_IMAGE} s; a transform may redraw without success'
        )

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, _SECONDS_PER_IMAGE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def seeded_generators() -> Iterator[None]:
    """Seed all random generators within the context, and restore their states at its end."""
    with restored_random_states():
        random.seed(0), np.random.seed(0), torch.random.default_generator.manual_seed(0)
        yield


@contextlib.contextmanager
def _discard_output() -> Iterator[None]:
    """Discard output on stdout within the context, such as that of pycocotools when it loads annotations."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _show_progress(done, of):
    if sys.stderr.isatty() and (not of or done % 16 == 0):
        share = round(20 * done / of) if of else 0
        text = f'[{"#" * share}{"." * (20 - share)}] sizes of images, by the pipeline' if of else ' ' * 82
        print(f'\r{text}', end='' if of else '\r', file=sys.stderr, flush=True)
