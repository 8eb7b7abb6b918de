"""Masks have the right ratios, evenness and alignment, and depend on the right things."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbp_mmdet.stochastic_backprop import masks
from sbp_mmdet.stochastic_backprop.masks import (
    SAMPLERS,
    format_keep_ratio,
    grid_positions,
    mask_generator,
    parse_keep_ratio,
    positions,
    sample_mask,
    stage_masks,
    token_positions,
)

RATIOS = [
    Fraction(1, 2),
    Fraction(1, 3),
    Fraction(1, 4),
    Fraction(2, 5),
    Fraction(3, 5),
    Fraction(5, 7),
    Fraction(9, 10),
]


def draw(height, width, ratio, sampler='grid', step=0):
    return sample_mask(height, width, ratio, sampler, mask_generator(0, 0, step))


def diagonals(height, width):
    return torch.arange(height)[:, None] + torch.arange(width)


@pytest.mark.parametrize(
    ('ratio', 'fraction'), [(0.5, '1/2'), (0.4, '2/5'), (0.3333, '1/3'), (0.07, '7/100'), (0.6667, '2/3'), (1, '1')]
)
def test_ratio_is_honoured(ratio, fraction):
    fraction = Fraction(fraction)
    assert parse_keep_ratio(ratio) == fraction
    for sampler in SAMPLERS:
        mask = draw(100, 300, ratio, sampler)
        assert mask.dtype == torch.bool and mask.shape == (100, 300)
        assert mask.sum().item() == fraction * 30000


@pytest.mark.parametrize('ratio', [0, -1, 1.5, 1.0001, True, False, 'a', '0.5', None, float('nan'), float('inf')])
def test_ratio_out_of_range(ratio):
    with pytest.raises(ValueError, match=r'in \(0, 1\]') as error:
        parse_keep_ratio(ratio)
    assert repr(ratio) in str(error.value)


@pytest.mark.parametrize(
    ('ratio', 'text'),
    [(0.5, '0.5'), (0.07, '0.07'), (0.123456, '10/81'), (0.123457, '10/81'), (1 / 3, '1/3'), (1, '1')],
)
def test_the_ratio_that_is_used_is_printed(ratio, text):
    assert format_keep_ratio(ratio) == text


@pytest.mark.parametrize(('ratio', 'nearest'), [(0.333, '1/3'), (0.4951, '49/99'), (0.999, '99/100'), (0.9951, '1')])
def test_ratio_that_cannot_be_honoured_names_the_nearest(ratio, nearest):
    with pytest.raises(ValueError, match=rf'{ratio}.*nearest: .*\(= {nearest}\)'):
        parse_keep_ratio(ratio)
    with pytest.raises(ValueError, match='nearest'):
        draw(8, 8, ratio)


@pytest.mark.parametrize('ratio', [1e-6, 0.001, 0.004])
def test_ratio_near_zero_names_the_nearest(ratio):
    with pytest.raises(ValueError, match=r'nearest: .*\(= 1/100\)'):
        parse_keep_ratio(ratio)


def test_unknown_sampler():
    with pytest.raises(ValueError, match="'blue'.*grid.*random"):
        draw(8, 8, 0.5, 'blue')


@pytest.mark.parametrize('n', [1, 2, 3, 4, 7])
def test_grid_keeps_every_nth_diagonal(n):
    for step in range(5):
        mask = draw(11, 17, 1 / n if n < 7 else Fraction(1, 7), step=step)
        assert any(torch.equal(mask, diagonals(11, 17) % n == phase) for phase in range(n))


@pytest.mark.parametrize('n', [3, 4, 5])
def test_grid_above_one_half_is_a_complement(n):
    for step in range(5):
        dropped = ~draw(11, 17, (n - 1) / n, step=step)
        assert any(torch.equal(dropped, diagonals(11, 17) % n == phase) for phase in range(n))


@pytest.mark.parametrize('ratio', RATIOS)
def test_grid_is_even_and_visits_every_position(ratio):
    q = ratio.denominator
    masks = torch.stack([draw(2 * q, 3 * q, ratio, step=step) for step in range(30 * q)])
    assert (masks.double().mean(1) == float(ratio)).all()  # in every column
    assert (masks.double().mean(2) == float(ratio)).all()  # in every row
    phases = masks.flatten(1).unique(dim=0)
    assert len(phases) == q
    assert (phases.sum(0) == ratio.numerator).all()  # a position is kept in p of the q phases


@pytest.mark.parametrize('ratio', RATIOS)
def test_grid_spreads_what_it_keeps(ratio):
    """Along a row, the longest gap is as short as the keep ratio allows."""
    row = draw(1, 10 * ratio.denominator, ratio)[0]
    gaps = row.nonzero().flatten().diff()
    assert set(gaps.tolist()) <= {int(1 / ratio), -(-ratio.denominator // ratio.numerator)}


@given(height=st.integers(1, 20), width=st.integers(1, 20), ratio=st.sampled_from(RATIOS), step=st.integers(0, 9))
def test_random_keeps_exactly(height, width, ratio, step):
    mask = draw(height, width, ratio, 'random', step)
    assert mask.sum() == round(ratio * height * width)


def test_random_visits_every_position_alike():
    masks = torch.stack([draw(6, 7, 0.5, 'random', step) for step in range(400)])
    assert len(masks.flatten(1).unique(dim=0)) > 390
    frequency = masks.double().mean(0)
    assert (frequency - 0.5).abs().max() < 0.13  # five standard deviations


@given(
    height=st.integers(8, 75),
    width=st.integers(8, 75),
    stages=st.integers(1, 4),
    ratio=st.sampled_from(RATIOS),
    sampler=st.sampled_from(SAMPLERS),
)
def test_stages_are_aligned(height, width, stages, ratio, sampler):
    """A kept position of a stage is a kept 2x2 patch of the stage before it, whatever the size of the image."""
    sizes = [(height // 2**i, width // 2**i) for i in range(stages)]
    masks = stage_masks(sizes, ratio, sampler, mask_generator(1, 0, 2))
    assert [tuple(mask.shape) for mask in masks] == sizes
    for fine, coarse in zip(masks[:-1], masks[1:], strict=True):
        h, w = coarse.shape
        patches = fine[: 2 * h, : 2 * w].reshape(h, 2, w, 2)
        assert torch.equal(patches.all(3).all(1), coarse)
        assert torch.equal(patches.any(3).any(1), coarse)


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_ragged_edges_are_sampled_too(sampler):
    """The last odd row and column of a stage, which no deeper stage sees, are kept as often as the others."""
    masks = [stage_masks([(15, 15), (7, 7), (3, 3)], 0.5, sampler, mask_generator(0, 0, s))[0] for s in range(200)]
    frequency = torch.stack(masks).double().mean(0)
    assert (frequency - 0.5).abs().max() < 0.18


@pytest.mark.parametrize('sampler', SAMPLERS)
def test_mask_depends_on_its_arguments_only(sampler):
    def sequence(*fixed, ratio=0.25):
        return torch.stack([sample_mask(9, 9, ratio, sampler, mask_generator(*fixed, step)) for step in range(20)])

    torch.manual_seed(1)
    first = sequence(5, 0)
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(sequence(5, 0), first)
    assert not torch.equal(sequence(6, 0), first)
    assert not torch.equal(sequence(5, 1), first)
    assert not torch.equal(sequence(0, 5), first)
    repeats = [sample_mask(9, 9, 0.25, sampler, mask_generator(5, 0, 3, repeat)) for repeat in range(20)]
    assert torch.equal(repeats[0], first[3])
    assert len({tuple(mask.flatten().tolist()) for mask in repeats}) > 1


def test_drawing_leaves_the_global_generators_alone():
    before = torch.get_rng_state(), random.getstate()
    for sampler in SAMPLERS:
        stage_masks([(16, 16), (8, 8)], 0.5, sampler, mask_generator(0, 0, 0))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize('kept', [0, 5, 12])
def test_positions_partition_the_map(kept):
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask.view(-1)[torch.randperm(12, generator=torch.Generator().manual_seed(0))[:kept]] = True
    keep, drop = positions(mask)
    assert keep.dtype == drop.dtype == torch.int64
    assert keep.tolist() == [i * 4 + j for i in range(3) for j in range(4) if mask[i, j]]
    assert sorted([*keep.tolist(), *drop.tolist()]) == list(range(12))
    assert drop.tolist() == sorted(drop.tolist())


def test_positions_of_a_mask_that_was_there_before():
    """A mask that occurs again gets the same tensors as at first, whatever was called in between."""
    masks_ = [sample_mask(6, 7, 0.5, 'grid', torch.Generator().manual_seed(seed)) for seed in range(8)]
    masks_ += [mask[:, :6].contiguous() for mask in masks_] + [mask.view(7, 6) for mask in masks_]
    masks._of_grid.cache_clear()
    first = [grid_positions(mask) for mask in masks_]
    misses = masks._of_grid.cache_info().misses
    for mask, before in zip(masks_, first, strict=True):
        assert grid_positions(mask) is before
        assert all(map(torch.equal, positions(mask), before))
    assert masks._of_grid.cache_info().misses == misses <= 7
    assert masks._of_grid.cache_info().maxsize


def test_positions_of_tokens():
    """The leading tokens are always kept."""
    before = positions(torch.eye(4).bool())
    assert token_positions(before, 0) is before
    tokens = token_positions(before, 2)
    assert tokens.keep.tolist() == [0, 1, *(before.keep + 2).tolist()] and torch.equal(tokens.drop, before.drop + 2)
