"""Pipelines on blank images: transforms that read files are replaced, so that the files are not needed."""

import contextlib
import copy
from collections.abc import Sequence

import numpy as np
from mmcv.transforms import BaseTransform, LoadImageFromFile
from mmdet.datasets.transforms import (
    CopyPaste,
    Expand,
    LoadAnnotations,
    LoadMultiChannelImageFromFiles,
    LoadPanopticAnnotations,
    PackDetInputs,
    PhotoMetricDistortion,
    YOLOXHSVRandomAug,
)
from mmdet.structures.mask import PolygonMasks
from mmengine.dataset import Compose
from PIL import Image

from .held import MUTABLE

__all__ = ['NO_BOXES', 'as_array', 'blank_copy', 'make_polygon']

NO_BOXES = np.zeros((0, 4))
# Largest number of other images that a data set tries when the pipeline rejects one; mmengine's default is 1000.
_REFETCHES = 15
_ORIENTATION = 0x0112  # tag of EXIF


def make_polygon(box: Sequence[float]) -> list[list[float]]:
    """Return the polygon of a box in COCO's format.

    Args:
        box (Sequence[float]): Left, upper, right and lower side of the box.
    """
    x, y, x2, y2 = box
    return [[x, y, x2, y, x2, y2, x, y2]]


def as_array(boxes) -> np.ndarray:
    """Return boxes of any kind as an array with a row for each.

    Args:
        boxes (BaseBoxes | Tensor | np.ndarray | Sequence): The boxes.
    """
    return np.asarray(getattr(boxes, 'tensor', boxes), np.float32).reshape(len(boxes), -1) if len(boxes) else NO_BOXES


class _BlankImage(BaseTransform):
    """Replacement for a transform that reads an image.

    Images are read to learn the channels of the first few, and where the file has another size than its annotations.
    """

    def __init__(self, loader, channels):
        self.loader, self.channels, self.num_read = loader, channels, 0

    def transform(self, results):
        shape = results.get('height'), results.get('width')
        known = all(shape)
        if not known or self.num_read < 3 or _has_other_size(results.get('img_path'), shape):
            self.num_read += 1
            try:
                read = self.loader(dict(results))
            except Exception:
                if not known:
                    raise
                self.num_read = 3
            else:
                if read is None:
                    return None
                image = read['img']
                self.channels = image.shape[2] if image.ndim == 3 else 0
                if image.shape[:2] != shape:
                    return read
        kind = np.float32 if self.loader.to_float32 else np.uint8
        results['img'] = np.zeros((*shape, self.channels) if self.channels else shape, kind)
        results['img_shape'] = results['ori_shape'] = shape
        return results


def _has_other_size(path, shape):
    """Return whether the header of an image file says another size than its annotations, or that it is rotated."""
    path = path[0] if isinstance(path, (list, tuple)) and path else path
    with contextlib.suppress(Exception):  # no file of this machine, or of a kind that Pillow does not know
        with Image.open(path) as image:
            rotated = 'exif' in image.info and image.getexif().get(_ORIENTATION, 1) != 1
            return rotated or image.size != shape[::-1]
    return False


class _BlankAnnotations(BaseTransform):
    """Replacement for a transform that reads annotations: masks are polygons, and maps of classes are not read."""

    def __init__(self, loader):
        self.seg = loader.with_seg
        keys = ('with_bbox', 'with_label', 'with_mask', 'box_type')
        self.loader = LoadAnnotations(**{key: getattr(loader, key) for key in keys}, poly2mask=False)

    def transform(self, results):
        if self.loader.with_mask:
            for instance in results.get('instances', []):
                if not isinstance(instance.get('mask'), list):  # run-length encoded
                    instance['mask'] = make_polygon(instance['bbox'])
        results = self.loader(results)
        if self.seg:
            results['gt_seg_map'] = np.zeros(results['ori_shape'], np.uint8)
        return results


class _ShapeAndBoxes(BaseTransform):
    """Replacement for the transform that packs tensors, which returns the image's shape and its boxes instead."""

    def transform(self, results):
        shape, boxes = results['img'].shape, results.get('gt_bboxes', ())
        ignored = results.get('gt_ignore_flags')
        boxes = as_array(boxes)
        boxes = boxes if ignored is None else boxes[np.asarray(ignored) == 0]
        return dict(inputs=(*shape[:2], shape[2] if len(shape) == 3 else 1), data_samples=boxes)


class _Colours(BaseTransform):
    """Replacement for a transform of colours, which changes at most the type of the image."""

    def __init__(self, floats):
        self.floats = floats

    def transform(self, results):
        if self.floats:
            results['img'] = results['img'].astype(np.float32)
        return results


