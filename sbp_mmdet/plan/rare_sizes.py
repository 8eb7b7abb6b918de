"""The size that a long training reaches, estimated from the sizes of some thousand images.

Random crops make rare images much wider or higher than the usual ones. A training of a million batches contains rarer
ones than the images that the planner runs through the pipeline. Their sizes are extrapolated by extreme value theory:
what exceeds a high threshold follows a generalised Pareto distribution (Pickands, 1975). Its two parameters are
estimated by probability-weighted moments (Hosking and Wallis, 1987).
"""

import numpy as np

__all__ = ['expected_largest']

_TAIL = 32  # number of largest values that the distribution is fitted to, but at most a quarter of all
_LEAST = 8  # with fewer values in the tail, nothing is extrapolated
_LEVELS = 256
# If the three largest values are as close together as this, the distribution ends there, as that of scales from 640 to
# 800 does. A pixel more would add a row of blocks to the padded batch.
_CLOSE = 0.995


def expected_largest(
    heights: np.ndarray, widths: np.ndarray, images: int, batches: float, bound: int
) -> tuple[int, int]:
    """Estimate the largest size that one of ``batches`` batches is expected to be padded to.

    A batch is as high as one of its images and as wide as another one. The images of a batch are drawn independently.
    So the expected number of batches that are at least h high and w wide because of two different images is
    ``batches * images * (images - 1) * P(height >= h) * P(width >= w)``. Of the sizes for which it is 1, the one with
    the most pixels is returned.

    Args:
        heights (np.ndarray): Heights of a random sample of the training's images, in pixels.
        widths (np.ndarray): Their widths.
        images (int): Number of images of a batch, at least 2.
        batches (float): Number of batches of the training.
        bound (int): Largest side that the pipeline gives an image.

    Returns:
        tuple[int, int]: Height and width of the batch.
    """
    pairs = images * (images - 1) * batches
    high = np.geomspace(min(1, 1 / pairs), 1, _LEVELS)
    wide = np.minimum(1, 1 / (pairs * high))
    sizes = np.stack([_exceeded_by(heights, high), _exceeded_by(widths, wide)], 1)
    height, width = sizes[sizes.prod(1).argmax()]
    return min(round(height), bound), min(round(width), bound)


def _exceeded_by(values, shares):
    """Return the values that given shares of all images reach: those of the sample, or extrapolated ones."""
    order = np.sort(values)[::-1].astype(float)
    number = len(order)
    found = order[np.minimum((shares * number).astype(int), number - 1)]
    tail = min(_TAIL, number // 4)
    if tail < _LEAST or order[2] > _CLOSE * order[0]:
        return np.where(shares * number < 1, order[0], found)
    threshold = order[tail]
    shape, scale = _fit(order[:tail] - threshold)
    rarer = np.minimum(1, shares * number / tail)
    # The quantile of the distribution, which is exponential for shape 0.
    excess = -np.log(rarer) if abs(shape) < 1e-6 else (rarer**-shape - 1) / shape
    return np.where(rarer < 1, np.maximum(found, threshold + scale * excess), found)


def _fit(excesses):
    """Fit shape and scale of the generalised Pareto distribution; the shape is at most 0, as sizes are bounded."""
    mean = excesses.mean()
    ascending = np.sort(excesses)
    exceeded = 1 - (np.arange(len(ascending)) + 0.65) / len(ascending)
    weighted = (exceeded * ascending).mean()  # E[X (1 - F(X))]
    shape = min(max(2 - mean / (mean - 2 * weighted), -1.0), 0.0)
    return shape, mean * (1 - shape)  # the mean of the distribution is scale / (1 - shape)
