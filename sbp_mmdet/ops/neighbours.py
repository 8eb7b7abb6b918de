"""Dropped rows that send gradients by the activations of the kept row nearest to them.

A kept row and the dropped ones that go with it are a group. There are two ways (``dropped``):

- 'nearest': each dropped row goes back for itself, with the activations of its group's kept row (:class:`Neighbours`).
- 'pool': with the same activations for all of them, the backward pass is linear in the incoming gradient. So the
  gradients of a group are summed and go back once, in one row, and it takes the products of as many rows as are kept.
  The activations are those of an input between the kept row and its group's mean (:func:`.functional.centres`). Each
  row's input gets its share of what comes back (:func:`.functional.shares`). See :class:`Groups`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import centres, shares, take
from ..masks import Positions
from .chunks import Chunk
from .operation import OnHost
from .rows import add_rows_

__all__ = ['SHARE', 'Groups', 'Neighbours', 'SavedPositions']

# How much a dropped row counts in the weights' gradient. It borrows the activations of a kept row. The kept row owns
# them, so it takes over the rest. Other shares were tried: see docs/gradient_study.md.
SHARE = 0.75


class SavedPositions(NamedTuple):
    """What an operation saves of its positions.

    Attributes:
        keep (Tensor | None): ``Positions.keep``; None: all positions are kept.
        drop (Tensor | None): ``Positions.drop``, if dropped positions send gradients. Default: None.
        pairs (Tensor | None): ``Nearest.index``. Default: None.
        starts (OnHost | None): ``Nearest.starts``, for 'nearest'. Default: None.
    """

    keep: Tensor | None
    drop: Tensor | None = None
    pairs: Tensor | None = None
    starts: OnHost | None = None

    @classmethod
    def of(cls, positions: Positions | None, dropped: str) -> 'SavedPositions':
        """What an operation saves.

        Args:
            positions (Positions | None): Of the operation; None: all are kept.
            dropped (str): 'zero', 'nearest' or 'pool'.

        Raises:
            ValueError: If dropped positions are to send gradients, and nothing says with which kept ones they go.
        """
        if positions is None:
            return cls(None)
        if dropped == 'zero':
            return cls(positions.keep)
        if positions.nearest is None:
            raise ValueError(
                f'dropped={dropped!r} needs a kept position for each dropped one, but positions.nearest is None: '
                'make them by positions(mask, nearest=True)'
            )
        pairs, starts = positions.nearest
        return cls(positions.keep, positions.drop, pairs, OnHost(starts) if dropped == 'nearest' else None)

    def neighbours(self, images: int) -> 'Neighbours | None':
        """With 'nearest', how dropped rows of a batch of that many images go with kept ones; else None."""
        return None if self.starts is None else Neighbours(self.pairs, self.starts.tensor, images)

    @property
    def groups(self) -> 'Groups | None':
        """With 'pool', how gradients are summed and shared; else None."""
        return None if self.drop is None or self.starts is not None else Groups(self.keep, self.drop, self.pairs)


class Groups:
    """Kept rows with the dropped ones that go with them.

    Args:
        keep, drop (Tensor): Of ``Positions``, shapes (K,) and (D,), or (N, K) and (N, D).
        pairs (Tensor | None): ``Nearest.index``, shape (D,) or (N, D).
    """

    def __init__(self, keep: Tensor, drop: Tensor, pairs: Tensor | None):
        self.keep, self.drop, self.pairs = keep, drop, pairs

    def centres(self, x: Tensor) -> Tensor:
        """Of tokens (N, L, ...) what stands for groups in the backward pass; see :func:`.functional.centres`."""
        return centres(x, self.keep, self.drop, self.pairs)

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """How many rows each group has, its kept one among them: shape (K, 1) or (N, K, 1)."""
        if self.pairs is None:
            return torch.full((*self.keep.shape, 1), 2, dtype=dtype, device=self.keep.device)
        sizes = torch.ones(self.keep.shape, dtype=dtype, device=self.keep.device)
        return sizes.scatter_add_(-1, self.pairs, sizes.new_ones(self.pairs.shape))[..., None]

    def sum_(self, kept: Tensor, dropped: Tensor) -> Tensor:
        """Gradients (N, K, C) of kept and (N, D, C) of dropped rows, summed over groups in place of ``kept``."""
        return add_rows_(kept, self.pairs, dropped)

    def shares(self, total: Tensor, dropped: Tensor) -> Tensor:
        """Which part of its group's sum each dropped row's gradient is, (N, D, 1); see :func:`.functional.shares`."""
        return shares(total, dropped, self.pairs)

    def share_(self, rows: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What each row of a group gets of its gradient.

        Args:
            rows (Tensor): Gradients of the groups, shape (N, K, C); holds those of the kept rows afterwards.
            shares (Tensor | None): Of the dropped rows, see :meth:`shares`; None: all rows get the same. Default: None.

        Returns:
            tuple[Tensor, Tensor]: Gradients of the kept rows, ``rows``, and of the dropped ones, (N, D, C).
        """
        if shares is None:
            rows.div_(self.sizes(torch.float32))
            return rows, take(rows, self.pairs)
        dropped = take(rows, self.pairs).mul(shares).to(rows.dtype)
        own = shares.new_ones(len(shares), rows.shape[1], 1)
        return rows.mul_(add_rows_(own, self.pairs, -shares)), dropped


