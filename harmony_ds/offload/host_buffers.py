"""A pool of page-locked host buffers, which are reused from step to step, since page-locking is slow.

The pool keeps no more bytes than were in use at one time. Size classes let tensors of varying lengths share buffers. A
buffer whose user is dropped without releasing it, as in a step that failed, returns to the pool by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harmony_ds.device.base import HOME, Device, Event, Stream


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A buffer of the pool.

    Attributes:
        memory: page-locked bytes.
        asked: the bytes that its user asked for, rounded up; the memory may be larger.
        user: the object that uses it, dead or alive; None while it is spare.
        read: event after the last copy into it and out of it; None: not known.
        number: number of the device of its last user.
    """

    memory: Tensor
    asked: int = 0
    user: weakref.ref[object] | None = None
    read: Event | None = None
    number: int = HOME

    def tensor(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the buffer's first bytes; `strides` must not make elements overlap."""
        nbytes = shape.numel() * dtype.itemsize
        return self.memory[:nbytes].view(dtype).as_strided(shape, strides)


class HostBuffers:
    """The pool. The swap-out stream fills its buffers; any thread may release one."""

    def __init__(self, device: Device, exact: bool = False) -> None:
        """Begin without buffers; `exact`: make them of the size asked for, and not of size classes."""
        self._device = device
        self._exact = exact
        self._all: set[HostBuffer] = set()
        self._spare: dict[int, list[HostBuffer]] = {}  # by size
        # Of users that are gone; filled by the garbage collector, on any thread:
        self._dropped: deque[HostBuffer] = deque()
        self._asked_bytes = 0  # of buffers in use
        self._most_bytes = 0  # the most of these so far
        self._lock = threading.Lock()
        self.nbytes = 0

    def acquire(self, user: object, nbytes: int) -> HostBuffer:
        """Return a buffer of `nbytes` or more, for the swap-out stream, until `release` or until `user` is dropped."""
        size = nbytes if self._exact else size_class(nbytes)
        with self._lock:
            while self._dropped:
                self._put_back(self._dropped.popleft(), None)
            self._most_bytes = max(self._most_bytes, self._asked_bytes + size)
            buffer = self._spare_of(size) or self._make(size)
            self._asked_bytes += size
            buffer.asked, buffer.number = size, self._device.number
            buffer.user = weakref.ref(user, lambda _: self._dropped.append(buffer))
        return buffer

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate buffers of exactly these `sizes` in advance, and free spare ones of others."""
        with self._lock:
            there, wanted = Counter(buffer.memory.numel() for buffer in self._all), Counter(sizes)
            for size, number in (there - wanted).items():
                spares = self._spare.get(size, [])
                for buffer in spares[:number]:
                    self._free(buffer)
                del spares[:number]
            missing = list((wanted - there).elements())
            self._most_bytes = self.nbytes + sum(missing)
            for size in missing:
                self._spare.setdefault(size, []).append(self._make(size))

    def _spare_of(self, size: int) -> HostBuffer | None:
        """Return a spare buffer of `size`, or a larger one if the pool may not grow; None: there is none."""
        may_grow = self.nbytes + size <= self._most_bytes
        fitting = [size] if may_grow else sorted(known for known in self._spare if known >= size)
        spares = next((self._spare[known] for known in fitting if self._spare.get(known)), None)
        if spares is None:
            return None
        buffer = spares.pop()
        for event in self._last_uses(buffer):
            # The copy that fills the buffer next comes after the copies of its last user.
            self._device.wait(Stream.SWAP_OUT, event)
        return buffer

    def _last_uses(self, buffer: HostBuffer) -> list[Event]:
        """Return events after all copies into and out of a buffer.

        Where `read` is not known, those are the last copies issued on the device of its last user.
        """
        if buffer.read is not None:
            return [buffer.read]
        here = self._device.number
        self._device.enter(buffer.number)
        events = [self._device.record(Stream.SWAP_IN), self._device.record(Stream.SWAP_OUT)]
        self._device.enter(here)
        return events

    def _make(self, size: int) -> HostBuffer:
        """Allocate a buffer, after freeing spare ones, the smallest first, until the pool is small enough."""
        small = [buffer for _, spares in sorted(self._spare.items()) for buffer in spares]
        while small and self.nbytes + size > self._most_bytes:
            buffer = small.pop(0)
            self._spare[buffer.memory.numel()].remove(buffer)
            self._free(buffer)
        buffer = HostBuffer(self._device.host_empty(size, torch.uint8))
        self._all.add(buffer)
        self.nbytes += size
        return buffer

    def release(self, buffer: HostBuffer, read: Event | None) -> None:
        """Put a buffer back into the pool; `read`: an event after every copy into it and out of it (None: not known)."""
        with self._lock:
            self._put_back(buffer, read)

    def _put_back(self, buffer: HostBuffer, read: Event | None) -> None:
        self._asked_bytes -= buffer.asked
        buffer.user, buffer.read = None, read
        self._spare.setdefault(buffer.memory.numel(), []).append(buffer)

    def _free(self, buffer: HostBuffer) -> None:
        self._all.remove(buffer)
        self.nbytes -= buffer.memory.numel()
        self._device.host_free(buffer.memory)

    def destroy(self) -> None:
        """Free every buffer, in use or not."""
        with self._lock:
            for buffer in list(self._all):
                buffer.user = None
                self._free(buffer)
            self._spare.clear()
            self._dropped.clear()
            self._asked_bytes = 0


def size_class(nbytes: int) -> int:
    """Return `nbytes` rounded up by less than an eighth; small multiples of powers of two, like most activations, stay."""
    step = max(1, 1 << max(0, nbytes - 1).bit_length() >> 4)
    return -(-nbytes // step) * step
