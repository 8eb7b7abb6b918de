"""Mask2Former and MaskFormer heads that need less memory for their ground truth and losses."""

import copy
import functools

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmdet.models.dense_heads import Mask2FormerHead, MaskFormerHead
from mmdet.structures.mask import BitmapMasks
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ..adapters.predicate import find_interference
from ..ops.common.module_state import ModuleState, submodules
from ..passes import PLANNER, is_of_known_library
from ..surgery import Mixin, has_methods_of, mix_into_known

__all__ = ['query_heads_in_chunks']


def query_heads_in_chunks(model: nn.Module, number: int) -> dict[str, list[str]]:
    """Change the Mask2Former and MaskFormer heads of a model.

    Args:
        model (nn.Module): Detector, changed in place.
        number (int): Number of masks from which points are sampled at a time.

    Returns:
        dict[str, list[str]]: Names of the changed heads, by what was changed.
    """
    parts = '_loss_by_feat_single', '_get_targets_single'
    checkpointed = mix_into_known(model, _CheckpointedLosses, lambda head: has_methods_of(head, MaskFormerHead, *parts))
    sampled = mix_into_known(
        model, _HeadWithByteMasks, lambda head: has_methods_of(head, Mask2FormerHead, 'preprocess_gt', *parts)
    )
    for head in sampled.values():
        head.masks_at_a_time = number
    return {'sampled masks': [*sampled], 'checkpointed mask losses': [*checkpointed]}


class _CheckpointedLosses(Mixin):
    """A MaskFormer head that recomputes its losses in the backward pass, from the same assignment.

    The recomputation finds the settings of the losses as they were in the forward pass. Losses with hooks and losses of
    the user's own run once.
    """

    def _loss_by_feat_single(self, *args):
        losses = submodules([self.loss_cls, self.loss_mask, self.loss_dice])
        if not all(is_of_known_library(loss) and not find_interference(loss, (PLANNER,)) for loss in losses):
            return super()._loss_by_feat_single(*args)
        assigned, parts, state = [], [self, *losses], None

        def compute(*args):
            head = copy.copy(self)
            head.assigner = _Replay(self.assigner, assigned)
            return super(_CheckpointedLosses, head)._loss_by_feat_single(*args)

        def run(*args):
            nonlocal state
            if state is not None:
                with state.restored():
                    return compute(*args)
            out, state = compute(*args), ModuleState(parts)
            return out

        return cp.checkpoint(run, *args, use_reentrant=False)


class _Replay:
    """An assigner that computes each assignment once and returns it again when it is asked in the same order.

    Args:
        assigner (BaseAssigner): Assigner of the head.
        results (list): Results so far, which all replays of one forward pass share.
    """

    def __init__(self, assigner, results):
        self.assigner, self.results, self.calls = assigner, results, 0

    @torch.no_grad()  # an assignment has no gradients, and checkpointing would miss what only the first run saves
    def assign(self, *args, **kwargs):
        if self.calls == len(self.results):
            self.results.append(self.assigner.assign(*args, **kwargs))
        self.calls += 1
        return self.results[self.calls - 1]

    def __getattr__(self, name):
        return getattr(self.assigner, name)


class _HeadWithByteMasks(Mixin):
    """A Mask2Former head that keeps its ground truth masks in one byte for each pixel. The batch is not changed.

    Attributes:
        masks_at_a_time (int): Number of masks from which points are sampled at a time.
    """

    def preprocess_gt(self, batch_gt_instances, *args, **kwargs):
        given = []
        for instances in batch_gt_instances:
            if type(instances.masks) is BitmapMasks:
                instances = copy.copy(instances)
                instances.masks = _ByteBitmapMasks(instances.masks, _byte_mask_class(self.masks_at_a_time))
            given.append(instances)
        return super().preprocess_gt(given, *args, **kwargs)


class _ByteBitmapMasks(BitmapMasks):
    """Masks of an image whose ``to_tensor`` returns a :class:`_ByteMaskTensor`.

    Args:
        masks (BitmapMasks): The masks; their memory is shared.
        kind (type[_ByteMaskTensor]): Class of the tensor.
    """

    def __init__(self, masks, kind):
        super().__init__(masks.masks, masks.height, masks.width)
        self.kind = kind

    def to_tensor(self, dtype, device):
        masks = super().to_tensor(dtype, device)
        return _as_subclass(masks, self.kind) if dtype == torch.bool else masks


def _as_subclass(x, kind):
    with _disable_current_modes():  # torch 2.1 makes no subclass while bytes are counted
        return x.as_subclass(kind)


class _ByteMaskTensor(torch.Tensor):
    """Masks of zeros and ones that remain bytes where mmdet converts them to integers or floats.

    Where mmdet samples points of the masks, ``at_a_time`` of them are converted at a time.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.long, torch.Tensor.float):
            return args[0]
        if func is not F.grid_sample:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return tree_map(lambda x: _as_subclass(x, cls) if isinstance(x, torch.Tensor) else x, result)
        masks, points, *rest = args
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(masks.split(cls.at_a_time), points.split(cls.at_a_time), strict=True)
            return torch.cat([func(some.to(points.dtype), where, *rest, **(kwargs or {})) for some, where in pairs])


@functools.cache
def _byte_mask_class(number):
    """Return the subclass of :class:`_ByteMaskTensor` that samples ``number`` masks at a time."""
    return type('_ByteMaskTensor', (_ByteMaskTensor,), dict(at_a_time=number))
