"""Gradients of weights from a sample of the rows, where all rows send gradients to the input.

The gradient of a weight is a sum over rows of outer products. Its estimate is the sum over every n-th row, times the
number of all rows over that of the sample. The first row is drawn, so each row is as likely as another, and the mean of
the estimate is the gradient. Gradients of inputs and biases are exact. So the error stays in the layer where it arises,
and averages out over steps as that of a minibatch does; that of the paper's method adds up over the depth, and its mean
is not zero.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ['Sample', 'Sampled']


class Sample(NamedTuple):
    """Every ``step``-th row, the first of them is number ``phase``, of all rows of a batch."""

    step: int
    phase: int


class Sampled:
    """The sampled ones of an operation's rows.

    Args:
        sample (Sample | None): None: all rows.
        number (int): Of all rows.
    """

    def __init__(self, sample: Sample | None, number: int):
        step, phase = sample or (1, 0)
        self.step = max(min(step, number), 1)  # at least one row
        self.phase = phase % self.step
        self.share = number / max(len(range(self.phase, number, self.step)), 1)

    def of(self, rows: Tensor, first: int = 0) -> Tensor:
        """Those among rows (K, ...) that are numbered from ``first`` on: a view."""
        return rows[(self.phase - first) % self.step :: self.step]

    def scale_(self, *sums: Tensor | None) -> None:
        """Makes sums over the sample into estimates of those over all rows, in place; None: nobody asks."""
        for total in sums:
            if self.step > 1 and total is not None:
                total.mul_(self.share)
