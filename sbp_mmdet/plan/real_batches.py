"""Batches of a data set's own samples, where a made-up batch would not have what the model or the collation reads."""

import functools
from collections.abc import Iterator

import numpy as np
from mmdet.structures import DetDataSample, TrackDataSample
from mmdet.structures.bbox import HorizontalBoxes
from mmdet.structures.mask import BitmapMasks, PolygonMasks
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.dist import get_world_size
from torch import Tensor

from .blank_images import blank_copy
from .index_batches import index_batches
from .memory import tensors_in
from .pipeline import CannotRun, Samples, sample_pipeline, seeded_generators
from .worst_batch import groups_of_samples

__all__ = ['build_real_batch', 'has_usual_structure', 'real_labels']

# What a made-up batch has, see :func:`.batch.build_batch`.
_KEYS = 'inputs', 'data_samples'
_META = {'img_id', 'img_path', 'ori_shape', 'img_shape', 'pad_shape', 'scale_factor', 'flip', 'flip_direction'}
_META |= {'homography_matrix', 'batch_input_shape', 'border', 'seg_map_path'}
_TRUTH = {'bboxes': (HorizontalBoxes, Tensor), 'labels': (Tensor,), 'masks': (BitmapMasks, PolygonMasks)}
_PARTS = {'gt_instances', 'ignored_instances', 'gt_sem_seg', 'proposals'}
# Numbers of batches that are tried, of times that a sample is drawn again to be as large as it was, and of images.
_BATCHES, _DRAWS, _IMAGES = 16, 16, 64


def has_usual_structure(loader) -> bool:
    """Return whether a loader's batches are images and annotations as mmdet's own pipelines pack and collate them.

    Args:
        loader (torch.utils.data.DataLoader): The loader of a training.
    """
    collate = loader.collate_fn
    while isinstance(collate, functools.partial):
        collate = collate.func
    if collate is not pseudo_collate:
        return False
    try:
        items = _read(loader.dataset, [0, len(loader.dataset) - 1])
    except Exception:  # noqa: BLE001  pictures that are not here; a made-up batch needs none, and training says it
        return True
    for item in items:
        if not isinstance(item, dict) or item.keys() != {*_KEYS}:
            return False
        inputs, samples = (
            one if isinstance(one, dict) else {'': one} for one in (item['inputs'], item['data_samples'])
        )
        if not all(isinstance(one, Tensor) and one.dim() == 3 for one in inputs.values() if one is not None):
            return False
        if not all(_is_usual(one) for one in samples.values() if one is not None):
            return False
    return True


def _is_usual(sample):
    if (
        type(sample) is not DetDataSample
        or not set(sample.metainfo_keys()) <= _META
        or not set(sample.keys()) <= _PARTS
    ):
        return False
    truth = sample.get('gt_instances') or {}
    return all(type(value) in _TRUTH.get(key, ()) for key, value in truth.items())


def build_real_batch(loader, config: Config, batch: int) -> tuple[dict, dict]:
    """Collate the largest and most crowded samples of a training's data, as its loader would.

    Args:
        loader (torch.utils.data.DataLoader): The loader of a training, which is not changed.
        config (Config): Config of the detector.
        batch (int): Number of images that are collated.

    Returns:
        tuple[dict, dict]: The batch, and a dict as :func:`.rehearse.build_largest_batch` returns it.
    """
    dataset, largest = blank_copy(loader.dataset, 3, None, blank=False, pack=True), None
    try:
        samples = sample_pipeline(loader.dataset, config, batch=batch)
        wanted = [*_wanted(samples, config, loader.dataset, batch)]
    except CannotRun:  # a pipeline of the user's own, whose result has no image by that name
        order = np.random.default_rng(0).permutation(len(dataset))
        wanted = [[(int(i), 0) for i in np.resize(order[start:], batch)] for start in range(0, len(order), batch)]
    with seeded_generators():
        for images in wanted[:_BATCHES]:
            data = loader.collate_fn([_draw(dataset, *one) for one in images])
            shape = _describe(data)
            if largest is None or _pixels(shape) > _pixels(largest[1]):
                largest = data, shape
    return largest


def _wanted(samples: Samples, config, dataset, batch) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of images of a data set, each with the number of pixels that it can have."""
    pixels = samples.sizes.prod(-1).max(-1)
    order = np.argsort(-pixels, kind='stable')
    most = dict(zip(samples.images[order][::-1].tolist(), pixels[order][::-1].tolist(), strict=True))
    if batches := index_batches(samples, config, dataset, batch, _IMAGES, get_world_size()):
        yield from sorted(
            ([(i, most.get(i, 0)) for i in one] for one in batches), key=lambda one: -sum(p for _, p in one)
        )
        return
    for group in groups_of_samples(samples, config, batch):
        chosen = []
        for inside, number in group:
            large = inside[np.argsort(-pixels[inside], kind='stable')]
            crowded = inside[np.argsort(-samples.boxes[inside].max(-1), kind='stable')]
            first = large[: -(-number // 2)]
            chosen += [*first, *np.resize(crowded, number - len(first))]
        yield [(int(samples.images[i]), most[int(samples.images[i])]) for i in chosen]


def _draw(dataset, image: int, pixels: int):
    """Return the largest of some samples of an image; the first one that has so many pixels."""
    best = None
    for _ in range(_DRAWS):
        item = dataset[image]
        found = max((t.shape[-1] * t.shape[-2] for t in tensors_in(item) if t.dim() > 2), default=0)
        if best is None or found > best[0]:
            best = found, item
        if best[0] >= pixels:
            break
    return best[1]


def _describe(data) -> dict:
    inputs = data.get('inputs', data) if isinstance(data, dict) else data
    pictures = [t for t in tensors_in(inputs) if t.dim() > 2]
    if not pictures:
        raise CannotRun('its train pipeline gives no tensor of an image; end it with PackDetInputs')
    height, width = (max(t.shape[at] for t in pictures) for at in (-2, -1))
    samples = data.get('data_samples') if isinstance(data, dict) else None
    boxes = max((len(one.gt_instances) for one in _samples_in(samples) if 'gt_instances' in one), default=0)
    images = sum(t.shape[:-3].numel() for t in pictures)
    return dict(batch=images, height=height, width=width, boxes=boxes, channels=pictures[0].shape[-3], usual=None)


def _pixels(shape):
    return shape['batch'] * shape['height'] * shape['width'], shape['boxes']


def _samples_in(value) -> Iterator[DetDataSample]:
    if isinstance(value, TrackDataSample):  # a clip
        value = value.video_data_samples
    if isinstance(value, DetDataSample):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _samples_in(one)


def _read(dataset, images):
    """Read samples from a copy of a data set, with random states that are restored afterwards."""
    dataset = blank_copy(dataset, 3, None, blank=False, pack=True)
    with seeded_generators():
        return [dataset[i] for i in images]


def real_labels(dataset) -> int | None:
    """Return the number of classes in samples of a data set's own pipeline: one more than the largest label.

    Args:
        dataset: A train data set, which is not changed.

    Returns:
        int | None: The number; ``None`` if the samples have no labels.
    """
    number = None
    for item in _read(dataset, range(min(len(dataset), _IMAGES))):
        for sample in _samples_in(item):
            labels = getattr(sample.get('gt_instances'), 'labels', None)
            if labels is not None:
                number = max(number or 0, int(labels.max()) + 1 if len(labels) else 0)
    return number
