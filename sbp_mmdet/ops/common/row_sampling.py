"""Weight gradients from a sample of the rows (preset ``sampled``)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .autograd_function import Sample
from .layouts import Chunk
from .precision import accumulator, cast

__all__ = ['ROWS_OF_MEANS', 'SampledRows', 'add_mean_term_', 'centre_', 'choose_rows_of_means', 'sample_rows']

# The chance of a row is proportional to its norm in units of mean norm / _UNITS, plus _LEAST units. Chances are whole
# numbers, because their sums in double precision are the same in every order: so they are deterministic on a GPU.
_UNITS, _LEAST = 2**16, 2**13
# Number of rows that means of activations are computed over.
ROWS_OF_MEANS = 256


class SampledRows(NamedTuple):
    """Rows that gradients of weights are estimated from.

    Attributes:
        index (Tensor | None): Indices of the drawn rows, (n,). If ``None``, all rows are taken.
        factor (Tensor | None): Factor of each drawn row in the estimate, (n, 1).
    """

    index: Tensor | None
    factor: Tensor | None

    def take(self, rows: Tensor) -> Tensor:
        """Select the drawn rows from ``rows``, shape (K, ...)."""
        return rows if self.index is None else rows.index_select(0, self.index)

    def take_weighted(self, rows: Tensor) -> Tensor:
        """Select the drawn rows and multiply each by its factor. One side of the estimated product is weighted."""
        return rows if self.index is None else rows.index_select(0, self.index).mul_(self.factor)


_ALL = SampledRows(None, None)


def sample_rows(sample: Sample | None, *parts: Tensor) -> SampledRows:
    """Draw the rows that gradients of weights are estimated from; gradients of inputs use all rows.

    The gradient is the sum over rows of outer products of the gradient's row and the activation's. Its estimate is the
    sum over n draws, each divided by n times its row's chance; so its mean is the gradient, except for rounding. A
    row's chance follows the norm of its gradient, since rows with large ones carry most of the sum, and n draws stand
    at even distances on the line of all chances (systematic sampling). Rows that would be drawn more than once get
    the chance of one draw, and others the draws that this spares. Gradients of inputs and biases are exact: the error
    stays in the layer where it arises, and averages out over steps as that of a minibatch does.

    Args:
        sample (Sample | None): Share of the rows, and where the draws begin. If ``None``, all rows are taken.
        *parts (Tensor): Gradients, shape (K, C), whose norms are added. If one of their numbers is not finite, the
            estimate is not finite either, so gradient scaling skips the step.

    Returns:
        SampledRows: Indices and factors of the drawn rows.
    """
    if sample is None or not len(parts[0]):
        return _ALL
    rows = len(parts[0])
    number = max(round(sample.ratio * rows), 1)
    norms, *others = [torch.linalg.vector_norm(part, dim=1, dtype=accumulator(part)) for part in parts]
    norms = sum(others, norms) if others else norms
    mean = norms.mean(dtype=torch.float64).clamp_min(torch.finfo(norms.dtype).tiny)
    sizes = torch.rsub(norms / mean, _LEAST, alpha=-_UNITS).floor_()  # _UNITS * norms / mean + _LEAST
    most = (_UNITS + _LEAST) * rows // number  # about the distance between draws: a larger row is sure to be drawn
    for _ in range(2):  # the draws that the first pass spares may reach further rows; the second leaves hardly any
        small = sizes <= most  # fewer than `number` are not, so the divisor is positive
        total = (sizes * small).sum(dtype=torch.float64)
        most = torch.div(total, small.sum() + (number - rows), rounding_mode='floor')
    sizes = torch.where(small, sizes, most)
    apart = sizes.sum(dtype=torch.float64) / number  # NaN where a row is not finite
    at = torch.arange(sample.at, sample.at + number - 0.5, dtype=torch.float64, device=sizes.device) * apart
    ends = sizes.long().cumsum(0)
    index = torch.searchsorted(ends, at.long(), right=True).clamp_(0, rows - 1)
    return SampledRows(index, (apart / sizes.index_select(0, index)).unsqueeze(1))


def choose_rows_of_means(images: int, each: int) -> Chunk:
    """Choose the rows over which means of activations are computed, for estimates from a sample.

    With a mean m, the sum of outer products splits into g^T a = g^T (a - m) + (sum of g)^T m. The second term is exact,
    so a sample of rows has to estimate the first one only, which is smaller: activations after a GELU are far from zero
    on average. The means must not depend on the draw, or the estimate would be biased.

    Args:
        images (int): Number of images.
        each (int): Rows of each image.

    Returns:
        Chunk: Evenly spaced rows of all images.
    """
    # Odd, or the rows would stand in one column of most maps; at most a quarter, or this would cost a product.
    step = max(images * each // ROWS_OF_MEANS, 4) | 1
    return Chunk(slice(0, images), slice(min(step // 2, each - 1), each, step))


def centre_(rows: Tensor, mean: Tensor | None) -> Tensor:
    """Subtract the mean from sampled rows in place. If the mean is ``None``, they are returned unchanged."""
    return rows if mean is None else rows.sub_(mean)


def add_mean_term_(estimate: Tensor | None, total: Tensor, mean: Tensor | None) -> Tensor | None:
    """Add (sum of g)^T m, the exact term of :func:`choose_rows_of_means`, to an estimate in place.

    If the estimate or the mean is ``None``, the estimate is returned unchanged.
    """
    return estimate if estimate is None or mean is None else estimate.addr_(total, cast(mean, total.dtype))
