"""The CPU device: the same engine on a machine without a GPU.

Device buffers are allocations of their own, never aliases of host memory, and every byte is counted against a budget,
so memory limits, traffic and the order of operations are real. No allocator counts activations here: the runtime charges
a layer's measured bytes while that layer runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, MemoryProbe, Stream, Timestamp
from harmony_ds.device.live_bytes import LiveBytes

_PASSED = torch.cpu.Event()


class HostStreamDevice(Device):
    """Device with null streams and the host's generator; base of the CPU device and of test devices."""

    copies_overlap = False

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext() if self._watch is None else self._watch(stream, nullcontext())

    def timestamp(self, stream: Stream) -> Timestamp:
        return time.perf_counter() * 1e3

    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        return [timestamp for timestamp in timestamps if isinstance(timestamp, float)]

    def record(self, stream: Stream) -> Event:
        return _PASSED

    def wait(self, stream: Stream, event: Event) -> None:
        return None

    def as_current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _copy_in(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.torch_device).copy_(tensor)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def host_free(self, buffer: Tensor) -> None:
        return None

    def random_state(self) -> tuple[Tensor, ...]:
        return (torch.get_rng_state(),)

    def set_random_state(self, state: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(state[0])

    def seed(self, seed: int) -> None:
        # Only the default generator: torch.manual_seed would also seed other devices.
        torch.default_generator.manual_seed(seed)


class CpuDevice(HostStreamDevice):
    """Host memory under a byte budget (None: unlimited)."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        self._allocated = 0
        self._peak = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.charge(numel * dtype.itemsize, "a device buffer")
        return super().empty(numel, dtype)

    def free(self, buffer: Tensor) -> None:
        self.discharge(buffer.numel() * buffer.element_size())

    def charge(self, nbytes: int, what: str) -> None:
        after = self._allocated + nbytes
        if self.budget_bytes is not None and after > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"{nbytes:,} bytes more for {what} do not fit into the device budget of {self.budget_bytes:,} bytes: "
                f"{self._allocated:,} are in use. Raise harmony.device_memory_gib or lower harmony.pack_layers. "
                "The device is out of memory."
            )
        self._allocated = after
        self._peak = max(self._peak, after)

    def discharge(self, nbytes: int) -> None:
        self._allocated -= nbytes

    def allocated_bytes(self) -> int:
        return self._allocated

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        return LiveBytes()
