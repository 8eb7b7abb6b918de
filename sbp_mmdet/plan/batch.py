"""A synthetic batch like those of COCO's training pipeline, and a detector that finds as much as a trained one."""

import contextlib
import functools
import os
from collections.abc import Iterator

import numpy as np
import torch
from mmdet.models.task_modules.assigners import DynamicSoftLabelAssigner
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import BaseBoxes, HorizontalBoxes
from mmdet.structures.mask import BitmapMasks
from mmengine.logging import MessageHub
from mmengine.structures import InstanceData, PixelData
from torch import nn

from .tables import format_gib, format_images

__all__ = ['LEAST_SIDE', 'as_if_trained', 'at_the_first_step', 'build_batch', 'while_as_if_trained']

# Least and largest side of a box as a share of the image's shorter side, from COCO's small to its large objects.
_BOX_SIDES = (0.02, 0.6)
LEAST_SIDE = 4  # of a box, in pixels
# Number of classes in a semantic map besides those of boxes.
_STUFF = 10
# Proposals of a trained RPN near each box (at most half of all), and predictions that are assigned to a box.
_PER_BOX = 8


def build_batch(
    batch: int,
    height: int,
    width: int,
    boxes: int,
    num_classes: int,
    with_masks: bool,
    seed: int = 0,
    semantic: bool = False,
    proposals: int = 0,
    channels: int = 3,
    truth: list[np.ndarray] | None = None,
) -> dict:
    """Make a batch of random images with ground truth.

    Args:
        batch (int): Number of images.
        height (int): Height of the images before padding, in pixels.
        width (int): Width of the images before padding, in pixels.
        boxes (int): Number of boxes in each image.
        num_classes (int): Number of classes; labels are below it.
        with_masks (bool): Whether each box has a mask, an ellipse that fills it.
        seed (int): Seed of pixels, sizes and places. Default: 0.
        semantic (bool): Whether each image has a semantic map, stripes of classes from ``num_classes`` on. Default:
            False.
        proposals (int): Number of proposals of each image, for detectors without an RPN. Default: 0.
        channels (int): Number of channels of the images. Default: 3.
        truth (list[np.ndarray] | None): Boxes of an image each, as shares of width and height, shape (boxes, 4). Image
            i of the batch takes number i modulo their number. If ``None``, boxes are random. Default: None.

    Returns:
        dict: ``inputs`` and ``data_samples``, for a detector's data preprocessor.

    Raises:
        ValueError: If the images are larger than this machine's memory.
    """
    _refuse_larger_than_memory(batch, height, width, boxes, channels)
    rng = np.random.default_rng(seed)
    inputs, samples = [], []
    for i in range(batch):
        inputs.append(torch.from_numpy(rng.integers(0, 256, (channels, height, width), dtype=np.uint8)))
        if truth and len(shares := truth[i % len(truth)]):
            bboxes = (np.resize(shares, (boxes, 4)) * (width, height, width, height)).astype(np.float32)
        else:
            bboxes = _draw_boxes(rng, boxes, height, width)
        sample = _sample(rng, i, bboxes, (height, width), num_classes, with_masks)
        if proposals:
            sample.proposals = _draw_proposals(rng, bboxes, proposals, height, width)
        if semantic:
            stripes = num_classes + torch.arange(width) * _STUFF // width
            sample.gt_sem_seg = PixelData(sem_seg=stripes.expand(1, height, width).clone())
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


def _refuse_larger_than_memory(batch, height, width, boxes, channels):
    """Refuse images that would exhaust the memory of this machine, upon which the system ends the process."""
    needed = batch * channels * height * width * (1 + torch.get_default_dtype().itemsize)  # bytes, then numbers
    if 'SC_PHYS_PAGES' not in getattr(os, 'sysconf_names', ()):  # not a Unix
        return
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if needed > memory:
        raise ValueError(
            f'a batch of {format_images(batch, height, width, boxes)} takes {format_gib(needed)} of the memory of this '
            f'machine, which has {format_gib(memory)}; take smaller or fewer images (--size, --batch)'
        )


