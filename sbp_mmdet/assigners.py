"""Dynamic assigners (RTMDet's, YOLOX's) whose costs are made for some priors at a time.

mmdet compares every prior inside of any box with every box in every class: five times priors x boxes x classes numbers.
A row of the costs depends on its own prior only, so they can be made piece by piece; the matching sees all of them.
"""

import copy

import torch
from mmdet.models.task_modules.assigners import (
    AssignResult,
    DynamicSoftLabelAssigner,
    SimOTAAssigner,
    dynamic_soft_label_assigner,
    sim_ota_assigner,
)

from .surgery import Mixin, mix_in

__all__ = ['costs_in_chunks']

# Numbers of a piece: priors x boxes x classes.
_PIECE = 2**22
# Assigner to the overlap, with the opposite sign, of a prior that goes with no box.
_NO_OVERLAP = {DynamicSoftLabelAssigner: dynamic_soft_label_assigner.INF, SimOTAAssigner: sim_ota_assigner.INF}


class _Costs(Exception):  # noqa: N818  not an error: it carries costs out of mmdet's method
    pass


def _hand_out(cost, ious, num_gt, valid):
    raise _Costs(cost, ious, valid)


class _CostsInChunks(Mixin):
    """Assigns the same, with less memory."""

    def assign(self, pred_instances, gt_instances, *args, **kwargs):
        boxes, scores = len(gt_instances.bboxes), pred_instances.scores
        size = max(_PIECE // max(boxes * scores.shape[-1], 1), 1)
        if len(scores) <= size:
            return super().assign(pred_instances, gt_instances, *args, **kwargs)
        probe = copy.copy(self)
        probe.dynamic_k_matching = _hand_out
        rows, valid = [], torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        for start in range(0, len(scores), size):
            piece = slice(start, start + size)
            try:
                super(_CostsInChunks, probe).assign(pred_instances[piece], gt_instances, *args, **kwargs)
            except _Costs as found:
                cost, ious, valid[piece] = found.args
                rows.append((cost, ious))
        if not rows:  # no prior is inside of a box, so there is nothing to compare
            return super().assign(pred_instances, gt_instances, *args, **kwargs)
        cost, ious = map(torch.cat, zip(*rows, strict=True))
        return self._result(cost, ious, valid, gt_instances.labels)

    def _result(self, cost, ious, valid, labels):
        found_ious, found = self.dynamic_k_matching(cost, ious, len(labels), valid)  # valid: the matched ones from here
        indices = valid.new_zeros(len(valid), dtype=torch.long)
        infinite = next(value for kind, value in _NO_OVERLAP.items() if isinstance(self, kind))
        classes, overlaps = torch.full_like(indices, -1), cost.new_full(indices.shape, -infinite, dtype=torch.float32)
        indices[valid] = found + 1
        classes[valid] = labels[found].long()
        overlaps[valid] = found_ious
        return AssignResult(len(labels), indices, overlaps, labels=classes)


def costs_in_chunks(assigner) -> None:
    """Makes a dynamic assigner compare some priors at a time; others stay as they are.

    Args:
        assigner (BaseAssigner): Changed in place.
    """
    if isinstance(assigner, tuple(_NO_OVERLAP)) and not isinstance(assigner, _CostsInChunks):
        mix_in(assigner, _CostsInChunks)
