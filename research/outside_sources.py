"""Runs public sources of other projects from a folder on a CPU: imports, batches as they collate them, stand-ins."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cv2
import mmcv
import numpy as np
import text_stand_in  # noqa: F401  registers the text encoder
import torch
from mmdet.models.layers.transformer import dino_layers
from mmengine.utils import digit_version

from sbp_mmdet.plan import detector as plan_detector

__all__ = ['sources']

_build_batch = plan_detector.build_batch
_PRIORS = 10_000  # whose distances to all boxes are computed at once
_SINGLE = torch.float32


@contextlib.contextmanager
def sources(folder: Path, config: str) -> Iterator[None]:
    """Make the sources in a folder importable, and let them run on a CPU, within the context.

    Args:
        folder (Path): The folder, see ``outside_models.py``.
        config (str): Path of the detector's config in the folder.
    """
    project = config.partition('/')[0]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, 'path', [str(folder / 'mmdet'), *sys.path]))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.Tensor, 'cuda', lambda self, *args, **kwargs: self))
        for name in ('prettytable', 'torchvision'):  # mmyolo prints with it; one detector of mmrotate turns images
            if name not in sys.modules and importlib.util.find_spec(name) is None and project != 'mmdet':
                stack.enter_context(mock.patch.dict(sys.modules, {name: mock.MagicMock()}))
        if project != 'mmdet':  # __init__ of the package refuses newer versions of mmcv and mmdet
            package = types.ModuleType(project)
            package.__path__ = [str(folder / project / project)]
            package.digit_version, package.mmcv_version = digit_version, digit_version(mmcv.__version__)
            stack.enter_context(mock.patch.dict(sys.modules, {project: package}))
        made = None
        if 'grounding_dino' in config:
            stack.enter_context(_grounding_dino_runs())
            made = _with_captions
        elif project == 'mmyolo':
            made = _collated_one_by_one if 'ppyoloe' in config else _collated
        elif project == 'mmrotate':
            importlib.import_module('mmrotate.structures')
            stack.enter_context(_rotated_overlaps_in_fp64())
            made = _rotated
        if made:
            stack.enter_context(mock.patch.object(plan_detector, 'build_batch', made))
        if project != 'mmdet':
            importlib.import_module(f'{project}.models')
        yield


def _grounding_dino_runs():
    """Make Grounding DINO encode positions with the width that its decoder expects, within the context.

    onedl-mmdetection 3.5.1 widens the encoding for DINO, but not the layer of Grounding DINO that reads it.
    """
    encode = dino_layers.coordinate_to_encoding

    def narrow(coordinates, num_feats):
        return encode(coordinates, num_feats=num_feats // 2)

    wide = 'num_feats=query.shape[2])' in inspect.getsource(dino_layers.DinoTransformerDecoder.forward)
    return mock.patch.object(dino_layers, 'coordinate_to_encoding', narrow if wide else encode)


def _with_captions(batch, height, width, boxes, num_classes, *args, **kwargs):
    """Build a batch whose samples name their classes, as Grounding DINO's data sets do."""
    batch_of_samples = _build_batch(batch, height, width, boxes, num_classes, *args, **kwargs)
    for sample in batch_of_samples['data_samples']:
        sample.set_metainfo(dict(text=tuple(f'thing{i}' for i in range(num_classes)), custom_entities=True))
    return batch_of_samples


def _collated(*args, **kwargs):
    """Build a batch as mmyolo collates it: all boxes in one tensor, with the number of their image and their label."""
    batch_of_samples = _build_batch(*args, **kwargs)
    rows = []
    for i, sample in enumerate(batch_of_samples['data_samples']):
        found = sample.gt_instances
        rows.append(
            torch.cat([found.labels.new_full((len(found), 1), i), found.labels[:, None], found.bboxes.tensor], 1)
        )
    samples = dict(
        bboxes_labels=torch.cat(rows), img_metas=[sample.metainfo for sample in batch_of_samples['data_samples']]
    )
    return dict(inputs=torch.stack(batch_of_samples['inputs']).float(), data_samples=samples)


def _collated_one_by_one(*args, **kwargs):
    """Build a batch as mmyolo collates it for PPYOLOE, whose preprocessor gets a list of images."""
    batch_of_samples = _collated(*args, **kwargs)
    return dict(batch_of_samples, inputs=[*batch_of_samples['inputs'].unbind()])


def _rotated(*args, **kwargs):
    """Build a batch of rotated boxes, as mmrotate's pipelines do."""
    kind = importlib.import_module('mmrotate.structures').RotatedBoxes
    batch_of_samples = _build_batch(*args, **kwargs)
    angles = np.random.default_rng(0)
    for sample in batch_of_samples['data_samples']:
        for instances in (sample.gt_instances, sample.ignored_instances):
            boxes = instances.bboxes.tensor
            sides = boxes[:, 2:] - boxes[:, :2]
            turned = torch.from_numpy(angles.uniform(-1.5, 1.5, (len(boxes), 1))).to(boxes)
            instances.bboxes = kind(torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, sides, turned], 1))
    return batch_of_samples


@contextlib.contextmanager
def _rotated_overlaps_in_fp64():
    """Compute overlaps of rotated boxes for detectors in fp64, of pairs that may overlap alone."""
    overlaps = importlib.import_module('mmrotate.structures.bbox.bbox_overlaps')
    overlap, rectangle = overlaps.box_iou_rotated, cv2.minAreaRect

    def near_pairs(a, b, mode='iou', aligned=False, **kwargs):  # mmcv's takes all pairs and knows no fp64 on a CPU
        first, second = a.to(_SINGLE), b.to(_SINGLE)
        if aligned:
            return overlap(first, second, mode, aligned=True, **kwargs).to(a.dtype)
        rows, columns = _pairs_that_may_overlap(first.numpy(force=True), second.numpy(force=True))
        found = a.new_zeros(len(a), len(b))
        found[rows, columns] = overlap(first[rows], second[columns], mode, aligned=True, **kwargs).to(a.dtype)
        return found

    with (
        mock.patch.object(cv2, 'minAreaRect', lambda points: rectangle(points.astype(np.float32))),
        mock.patch.object(overlaps, 'box_iou_rotated', near_pairs),
    ):
        yield


def _pairs_that_may_overlap(a, b):
    """Return the indices of those rotated boxes whose enclosing circles meet; all others have no overlap."""
    pairs = []
    for start in range(0, len(a) or 1, _PRIORS):
        part = a[start : start + _PRIORS]
        apart = np.linalg.norm(part[:, None, :2] - b[None, :, :2], axis=2)
        reach = np.linalg.norm(part[:, 2:4], axis=1)[:, None] + np.linalg.norm(b[:, 2:4], axis=1)
        rows, columns = np.nonzero(apart <= reach / 2)
        pairs.append((rows + start, columns))
    return tuple(torch.from_numpy(np.concatenate(found)) for found in zip(*pairs, strict=True))
