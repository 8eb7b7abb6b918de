"""Sizes that a long training reaches, extrapolated from a sample: against the quantiles of known distributions."""

import numpy as np
import pytest

from sbp_mmdet.plan.rare_sizes import expected_largest

CONSTANT = np.full(500, 800)


def _sample(name, seed):
    rng = np.random.default_rng(seed)
    kinds = dict(uniform=200 * rng.random(500), bounded=1000 / 3 * (1 - rng.random(500) ** 0.3))
    return 600 + (kinds | dict(exponential=rng.exponential(60, 500)))[name]


RARITY = 1 / (2 * 50_000)  # all images are 800 high, so a batch of two is as wide as the widest of 2 * 50,000 images
# Quantiles of the three distributions, and the relative error that is allowed for the median of 20 samples. The largest
# values of the samples themselves are 4 and 23 % below the latter two.
WIDTHS = dict(
    uniform=(600 + 200 * (1 - RARITY), 0.005),
    bounded=(600 + 1000 / 3 * (1 - RARITY**0.3), 0.02),  # a generalised Pareto distribution of shape -0.3
    exponential=(600 - 60 * np.log(RARITY), 0.15),
)


@pytest.mark.parametrize('name', WIDTHS)
def test_the_width_that_one_batch_in_a_training_reaches(name):
    expected, tolerance = WIDTHS[name]
    sizes = [expected_largest(CONSTANT, _sample(name, seed), 2, 50_000, 10_000) for seed in range(20)]
    assert {height for height, _ in sizes} == {800}
    assert np.median([width for _, width in sizes]) == pytest.approx(expected, rel=tolerance)


def test_sides_of_two_images_meet():
    # Half of the images are 100 x 200 and half are 200 x 100: a batch of one of each is padded to 200 x 200.
    heights, widths = np.repeat([100, 200], 250), np.repeat([200, 100], 250)
    assert expected_largest(heights, widths, 2, 1000, 200) == (200, 200)
    # 2 * P(height = 200) * P(width = 200) of a batch is a half, so it is not expected in 1 of 1 batch.
    assert expected_largest(heights, widths, 2, 1, 200) != (200, 200)


def test_sizes_from_a_list_are_not_exceeded():
    rng = np.random.default_rng(0)
    sides = rng.choice([640, 672, 704, 736, 768, 800], 500)
    assert expected_largest(sides, np.full(500, 1333), 2, 1e6, 1333) == (800, 1333)


def test_the_bound_holds():
    assert expected_largest(CONSTANT, _sample('exponential', 0), 2, 1e9, 900)[1] == 900


def test_a_few_images_are_not_extrapolated():
    widths = np.arange(600, 620)
    assert expected_largest(np.full(20, 800), widths, 2, 1e9, 10_000) == (800, 619)
