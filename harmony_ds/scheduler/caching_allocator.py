"""A model of PyTorch's CUDA caching allocator: addresses and bytes, without any memory and without a GPU.

A plan says how many bytes are allocated at a time. How many the allocator has to *reserve* for them is another number: it
hands out pieces of segments that it has from CUDA, and what is free in one place cannot be used in another. Give this model
the same requests, frees and streams as the real one, and it says what is reserved, and when the real one would give memory
back and try again ("retry"), or raise torch.OutOfMemoryError.

How the real one works (torch 2.13, c10/cuda/CUDACachingAllocator.cpp; names in parentheses are those of its functions):

    sizes       a request is rounded up to 512 bytes (round_size). Up to 1 MiB it is served by a pool of small blocks, else
                by a pool of large ones (get_pool); each stream has both pools for itself
    a request   takes the smallest free block of its pool that is large enough (get_free_block), and leaves the rest of the
                block free (should_split)
    else        a new segment is taken from CUDA (alloc_block): of 2 MiB for small blocks, of 20 MiB for requests under
                10 MiB, of the request's size in steps of 2 MiB for larger ones (get_allocation_size)
    a free      joins the block with free neighbours (free_block, try_merge_blocks). If another stream has used it
                (record_stream), it stays away until that stream has passed this point (insert_events, process_events)
    a cap       of `torch.cuda.set_per_process_memory_fraction` bounds what is reserved. Where a request would exceed it,
                the allocator waits for all streams, gives back everything that is free (release_cached_blocks), and tries
                once more: a retry
    expandable  segments (`expandable_segments:True`) are ranges of addresses, one for each pool, which get memory page by
                page (ExpandableSegment): of 2 MiB for small blocks, of 20 MiB for large ones. They grow at their end, or
                where pages have been given back (try_allocate_expandable_block), and give back whole pages in the middle
                (unmap_block); a fixed segment is given back only when all of it is free (release_block)

Not modelled: private pools, graph capture, peers, and options that are off by default (garbage collection,
max_split_size_mb, roundup_power2_divisions).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

_MIB = 2**20
MIN_BLOCK_BYTES = 512
"""kMinBlockSize: sizes are rounded up to it."""
SMALL_BYTES = _MIB
"""kSmallSize: the largest request of a pool of small blocks."""
SMALL_SEGMENT_BYTES = 2 * _MIB
"""kSmallBuffer: a segment of small blocks, and a page of an expandable one."""
LARGE_SEGMENT_BYTES = 20 * _MIB
"""kLargeBuffer: a segment for requests of 1 to 10 MiB, and a page of an expandable segment of large blocks."""
_OWN_SEGMENT_BYTES = 10 * _MIB
"""kMinLargeAlloc: from this on, a request gets a segment of its own size."""
_ROUND_LARGE_BYTES = 2 * _MIB
"""kRoundLarge: in steps of this."""
_FIRST_ADDRESS = 2**40

StreamKey = Hashable
Places = list[tuple[int, int]]
"""The bytes and the address of each of several blocks."""


def rounded_bytes(nbytes: int) -> int:
    """Return the bytes of a block for a request of `nbytes` (round_size)."""
    return max(MIN_BLOCK_BYTES, _round_up(nbytes, MIN_BLOCK_BYTES))


def segment_bytes(block_bytes: int) -> int:
    """Return the bytes of a fixed segment for a block, which are also what the cap is asked for (get_allocation_size)."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < _OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _round_up(block_bytes, _ROUND_LARGE_BYTES)


def _round_up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


class SimulatedOutOfMemoryError(Exception):
    """What the real allocator raises as torch.OutOfMemoryError.

    Attributes:
        asked_bytes: what was asked for.
        allocated_bytes: what is in use.
        unallocated_bytes: what is reserved and not in use.
    """

    def __init__(self, asked_bytes: int, allocated_bytes: int, unallocated_bytes: int) -> None:
        super().__init__(
            f"{asked_bytes:,} bytes do not fit: {allocated_bytes:,} are allocated, and {unallocated_bytes:,} reserved but "
            "unallocated."
        )
        self.asked_bytes = asked_bytes
        self.allocated_bytes = allocated_bytes
        self.unallocated_bytes = unallocated_bytes


