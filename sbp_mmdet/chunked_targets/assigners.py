"""Assigners that compare priors with ground-truth boxes in chunks."""

import copy
from collections.abc import Iterator

import torch
from mmdet.models.task_modules.assigners import (
    AssignResult,
    BaseAssigner,
    BboxOverlaps2D,
    DynamicSoftLabelAssigner,
    SimOTAAssigner,
    dynamic_soft_label_assigner,
    sim_ota_assigner,
)
from mmdet.models.task_modules.assigners.iou2d_calculator import BboxOverlaps2D_GLIP
from mmdet.structures.bbox import get_box_tensor
from torch import Tensor, nn

from ..library_code import replaced_code
from ..ops.common.precision import FULL
from ..surgery import Mixin, mix_in, stock_class
from . import overlaps

__all__ = ['LARGEST_STRIP', 'assigners_in_chunks']

# Calculators whose every entry depends on its own pair of boxes alone, so that it may be computed with any others.
_PAIRWISE = (BboxOverlaps2D, BboxOverlaps2D_GLIP)
# Overlaps in place need fewer temporaries, so their strips hold four times as many pairs, which means fewer launches on
# a GPU. On a CPU, strips are small enough for its caches.
_MORE_IN_PLACE = 4
LARGEST_STRIP = {'cpu': 2**18}
# Numbers (priors x boxes x classes) of the costs that a dynamic assigner computes at a time.
_COSTS = 2**22
# Dynamic assigners, and the negative of the overlap that they give to priors without a box.
_NO_OVERLAP = {DynamicSoftLabelAssigner: dynamic_soft_label_assigner.INF, SimOTAAssigner: sim_ota_assigner.INF}


def assigners_in_chunks(model: nn.Module, pairs: int) -> tuple[list[str], dict[str, str]]:
    """Make all assigners of a model compare priors with boxes in chunks.

    An assigner is found by its class in whichever attribute of a module holds it.

    Args:
        model (nn.Module): Detector, changed in place.
        pairs (int): Number of pairs of a prior and a box that are compared at a time.

    Returns:
        tuple[list[str], dict[str, str]]: Names of the modules with changed assigners, and names of unchanged assigners
        with the reason.
    """
    changed, unchanged = {}, {}
    for head, name, assigner in _assigners(model):
        calculator = getattr(assigner, 'iou_calculator', None)
        if _is_pairwise(calculator):
            if not isinstance(calculator, _PairsInChunks):
                mix_in(calculator, _PairsInChunks)
            calculator.pairs = pairs
            changed[head] = None
        else:
            kind = stock_class(type(assigner if calculator is None else calculator)).__name__
            reason = f'a {kind} compares no priors with boxes' if calculator is None else f'iou_calculator is a {kind}'
            reason = replaced_code(stock_class(type(calculator)), '__call__') or reason
            unchanged[f'{head}.{name}' if head else name] = reason
        if type(assigner) in _NO_OVERLAP and _computes_costs_one_by_one(assigner):
            mix_in(assigner, _CostsInChunks)
    return [head or 'the model' for head in changed], unchanged


def _assigners(model: nn.Module) -> Iterator[tuple[str, str, BaseAssigner]]:
    """Yield the name of a module, that of its attribute, and the assigner; cascades have several in a list."""
    for head, module in model.named_modules():
        for name, value in vars(module).items():
            values = value.values() if type(value) is dict else value if isinstance(value, (list, tuple)) else [value]
            for assigner in values:
                if isinstance(assigner, BaseAssigner):
                    yield head, name, assigner


def _is_pairwise(calculator):
    kind = stock_class(type(calculator))
    return kind in _PAIRWISE and not replaced_code(kind, '__call__')


def _computes_costs_one_by_one(assigner):
    """Return whether a dynamic assigner's costs of a prior depend on this prior alone.

    The overlaps must do so, and no function may be the instance's own, except the matching, which gets all costs.
    """
    kind = stock_class(type(assigner))
    own = [name for name in vars(assigner) if callable(getattr(kind, name, None)) and name != 'dynamic_k_matching']
    return not own and _is_pairwise(assigner.iou_calculator) and not replaced_code(kind, 'assign')


