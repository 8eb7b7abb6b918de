"""Chunks of the rows, so that what is larger than a row exists for one chunk at a time.

A chunk is some whole images, or some rows of one image. So it is a view of a tensor (N, K, ...), whatever its strides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import take

__all__ = ['CHUNK', 'Chunk', 'chunks']

# Elements of an operation's largest tensor that exist at a time: on a CPU what stays in its caches, on a GPU enough to
# keep it busy.
CHUNK = {'cpu': 2**20, 'cuda': 2**24}
# Rows of a chunk at least, where nobody says how many elements: a product of fewer spends its time on reading weights.
_ROWS = 640


class Chunk(NamedTuple):
    """Some rows of some images.

    Attributes:
        images, rows (slice): All images, or all rows, unless the chunk is of one image.
        each (int): Rows of each image.
    """

    images: slice
    rows: slice
    each: int

    @classmethod
    def all(cls, x: Tensor) -> 'Chunk':
        """All rows of ``x``, shape (N, K, ...)."""
        return cls(slice(0, len(x)), slice(0, x.shape[1]), x.shape[1])

    @property
    def number(self) -> int:
        """Of images."""
        return self.images.stop - self.images.start

    @property
    def flat(self) -> slice:
        """The same rows where they are numbered image after image."""
        return slice(
            self.images.start * self.each + self.rows.start, (self.images.stop - 1) * self.each + self.rows.stop
        )

    def of(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Its rows as a matrix, not copied if they lie one after another in ``x``.

        Args:
            x (Tensor): Shape (N, K, C); with ``index`` (N, L, C).
            index (Tensor | None): Of the rows among those of ``x``, shape (K,) or (N, K). Default: None.
        """
        if index is None:
            return x[self.images, self.rows].reshape(-1, x.shape[2])
        if self.number == 1:  # a CPU takes nine times as long where there is a dimension for images
            return x[self.images.start].index_select(0, self.of_index(index).view(-1))
        return take(x[self.images], self.of_index(index)).flatten(0, 1)

    def of_index(self, index: Tensor) -> Tensor:
        """Its part of an index of rows, shape (K,) for all images alike or (N, K)."""
        return index[self.rows] if index.dim() == 1 else index[self.images, self.rows]

    def put_(self, x: Tensor, rows: Tensor) -> None:
        """Writes its rows to their places in ``x``, shape (N, K, C)."""
        place = x[self.images, self.rows]
        place.copy_(rows.view(place.shape))


def chunks(images: int, each: int, width: int, device: torch.device, elements: int | None = None) -> list[Chunk]:
    """Cuts rows into chunks of about the same size: a short last one costs a GPU as many launches as a whole one.

    Args:
        images (int): N.
        each (int): Rows of each image.
        width (int): Elements that a row needs, of those that are counted by ``elements``.
        device (torch.device): Where they are.
        elements (int | None): At most so many elements at a time, but at least one row; None: by the device, but at
            least 640 rows. Default: None.

    Returns:
        list[Chunk]: All rows in order.
    """
    most = max(elements // width, 1) if elements else max(CHUNK.get(device.type, CHUNK['cuda']) // width, _ROWS)
    if each <= most:
        return [Chunk(part, slice(0, each), each) for part in _cut(images, most // max(each, 1)) if each]
    return [Chunk(slice(i, i + 1), part, each) for i in range(images) for part in _cut(each, most)]


def _cut(number, most):
    size = -(-number // max(-(-number // most), 1))
    return [slice(start, min(start + size, number)) for start in range(0, number, max(size, 1))]
