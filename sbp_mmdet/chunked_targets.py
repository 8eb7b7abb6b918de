"""Training targets computed in chunks: the same targets in less memory."""

import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.ops import roi_align
from mmdet.models.dense_heads import Mask2FormerHead, MaskFormerHead
from mmdet.structures.mask import BitmapMasks
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from .assigners import costs_in_chunks
from .surgery import Mixin, mix_in

__all__ = ['targets_in_chunks']


class _InChunks:
    """An IoU calculator that compares a number of priors at a time; what it puts out is the same.

    Args:
        calculator (Callable): mmdet's IoU calculator.
        chunk (int): Priors at a time.
    """

    def __init__(self, calculator, chunk):
        self.calculator, self.chunk = calculator, chunk

    def __call__(self, boxes1, boxes2, mode='iou', is_aligned=False):
        if is_aligned or len(boxes2) <= self.chunk or not len(boxes1):
            return self.calculator(boxes1, boxes2, mode=mode, is_aligned=is_aligned)
        out = None
        for start in range(0, len(boxes2), self.chunk):
            part = self.calculator(boxes1, boxes2[start : start + self.chunk], mode=mode)
            if out is None:
                out = part.new_empty(len(boxes1), len(boxes2))
            out[:, start : start + self.chunk] = part
        return out

    def __repr__(self):
        return f'{self.calculator!r} for {self.chunk} priors at a time'


def targets_in_chunks(model: nn.Module, masks: int = 8, priors: int = 16384) -> str:
    """Makes the training targets of mask heads and assigners piece by piece.

    mmdet makes a float copy of a whole-image mask for each positive proposal (128 of 800 x 1344: 550 MB, at the moment
    when all activations are stored), and compares all anchors with all boxes at once, dynamic assigners in all classes.
    In Mask2Former all masks of a batch lie there with eight bytes a pixel, and once more with four where points of them
    are looked up. MaskFormer's losses hold ten maps of the size of an image for each object and decoder layer: they are
    computed again in the backward pass. Targets and losses stay the same. Masks are taken for 0 and 1, which is what
    mmdet's pipelines make.

    Args:
        model (nn.Module): The model; its assigners are changed in place. Masks are changed for the whole process.
        masks (int): Masks that are cropped, or looked up, at a time. Default: 8.
        priors (int): Anchors or points that are compared with the boxes at a time. Default: 16384.

    Returns:
        str: What was done, for the log.

    Raises:
        ValueError: If a number is not positive.
    """
    for name, value in dict(masks=masks, priors=priors).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a whole number, 1 or more')
    for assigner in _assigners(model):
        calculator = assigner.iou_calculator
        if isinstance(calculator, _InChunks):
            calculator = calculator.calculator
        assigner.iou_calculator = _InChunks(calculator, priors)
        costs_in_chunks(assigner)
    for module in model.modules():
        if getattr(type(module), '_loss_by_feat_single', None) is MaskFormerHead._loss_by_feat_single:
            mix_in(module, _LossesAgain)
        if isinstance(module, Mask2FormerHead):
            if not isinstance(module, _MasksInChunks):
                mix_in(module, _MasksInChunks)
            module._masks_at_a_time = masks
    whole = getattr(BitmapMasks.crop_and_resize, 'whole', BitmapMasks.crop_and_resize)

    def crop_and_resize(self, bboxes, out_shape, inds, device='cpu', interpolation='bilinear', binarize=True):
        if len(bboxes) <= masks or not len(self.masks):
            return whole(self, bboxes, out_shape, inds, device, interpolation, binarize)
        bboxes, inds = (torch.as_tensor(values, device=device) for values in (bboxes, inds))
        parts = []
        for i in range(0, len(bboxes), masks):
            chosen = _unpack(_packed(self, device).index_select(0, inds[i : i + masks]), self.width)
            rois = torch.cat([torch.arange(len(chosen), device=device)[:, None], bboxes[i : i + masks]], 1)
            part = roi_align(chosen[:, None].to(rois.dtype), rois, out_shape, 1.0, 0, 'avg', True).squeeze(1)
            parts.append(part >= 0.5 if binarize else part)
        return BitmapMasks(torch.cat(parts).cpu().numpy(), *out_shape)  # the device is waited for here only

    crop_and_resize.whole = whole
    BitmapMasks.crop_and_resize = crop_and_resize
    losses = '; losses of masks run again' if any(isinstance(m, _LossesAgain) for m in model.modules()) else ''
    return f'training targets are made piece by piece{losses}'


