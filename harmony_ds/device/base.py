"""The interface of devices: memory, streams of work, and the events that order them.

Work is issued on a stream, and the work of one stream runs in order. Across streams only events give an order: `record`
marks a point of a stream, and `wait` lets another stream wait for it. The host waits only by `Event.synchronize`.

    SWAP_IN     weights 1   weights 2           weights 3, in the memory of pack 1
                         (a)         (a)       (b)
    COMPUTE                 pack 1      pack 2     pack 3
                                 (c)       (d)
    SWAP_OUT                        gradients 1

    (a) a pack's layers wait for its weights
    (b) a swap-in waits for what compute has been given so far, whose memory it fills
    (c) a swap-out waits for the backward pass that makes the gradients
    (d) compute waits for the swap-out before it reuses the memory of the gradients

Where no allocator counts memory (the CPU device), every byte is reported by `charge` and `discharge`.
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

PartsToRun = Callable[[Sequence[int]], Iterator[int]]
"""The numbers of the parts to run of something that runs in parts of these sizes: see `Device.parts_to_run`."""


class Stream(Enum):
    """Streams of a device; the work of each runs in order."""

    # Layer calls, and updates on the device: the stream that the user's code runs on.
    COMPUTE = "compute"
    # Weights and stashes, from the host to the device: beside compute, so that packs are prefetched.
    SWAP_IN = "swap_in"
    # Gradients and stashes, from the device to the host: a link moves both directions at once, each on its stream.
    SWAP_OUT = "swap_out"
    # Inputs of micro-batches: they are to wait neither for kernels nor for weights that are prefetched.
    UPLOAD = "upload"
    # Tensors between devices, and collectives: another device's work is not to hold up this one's swaps.
    PEER = "peer"
    # Weights that a thread reads from a disk: they come when the disk has read them. Allocates no memory.
    DISK = "disk"


class Event(Protocol):
    """A point in a stream's order, made by `Device.record`."""

    def synchronize(self) -> None:
        """Block the calling host thread until the device has passed this point."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""


class MemoryProbe(Protocol):
    """Counter of device memory: bytes alive now, and the most since `reset_peak`; for the measuring of a model."""

    def allocated_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...


Timestamp = object
"""The time of a point in a stream, which the device that made it reads later (`read_timestamps`)."""

StreamContext = AbstractContextManager[object]
TakeTimestamp = Callable[[Stream], Timestamp]
Watch = Callable[[TakeTimestamp, Stream, StreamContext], StreamContext]

HOME = 0
"""Number of the device that inputs, unlayered parameters and losses are on, where one process drives several."""


class Device(ABC):
    """Interface of a device: buffers, copies, streams, events, random state, memory limit and peak."""

    name: str
    torch_device: torch.device
    model = "CPU"
    """The product name. One plan is made for several devices only if they are of one model."""
    budget_bytes: int | None
    """The most bytes that training may use; None: unlimited."""
    copies_overlap: bool
    """Whether copies run beside compute; if not, they run on the thread that computes."""
    host_type = "cpu"
    """Torch's device type of host memory; another one only where nothing has values."""
    pins_host = False
    """Whether `host_empty` page-locks."""
    has_values = True
    """Whether tensors have contents; if not, equal calls take equal time."""
    number = 0
    """Number of the current device among the `count` that this process drives."""
    count = 1
    _watch: Callable[[Stream, StreamContext], StreamContext] | None = None

    def current_member(self) -> Device:
        """Return the current device of a group; a single device returns itself."""
        return self

    @property
    def optimizer_device(self) -> torch.device:
        """The torch device whose kernels optimizers would use."""
        return self.torch_device

    @contextmanager
    def watching_copies(self, watch: Watch, take: TakeTimestamp | None = None) -> Iterator[None]:
        """Wrap every context that `on` returns in `watch`, while open.

        Args:
            watch: is given the function for timestamps, the stream and the context; returns another context.
            take: the function for timestamps (None: `timestamp`).
        """
        self._watch = partial(watch, take or self.timestamp)
        try:
            yield
        finally:
            self._watch = None

    def now_ms(self) -> float:
        """Return the time in milliseconds (from an arbitrary origin), once all issued work is done."""
        # The compute stream has waited for all that the model needs.
        self.record(Stream.COMPUTE).synchronize()
        return time.perf_counter() * 1e3

    def issued_ms(self) -> float:
        """Return the host's time in milliseconds, without waiting for the device: what issuing operations takes."""
        return time.perf_counter() * 1e3

    def parts_to_run(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of the parts to run of something that runs in parts of these sizes, one after the other.

        Those are all parts, where tensors have contents.
        """
        yield from range(len(sizes))

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which torch operations of this thread are issued on `stream`."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event after all work that has been issued on `stream` so far."""

    @abstractmethod
    def timestamp(self, stream: Stream) -> Timestamp:
        """Return a mark after all work issued on `stream` so far, whose time can be read later."""

    @abstractmethod
    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        """Wait until the device has passed all `timestamps`; return their milliseconds on `time.perf_counter`'s clock."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work of `stream` wait for `event`; the host goes on."""

    @abstractmethod
    def as_current(self) -> AbstractContextManager[object]:
        """Return a context in which this device and its compute stream are current on the thread that runs the model."""

    def enter(self, number: int) -> None:  # noqa: B027 - only a group has several
        """Make device `number` of a group the current one."""

    def set_current(self) -> None:  # noqa: B027 - only CUDA has a current device
        """Make this device and its compute stream current on the calling thread."""

    def allocations(self) -> tuple[int, ...]:
        """Return `allocated_bytes` of each device of a group."""
        return (self.allocated_bytes(),)

    def peaks(self) -> tuple[int, ...]:
        """Return `peak_bytes` of each device of a group."""
        return (self.peak_bytes(),)

    def current(self) -> object:
        """Return the device and stream that are current on this thread, as a value that can be compared."""
        return None

    def make_current(self, place: object) -> None:  # noqa: B027 - most devices have one stream for the model's code
        """Make a result of `current` current on this thread again; its stream waits for the work issued so far."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Return a device copy for the compute stream; the caller may write into `tensor`, or drop it, at once."""
        copy = self._copy_in(tensor)
        # Compute reads the copy only after it is made, on another stream.
        self.wait(Stream.COMPUTE, self.record(Stream.UPLOAD))
        self.record_use(copy)
        return copy

    @abstractmethod
    def _copy_in(self, tensor: Tensor) -> Tensor:
        """Return a device copy that the upload stream allocates and writes; `tensor` may be written into at once."""

    def host_copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        """Return a copy in host memory; if `non_blocking`, it is valid once the compute stream has passed this point."""
        return torch.empty_like(tensor, device="cpu").copy_(tensor, non_blocking=non_blocking)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat buffer of the compute stream's memory, counted against the budget until `free`.

        Another stream may write it after the work that compute has been given so far; before it is freed, compute must
        have waited for that.

        Raises:
            torch.OutOfMemoryError: the budget would be exceeded.
        """
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def free(self, buffer: Tensor) -> None:
        """Stop counting a buffer of `empty`; the caller drops its last reference."""
        return

    @abstractmethod
    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat host buffer of exactly this size, page-locked if that makes copies faster."""

    def host_lock(self, buffer: Tensor) -> None:  # noqa: B027 - most devices have nothing to lock
        """Page-lock host memory that `host_empty` did not allocate; `host_free` undoes it."""

    @abstractmethod
    def host_free(self, buffer: Tensor) -> None:
        """Unlock host memory, after waiting for every copy issued so far. Call it before the buffer is dropped."""

    def record_use(self, tensor: Tensor) -> None:  # noqa: B027 - most devices have one stream
        """Tell the allocator that compute uses `tensor`, which another stream allocated: it is reused only after that."""

    def charge(self, nbytes: int, what: str) -> None:
        """Count `nbytes` of device memory where no allocator does; torch.OutOfMemoryError: they exceed the budget."""
        return

    def discharge(self, nbytes: int) -> None:
        """Stop counting `nbytes` that `charge` counted."""
        return

    def limit_process(self) -> None:  # noqa: B027 - other devices refuse in `charge`
        """Let the allocator refuse what exceeds the budget, for all of this process, until `unlimit_process`."""

    def unlimit_process(self) -> None:  # noqa: B027
        """Undo `limit_process`, if it is in force."""

    def reserve_bytes(self) -> int:
        """Return the bytes of the budget that a plan has to leave free, for libraries and fragmentation."""
        return 0

    def peer_reserve_bytes(self) -> int:
        """Return how many bytes more that are, if the device exchanges tensors with others."""
        return 0

    def fragment_bytes(self, working_bytes: int) -> int:
        """Return the bytes that the allocator is expected to hold in pieces that serve no request.

        Args:
            working_bytes: the most that one micro-batch takes while it runs through a layer or the loss.
        """
        return 0

    @property
    def has_caching_allocator(self) -> bool:
        """Whether its memory is torch's caching allocator's, in segments that grow up to a budget that was given."""
        return False

    def fill_pool(self, other_bytes: int) -> None:  # noqa: B027 - only CUDA's allocator has pools
        """Let the allocator take the rest of the budget now, so that no request of a step has to ask for more.

        Args:
            other_bytes: what is left to uploads, and to exchanging gradients, beside the segments of every stream.
        """

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
        """Begin to measure a peak. It may reset statistics that the program reads: call it only while measuring a model."""

    def reserved_bytes(self) -> int | None:
        """Return the most bytes that a caching allocator has held since the last `reset_peak`, in use or not.

        None: the device has no such allocator.
        """
        return None

    def allocator_retries(self) -> int:
        """Return how often, since this device was made, the caching allocator had no room for a request until it gave back
        all memory that it held and nothing used.
        """
        return 0

    def watch_peak(self) -> None:
        """Begin to watch the peak of a step; statistics that the program reads stay."""
        self.reset_peak()

    def peak_has_risen(self) -> bool:
        """Return whether `peak_bytes` was reached since `watch_peak`; False: it is from before."""
        return True

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        """Return a context with a counter of all memory, activations included; it may be this device itself."""
        return nullcontext(self)

    @abstractmethod
    def random_state(self) -> tuple[Tensor, ...]:
        """Return the states of all random generators that code on this device may use, the host's first."""

    @abstractmethod
    def set_random_state(self, state: tuple[Tensor, ...]) -> None:
        """Restore what `random_state` returned."""

    def random_states_of_all(self) -> list[tuple[Tensor, ...]]:
        """Return the `random_state` of each device of a group; a device alone is a group of one."""
        return [self.random_state()]

    def set_random_states_of_all(self, states: Sequence[tuple[Tensor, ...]]) -> None:
        """Restore what `random_states_of_all` returned."""
        (own,) = states
        self.set_random_state(own)

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed every generator of `random_state`."""
