"""The interface of devices.

A `Device` owns six streams: COMPUTE, SWAP_IN (host to device), SWAP_OUT (device to host), UPLOAD (inputs to the device,
which are to wait neither for kernels nor for weights that are prefetched), PEER (between devices) and DISK (weights that a
thread reads from a disk to the device; it allocates nothing).
Work is *issued* on a stream and *ordered* by events; the host waits for a device only through `Event.synchronize`.
Where no allocator counts memory (the CPU device), every byte is reported through `charge` and `discharge`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor


class Stream(Enum):
    """Streams of a device; the work of each runs in order."""

    COMPUTE = "compute"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    UPLOAD = "upload"
    PEER = "peer"
    DISK = "disk"


class Event(Protocol):
    """A point in a stream's order."""

    def synchronize(self) -> None:
        """Block the calling host thread until the device has passed this point."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""


class MemoryProbe(Protocol):
    """Bytes of device memory alive now, and the most since the last `reset_peak`; used while a model is being measured."""

    def allocated_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...


Timestamp = object
"""The time of a point in a stream, to be read later by the device that made it."""

StreamContext = AbstractContextManager[object]
TakeTimestamp = Callable[[Stream], Timestamp]
Watch = Callable[[TakeTimestamp, Stream, StreamContext], StreamContext]

HOME = 0
"""Number of the device, of those of one process, that has inputs, unlayered parameters and other shared tensors."""


class Device(ABC):
    """Buffers, copies, streams, events, random state, memory limit and peak of one device."""

    name: str
    torch_device: torch.device
    model = "CPU"
    """The product name: one plan is made for devices of one model."""
    budget_bytes: int | None
    copies_overlap: bool
    """Whether copies run in parallel to compute, or on the thread that computes."""
    host_type = "cpu"
    """Torch's device type of host memory."""
    pins_host = False
    """Whether `host_empty` page-locks."""
    has_values = True
    """Whether tensors have contents. Where they have none, equal calls take equal time."""
    number = 0
    """The number of the current device, of `count` that one process drives."""
    count = 1
    _watch: Callable[[Stream, StreamContext], StreamContext] | None = None

    def current_member(self) -> Device:
        """Return the current device of a group; another one returns itself."""
        return self

    @property
    def optimizer_device(self) -> torch.device:
        """The device whose kernels optimizers use."""
        return self.torch_device

    @contextmanager
    def watching_copies(self, watch: Watch, take: TakeTimestamp | None = None) -> Iterator[None]:
        """Wrap every context of `on` in `watch` while open; `take`: what takes its timestamps (None: `timestamp`)."""
        self._watch = partial(watch, take or self.timestamp)
        try:
            yield
        finally:
            self._watch = None

    def now_ms(self) -> float:
        """Return the time in milliseconds (from an arbitrary origin), once all issued work is done."""
        self.record(Stream.COMPUTE).synchronize()
        return time.perf_counter() * 1e3

    def issued_ms(self) -> float:
        """Return milliseconds of the clock that issuing operations takes time on: the host's."""
        return time.perf_counter() * 1e3

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which torch operations of this thread are issued on `stream`."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Record an event after all work issued on `stream` so far."""

    @abstractmethod
    def timestamp(self, stream: Stream) -> Timestamp:
        """Record the time at which `stream` will have done all work issued so far, without waiting for it."""

    @abstractmethod
    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Return milliseconds on the clock of `time.perf_counter`, after the device has passed all `timestamps`."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let `stream` (not the host) wait for `event`."""

    @abstractmethod
    def as_current(self) -> AbstractContextManager[object]:
        """Return a context, for the thread that runs a model, with this device and its compute stream current."""

    def enter(self, number: int) -> None:  # noqa: B027 - a device is alone unless it is a group
        """Make device `number` of a group the current one."""

    def set_current(self) -> None:  # noqa: B027 - to torch, most devices are one
        """Make this device (of a group, this member), and its compute stream, current on this thread."""

    def peaks(self) -> tuple[int, ...]:
        return (self.peak_bytes(),)

    def current(self) -> object:
        """Return the device and stream that are current on this thread; comparable."""
        return None

    def make_current(self, place: object) -> None:  # noqa: B027 - most devices have one stream for the model's code
        """Make `place`, which `current` returned, current on this thread; it waits for work issued so far."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a device copy for the compute stream; the caller may write into `tensor`, or drop it, at once."""
        copy = self._copy_in(tensor)
        self.wait(Stream.COMPUTE, self.record(Stream.UPLOAD))
        self.record_use(copy)
        return copy

    @abstractmethod
    def _copy_in(self, tensor: Tensor) -> Tensor:
        """Return a device copy, allocated and written on the upload stream; `tensor` is as free as after `upload`."""

    def host_copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        """Return a copy in host memory; if `non_blocking`, it is there when the compute stream has passed this point."""
        return torch.empty_like(tensor, device="cpu").copy_(tensor, non_blocking=non_blocking)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat buffer, counted against the budget until `free`.

        Must be called, and the buffer freed, on the stream that first writes it.

        Raises:
            torch.OutOfMemoryError: the budget would be exceeded.
        """
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Stop counting a buffer of `empty`; the caller drops its last reference."""
        return

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat host buffer of exactly this size, page-locked if the device can use that."""

    def host_lock(self, buffer: Tensor) -> None:  # noqa: B027 - most devices have nothing to lock
        """Page-lock host memory that the device did not allocate, if it can use that; `host_free` undoes it."""

    @abstractmethod
    def host_free(self, buffer: Tensor) -> None:
        """Unlock host memory once every copy issued so far is done. To be called before the buffer is dropped."""

    def record_use(self, tensor: Tensor) -> None:  # noqa: B027 - most devices have one stream
        """Keep the memory of `tensor`, which another stream allocated, until the compute stream has used it."""

    def charge(self, nbytes: int, what: str) -> None:
        """Count `nbytes` of device memory where no allocator does; torch.OutOfMemoryError: they exceed the budget."""
        return

    def discharge(self, nbytes: int) -> None:
        return

    def limit_process(self) -> None:  # noqa: B027 - most devices meter what they are told of
        """Limit all of this process to the budget, if the device can, until `unlimit_process`."""

    def unlimit_process(self) -> None:  # noqa: B027
        """Undo `limit_process`, if it is in force."""

    def reserve_bytes(self) -> int:
        """Return the bytes of the budget that no plan may fill: those of libraries, and of fragmentation."""
        return 0

    def available_bytes(self) -> int | None:
        """Return the bytes that this process has or could get now; None: the device does not say."""
        return None

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes in use now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes in use since the last `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to measure a peak, which may reset statistics that the program reads: only while a model is measured."""

    def watch_peak(self) -> None:
        """Begin to watch the peak of a step, without resetting statistics that the program reads."""
        self.reset_peak()

    def peak_has_risen(self) -> bool:
        """Return whether `peak_bytes` was reached after `watch_peak`; False: only before."""
        return True

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        """Return a context that measures memory, activations included: the device itself if its allocator counts them."""
        return nullcontext(self)

    @abstractmethod
    def random_state(self) -> tuple[Tensor, ...]:
        """Return the states of every generator that code on this device may draw from (host first)."""

    @abstractmethod
    def set_random_state(self, state: tuple[Tensor, ...]) -> None: ...

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed every generator of `random_state`."""