class _Pasted(BaseTransform):
    """Replacement for :class:`CopyPaste`, which works on bitmaps: boxes of the other image come too."""

    def __init__(self, paste):
        self.paste = paste

    def get_indexes(self, dataset):
        return self.paste.get_indexes(dataset)

    def transform(self, results):
        other, number = results['mix_results'][0], self.paste.max_num_pasted
        for key in ('gt_bboxes', 'gt_bboxes_labels', 'gt_ignore_flags', 'gt_masks'):
            own = results[key]
            cat = getattr(type(own), 'cat', np.concatenate)
            results[key] = cat([own, other[key][:number]])
        return results


class _Expanded(BaseTransform):
    """Replacement for :class:`Expand`, which mmdet implements for bitmaps but not for polygons."""

    def __init__(self, expand):
        self.expand = expand

    def transform(self, results):
        masks = results.get('gt_masks')
        if isinstance(masks, PolygonMasks):
            results['gt_masks'] = _MovedPolygons(masks.masks, masks.height, masks.width)
        return self.expand(results)


class _MovedPolygons(PolygonMasks):
    """Polygons that can be moved into a larger image."""

    def expand(self, expanded_h, expanded_w, top, left):
        moved = [[np.asarray(p) + np.resize([left, top], len(p)) for p in polygons] for polygons in self.masks]
        return PolygonMasks(moved, expanded_h, expanded_w)


def _get_replacement(transform, channels):
    """Return the replacement for a transform, or ``None``. Only exact classes have one: a subclass may do more."""
    kind = type(transform)
    if kind is LoadImageFromFile:
        return _BlankImage(transform, {'color': 3, 'grayscale': 0}.get(transform.color_type, channels))
    if kind is LoadMultiChannelImageFromFiles:
        return _BlankImage(transform, channels)
    if kind in (LoadAnnotations, LoadPanopticAnnotations):
        return _BlankAnnotations(transform)
    if kind is CopyPaste:
        return _Pasted(transform)
    if kind is Expand:
        return _Expanded(transform)
    if kind in (PhotoMetricDistortion, YOLOXHSVRandomAug):
        return _Colours(kind is PhotoMetricDistortion)
    return None


def _replace_transforms(node, channels, blank):
    """Return a copy of a pipeline, or of a part of it, with stand-ins for transforms, at any depth."""
    if isinstance(node, (list, tuple)):
        return type(node)(_replace_transforms(item, channels, blank) for item in node)
    if isinstance(node, dict):
        return {key: _replace_transforms(value, channels, blank) for key, value in node.items()}
    if type(node) is PackDetInputs:
        return _ShapeAndBoxes()
    if blank and (replacement := _get_replacement(node, channels)):
        return replacement
    if isinstance(node, BaseTransform) or type(node).__name__ == 'Compose':
        node = copy.copy(node)
        if blank and getattr(node, 'interpolation', None) == 'bilinear':
            node.interpolation = 'nearest'  # the fastest one; the images are blank
        for key, value in vars(node).items():
            holds = isinstance(value, (list, tuple, dict, BaseTransform)) or type(value).__name__ == 'Compose'
            if holds:
                vars(node)[key] = _replace_transforms(value, channels, blank)
    return node


def blank_copy(dataset, channels: int, step: list | None, blank: bool, pack: bool = False):
    """Copy a data set with a pipeline whose images are blank. The annotations are shared.

    Args:
        dataset: A data set like mmengine's ``BaseDataset``, or a wrapper of data sets.
        channels (int): Number of channels of images that are not read.
        step (list | None): Pipeline that replaces the data set's own. If ``None``, its own.
        blank (bool): Whether images are blank. If ``False``, they are read.
        pack (bool): Whether samples are packed as the data set packs them, and not replaced by shapes. Default: False.

    Returns:
        The copy.
    """
    original, dataset = dataset, object.__new__(type(dataset))  # mmengine's slice of a data set cannot be copied
    # Its containers are its own, so that counters and caches of the user's data set stay as they are.
    own = {key: copy.copy(value) if type(value) in MUTABLE else value for key, value in vars(original).items()}
    vars(dataset).update(own)
    for key in ('datasets', 'dataset', '_dataset'):
        inner = vars(dataset).get(key)
        if inner is not None:
            many = isinstance(inner, (list, tuple))
            copies = [
                blank_copy(one, channels, step if key == '_dataset' else None, blank, pack)
                for one in (inner if many else [inner])
            ]
            setattr(dataset, key, copies if many else copies[0])
    if step is not None and '_dataset' not in vars(dataset):
        dataset.pipeline = Compose(copy.deepcopy(step))
    if 'pipeline' in vars(dataset):
        dataset.pipeline = copy.deepcopy(dataset.pipeline)
        dataset.pipeline = dataset.pipeline if pack else _replace_transforms(dataset.pipeline, channels, blank)
    if 'max_refetch' in vars(dataset):
        dataset.max_refetch = min(dataset.max_refetch, _REFETCHES)
    return dataset
