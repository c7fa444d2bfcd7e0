"""The CUDA device: a compute stream and a stream for each kind of copies, which events alone order.

Compute runs on the stream that is current when a step begins, the user's. Buffers that swap-ins fill are of its memory: in
one pool of the caching allocator, what weights leave serves activations, and the other way round. Host slabs are
page-locked by registration at their exact size, since `pin_memory` pads to powers of two.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import ClassVar

import torch
from torch import Tensor

from harmony_ds.device.allocator_room import (
    FIXED_PARTS,
    OTHER_POOLS_BYTES,
    SEGMENT_BYTES,
    fragment_bytes,
    reserve_bytes,
)
from harmony_ds.device.base import Device, Event, MemoryProbe, Stream, Timestamp

_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is page-locked for every device."""
_EXPANDABLE = "expandable_segments:True"


class CudaDevice(Device):
    """A CUDA device under a hard budget (None: nine tenths of the memory that this process has or could get now)."""

    copies_overlap = True
    _memory_fractions: ClassVar[dict[int, list[float]]] = {}
    """Device index -> memory fractions of this process: without engines, then each engine's. The last is in force."""
    _growing: ClassVar[int] = 0
    """How many devices of living engines have asked for expandable segments of the caching allocator."""

    def __init__(self, index: int = 0, budget_bytes: int | None = None, pin: bool = True, logical: int = 1) -> None:
        """Make the device; `logical`: how many logical devices share this GPU's memory, each with streams of its own."""
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self.model = torch.cuda.get_device_name(index)
        self._logical = logical
        _, total_bytes = torch.cuda.mem_get_info(index)
        self.budget_bytes = int(0.9 * self.available_bytes()) if budget_bytes is None else budget_bytes
        self._memory_fraction = None if budget_bytes is None else min(1.0, logical * budget_bytes / total_bytes)
        self._given_bytes = budget_bytes
        self._grows_at_first = self._may_grow_segments()
        self._limits = self._grows = False
        self._peak_before = 0  # when the step began
        self._retries_before = self._process_retries()  # those of the program before this device was made
        self.pins_host = pin
        self._registered: dict[int, int] = {}  # address to bytes
        self._mapped: dict[int, mmap.mmap] = {}  # address to the memory of `host_empty`
        self._streams: dict[Stream, torch.cuda.Stream] = {}
        for stream in Stream:
            # Compute is on the user's stream, but for logical devices: the user's may be another logical device's.
            if stream is not Stream.COMPUTE or logical > 1:
                self._streams[stream] = torch.cuda.Stream(index)

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream in self._streams:
            return self._streams[stream]
        return torch.cuda.current_stream(self.torch_device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        context = torch.cuda.stream(self._stream(stream))
        return context if self._watch is None else self._watch(stream, context)

    def timestamp(self, stream: Stream) -> Timestamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(stream))
        return event

    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        torch.cuda.synchronize(self.torch_device)
        # Device and host have different clocks. This event is recorded last: its times on both are known.
        anchor = torch.cuda.Event(enable_timing=True)
        anchor.record(self._stream(Stream.SWAP_OUT))
        anchor.synchronize()
        now_ms = time.perf_counter() * 1e3
        events = [timestamp for timestamp in timestamps if isinstance(timestamp, torch.cuda.Event)]
        return [now_ms - event.elapsed_time(anchor) for event in events]

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream(stream).wait_event(event)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        outside, own = torch.cuda.current_stream(self.torch_device), self._stream(Stream.COMPUTE)
        if own != outside:
            own.wait_stream(outside)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            if own != outside:
                outside.wait_stream(own)

    def set_current(self) -> None:
        torch.cuda.set_stream(self._stream(Stream.COMPUTE))

    def current(self) -> object:
        return torch.cuda.current_device(), torch._C._cuda_getCurrentStream(self.torch_device.index)

    def make_current(self, place: object) -> None:
        assert isinstance(place, tuple)
        device, (number, index, kind) = place
        before = torch.cuda.current_stream(self.torch_device)
        stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        if stream != before:
            stream.wait_stream(before)
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)  # after set_stream, which makes the stream's own device current

    def upload(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:  # whose memory `record_use` does not know
            return tensor.to(self.torch_device, copy=True)
        return super().upload(tensor)

    def _copy_in(self, tensor: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream(Stream.UPLOAD)):
            if not self.pins_host:
                return tensor.to(self.torch_device, copy=True)
            # Staged in torch's page-locked memory (copies from pageable memory block the host), which returns to its pool
            # after the copy: the caller's memory is not read later.
            staged = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
            return staged.to(self.torch_device, non_blocking=True)

    def host_copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.pins_host)
        return host.copy_(tensor, non_blocking=non_blocking and self.pins_host)

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream(Stream.COMPUTE))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream(Stream.COMPUTE)):
            return super().empty(numel, dtype)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not (self.pins_host and numel):
            return torch.empty(numel, dtype=dtype)
        # Processes that are forked later (a DataLoader's workers) do not get these pages: Linux would copy what is
        # page-locked for each, or (before 5.9) give this process others at its next write, which the device does not know.
        memory = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._mapped[buffer.data_ptr()] = memory
        self.host_lock(buffer)
        return buffer

    def host_lock(self, buffer: Tensor) -> None:
        nbytes = buffer.numel() * buffer.element_size()
        if not self.pins_host or nbytes == 0:
            return
        with torch.cuda.device(self.torch_device):  # registering makes a device the current one
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, _PORTABLE)
        if int(status) == 0:
            self._registered[buffer.data_ptr()] = nbytes
        else:
            self._clear_last_error()
            # `ulimit -l` is not the reason: the driver does not check it (see offload/host_memory.py).
            warnings.warn(
                f"{nbytes:,} bytes of host memory could not be page-locked (CUDA error {int(status)}), beside "
                f"{sum(self._registered.values()):,} bytes that are: copies of them will be slower. WSL and some "
                "containers limit page-locked memory; set harmony.pin_memory to false to silence this.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _clear_last_error(self) -> None:
        """Clear CUDA's last error, which the check after the next launch would raise, by a launch.

        torch binds no cudaGetLastError, and it is not known which of several loaded runtimes it uses.
        """
        with suppress(RuntimeError):
            torch.zeros((), device=self.torch_device).add_(1)

    def host_free(self, buffer: Tensor) -> None:
        if self._registered.pop(buffer.data_ptr(), None) is not None:
            with torch.cuda.device(self.torch_device):
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        if (memory := self._mapped.pop(buffer.data_ptr(), None)) is not None:
            memory.madvise(mmap.MADV_DOFORK)

    def limit_process(self) -> None:
        """Make the caching allocator refuse to reserve more than the budget, and its segments expandable."""
        if self._limits:
            return
        self._limits = True
        self._grow_segments()
        if self._memory_fraction is None:
            return
        index = self.torch_device.index
        fractions = self._memory_fractions.setdefault(index, [torch.cuda.get_per_process_memory_fraction(index)])
        fractions.append(self._memory_fraction)
        torch.cuda.set_per_process_memory_fraction(self._memory_fraction, index)

    def unlimit_process(self) -> None:
        if not self._limits:
            return
        self._limits = False
        self._put_segments_back()
        if self._memory_fraction is None:
            return
        index = self.torch_device.index
        fractions = self._memory_fractions[index]
        del fractions[fractions.index(self._memory_fraction, 1)]
        torch.cuda.set_per_process_memory_fraction(fractions[-1], index)
        if len(fractions) == 1:
            del self._memory_fractions[index]

    @classmethod
    def _may_grow_segments(cls) -> bool:
        """Return whether the program leaves the caching allocator's settings to the engine."""
        if os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            return False
        return cls._growing > 0 or not torch._C._accelerator_getAllocatorSettings()

    def _grow_segments(self) -> None:
        self._grows = self._may_grow_segments()
        if self._grows:
            CudaDevice._growing += 1
            if CudaDevice._growing == 1:
                torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)

    def _put_segments_back(self) -> None:
        """Allocate as torch does by default after the last engine; segments that there are stay as they are."""
        if self._grows:
            self._grows = False
            CudaDevice._growing -= 1
            # A program that has set others meanwhile keeps them.
            if CudaDevice._growing == 0 and torch._C._accelerator_getAllocatorSettings() == _EXPANDABLE:
                torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
                torch._C._accelerator_setAllocatorSettings("")

    def reserve_bytes(self) -> int:
        capability = torch.cuda.get_device_capability(self.torch_device)
        fixed_bytes = 0 if self._grows_at_first else (self._given_bytes or 0) // FIXED_PARTS
        return reserve_bytes(capability) + fixed_bytes

    @property
    def has_caching_allocator(self) -> bool:
        return self._given_bytes is not None and self._grows_at_first

    def fragment_bytes(self, working_bytes: int) -> int:
        """Return the fragments of segments that grow, under a given budget: without one, there is memory beside it."""
        if self._given_bytes is None or not self.has_caching_allocator:
            return 0
        return fragment_bytes(self._given_bytes, working_bytes)

    def fill_pool(self, other_bytes: int) -> None:
        """Let the compute stream's pool of larger blocks grow to the budget, but for what other pools begin with.

        torch asks its cap for the whole of a request, even where an expandable segment lacks one page of it (alloc_block in
        c10/cuda/CUDACachingAllocator.cpp), and then gives back all that is free. What is in the pool is not asked for.
        """
        if self._memory_fraction is None or not self._grows or self._logical > 1:
            return
        _, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        most_bytes = int(self._memory_fraction * total_bytes) - OTHER_POOLS_BYTES - other_bytes
        held: list[Tensor] = []
        with suppress(torch.OutOfMemoryError):  # another program has the memory: requests will find out
            while (room := most_bytes - torch.cuda.memory_reserved(self.torch_device)) >= SEGMENT_BYTES:
                held.append(torch.empty(room, dtype=torch.uint8, device=self.torch_device))

    def peer_reserve_bytes(self) -> int:
        return SEGMENT_BYTES

    def available_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return (free_bytes + torch.cuda.memory_reserved(self.torch_device)) // self._logical

    def allocated_bytes(self) -> int:
        """Return the bytes in use now; an equal part of them for each logical device of the GPU."""
        return torch.cuda.memory_allocated(self.torch_device) // self._logical

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device) // self._logical

    @contextmanager
    def probe(self) -> Iterator[MemoryProbe]:
        logical, self._logical = self._logical, 1  # while a model is measured, only one of them works
        try:
            with super().probe() as probe:
                yield probe
        finally:
            self._logical = logical

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def watch_peak(self) -> None:
        # torch has one peak a process, which the program may read, too: it is not reset, so that a step that stays below it
        # has no peak of its own.
        self._peak_before = torch.cuda.max_memory_allocated(self.torch_device)

    def reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device) // self._logical

    def allocator_retries(self) -> int:
        retries = self._process_retries()
        # The program may have set the count to zero (torch.cuda.reset_accumulated_memory_stats).
        self._retries_before = min(self._retries_before, retries)
        return retries - self._retries_before

    def _process_retries(self) -> int:
        retries: int = torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_alloc_retries", 0)
        return retries

    def peak_has_risen(self) -> bool:
        return torch.cuda.max_memory_allocated(self.torch_device) > self._peak_before

    def random_state(self) -> tuple[Tensor, ...]:
        return (torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device))

    def set_random_state(self, state: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(seed)
