"""The one interface behind which every device sits.

A `Device` owns four streams: COMPUTE, SWAP_IN (host to device), SWAP_OUT (device to host) and PEER (between devices).
Work is *issued* on a stream and *ordered* by events; the host waits for a device only through `Event.synchronize`.
Devices whose memory is not metered by an allocator of their own (the CPU device) are told of every byte through `charge`
and `discharge`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Stream(Enum):
    """The queues of a device; what is issued on one runs in order."""

    COMPUTE = "compute"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    PEER = "peer"


class Event(Protocol):
    """A point in a stream's order."""

    def synchronize(self) -> None:
        """Blocks the calling host thread until the device has passed this point."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""


class MemoryProbe(Protocol):
    """Bytes of device memory alive now, and the most since the last `reset`; used while a model is being measured."""

    def live_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def reset(self) -> None: ...


Moment = object
"""A point in a stream's time, to be read later by the device that made it."""

Issuing = AbstractContextManager[object]

HOME = 0
"""Of the devices that one process drives, that of inputs, unlayered parameters, and all else that is no pack's."""


class Device(ABC):
    """Buffers, copies, streams, events, random state, memory limit and peak of one device."""

    name: str
    torch_device: torch.device
    model = "CPU"
    """What it is: one plan is made for devices of one model."""
    budget_bytes: int | None
    copies_overlap: bool
    """Whether copies run beside compute, or on the thread that computes."""
    host_type = "cpu"
    """What torch calls the device that host memory is on."""
    pins_host = False
    """Whether `host_empty` page-locks."""
    has_values = True
    """Whether tensors have contents. Where they have none, nothing can depend on them: equal calls take the same."""
    number = 0
    """Which of the devices that one process drives is current, of `count`."""
    count = 1
    modes: tuple[type, ...] = ()
    """Torch's modes of its own, which `inherited` enters."""
    _watch: Callable[[Stream, Issuing], Issuing] | None = None

    @property
    def steps_as(self) -> torch.device:
        """Where optimizers step as they do here."""
        return self.torch_device

    @contextmanager
    def copies_watched(self, watch: Callable[[Stream, Issuing], Issuing]) -> Iterator[None]:
        """While open, `watch` is put around every context of `on`."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def now_ms(self) -> float:
        """Milliseconds since some moment, once the device is done with everything computed so far."""
        self.record(Stream.COMPUTE).synchronize()
        return time.perf_counter() * 1e3

    def issued_ms(self) -> float:
        """Return milliseconds of the clock that issuing operations takes time on: the host's."""
        return time.perf_counter() * 1e3

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which torch operations of this thread are issued on `stream`."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event behind everything issued on `stream` so far."""

    @abstractmethod
    def moment(self, stream: Stream) -> Moment:
        """When the stream has done everything issued so far. Nothing waits for it, and nothing is read yet."""

    @abstractmethod
    def read_moments(self, moments: Sequence[Moment]) -> list[float]:
        """Milliseconds on the clock of `time.perf_counter`; waits until the device has passed them all."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Lets `stream` (not the host) wait for `event`."""

    @abstractmethod
    def inherited(self) -> AbstractContextManager[object]:
        """A context for the thread that runs a model: this is the current device, its compute stream the current one."""

    def enter(self, number: int) -> None:  # noqa: B027 - a device is alone unless it is a group
        """Make device `number` of a group the one that this thread issues on."""

    def peaks(self) -> tuple[int, ...]:
        """The peak of each device, in bytes."""
        return (self.peak_bytes(),)

    def current(self) -> object:
        """What this thread would issue on now; two of them compare."""
        return None

    def make_current(self, place: object) -> None:  # noqa: B027 - most devices have one stream for the model's code
        """From now on this thread issues on `place`, as `current` gave it, behind what it has issued until now."""

    @abstractmethod
    def upload(self, tensor: Tensor) -> Tensor:
        """A copy of the host tensor as it is now, on the device before what the compute stream does next.

        The caller may write into the tensor, or drop it, at once.
        """

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat buffer of its own, counted against the budget until `free`.

        Must be called, and the buffer freed, on the stream that first writes it.

        Raises:
            torch.OutOfMemoryError: the budget would be exceeded.
        """
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Uncounts a buffer of `empty`; the caller drops its last reference."""
        return

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat host buffer of exactly that many bytes, page-locked where the device can use it."""

    def host_lock(self, buffer: Tensor) -> None:  # noqa: B027 - most devices have nothing to lock
        """Page-locks host memory that the device did not make, where it can use that; undone by `host_free`."""

    @abstractmethod
    def host_free(self, buffer: Tensor) -> None:
        """Undoes what `host_empty` did to the memory beyond allocating it, once every copy issued so far is done.

        To be called before the buffer is dropped.
        """

    def used(self, tensor: Tensor) -> None:  # noqa: B027 - most devices have one stream
        """The compute stream uses `tensor`, which another stream made: its memory is not used again before that is done."""

    def charge(self, nbytes: int, what: str) -> None:
        """Tells of `nbytes` that torch holds on the device for us. Does nothing where an allocator counts them.

        Raises:
            torch.OutOfMemoryError: the budget would be exceeded; nothing is charged then.
        """
        return

    def discharge(self, nbytes: int) -> None:
        """Takes a charge back."""
        return

    def limit_process(self) -> None:  # noqa: B027 - most devices meter what they are told of
        """Holds all of this process to the budget, where the device can, until `unlimit_process`."""

    def unlimit_process(self) -> None:  # noqa: B027
        """Undoes `limit_process`; nothing if that is undone, or was never done."""

    def reserve_bytes(self) -> int:
        """Of the budget, what no plan may fill: what libraries take, and what the allocator cannot hand out."""
        return 0

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes in use now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most bytes in use since the last `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        """Measures activations too, on any device, while the context is open."""
        return nullcontext(_AllocatorProbe(self))

    @abstractmethod
    def random_state(self) -> tuple[Tensor, ...]:
        """The states of every generator that code on this device may draw from (host first)."""

    @abstractmethod
    def set_random_state(self, state: tuple[Tensor, ...]) -> None: ...

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds every generator of `random_state`."""


class _AllocatorProbe:
    """A `MemoryProbe` over a device whose allocator counts every byte, activations included."""

    def __init__(self, device: Device) -> None:
        self.live_bytes = device.allocated_bytes
        self.peak_bytes = device.peak_bytes
        self.reset = device.reset_peak