@dataclass(slots=True)
class AllocatorStats:
    """What `torch.cuda.memory_stats()` counts.

    Attributes:
        allocated_bytes, active_bytes, reserved_bytes: now. Active is what is allocated, or freed and waiting for a stream.
        allocated_peak_bytes, active_peak_bytes, reserved_peak_bytes: the most since `reset`.
        requests: since `reset`, as all that follow.
        retries: how often everything that was free was given back (num_alloc_retries).
        host_waits: how often the host has waited for a stream or for the device.
        growths, grown_bytes: memory that was taken from CUDA.
        returns, returned_bytes: memory that was given back to CUDA.
    """

    allocated_bytes: int = 0
    active_bytes: int = 0
    reserved_bytes: int = 0
    allocated_peak_bytes: int = 0
    active_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    requests: int = 0
    retries: int = 0
    host_waits: int = 0
    growths: int = 0
    grown_bytes: int = 0
    returns: int = 0
    returned_bytes: int = 0

    def reset(self) -> None:
        """Begin to count anew, and let peaks be what there is now."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.active_peak_bytes = self.active_bytes
        self.reserved_peak_bytes = self.reserved_bytes
        self.requests = self.retries = self.host_waits = 0
        self.growths = self.grown_bytes = self.returns = self.returned_bytes = 0

    def change_allocated(self, nbytes: int) -> None:
        self.allocated_bytes += nbytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)

    def change_active(self, nbytes: int) -> None:
        self.active_bytes += nbytes
        self.active_peak_bytes = max(self.active_peak_bytes, self.active_bytes)

    def grow(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        self.growths += 1
        self.grown_bytes += nbytes

    def shrink(self, nbytes: int) -> None:
        self.reserved_bytes -= nbytes
        # cudaFree waits for the device; unmapping waits for the segment's stream (ExpandableSegment::unmapHandles).
        self.host_waits += 1
        self.returns += 1
        self.returned_bytes += nbytes


@dataclass(frozen=True, slots=True)
class ExpandableSegment:
    """Addresses that get memory page by page."""

    start: int
    page_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses between its neighbours in a segment (struct Block).

    Attributes:
        pool: where it goes when it is free.
        start, nbytes: its addresses.
        segment: the expandable segment that it is part of; None: a fixed one.
        is_allocated: whether the program has it.
        is_mapped: whether there is memory at its addresses; always true in a fixed segment.
        previous, following: its neighbours in the segment.
        used_on: streams that `record_stream` has named since it was allocated.
        awaited_events: how many streams have to pass the point where it was freed.
    """

    pool: BlockPool
    start: int
    nbytes: int
    segment: ExpandableSegment | None = None
    is_allocated: bool = False
    is_mapped: bool = True
    previous: Block | None = None
    following: Block | None = None
    used_on: set[StreamKey] = field(default_factory=set)
    awaited_events: int = 0

    @property
    def is_free(self) -> bool:
        return not (self.is_allocated or self.awaited_events or self.used_on)

    @property
    def room_bytes(self) -> int:
        """Its bytes, and those of the addresses without memory right after it."""
        following = self.following
        return self.nbytes + (following.nbytes if following is not None and not following.is_mapped else 0)

    def cut_front(self, nbytes: int) -> Block:
        """Cut off the first `nbytes`, and return them as a block of their own."""
        front = Block(self.pool, self.start, nbytes, self.segment, is_mapped=self.is_mapped, following=self)
        front.previous, self.previous = self.previous, front
        if front.previous is not None:
            front.previous.following = front
        self.start += nbytes
        self.nbytes -= nbytes
        return front