class _PairsInChunks(Mixin):
    """An overlap calculator that computes the matrix of all pairs in strips.

    The assigners of mmdet agree neither on which argument holds the priors nor on which is longer, so the longer one is
    cut.

    Attributes:
        pairs (int): Number of pairs in a strip; a strip has at least one row or column.
    """

    def __call__(self, *args, **kwargs):
        whole = super().__call__
        if not _is_pairwise(self):
            return whole(*args, **kwargs)
        first, second, mode, is_aligned = _read_arguments(*args, **kwargs)
        rows, columns = len(first), len(second)
        if is_aligned:
            return whole(*args, **kwargs)
        if boxes := _as_plain_boxes(self, first, second, mode):
            first, second = boxes
            out, pairs = first.new_empty(rows, columns), _MORE_IN_PLACE * self.pairs
            for place, *strip in _strips(first, second, min(pairs, LARGEST_STRIP.get(out.device.type, pairs))):
                overlaps.write_overlaps(out[place], *strip, mode)
            return out
        if rows * columns <= self.pairs:
            return whole(*args, **kwargs)
        out = None
        for place, *strip in _strips(first, second, self.pairs):
            part = whole(*strip, mode)
            out = part.new_empty(rows, columns) if out is None else out
            out[place] = part
        return out


def _read_arguments(bboxes1, bboxes2, mode='iou', is_aligned=False):
    """Return the arguments of an overlap calculator of mmdet in their order."""
    return bboxes1, bboxes2, mode, is_aligned


def _strips(first, second, pairs):
    """Yield strips of a matrix of pairs: their places in the matrix, and the boxes of both sides."""
    rows, columns = len(first), len(second)
    size = max(pairs // max(min(rows, columns), 1), 1)
    for start in range(0, max(rows, columns), size):
        strip = slice(start, start + size)
        if rows >= columns:
            yield (strip,), first[strip], second
        else:
            yield (slice(None), strip), first, second[strip]


def _as_plain_boxes(calculator, first, second, mode) -> tuple[Tensor, Tensor] | None:
    """Return both arguments as boxes (K, 4) if :func:`.write_overlaps` can replace the calculator, else ``None``."""
    kind = stock_class(type(calculator))
    if kind is not BboxOverlaps2D or calculator.dtype is not None or mode not in ('iou', 'iof'):
        return None
    boxes = [get_box_tensor(boxes) for boxes in (first, second)]
    if {(x.dtype, x.device) for x in boxes} not in [{(dtype, boxes[0].device)} for dtype in FULL]:
        return None
    if any(x.dim() != 2 or x.shape[1] not in (4, 5) or (torch.is_grad_enabled() and x.requires_grad) for x in boxes):
        return None
    return tuple(x[:, :4] for x in boxes)


class _Costs(Exception):  # noqa: N818  not an error: it carries costs out of mmdet's method
    pass


def _hand_out(cost, ious, num_gt, valid):
    raise _Costs(cost, ious, valid)


class _CostsInChunks(Mixin):
    """A dynamic assigner that computes its costs for some priors at a time.

    mmdet compares every prior inside of any box with every box in every class: five times priors x boxes x classes
    numbers. The costs of a prior depend on this prior alone, so they are computed in chunks; the matching that follows
    compares all priors.
    """

    def assign(self, pred_instances, gt_instances, *args, **kwargs):
        boxes, scores = len(gt_instances.bboxes), pred_instances.scores
        size = max(_COSTS // max(boxes * scores.shape[-1], 1), 1)
        if len(scores) <= size or not _computes_costs_one_by_one(self):
            return super().assign(pred_instances, gt_instances, *args, **kwargs)
        probe = copy.copy(self)
        probe.dynamic_k_matching = _hand_out
        rows, valid = [], torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        for start in range(0, len(scores), size):
            chunk = slice(start, start + size)
            try:
                super(_CostsInChunks, probe).assign(pred_instances[chunk], gt_instances, *args, **kwargs)
            except _Costs as found:
                cost, ious, valid[chunk] = found.args
                rows.append((cost, ious))
        if not rows:  # no prior is inside of a box, so there is nothing to compare
            return super().assign(pred_instances, gt_instances, *args, **kwargs)
        cost, ious = map(torch.cat, zip(*rows, strict=True))
        return self._result(cost, ious, valid, gt_instances.labels)

    def _result(self, cost, ious, valid, labels):
        found_ious, found = self.dynamic_k_matching(cost, ious, len(labels), valid)  # leaves the matched ones in valid
        indices = valid.new_zeros(len(valid), dtype=torch.long)
        infinite = _NO_OVERLAP[stock_class(type(self))]
        classes, overlaps = torch.full_like(indices, -1), cost.new_full(indices.shape, -infinite, dtype=torch.float32)
        indices[valid] = found + 1
        classes[valid] = labels[found].long()
        overlaps[valid] = found_ious
        return AssignResult(len(labels), indices, overlaps, labels=classes)
