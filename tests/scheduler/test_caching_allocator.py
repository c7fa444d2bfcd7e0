"""The model of torch's caching allocator: cases by hand, each worked out from torch's source."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from harmony_ds.scheduler.caching_allocator import (
    Block,
    CachingAllocator,
    SimulatedOutOfMemoryError,
    rounded_bytes,
    segment_bytes,
)

MIB = 2**20


def test_requests_are_rounded_to_512_bytes_and_segments_to_their_kind() -> None:
    assert [rounded_bytes(nbytes) for nbytes in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert segment_bytes(512) == segment_bytes(MIB) == 2 * MIB
    assert segment_bytes(MIB + 512) == segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(10 * MIB + 512) == 12 * MIB


def test_small_blocks_share_a_segment() -> None:
    allocator = CachingAllocator()
    one = allocator.malloc(512, "compute")
    two = allocator.malloc(1000, "compute")
    assert two.start == one.start + 512
    assert (allocator.stats.reserved_bytes, allocator.stats.allocated_bytes) == (2 * MIB, 1536)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    whole = allocator.malloc(11 * MIB, "compute")  # of a segment of 12 MiB
    assert whole.nbytes == allocator.stats.allocated_bytes == 12 * MIB
    allocator.free(whole)
    part = allocator.malloc(10 * MIB, "compute")
    assert part.nbytes == 10 * MIB
    rest = allocator.malloc(2 * MIB, "compute")
    assert rest.start == part.start + 10 * MIB
    assert allocator.stats.reserved_bytes == 12 * MIB


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(nbytes * MIB, "compute") for nbytes in (40, 60, 50)]
    smallest_that_fits = blocks[2].start
    for block in blocks:
        allocator.free(block)
    fit = allocator.malloc(45 * MIB, "compute")
    rest = allocator.malloc(5 * MIB, "compute")
    assert (fit.start, rest.start) == (smallest_that_fits, smallest_that_fits + 45 * MIB)
    allocator.free(fit)
    allocator.free(rest)
    assert allocator.malloc(50 * MIB, "compute").start == smallest_that_fits
    assert allocator.stats.reserved_bytes == 150 * MIB


def test_streams_do_not_share_memory() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(100 * MIB, "compute"))
    allocator.malloc(100 * MIB, "swap in")
    assert allocator.stats.reserved_bytes == 200 * MIB
    assert allocator.reserved_by_stream() == {"compute": 100 * MIB, "swap in": 100 * MIB}


def test_at_the_cap_fixed_segments_that_are_free_as_a_whole_are_given_back() -> None:
    allocator = CachingAllocator(cap_bytes=250 * MIB)
    allocator.free(allocator.malloc(100 * MIB, "compute"))
    held = allocator.malloc(100 * MIB, "swap in")
    assert allocator.stats.retries == 0
    allocator.malloc(60 * MIB, "swap in")  # the 100 of the compute stream go back
    stats = allocator.stats
    assert (stats.reserved_bytes, stats.retries, stats.returns, stats.host_waits) == (160 * MIB, 1, 1, 1)
    allocator.free(held)
    part = allocator.malloc(70 * MIB, "swap in")  # of the segment of 100
    with pytest.raises(
        SimulatedOutOfMemoryError, match="125,829,120 bytes do not fit: 136,314,880 are allocated, and 31,457,280"
    ) as failed:
        allocator.malloc(120 * MIB, "compute")
    assert failed.value.asked_bytes == 120 * MIB
    assert (failed.value.allocated_bytes, failed.value.unallocated_bytes) == (130 * MIB, 30 * MIB)
    allocator.free(part)
    allocator.malloc(120 * MIB, "compute")
    assert allocator.stats.reserved_bytes == 180 * MIB


def test_memory_that_another_stream_uses_comes_back_when_that_stream_is_waited_for() -> None:
    allocator = CachingAllocator(cap_bytes=150 * MIB)
    block = allocator.malloc(100 * MIB, "peer")
    allocator.record_stream(block, "compute")
    allocator.free(block)
    assert (allocator.stats.allocated_bytes, allocator.stats.active_bytes) == (0, 100 * MIB)
    allocator.malloc(40 * MIB, "peer")
    assert allocator.stats.reserved_bytes == 140 * MIB
    allocator.malloc(50 * MIB, "peer")  # 190 are over the cap: the event is waited for, and the 100 go back
    assert (allocator.stats.reserved_bytes, allocator.stats.host_waits) == (90 * MIB, 2)


def test_memory_that_another_stream_uses_comes_back_after_the_delay() -> None:
    allocator = CachingAllocator(event_delay=2)
    block = allocator.malloc(100 * MIB, "peer")
    start = block.start
    allocator.record_stream(block, "compute")
    allocator.free(block)
    allocator.malloc(512, "peer")
    assert allocator.malloc(100 * MIB, "peer").start == start


def test_a_block_used_by_its_own_stream_is_free_at_once() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(100 * MIB, "compute")
    allocator.record_stream(block, "compute")
    allocator.free(block)
    assert allocator.stats.active_bytes == 0


def test_expandable_segments_grow_by_pages_and_split_to_512_bytes() -> None:
    allocator = CachingAllocator(expandable=True)
    one = allocator.malloc(30 * MIB, "compute")
    assert (allocator.stats.reserved_bytes, one.nbytes) == (40 * MIB, 30 * MIB)
    two = allocator.malloc(25 * MIB, "compute")  # 10 that are there, and 15 of another page
    assert two.start == one.start + 30 * MIB
    assert allocator.stats.reserved_bytes == 60 * MIB
    allocator.malloc(512, "compute")
    assert allocator.stats.reserved_bytes == 62 * MIB
    start = one.start
    allocator.free(one)
    allocator.free(two)
    assert allocator.malloc(60 * MIB, "compute").start == start
    assert allocator.stats.reserved_bytes == 62 * MIB


def test_a_block_that_can_grow_is_taken_last() -> None:
    allocator = CachingAllocator(expandable=True)
    front = allocator.malloc(40 * MIB, "compute")
    allocator.malloc(20 * MIB, "compute")
    end = allocator.malloc(30 * MIB, "compute")  # 10 of the last page are left after it
    starts = front.start, end.start
    allocator.free(front)
    allocator.free(end)  # 40 are free in both places
    assert allocator.malloc(20 * MIB, "compute").start == starts[0]
    assert allocator.malloc(30 * MIB, "compute").start == starts[1]


def test_expandable_segments_give_pages_back_and_fill_the_hole_first() -> None:
    allocator = CachingAllocator(cap_bytes=120 * MIB, expandable=True)
    blocks = [allocator.malloc(20 * MIB, "compute") for _ in range(5)]
    hole = blocks[1].start
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    other = allocator.malloc(30 * MIB, "swap in")  # 130 are over the cap: two pages of the compute stream go back
    stats = allocator.stats
    assert (stats.reserved_bytes, stats.retries, stats.returns, stats.returned_bytes) == (100 * MIB, 1, 1, 40 * MIB)
    allocator.free(other)
    assert allocator.malloc(15 * MIB, "compute").start == hole
    assert allocator.stats.reserved_bytes == 120 * MIB


def test_the_cap_is_asked_for_the_whole_block_where_one_page_would_do() -> None:
    allocator = CachingAllocator(cap_bytes=120 * MIB, expandable=True)
    allocator.malloc(50 * MIB, "compute")
    allocator.free(allocator.malloc(25 * MIB, "compute"))  # 80 are reserved, of which 30 are free
    allocator.malloc(45 * MIB, "compute")  # a page more would do; 80 + 46 is over the cap
    stats = allocator.stats
    assert (stats.retries, stats.returned_bytes, stats.reserved_bytes) == (1, 20 * MIB, 100 * MIB)


def test_a_request_under_10_mib_asks_the_cap_for_20() -> None:
    allocator = CachingAllocator(cap_bytes=30 * MIB, expandable=True)
    allocator.malloc(15 * MIB, "compute")
    allocator.malloc(3 * MIB, "compute")
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.malloc(4 * MIB, "compute")


def test_a_page_may_exceed_the_cap() -> None:
    allocator = CachingAllocator(cap_bytes=32 * MIB, expandable=True)
    allocator.malloc(20 * MIB, "compute")
    allocator.malloc(12 * MIB, "compute")  # the cap is asked for 12, and 20 are mapped
    assert allocator.stats.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_without_a_cap_the_device_is_the_bound(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable, device_bytes=100 * MIB)
    held = allocator.malloc(60 * MIB, "compute")
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.malloc(60 * MIB, "compute")
    allocator.free(held)
    allocator.malloc(100 * MIB, "compute")
    assert allocator.stats.reserved_bytes == 100 * MIB


def test_a_reset_begins_peaks_and_counts_anew() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB, "compute"))
    allocator.malloc(10 * MIB, "compute")
    allocator.stats.reset()
    stats = allocator.stats
    assert (stats.allocated_peak_bytes, stats.active_peak_bytes, stats.reserved_peak_bytes) == (
        10 * MIB,
        10 * MIB,
        40 * MIB,
    )
    assert stats.requests == stats.growths == 0


def test_a_block_is_not_freed_twice() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(512, "compute")
    allocator.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(block)


@pytest.mark.parametrize("expandable", [False, True])
def test_in_a_long_run_no_two_blocks_overlap_and_all_sums_hold(expandable: bool) -> None:
    chance = random.Random(1)
    allocator = CachingAllocator(cap_bytes=2000 * MIB, expandable=expandable, event_delay=7)
    held: list[Block] = []
    for number in range(20_000):
        if held and chance.random() < 0.52:
            block = held.pop(chance.randrange(len(held)))
            if chance.random() < 0.1:
                allocator.record_stream(block, "compute")
            allocator.free(block)
        else:
            nbytes = int(2 ** chance.uniform(3, 27))
            try:
                held.append(allocator.malloc(nbytes, chance.choice(["compute", "swap in", "swap out"])))
            except SimulatedOutOfMemoryError:
                for block in held[1::2]:
                    allocator.free(block)
                del held[1::2]
        if number % 500 == 0:
            _check_sums(allocator, held)
    for block in held:
        allocator.free(block)
    allocator.release_cached()
    stats = allocator.stats
    assert stats.allocated_bytes == stats.active_bytes == stats.reserved_bytes == 0


def _check_sums(allocator: CachingAllocator, held: list[Block]) -> None:
    spans = sorted((block.start, block.start + block.nbytes) for block in held)
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start
    stats = allocator.stats
    assert stats.allocated_bytes == sum(block.nbytes for block in held)
    assert stats.reserved_bytes == allocator.free_bytes() + stats.active_bytes
    assert stats.reserved_bytes == sum(allocator.reserved_by_stream().values()) <= 2020 * MIB