def _sample(rng, number, bboxes, size, num_classes, with_masks) -> DetDataSample:
    """Return the ground truth of the image with this number in the batch."""
    sample = DetDataSample(
        metainfo=dict(
            img_id=number,
            img_path=f'{number}.jpg',
            ori_shape=size,
            img_shape=size,
            pad_shape=size,
            scale_factor=(1.0, 1.0),
            flip=False,
            flip_direction=None,
            homography_matrix=np.eye(3, dtype=np.float32),
        )
    )
    sample.gt_instances = InstanceData(
        bboxes=HorizontalBoxes(torch.from_numpy(bboxes)),
        labels=torch.from_numpy(rng.integers(0, num_classes, len(bboxes))),
    )
    if with_masks:
        sample.gt_instances.masks = BitmapMasks(_draw_ellipses(bboxes, *size), *size)
    sample.ignored_instances = InstanceData(
        bboxes=HorizontalBoxes(torch.zeros(0, 4)), labels=torch.zeros(0, dtype=torch.long)
    )
    return sample


def _draw_boxes(rng, number, height, width):
    low, high = _BOX_SIDES
    sides = min(height, width) * np.exp(rng.uniform(np.log(low), np.log(high), number))
    aspect = np.exp(rng.uniform(-0.7, 0.7, number))
    w = np.clip(sides * aspect**0.5, LEAST_SIDE, width)
    h = np.clip(sides / aspect**0.5, LEAST_SIDE, height)
    x, y = rng.uniform(0, 1, number) * (width - w), rng.uniform(0, 1, number) * (height - h)
    return np.stack([x, y, x + w, y + h], 1).astype(np.float32)


def _draw_ellipses(bboxes, height, width):
    masks = np.zeros((len(bboxes), height, width), np.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, bboxes, strict=True):
        rows, columns = np.arange(int(y1), int(np.ceil(y2))), np.arange(int(x1), int(np.ceil(x2)))
        dy = (rows[:, None] + 0.5 - (y1 + y2) / 2) / (y2 - y1) * 2
        dx = (columns[None] + 0.5 - (x1 + x2) / 2) / (x2 - x1) * 2
        mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = dy**2 + dx**2 <= 1
    return masks


