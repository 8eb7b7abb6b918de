"""Mask heads of RoI detectors whose targets are cropped from the ground truth in chunks."""

import copy

import numpy as np
import torch
from mmcv.ops import roi_align
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.structures.mask import BitmapMasks
from torch import nn

from ..surgery import Mixin, has_methods_of, mix_into_known

__all__ = ['CroppedInChunks', 'mask_heads_in_chunks']


def mask_heads_in_chunks(model: nn.Module, number: int) -> list[str]:
    """Make the mask heads of a model crop their targets in chunks.

    Args:
        model (nn.Module): Detector, changed in place.
        number (int): Number of whole masks that exist as floats at a time.

    Returns:
        list[str]: Names of the changed heads.
    """
    heads = mix_into_known(model, _CropsInChunks, lambda head: has_methods_of(head, FCNMaskHead, 'get_targets'))
    for head in heads.values():
        head.masks_at_a_time = number
    return [*heads]


class _CropsInChunks(Mixin):
    """A mask head that crops its ground truth in chunks, see :class:`CroppedInChunks`. The batch is not changed.

    Attributes:
        masks_at_a_time (int): Number of whole masks that exist as floats at a time.
    """

    def get_targets(self, sampling_results, batch_gt_instances, *args, **kwargs):
        given = []
        for instances in batch_gt_instances:
            if type(instances.masks) is BitmapMasks:
                instances = copy.copy(instances)
                instances.masks = CroppedInChunks(instances.masks, self.masks_at_a_time)
            given.append(instances)
        return super().get_targets(sampling_results, given, *args, **kwargs)


class CroppedInChunks(BitmapMasks):
    """Masks of an image that are cropped to boxes without a float copy of the whole mask for each box.

    mmdet sends all masks of an image to the device and makes a float copy for each box. Here RoIAlign reads the mask of
    a box's object by its index, so each mask is copied once, and some masks at a time.

    Args:
        masks (BitmapMasks): The masks; their memory is shared.
        number (int): Number of masks that exist as floats at a time. Masks are sent to the device, which waits for all
            earlier work, as many at a time as take the same memory in bytes.
    """

    def __init__(self, masks, number):
        super().__init__(masks.masks, masks.height, masks.width)
        self.number = number

    def crop_and_resize(self, bboxes, out_shape, inds, device='cpu', interpolation='bilinear', binarize=True):
        if not len(self.masks) or not len(bboxes):
            masks = BitmapMasks(self.masks, self.height, self.width)
            return masks.crop_and_resize(bboxes, out_shape, inds, device, interpolation, binarize)
        bboxes, inds = _to_numpy(bboxes), _to_numpy(inds)
        if inds.min() < 0 or inds.max() >= len(self.masks):
            raise IndexError(f'inds from {inds.min()} to {inds.max()} for {len(self.masks)} masks')
        order = np.argsort(inds, kind='stable')  # boxes of one object follow each other
        inds, sent, crops = inds[order], self._number_sent(bboxes), []
        rois = np.concatenate([inds[:, None].astype(bboxes.dtype), bboxes[order]], 1)
        rois = torch.from_numpy(rois).to(device)
        for start in range(0, len(self.masks), sent):
            begin, end = np.searchsorted(inds, [start, start + sent])
            if begin < end:
                crops += self._crop_some(start, sent, inds[begin:end], rois[begin:end], out_shape)
        crops = torch.cat(crops).squeeze(1)
        crops = (crops >= 0.5 if binarize else crops).cpu().numpy()
        out = np.empty_like(crops)
        out[order] = crops
        return BitmapMasks(out, *out_shape)

    def _number_sent(self, bboxes):
        """Return how many masks are sent to the device at a time."""
        return max(self.number * bboxes.itemsize // self.masks.itemsize, 1)

    def _crop_some(self, start, sent, inds, rois, out_shape):
        """Send the masks from ``start`` on to the device, and return the crops of their boxes."""
        masks, crops = torch.from_numpy(self.masks[start : start + sent]).to(rois.device, copy=True), []
        for first in range(0, len(masks), self.number):
            last = min(first + self.number, len(masks))
            begin, end = np.searchsorted(inds, [start + first, start + last])
            if begin < end:
                boxes = rois[begin:end]
                boxes[:, 0] -= start + first
                floats = masks[first:last, None].to(rois.dtype)
                crops.append(roi_align(floats, boxes, out_shape, 1.0, 0, 'avg', True))
                del floats  # before the next ones are made
        return crops


def _to_numpy(values):
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
