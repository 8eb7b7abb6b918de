"""Overlaps of all pairs of boxes, written to a matrix in place."""

import torch
from torch import Tensor

__all__ = ['write_overlaps']

_EPS = 1e-6  # the least area that mmdet divides by


def write_overlaps(out: Tensor, first: Tensor, second: Tensor, mode: str = 'iou') -> None:
    """Write the IoU or IoF of all pairs of boxes to ``out``, with two temporary matrices of its size.

    The results equal those of mmdet's ``bbox_overlaps``, which has nine such matrices.

    With the intersection w * h of two boxes, where w = max(min(x2) - max(x1), 0), and their areas,

        IoU = w h / max(area_1 + area_2 - w h, eps),   IoF = w h / max(area_1, eps).

    Args:
        out (Tensor): Matrix that is written to, shape (M, N).
        first (Tensor): Corners x1, y1, x2, y2 of boxes, shape (M, 4), in the precision of ``out``.
        second (Tensor): Corners of other boxes, shape (N, 4).
        mode (str): 'iou' or 'iof'. Default: 'iou'.
    """
    rows, columns = first.t().contiguous().unsqueeze(2), second.t().contiguous()  # each coordinate contiguous
    height, other = (torch.empty(out.shape, dtype=out.dtype, device=out.device) for _ in range(2))
    for axis, size in ((0, out), (1, height)):
        torch.minimum(rows[axis + 2], columns[axis + 2], out=size)
        torch.maximum(rows[axis], columns[axis], out=other)
        size.sub_(other).clamp_min_(0)
    intersection = out.mul_(height)
    area = _areas(rows)
    if mode == 'iou':
        area = torch.add(area, _areas(columns), out=other).sub_(intersection)
    out.div_(area.clamp_min_(_EPS))


def _areas(corners):
    left, top, right, bottom = corners
    return (right - left) * (bottom - top)
