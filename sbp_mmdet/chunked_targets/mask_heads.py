"""Mask heads of RoI detectors whose targets are cropped from the ground truth in chunks."""

import copy

import numpy as np
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.structures.mask import BitmapMasks
from torch import nn

from ..surgery import Mixin, has_methods_of, mix_into_known

__all__ = ['mask_heads_in_chunks']


def mask_heads_in_chunks(model: nn.Module, number: int) -> list[str]:
    """Make the mask heads of a model crop their targets in chunks.

    Args:
        model (nn.Module): Detector, changed in place.
        number (int): Number of masks that are cropped at a time.

    Returns:
        list[str]: Names of the changed heads.
    """
    heads = mix_into_known(model, _CropsInChunks, lambda head: has_methods_of(head, FCNMaskHead, 'get_targets'))
    for head in heads.values():
        head.masks_at_a_time = number
    return [*heads]


class _CropsInChunks(Mixin):
    """A mask head that passes ground truth on which is cropped in chunks; the batch itself stays as it is.

    Attributes:
        masks_at_a_time (int): Number of masks that are cropped at a time.
    """

    def get_targets(self, sampling_results, batch_gt_instances, *args, **kwargs):
        given = []
        for instances in batch_gt_instances:
            if type(instances.masks) is BitmapMasks:
                instances = copy.copy(instances)
                instances.masks = _CroppedInChunks(instances.masks, self.masks_at_a_time)
            given.append(instances)
        return super().get_targets(sampling_results, given, *args, **kwargs)


class _CroppedInChunks(BitmapMasks):
    """Masks of an image, of which some are cropped at a time.

    mmdet sends all masks of an image to the device and makes a float copy for each box. Here boxes of the same object
    follow each other, and a chunk sends the masks of its own objects, so each mask is sent about once.

    Args:
        masks (BitmapMasks): The masks; their memory is shared.
        number (int): Number of boxes in a chunk.
    """

    def __init__(self, masks, number):
        super().__init__(masks.masks, masks.height, masks.width)
        self.number = number

    def crop_and_resize(self, bboxes, out_shape, inds, *args, **kwargs):
        masks, out = BitmapMasks(self.masks, self.height, self.width), None
        if len(bboxes) <= self.number or not len(self.masks):
            return masks.crop_and_resize(bboxes, out_shape, inds, *args, **kwargs)
        order = np.argsort(inds, kind='stable')
        for start in range(0, len(order), self.number):
            chunk = order[start : start + self.number]
            objects, own = np.unique(inds[chunk], return_inverse=True)
            part = masks[objects].crop_and_resize(bboxes[chunk], out_shape, own, *args, **kwargs).masks
            if out is None:
                out = np.empty((len(bboxes), *part.shape[1:]), part.dtype)
            out[chunk] = part
        return BitmapMasks(out, *out_shape)