def _draw_proposals(rng, truth, number, height, width):
    """Return proposals, of which at most half lie near the ground truth, :data:`_PER_BOX` for each box."""
    near = truth[np.arange(min(_PER_BOX * len(truth), number // 2)) % max(len(truth), 1)]
    near = near + rng.uniform(-0.05, 0.05, near.shape) * np.tile(near[:, 2:] - near[:, :2], 2)
    others = _draw_boxes(rng, number - len(near), height, width)
    boxes = torch.from_numpy(np.concatenate([near, others]).astype(np.float32))
    return InstanceData(bboxes=boxes, scores=torch.zeros(number), labels=torch.zeros(number, dtype=torch.long))


def _move_boxes(rng, truth, number, height, width):
    """Return proposals as :func:`_draw_proposals` does, for boxes of another kind: true boxes that are moved.

    Args:
        rng (np.random.Generator): Source of the places.
        truth (np.ndarray): Boxes, shape (boxes, columns). With an odd number of columns these are a centre, a width, a
            height and an angle (mmrotate), otherwise they are points.
        number (int): Number of proposals.
        height (int): Height of the image.
        width (int): Width of the image.
    """
    near = min(_PER_BOX * len(truth), number // 2)
    boxes = np.resize(truth, (number, truth.shape[1])) if len(truth) else np.zeros((number, truth.shape[1]))
    points = boxes.reshape(number, -1, 2) if truth.shape[1] % 2 == 0 else boxes[:, None, :2]
    sides = np.ptp(points, axis=1) if points.shape[1] > 1 else boxes[:, 2:4]
    moved = rng.uniform(-0.05, 0.05, (number, 2)) * sides
    moved[near:] = rng.uniform(0, 1, (number - near, 2)) * (width, height) - points[near:].mean(1)
    boxes[:, : 2 * points.shape[1]] += np.tile(moved, points.shape[1])
    scores, labels = torch.zeros(number), torch.zeros(number, dtype=torch.long)
    return InstanceData(bboxes=torch.from_numpy(boxes.astype(np.float32)), scores=scores, labels=labels)


def _converted(boxes, like):
    """Return boxes as a tensor, converted to the kind of other boxes, such as rotated ones to rectangles."""
    if isinstance(boxes, BaseBoxes):
        if isinstance(like, BaseBoxes):
            boxes = boxes.convert_to(type(like))
        elif like.shape[-1] == 4:
            boxes = boxes.convert_to(HorizontalBoxes)
        boxes = boxes.tensor
    return boxes


@contextlib.contextmanager
def at_the_first_step() -> Iterator[None]:
    """Set iteration and epoch to 0 for heads that read them, within the context and if no runner has set them."""
    info = MessageHub.get_current_instance().runtime_info
    added = {key: 0 for key in ('iter', 'epoch') if info.get(key) is None}
    info.update(added)
    try:
        yield
    finally:
        for key in added:
            info.pop(key)


def as_if_trained(detector: nn.Module) -> None:
    """Make an untrained detector find as many objects as a trained one.

    An untrained RPN finds next to nothing, so RoI heads would get fewer positive samples, and mask heads would save
    less, than in all but the first steps of a training. Its proposals are replaced by boxes of which some lie near the
    ground truth. RTMDet's heads assign the more predictions to a box the better they are, and RTMDet-Ins has a mask for
    each of them, so :data:`_PER_BOX` predictions are assigned to each box.

    Args:
        detector (nn.Module): A detector, changed in place. Without an RPN or such a head it is left unchanged.
    """
    for owner, method in _methods_that_find(detector):
        if method == 'loss_and_predict':
            _find_near_the_truth(owner)
        else:
            owner.dynamic_k_matching = functools.partial(_assign_cheapest, owner.dynamic_k_matching)


def _methods_that_find(detector):
    """Yield the owners and names of methods whose results depend on how well a detector is trained."""
    seen = set()
    for module in detector.modules():
        assigner = getattr(module, 'assigner', None)
        if isinstance(assigner, DynamicSoftLabelAssigner) and id(assigner) not in seen:
            seen.add(id(assigner))
            yield assigner, 'dynamic_k_matching'
    if hasattr(rpn := getattr(detector, 'rpn_head', None), 'loss_and_predict'):
        yield rpn, 'loss_and_predict'


@contextlib.contextmanager
def while_as_if_trained(detector: nn.Module) -> Iterator[None]:
    """Run :func:`as_if_trained`, and give a detector its own methods back at the end.

    Args:
        detector (nn.Module): The detector.
    """
    before = [(owner, method, vars(owner).get(method)) for owner, method in _methods_that_find(detector)]
    as_if_trained(detector)
    try:
        yield
    finally:
        for owner, method, own in before:
            vars(owner).pop(method)
            if own is not None:  # of the instance, by another hook
                vars(owner)[method] = own


def _assign_cheapest(original, cost, ious, *args):
    """Run the assigner's matching with IoUs that make it assign the :data:`_PER_BOX` cheapest predictions to a box.

    Args:
        original (Callable): The assigner's own ``dynamic_k_matching``, which assigns to a box as many predictions as
            the sum of its largest IoUs.
        cost (Tensor): Cost of each prediction and box, shape (predictions, boxes).
        ious (Tensor): IoUs of the untrained predictions, of which only the shape is used.
        *args: Further arguments of ``original``.

    Returns:
        tuple: Result of ``original``.
    """
    cheapest = cost.topk(min(13, len(cost)), 0, largest=False).indices
    number = min(_PER_BOX, len(cheapest))  # of a small image, as many as there are
    return original(cost, torch.zeros_like(ious).scatter_(0, cheapest, (number + 0.5) / len(cheapest)), *args)


def _find_near_the_truth(rpn):
    """Replace the proposals of an RPN by boxes of which some lie near the ground truth."""
    original = rpn.loss_and_predict

    def loss_and_predict(x, batch_data_samples, *args, **kwargs):
        losses, results = original(x, batch_data_samples, *args, **kwargs)
        if any('features' in result for result in results):  # learnt proposals (Sparse R-CNN), whose number is fixed
            return losses, results
        rng = np.random.default_rng(0)
        total = (kwargs.get('proposal_cfg') or {}).get('max_per_img')
        proposals = []
        for sample, result in zip(batch_data_samples, results, strict=True):
            truth = _converted(sample.gt_instances.bboxes, result.bboxes).cpu().numpy()
            draw = _draw_proposals if truth.shape[1] == 4 else _move_boxes
            drawn = draw(rng, truth, total or len(result), *sample.img_shape[:2]).to(result.bboxes.device)
            if isinstance(result.bboxes, BaseBoxes):
                drawn.bboxes = type(result.bboxes)(drawn.bboxes)
            proposals.append(drawn)
        return losses, proposals

    rpn.loss_and_predict = loss_and_predict