class Neighbours:
    """Which dropped rows of a batch go with which kept rows.

    Args:
        pairs (Tensor | None): ``Nearest.index``: shape (D,) for all images alike, or (N, D).
        starts (Tensor): ``Nearest.starts``, shape (K + 1,) or (N, K + 1), on the CPU.
        images (int): N; rows are image after image.
    """

    def __init__(self, pairs: Tensor | None, starts: Tensor, images: int):
        self.starts = starts.expand(images, -1)
        kept = starts.shape[-1] - 1
        self.all = Chunk(slice(0, images), slice(0, kept), kept)
        self.own = 2 - SHARE
        self.pairs = None
        if pairs is not None:
            first = kept * torch.arange(images, device=pairs.device)
            self.pairs = (first[:, None] + pairs).flatten()
            self.own = pairs.new_ones(images * kept, 1, dtype=torch.float32)
            self.own.index_add_(0, self.pairs, self.own.new_full((len(self.pairs), 1), 1 - SHARE))

    def dropped(self, chunk: Chunk) -> Chunk:
        """The dropped rows that go with some kept ones."""
        image = chunk.images.start
        first, last = (int(self.starts[image, row]) for row in (chunk.rows.start, chunk.rows.stop))
        return Chunk(chunk.images, slice(first, last), int(self.starts[0, -1]))  # as many in each image

    def _local(self, chunk):
        """The number of the kept row among those of the chunk, for each dropped one."""
        return self.pairs[self.dropped(chunk).flat] - chunk.flat.start

    def lend(self, chunk: Chunk | None, *rows: Tensor | None) -> list[Tensor | None]:
        """Some of the kept rows, or all of them, given to the dropped rows that go with them."""
        if self.pairs is None:
            return list(rows)
        local = self._local(chunk or self.all)
        return [None if r is None else r.index_select(0, local) for r in rows]

    def pool_(self, kept: Tensor, dropped: Tensor, chunk: Chunk | None = None) -> Tensor:
        """Sums of gradient rows by kept row, in place, for the product with the kept activations.

        Args:
            kept (Tensor): Shape (K, C); holds the sums afterwards.
            dropped (Tensor): Shape (D, C).
            chunk (Chunk | None): Which of the kept rows these are; None: all. Default: None.

        Returns:
            Tensor: ``kept``.
        """
        if self.pairs is None:
            return kept.mul_(self.own).add_(dropped, alpha=SHARE)
        chunk = chunk or self.all
        return kept.mul_(self.own[chunk.flat]).index_add_(0, self._local(chunk), dropped, alpha=SHARE)
