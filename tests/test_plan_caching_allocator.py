"""The model of CUDA's caching allocator agrees with cases worked out by hand from torch's source."""

import random

import pytest

from sbp_mmdet.plan.caching_allocator import CachingAllocator, OutOfMemory, replay

MIB = 2**20


def figures(allocator):
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize(
    ('nbytes', 'allocated', 'reserved'),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not cut off, and counts as allocated
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_the_first_block_of_a_size(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(nbytes))
    assert figures(allocator) == (0, reserved)
    allocator.allocate(nbytes)  # finds the cached one
    assert figures(allocator) == (allocated, reserved)


def test_small_blocks_share_segments_of_2_mib():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.allocate(MIB)
    assert figures(allocator) == (3 * MIB, 4 * MIB)


def test_the_smallest_block_that_fits_is_taken():
    """25 MiB are taken from the first of two cached blocks of 30 and 40 MiB; then 35 fit into the second."""
    allocator = CachingAllocator()
    cached = [allocator.allocate(size * MIB) for size in (40, 30)]
    for block in cached:
        allocator.free(block)
    allocator.allocate(25 * MIB)
    allocator.allocate(35 * MIB)
    assert figures(allocator) == (60 * MIB, 70 * MIB)


def test_free_neighbours_become_one_block_but_segments_do_not():
    allocator = CachingAllocator()
    parts = [allocator.allocate(6 * MIB) for _ in range(3)]  # 18 of 20 MiB
    assert figures(allocator) == (18 * MIB, 20 * MIB)
    for block in (parts[0], parts[2], parts[1]):  # the last one between two that are free
        allocator.free(block)
    whole = allocator.allocate(20 * MIB)
    assert figures(allocator) == (20 * MIB, 20 * MIB)
    other = allocator.allocate(20 * MIB)
    allocator.free(whole)
    allocator.free(other)
    allocator.allocate(40 * MIB)  # two free segments of 20 MiB serve no block of 40
    assert figures(allocator) == (40 * MIB, 80 * MIB)


def test_sizes_that_grow_leave_segments_behind():
    """Maps of 30, 40 and 50 MiB follow each other, and each is larger than all cached blocks."""
    allocator, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for one in (allocator, expandable):
        for size in (30, 40, 50):
            one.free(one.allocate(size * MIB))
    assert allocator.reserved == 120 * MIB
    assert expandable.reserved == 60 * MIB  # three granules of 20 MiB


def test_cached_segments_are_given_back_before_it_is_out_of_memory():
    allocator = CachingAllocator(capacity=100 * MIB)
    for size in (30, 40):
        allocator.free(allocator.allocate(size * MIB))
    kept = allocator.allocate(20 * MIB)  # of the segment of 30 MiB, which cannot go from now on
    allocator.allocate(60 * MIB)
    assert figures(allocator) == (80 * MIB, 90 * MIB)
    assert (allocator.retries, allocator.most_reserved) == (1, 90 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(12 * MIB)
    allocator.free(kept)
    allocator.allocate(12 * MIB)  # of the 30 MiB that the freed block makes with its neighbour
    assert figures(allocator) == (72 * MIB, 90 * MIB)


def test_expandable_segments_grow_at_a_free_end():
    """The last 15 of 20 MiB are freed, after 5 that are in use: 30 MiB take these and 20 more."""
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(5 * MIB)
    allocator.free(allocator.allocate(15 * MIB))
    assert figures(allocator) == (5 * MIB, 20 * MIB)
    allocator.allocate(30 * MIB)
    assert figures(allocator) == (35 * MIB, 40 * MIB)
    allocator.allocate(2 * MIB + 512)  # their rest is cut at any size
    assert figures(allocator) == (37 * MIB + 512, 40 * MIB)


def test_expandable_segments_give_back_whole_granules():
    """5 of 60 MiB are in use at either end: the granule in the middle is freed and allocated again."""
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(5 * MIB)
    middle = allocator.allocate(50 * MIB)
    allocator.allocate(5 * MIB)
    assert figures(allocator) == (60 * MIB, 60 * MIB)
    allocator.free(middle)
    allocator.give_back()
    assert figures(allocator) == (10 * MIB, 40 * MIB)
    allocator.allocate(50 * MIB)
    assert figures(allocator) == (60 * MIB, 60 * MIB)


def test_expandable_segments_within_a_capacity():
    """2 MiB of the other pool and 60 MiB exceed a capacity of 60, so the 2 MiB are freed."""
    allocator = CachingAllocator(capacity=60 * MIB, expandable=True)
    allocator.free(allocator.allocate(MIB))
    allocator.allocate(59 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    with pytest.raises(OutOfMemory):
        allocator.allocate(2 * MIB)


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match='twice'):
        allocator.free(block)


@pytest.mark.parametrize('expandable', [False, True])
@pytest.mark.parametrize('seed', range(4))
def test_any_stream(expandable, seed):
    """Blocks never overlap, allocated bytes lie between requested and reserved ones, and everything is freed at the
    end."""
    rng, allocator, blocks, asked = random.Random(seed), CachingAllocator(expandable=expandable), [], 0
    for _ in range(1500):
        if blocks and rng.random() < 0.5:
            block, nbytes = blocks.pop(rng.randrange(len(blocks)))
            allocator.free(block)
            asked -= nbytes
        else:
            nbytes = int(2 ** rng.uniform(0, 26))
            blocks.append((allocator.allocate(nbytes), nbytes))
            asked += nbytes
        if rng.random() < 0.01:
            allocator.give_back()
        assert asked <= allocator.allocated <= allocator.reserved <= allocator.most_reserved
        waste = MIB + 512
        assert all(nbytes <= block.size < nbytes + waste for block, nbytes in blocks)
        assert allocator.allocated == sum(block.size for block, _ in blocks)
    for small in (False, True):
        spans = sorted((b.address, b.address + b.size) for b, _ in blocks if b.pool.small == small)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    for block, _ in blocks:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.give_back()
    assert allocator.reserved == 0


def test_capacity_needs_no_more_than_the_unlimited_run():
    """The memory that is reserved without a limit suffices as the limit, and nothing has to be freed then."""
    rng = random.Random(0)
    step = [event for i in range(200) for event in ((i, rng.randrange(1, 30 * MIB)),)]
    step = [*step[:120], *((i, 0) for i in range(60)), *step[120:]]
    for expandable in (False, True):
        free = replay(CachingAllocator(expandable=expandable), [MIB], [step, step])
        tight = replay(CachingAllocator(free.most_reserved, expandable), [MIB], [step, step])
        assert (tight.most_reserved, tight.retries) == (free.most_reserved, 0)


def test_replay():
    """Consecutive tensors of 30 MiB share a segment, held tensors remain, and the end of a step frees the others."""
    step = [(0, 30 * MIB), (0, 0), (1, 30 * MIB), (2, 5 * MIB)]
    allocator = replay(CachingAllocator(), [12 * MIB, 12 * MIB], [step, step])
    assert figures(allocator) == (24 * MIB, (24 + 30 + 20) * MIB)
    assert allocator.most_allocated == (24 + 35) * MIB
    larger = [(0, 32 * MIB), (0, 0)]
    replay(allocator, [], [larger])
    assert allocator.reserved == (24 + 30 + 20 + 32) * MIB
