"""Dropped rows that send gradients by the activations of the kept row nearest to them.

A kept row and the dropped ones that go with it are a group. In position-wise operations each dropped row goes back for
itself, with the activations of its group's kept row (:class:`Neighbours`). In attention, the backward pass is linear in
the gradient of the output where a group has the same activations, so the gradients of a group are summed and go back
once, in one row (:class:`Groups`).
"""

import torch
from torch import Tensor

from ..functional import take
from ..masks import Positions
from .rows import Chunk, add_rows_, put_together

__all__ = ['SHARE', 'Groups', 'Neighbours']

# How much a dropped row counts in the weights' gradient. It borrows the activations of a kept row. The kept row owns
# them, so it takes over the rest. Other shares were tried: see docs/gradient_study.md.
SHARE = 0.75


class Neighbours:
    """Which dropped rows of a batch go with which kept rows.

    Args:
        positions (Positions): As :meth:`.operation.Form.saved` has them.
        images (int): N; rows are image after image.
    """

    def __init__(self, positions: Positions, images: int):
        keep, drop, (index, starts) = positions
        self.starts, self.drop = starts.tensor, drop
        self.all = Chunk(slice(0, images), slice(0, len(keep)), len(keep))
        self.own = 2 - SHARE  # what a kept row counts
        self.lender = None  # the kept row of each dropped one
        if index is not None:
            first = len(keep) * torch.arange(images, device=index.device)
            self.lender = (first[:, None] + index).flatten()
            self.own = index.new_ones(images * len(keep), 1, dtype=torch.float32)
            self.own.index_add_(0, self.lender, self.own.new_full((len(self.lender), 1), 1 - SHARE))

    def dropped(self, chunk: Chunk) -> Chunk:
        """The dropped rows that go with some kept ones."""
        first, last = int(self.starts[chunk.rows.start]), int(self.starts[chunk.rows.stop])
        return Chunk(chunk.images, slice(first, last), len(self.drop))

    def _lender_in(self, chunk):
        """The number of the kept row among those of the chunk, for each dropped one."""
        return self.lender[self.dropped(chunk).flat] - chunk.flat.start

    def lend(self, *rows: Tensor | None, chunk: Chunk | None = None) -> list[Tensor | None]:
        """Some of the kept rows, or all of them, given to the dropped rows that go with them."""
        if self.lender is None:
            return list(rows)
        lender = self._lender_in(chunk or self.all)
        return [None if r is None else r.index_select(0, lender) for r in rows]

    def sum_(self, kept: Tensor, dropped: Tensor, chunk: Chunk | None = None) -> Tensor:
        """Weighted sums of gradient rows by kept row, in place, for the product with the kept activations.

        Args:
            kept (Tensor): Shape (K, C); holds the sums afterwards.
            dropped (Tensor): Shape (D, C).
            chunk (Chunk | None): Which of the kept rows these are; None: all. Default: None.

        Returns:
            Tensor: ``kept``.
        """
        if self.lender is None:
            return kept.mul_(self.own).add_(dropped, alpha=SHARE)
        chunk = chunk or self.all
        return kept.mul_(self.own[chunk.flat]).index_add_(0, self._lender_in(chunk), dropped, alpha=SHARE)


class Groups:
    """Kept tokens with the dropped ones that go with them, for gradients that go back once for each group.

    Args:
        positions (Positions): With ``nearest``.
    """

    def __init__(self, positions: Positions):
        self.keep, self.drop, (self.index, _) = positions

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """How many tokens each group has, its kept one among them: shape (K,)."""
        sizes = torch.ones(len(self.keep), dtype=dtype, device=self.keep.device)
        return sizes + 1 if self.index is None else sizes.index_add_(0, self.index, sizes.new_ones(len(self.index)))

    def sum_(self, kept: Tensor, dropped: Tensor) -> Tensor:
        """Gradients (N, K, C) of kept and (N, D, C) of dropped tokens, summed over groups in place of ``kept``."""
        return add_rows_(kept, self.index, dropped)

    def spread(self, rows: Tensor) -> Tensor:
        """Gradients of groups (N, K, C), changed; all tokens of a group get the same share: shape (N, L, C)."""
        rows.div_(self.sizes(torch.float32)[:, None])
        dropped = take(rows, self.index)
        return put_together(rows, self.keep, len(self.keep) + len(self.drop), dropped, self.drop)
