"""Replays recorded events in the model of torch's caching allocator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from benchmarks.allocator.events import Allocated, Event, Freed, PoolFilled, Refused, StepBegun, TaskDone, Used
from benchmarks.common import MIB
from harmony_ds.device.allocator_room import OTHER_POOLS_BYTES, SEGMENT_BYTES
from harmony_ds.device.base import Stream
from harmony_ds.scheduler.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError

STEPS = 3
QUEUED = 1024
"""After so many requests the device has passed what was issued before: CUDA queues about as many kernels, then the host
waits.
"""
WORKSPACES = (32 * MIB, 32 * MIB)
"""cuBLAS's, of the engine's thread and of autograd's, on a GPU of compute capability 9.0."""


class Pools(Enum):
    """Which allocations share a pool of the allocator."""

    ENGINE = "engine"
    """Those of one stream, as the engine allocates them: weights that are swapped in share compute's."""
    WEIGHTS_APART = "weights-apart"
    """The same, but weights that are swapped in have a pool of their own."""

    def pool_of(self, event: Allocated | Refused) -> object:
        """Return the stream that the allocator is to think an allocation is for."""
        if self is Pools.WEIGHTS_APART and event.is_buffer:
            return Stream.SWAP_IN
        return event.stream


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the allocator has done in the third step.

    Attributes:
        failure: of whichever step was out of memory; empty: none was.
        allocated_peak_bytes: the most in use, workspaces included.
        reserved_peak_bytes: the most that was reserved.
        retries: how often all that was free was given back.
        host_waits: how often the host waited for a stream.
        returned_bytes: what was given back, which then had to be taken from CUDA again.
    """

    failure: str
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    retries: int
    host_waits: int
    returned_bytes: int


class AllocatorReplay:
    """An allocator that is given one event after the other."""

    def __init__(self, cap_bytes: int | None, expandable: bool, pools: Pools) -> None:
        """Begin with cuBLAS's workspaces, in an allocator that may reserve `cap_bytes` (None: any number)."""
        self._cap_bytes = cap_bytes
        self._expandable = expandable
        self._pools = pools
        self._allocator = CachingAllocator(cap_bytes, expandable, event_delay=QUEUED)
        self._workspaces = [self._allocator.malloc(nbytes, Stream.COMPUTE) for nbytes in WORKSPACES]
        self._blocks: dict[int, Block] = {}
        self._step, self._last_task = -1, "no task"
        self.failure = ""

    def play(self, event: Event) -> None:
        """Do what the event says; nothing, once memory has run out: `failure` says so."""
        if self.failure:
            return
        allocator = self._allocator
        match event:
            case Allocated():
                try:
                    self._blocks[event.number] = allocator.malloc(event.nbytes, self._pools.pool_of(event))
                except SimulatedOutOfMemoryError as error:
                    self.failure = f"in step {self._step + 1}, after {self._last_task}: {error}"
            case Refused():
                if self._cap_bytes is not None:
                    self.serves(event)
            case Freed():
                allocator.free(self._blocks.pop(event.number))
            case Used():
                allocator.record_stream(self._blocks[event.number], event.stream)
            case PoolFilled():
                if self._cap_bytes is not None and self._expandable:
                    self._fill_pool(self._cap_bytes - OTHER_POOLS_BYTES - event.other_bytes)
            case TaskDone():
                self._last_task = event.task
            case StepBegun():
                self._step = event.step
                if self._step < STEPS:
                    allocator.stats.reset()

    def serves(self, request: Refused) -> bool:
        """Return whether the allocator can serve a request now, and free what it gives; it tries all that it can."""
        with suppress(SimulatedOutOfMemoryError):
            self._allocator.free(self._allocator.malloc(request.nbytes, self._pools.pool_of(request)))
            return True
        return False

    def _fill_pool(self, most_bytes: int) -> None:
        """Do what `CudaDevice.fill_pool` does."""
        held: list[Block] = []
        while (room := most_bytes - self._allocator.stats.reserved_bytes) >= SEGMENT_BYTES:
            held.append(self._allocator.malloc(room, Stream.COMPUTE))
        for block in held:
            self._allocator.free(block)

    def replayed(self) -> Replayed:
        """Return what the allocator has done since the third step began."""
        stats = self._allocator.stats
        assert all(block.is_allocated for block in self._workspaces)
        return Replayed(
            self.failure,
            stats.allocated_peak_bytes,
            stats.reserved_peak_bytes,
            stats.retries,
            stats.host_waits,
            stats.returned_bytes,
        )


def replay(events: Sequence[Event], cap_bytes: int | None, expandable: bool, pools: Pools) -> Replayed:
    """Replay what was recorded, in an allocator that may reserve `cap_bytes` (None: any number)."""
    allocator = AllocatorReplay(cap_bytes, expandable, pools)
    for event in events:
        allocator.play(event)
    return allocator.replayed()
