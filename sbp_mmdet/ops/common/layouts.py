"""Feature maps and tokens of any memory layout, and their rows in chunks.

A row is one position, a vector of C numbers. Rows of kept positions are contiguous, image after image.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    'CHUNK',
    'Chunk',
    'add_rows_',
    'as_rows',
    'cut_into_chunks',
    'elements_at_a_time',
    'empty_tokens',
    'from_rows',
    'in_shape',
    'to_layout',
    'layout_of',
    'memory_format',
    'scatter_rows',
    'tokens_of',
]

# Number of elements of an operation's largest tensor that exist at a time. On a CPU, they should stay in its caches. On
# a GPU, a launch costs more than memory: one image of 800 x 1344 in the first stage of ConvNeXt-B (34 million) and in
# the encoder of DINO (46 million), and two images in ConvNeXt's other stages, are one chunk. The number does not depend
# on the memory that is free, because sums would be rounded differently from run to run.
CHUNK = {'cpu': 2**20, 'cuda': 44 * 2**20}
_LEAST = CHUNK['cpu']  # a smaller chunk would save little memory for its launches
# Least number of rows of a chunk by default. A product of fewer rows spends its time on reading weights.
_ROWS = 640
# Chunks of an image's rows are multiples of this number, as the tiles of a GPU's matrix products are.
_TILE = 64


# Maps and tokens.


def memory_format(x: Tensor) -> torch.memory_format:
    """Return channels last if ``x`` is laid out so and is not contiguous, else the contiguous format."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def layout_of(x: Tensor) -> torch.memory_format | None:
    """Return :func:`memory_format` of a feature map, or ``None`` for tokens."""
    return None if x.dim() == 3 else memory_format(x)


def to_layout(x: Tensor, layout: torch.memory_format | None) -> Tensor:
    """Return ``x`` in a layout of :func:`layout_of`; it is copied only if it has another one."""
    return x if layout is None else x.contiguous(memory_format=layout)


def tokens_of(x: Tensor) -> Tensor:
    """Return a feature map (N, C, H, W) as tokens (N, H * W, C), without a copy; tokens are returned unchanged."""
    return x if x.dim() == 3 else x.flatten(2).transpose(1, 2)