class BlockPool:
    """The free blocks of one stream that are small, or those that are large (struct BlockPool).

    Attributes:
        stream: whose they are.
        is_small: which of both it is.
        reserved_bytes: of its segments, free or not.
    """

    def __init__(self, stream: StreamKey, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.reserved_bytes = 0
        self._free: list[tuple[int, int]] = []  # (bytes, address) of blocks with memory, sorted
        self._unmapped: list[int] = []  # addresses of blocks without memory, sorted
        self._blocks: dict[int, Block] = {}  # of both kinds, by address

    @property
    def page_bytes(self) -> int:
        """The bytes of a page of its expandable segments."""
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    @property
    def free_blocks(self) -> list[Block]:
        """The free blocks that have memory, from the smallest to the largest."""
        return [self._blocks[start] for _, start in self._free]

    @property
    def unmapped_blocks(self) -> list[Block]:
        """The blocks without memory, from the lowest address to the highest."""
        return [self._blocks[start] for start in self._unmapped]

    def add(self, block: Block) -> None:
        self._blocks[block.start] = block
        if block.is_mapped:
            insort(self._free, (block.nbytes, block.start))
        else:
            insort(self._unmapped, block.start)

    def remove(self, block: Block) -> None:
        del self._blocks[block.start]
        if block.is_mapped:
            del self._free[bisect_left(self._free, (block.nbytes, block.start))]
        else:
            del self._unmapped[bisect_left(self._unmapped, block.start)]

    def take_best_fit(self, nbytes: int) -> Block | None:
        """Remove and return the smallest block that has `nbytes`; None: none has (get_free_block).

        A block that can grow counts with what it can grow to, so that it is taken last.
        """
        place = bisect_left(self._free, (nbytes, 0))
        if place == len(self._free):
            return None
        block = self._at(place)
        while block.segment is not None and place + 1 < len(self._free):
            larger = self._at(place + 1)
            if larger.room_bytes >= block.room_bytes:
                break
            block, place = larger, place + 1
        self.remove(block)
        return block

    def _at(self, place: int) -> Block:
        return self._blocks[self._free[place][1]]

    def add_merged(self, block: Block) -> None:
        """Add a block, as one with its free neighbours, if these are mapped as it is, or not (try_merge_blocks)."""
        before, after = block.previous, block.following
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self.remove(before)
            block.start, block.previous = before.start, before.previous
            block.nbytes += before.nbytes
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self.remove(after)
            block.following = after.following
            block.nbytes += after.nbytes
        if block.previous is not None:
            block.previous.following = block
        if block.following is not None:
            block.following.previous = block
        self.add(block)


class CachingAllocator:
    """The caching allocator of one device.

    Attributes:
        stats: bytes and counts, as `torch.cuda.memory_stats()` has them.
    """

    def __init__(
        self,
        cap_bytes: int | None = None,
        expandable: bool = False,
        device_bytes: int = 2**40,
        event_delay: int | None = None,
    ) -> None:
        """Begin without any memory.

        Args:
            cap_bytes: the most bytes that it may reserve (set_per_process_memory_fraction); None: all of the device's.
            expandable: whether segments are expandable.
            device_bytes: the memory of the device.
            event_delay: after so many requests, a stream has passed the point where a block was freed that it had used;
                None: only when the allocator waits for it. The model knows no time.
        """
        self.stats = AllocatorStats()
        self._cap_bytes = cap_bytes
        self._expandable = expandable
        self._device_bytes = device_bytes
        self._event_delay = event_delay
        self._pools: dict[tuple[StreamKey, bool], BlockPool] = {}
        # Stream -> (number of requests when the event was recorded, block), in this order.
        self._events: defaultdict[StreamKey, deque[tuple[int, Block]]] = defaultdict(deque)
        self._requests = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def free_places(self) -> Places:
        """The free blocks that have memory, pool by pool; those without are what is left of the addresses."""
        return [(block.nbytes, block.start) for pool in self._pools.values() for block in pool.free_blocks]

    # ---- what a program calls

    def malloc(self, nbytes: int, stream: StreamKey) -> Block:
        """Return a block for `nbytes`, which work of `stream` may use at once (malloc).

        Raises:
            SimulatedOutOfMemoryError: the cap, or the device, does not hold it, even after a retry.
        """
        self._requests += 1
        self.stats.requests += 1
        self._process_events()
        block_bytes = rounded_bytes(nbytes)
        pool = self._pool(stream, is_small=block_bytes <= SMALL_BYTES)
        block = pool.take_best_fit(block_bytes)
        if block is None:
            block = self._new_block(pool, block_bytes)
        if block is None:
            self.release_cached()
            self.stats.retries += 1
            block = self._new_block(pool, block_bytes)
        if block is None:
            unallocated_bytes = self.stats.reserved_bytes - self.stats.allocated_bytes
            raise SimulatedOutOfMemoryError(segment_bytes(block_bytes), self.stats.allocated_bytes, unallocated_bytes)
        if self._splits(block, block_bytes):
            front = block.cut_front(block_bytes)
            pool.add(block)
            block = front
        block.is_allocated = True
        self.stats.change_allocated(block.nbytes)
        self.stats.change_active(block.nbytes)
        return block

    def record_stream(self, block: Block, stream: StreamKey) -> None:
        """Note that work of `stream` uses the block, which is not to be reused before that is done (recordStream)."""
        if stream != block.pool.stream:
            block.used_on.add(stream)

    def free(self, block: Block) -> None:
        """Free a block: at once, or when the streams that have used it have come this far (free)."""
        assert block.is_allocated, "a block is freed twice"
        block.is_allocated = False
        self.stats.change_allocated(-block.nbytes)
        for stream in block.used_on:
            block.awaited_events += 1
            self._events[stream].append((self._requests, block))
        block.used_on = set()
        if not block.awaited_events:
            self._put_back(block)

    def release_cached(self) -> None:
        """Wait for all events, and give back all memory that no block is in (release_cached_blocks, empty_cache)."""
        for stream in list(self._events):
            for _, block in self._events.pop(stream):
                self.stats.host_waits += 1
                self._pass_event(block)
        for is_small in (False, True):
            for pool in list(self._pools.values()):
                if pool.is_small is is_small:
                    self._release_pool(pool)

    def reserved_by_stream(self) -> dict[StreamKey, int]:
        """Return the bytes of each stream's segments."""
        found: dict[StreamKey, int] = {}
        for pool in self._pools.values():
            found[pool.stream] = found.get(pool.stream, 0) + pool.reserved_bytes
        return found

    def free_bytes(self) -> int:
        """Return the bytes of all blocks that are free and have memory."""
        return sum(block.nbytes for pool in self._pools.values() for block in pool.free_blocks)

    # ---- requests

    def _pool(self, stream: StreamKey, is_small: bool) -> BlockPool:
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = BlockPool(stream, is_small)
        return pool

    def _splits(self, block: Block, nbytes: int) -> bool:
        """Return whether what `nbytes` leave of the block is worth a block of its own (should_split)."""
        rest = block.nbytes - nbytes
        if block.pool.is_small or self._expandable:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES

    def _new_block(self, pool: BlockPool, nbytes: int) -> Block | None:
        """Return a block of new memory, in no pool; None: the cap refuses it, or there is none (alloc_block).

        The cap is asked for the whole block, though an expandable segment may have a part of it, and maps whole pages.
        """
        asked_bytes = segment_bytes(nbytes)
        if self._cap_bytes is not None and self.stats.reserved_bytes + asked_bytes > self._cap_bytes:
            return None
        if self._expandable:
            return self._expand(pool, nbytes)
        if self.stats.reserved_bytes + asked_bytes > self._device_bytes:
            return None
        self._grow(pool, asked_bytes)
        return Block(pool, self._new_addresses(asked_bytes), asked_bytes)

    def _grow(self, pool: BlockPool, nbytes: int) -> None:
        pool.reserved_bytes += nbytes
        self.stats.grow(nbytes)

    def _shrink(self, pool: BlockPool, nbytes: int) -> None:
        pool.reserved_bytes -= nbytes
        self.stats.shrink(nbytes)

    def _new_addresses(self, nbytes: int) -> int:
        """Return the first of so many addresses that nothing has; no two segments touch."""
        start = self._next_address
        self._next_address += _round_up(nbytes, LARGE_SEGMENT_BYTES) + LARGE_SEGMENT_BYTES
        return start

    # ---- expandable segments

    def _expand(self, pool: BlockPool, nbytes: int) -> Block | None:
        """Return a block that has got its memory, or the rest of it, now (try_allocate_expandable_block)."""
        block: Block | None = self._expandable_block(pool, nbytes)
        while block is not None and not (block.is_mapped and block.nbytes >= nbytes):
            if block.is_mapped:
                assert block.following is not None
                block = self._map(block.following, nbytes - block.nbytes)
            else:
                block = self._map(block, nbytes)
        if block is not None:
            pool.remove(block)
        return block

    def _expandable_block(self, pool: BlockPool, nbytes: int) -> Block:
        """Return the first of the lowest neighbours, free or without memory, that have `nbytes` (find_expandable_block)."""
        for unmapped in pool.unmapped_blocks:
            first = unmapped
            if first.previous is not None and first.previous.is_free:
                first = first.previous
            room_bytes = 0
            block: Block | None = first
            while block is not None and block.is_free:
                room_bytes += block.nbytes
                block = block.following
            if room_bytes >= nbytes:
                return first
        # As many addresses as the device has bytes, and an eighth more.
        address_bytes = _round_up(self._device_bytes + self._device_bytes // 8, pool.page_bytes)
        segment = ExpandableSegment(self._new_addresses(address_bytes), pool.page_bytes)
        block = Block(pool, segment.start, address_bytes, segment, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, most_bytes: int) -> Block | None:
        """Give the front of a block memory, in whole pages (map_block).

        Returns the block with its neighbours that it has merged with, in the pool; None: the device has no memory left.
        """
        assert block.segment is not None
        pool = block.pool
        nbytes = _round_up(min(most_bytes, block.nbytes), block.segment.page_bytes)
        if self.stats.reserved_bytes + nbytes > self._device_bytes:
            return None
        pool.remove(block)
        if nbytes < block.nbytes:
            front = block.cut_front(nbytes)
            pool.add(block)
            block = front
        block.is_mapped = True
        pool.add_merged(block)
        self._grow(pool, nbytes)
        return block

    def _unmap(self, block: Block) -> None:
        """Take the memory of all whole pages from a free block (unmap_block)."""
        segment, pool = block.segment, block.pool
        assert segment is not None
        end = block.start + block.nbytes
        first = segment.start + _round_up(block.start - segment.start, segment.page_bytes)
        last = segment.start + (end - segment.start) // segment.page_bytes * segment.page_bytes
        if first >= last:
            return
        pool.remove(block)
        if first > block.start:
            pool.add(block.cut_front(first - block.start))
        if last < end:
            whole_pages = block.cut_front(last - first)
            pool.add(block)
            block = whole_pages
        block.is_mapped = False
        pool.add_merged(block)
        self._shrink(pool, last - first)

    # ---- frees

    def _put_back(self, block: Block) -> None:
        """Put a block back into its pool (free_block)."""
        self.stats.change_active(-block.nbytes)
        block.pool.add_merged(block)

    def _release_pool(self, pool: BlockPool) -> None:
        """Give back a pool's free pages, and its fixed segments that are free as a whole (release_blocks)."""
        for block in pool.free_blocks:
            if block.segment is not None:
                self._unmap(block)
            elif block.previous is None and block.following is None:
                pool.remove(block)
                self._shrink(pool, block.nbytes)

    def _process_events(self) -> None:
        """Put back the blocks whose streams have come far enough (process_events)."""
        if self._event_delay is None:
            return
        for queue in self._events.values():
            while queue and queue[0][0] + self._event_delay <= self._requests:
                self._pass_event(queue.popleft()[1])

    def _pass_event(self, block: Block) -> None:
        block.awaited_events -= 1
        if not block.awaited_events:
            self._put_back(block)
