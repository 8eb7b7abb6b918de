"""The memory that a GPU reserves for a counted step follows from a replay of its allocations."""

import pytest
import torch

from sbp_mmdet.plan.caching_allocator import CachingAllocator, replay
from sbp_mmdet.plan.memory import LiveBytes
from sbp_mmdet.plan.reserved import reserved_bytes, scale_events

MIB = 2**20


def test_a_record_says_what_was_made_and_freed():
    """Maps have 4 MiB: first x, then y and z; y is freed before w is allocated in its place."""
    n = MIB
    with LiveBytes(record=True) as counter:
        x = torch.zeros(n)
        y = x + 1
        z = y * 2
        del y
        w = z - 1
        small = torch.zeros(4)
    sizes = [nbytes for _, nbytes in counter.events]
    assert sizes == [4 * MIB, 4 * MIB, 4 * MIB, 0, 4 * MIB, 16]
    assert counter.events[3][0] == counter.events[1][0]
    assert counter.peak == 12 * MIB + 16
    allocator = replay(CachingAllocator(), [], [counter.events])
    assert (allocator.most_allocated, allocator.most_reserved) == (12 * MIB + 512, 22 * MIB)
    assert LiveBytes().events is None
    del x, z, w, small


def test_maps_shrink_with_the_images_and_gradients_do_not():
    events = [(0, 8 * MIB), (1, 6 * MIB), (2, 100), (0, 0)]
    assert scale_events(events, 0.25, frozenset([6 * MIB])) == [(0, 2 * MIB), (1, 6 * MIB), (2, 100), (0, 0)]


def test_images_of_one_size_and_of_several():
    """A map has 40 MiB, the parameters 60. Smaller maps come first, and their segments are useless later."""
    events = [(0, 40 * MIB), (0, 0)]
    assert reserved_bytes([60 * MIB], events) == dict.fromkeys(('reserved', 'capacity', 'expandable'), 100 * MIB)
    reserved = reserved_bytes([60 * MIB], events, usual_share=0.25)
    assert reserved['reserved'] == (60 + 10 + 20 + 30 + 40) * MIB
    # The smaller segments are given back where there is no room for them.
    assert reserved['capacity'] == pytest.approx(100 * MIB, rel=0.01) == reserved['expandable']