def in_shape(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return tokens as a feature map or tokens of this shape, without a copy: the inverse of :func:`tokens_of`."""
    if len(shape) == 3:
        return tokens
    return tokens.transpose(1, 2).view(tokens.shape[0], tokens.shape[2], *shape[2:])


def as_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return all positions of a feature map or of tokens as rows (N * L, C), a view where they are laid out so.

    Args:
        x (Tensor): Feature map (N, C, H, W) or tokens (N, L, C).
        dtype (torch.dtype | None): Precision of the rows. If ``None``, that of ``x``. Default: None.
    """
    x = x if x.dim() == 3 else x.permute(0, 2, 3, 1)
    if dtype is not None and dtype is not x.dtype:  # one pass for layout and precision
        x = x.to(dtype, memory_format=torch.contiguous_format)
    return x.reshape(-1, x.shape[-1])


def from_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return contiguous rows as a feature map or tokens of this shape, as a view: the inverse of :func:`as_rows`."""
    if len(shape) == 3:
        return rows.view(shape)
    n, channels, height, width = shape
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


def empty_tokens(
    shape: tuple[int, ...], layout: torch.memory_format | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return unwritten tokens that :func:`in_shape` turns into a map of some layout without a copy.

    Args:
        shape (tuple[int, ...]): Shape (N, L, C).
        layout (torch.memory_format | None): The layout, see :func:`layout_of`.
        dtype (torch.dtype): Precision of the tokens.
        device (torch.device): Their device.
    """
    n, length, channels = shape
    if layout == torch.contiguous_format:
        return torch.empty(n, channels, length, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=device)


def scatter_rows(rows: Tensor, index: Tensor | None, length: int) -> Tensor:
    """Write rows to their positions among tokens that are zero elsewhere.

    Args:
        rows (Tensor): The rows, shape (N, K, C).
        index (Tensor | None): Their positions, shape (K,). If ``None``, the rows are all tokens in order and are
            returned unchanged.
        length (int): Number of tokens L.

    Returns:
        Tensor: Shape (N, L, C).
    """
    if index is None:
        return rows
    return rows.new_zeros(len(rows), length, rows.shape[2]).index_copy_(1, index, rows)


def add_rows_(tokens: Tensor, index: Tensor | None, rows: Tensor) -> Tensor:
    """Add rows (N, K, C) in place to the tokens (N, L, C) at the positions ``index`` (K,), which all differ.

    If ``index`` is ``None``, the rows are added to all tokens in order.
    """
    if index is None:
        return tokens.add_(rows)
    # Not index_add_, which torch names among what CUDA does in any order.
    return tokens.index_copy_(1, index, tokens.index_select(1, index).add_(rows))


# Chunks: intermediate tensors exist for one chunk at a time.


class Chunk(NamedTuple):
    """Some rows of some images of a tensor (N, K, ...), as a view of it.

    Attributes:
        images (slice): Images, with a start and a stop; a step is allowed.
        rows (slice): Rows of each image, with a start and a stop; a step is allowed.
    """

    images: slice
    rows: slice

    @classmethod
    def whole(cls, x: Tensor) -> 'Chunk':
        """Return the chunk of all rows of ``x``, shape (N, K, ...)."""
        return cls(slice(0, len(x)), slice(0, x.shape[1]))

    @property
    def num_images(self) -> int:
        """Number of images in the chunk."""
        return len(range(self.images.start, self.images.stop, self.images.step or 1))

    def take_rows(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the chunk's rows as a matrix, which is a view where they are contiguous in ``x``.

        Args:
            x (Tensor): Shape (N, K, C); with ``index`` (N, L, C).
            index (Tensor | None): Positions of the K rows among the L of ``x``, (K,). If ``None``, all. Default: None.
        """
        if index is None:
            return x[self.images, self.rows].reshape(-1, x.shape[2])
        if self.num_images == 1:  # with a dimension for images, a CPU takes nine times as long
            return x[self.images.start].index_select(0, index[self.rows])
        return x[self.images].index_select(1, index[self.rows]).flatten(0, 1)

    def put_(self, x: Tensor, rows: Tensor, index: Tensor | None = None) -> None:
        """Write the chunk's rows to their positions in ``x``; the arguments are those of :meth:`take_rows`."""
        place = x[self.images, self.rows] if index is None else x[self.images]
        if index is None:
            place.copy_(rows.view(place.shape))
        else:
            place.index_copy_(1, index[self.rows], rows.view(self.num_images, -1, x.shape[2]))


def elements_at_a_time(device: torch.device, form=None) -> int:
    """Return how many elements of an operation's largest tensor exist at a time.

    Args:
        device (torch.device): Device of the tensors.
        form (Form | None): Form of the operation. With ``form.small_chunks`` it is a half on a GPU. If ``None``, it
            is as much as the device is fastest with. Default: None.
    """
    most = CHUNK.get(device.type, CHUNK['cuda'])
    return max(most // 2, min(most, _LEAST)) if form is not None and form.small_chunks else most


def cut_into_chunks(
    images: int, each: int, width: int, device: torch.device, elements: int | None = None, form=None
) -> list[Chunk]:
    """Cut rows into chunks of about the same size, because a short one costs a GPU as many launches as a long one.

    A chunk is some whole images, or some rows of one image.

    Args:
        images (int): Number of images.
        each (int): Rows of each image.
        width (int): Elements of the largest tensor for each row.
        device (torch.device): Device of the tensors.
        elements (int | None): Elements of the largest tensor that may exist at a time; a chunk has at least one row. If
            ``None``, :func:`elements_at_a_time` decides, and a chunk has at least 640 rows. Default: None.
        form (Form | None): See :func:`elements_at_a_time`. Default: None.

    Returns:
        list[Chunk]: All rows in order.
    """
    most = max(elements // width, 1) if elements else max(elements_at_a_time(device, form) // width, _ROWS)
    if 0 < images * each <= most:
        return [Chunk(slice(0, images), slice(0, each))]
    if each <= most:
        return [Chunk(part, slice(0, each)) for part in _cut(images, most // max(each, 1)) if each]
    return [Chunk(slice(i, i + 1), part) for i in range(images) for part in _cut(each, most)]


def _cut(number, most):
    size = -(-number // max(-(-number // most), 1))
    if most >= _TILE:
        size = min(-(-size // _TILE) * _TILE, most // _TILE * _TILE)
    return [slice(start, min(start + size, number)) for start in range(0, number, max(size, 1))]
