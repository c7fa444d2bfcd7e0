"""The CPU device: the same engine on a machine without a GPU.

Device buffers are allocations of their own, never aliases of host memory, and every byte is counted against a budget,
so memory limits, traffic and the order of operations are real. Activations have no allocator to count them here: the
runtime charges what was measured for a layer while that layer runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from harmony_ds.device.base import MemoryProbe
from harmony_ds.device.host_streams import HostStreamDevice
from harmony_ds.device.live_bytes import LiveBytes


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
                f"the device budget of {self.budget_bytes:,} bytes does not hold {nbytes:,} bytes more for {what}: "
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