def _packed(bitmaps: BitmapMasks, device) -> torch.Tensor:
    """An image's masks on the device, eight pixels a byte, shape (n, H, ceil(W / 8)).

    They are sent once for all stages of a cascade, and there as long as the image's ground truth.
    """
    of, packed = getattr(bitmaps, '_packed_masks', (None, None))
    if of is not bitmaps.masks or packed.device != torch.device(device):
        bits = np.packbits(bitmaps.masks.astype(bool, copy=False), axis=-1)
        packed = torch.from_numpy(bits).to(device, copy=True)  # a copy on a CPU too, for those who count bytes there
        bitmaps._packed_masks = bitmaps.masks, packed
    return packed


def _unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """(n, H, ceil(W / 8)) bytes to (n, H, W) pixels, 0 and 1."""
    bits = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] & bits).clamp_(max=1).flatten(2)[..., :width]


class _LossesAgain(Mixin):
    """A MaskFormer head that computes the losses of a decoder layer again, from the same assignment."""

    def _loss_by_feat_single(self, *args):
        loss, assigner, assigned = super()._loss_by_feat_single, self.assigner, []

        def run(*args):
            again = iter([*assigned])

            @torch.no_grad()  # what it saves for gradients that nobody asks for would be missed in the second run
            def assign(*args, **kwargs):
                if (found := next(again, None)) is None:
                    assigned.append(found := assigner.assign(*args, **kwargs))
                return found

            with mock.patch.object(self, 'assigner', SimpleNamespace(assign=assign)):
                return loss(*args)

        return cp.checkpoint(run, *args, use_reentrant=False)


class _MasksInChunks(Mixin):
    """A Mask2Former head whose ground truth takes a byte a pixel; what is sampled from it is the same."""

    def preprocess_gt(self, batch_gt_instances, *args, **kwargs):
        given = []
        for instances in batch_gt_instances:
            instances = copy.copy(instances)
            instances.masks = copy.copy(instances.masks)
            mix_in(instances.masks, _AsBits)
            instances.masks.kind = _bits(self._masks_at_a_time)
            given.append(instances)
        return super().preprocess_gt(given, *args, **kwargs)


class _AsBits(Mixin):
    """mmdet's masks, whose tensor is a :class:`_Bits`."""

    def to_tensor(self, dtype, device):
        return _as_subclass(super().to_tensor(torch.bool, device), self.kind)


def _as_subclass(x, kind):
    with _disable_current_modes():  # torch 2.1 makes no subclass while bytes are counted
        return x.as_subclass(kind)


class _Bits(torch.Tensor):
    """Masks of 0 and 1, ``at_a_time`` of which become numbers where points are looked up; elsewhere they stay as they
    are, where mmdet converts them too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.long, torch.Tensor.float):
            return args[0]
        if func is not F.grid_sample:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            return tree_map(lambda x: _as_subclass(x, cls) if isinstance(x, torch.Tensor) else x, found)
        masks, points, *rest = args
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(masks.split(cls.at_a_time), points.split(cls.at_a_time), strict=True)
            return torch.cat([func(some.to(points.dtype), where, *rest, **(kwargs or {})) for some, where in pairs])


@functools.cache
def _bits(number):
    """The class of masks, so many of which are looked up at a time."""
    return type('_Bits', (_Bits,), dict(at_a_time=number))


def _assigners(model: nn.Module) -> Iterator:
    """Everything in the model that assigns boxes to priors by IoU."""
    for module in model.modules():
        for name in ('assigner', 'bbox_assigner'):
            found = getattr(module, name, None)
            for assigner in found if isinstance(found, (list, tuple)) else [found]:
                if hasattr(assigner, 'iou_calculator'):
                    yield assigner
