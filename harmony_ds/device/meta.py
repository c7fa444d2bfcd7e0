"""The meta device, for estimates: tensors have shapes but no data, and a clock tells what their operations would take.

Nothing is allocated or computed, so that a model of any size passes through the engine's own code in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from harmony_ds.device.allocator_room import fragment_bytes, reserve_bytes
from harmony_ds.device.base import MemoryProbe
from harmony_ds.device.cpu import HostStreamDevice
from harmony_ds.device.live_bytes import LiveBytes


class Clock(Protocol):
    """Milliseconds of all operations so far: of computing, and of issuing them."""

    ms: float
    issued_ms: float


class MetaDevice(HostStreamDevice):
    """Device whose memory, and the host's, is on torch's meta device. Only `probe` counts bytes."""

    copies_overlap = True
    host_type = "meta"
    has_values = False

    def __init__(
        self,
        clock: Clock,
        budget_bytes: int | None = None,
        optimizer_device: str = "cuda",
        leaves_room: bool = False,
    ) -> None:
        """Make a device.

        Args:
            clock: tells what the operations take.
            budget_bytes: memory of the device that is estimated.
            optimizer_device: its device type in torch.
            leaves_room: whether plans leave the room in the budget that libraries and the allocator of a CUDA device of
                compute capability 9.0 take.
        """
        self.name = "meta"
        self.torch_device = torch.device("meta")
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._optimizer_device = torch.device(optimizer_device)
        self._leaves_room = leaves_room

    @property
    def optimizer_device(self) -> torch.device:
        return self._optimizer_device

    def now_ms(self) -> float:
        return self._clock.ms

    def issued_ms(self) -> float:
        return self._clock.issued_ms

    def parts_to_run(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the first two of equal parts: the others take the time of the second, and the same memory again."""
        first = 0
        for _, equal in groupby(sizes):
            count = len([*equal])
            yield first
            if count > 1:
                ms, issued_ms = self._clock.ms, self._clock.issued_ms
                yield first + 1
                self._clock.ms += (count - 2) * (self._clock.ms - ms)
                self._clock.issued_ms += (count - 2) * (self._clock.issued_ms - issued_ms)
            first += count

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.empty(numel, dtype)

    def reserve_bytes(self) -> int:
        return reserve_bytes((9, 0)) if self._leaves_room else 0

    @property
    def has_caching_allocator(self) -> bool:
        return self.budget_bytes is not None and self._leaves_room

    def fragment_bytes(self, working_bytes: int) -> int:
        if self.budget_bytes is None or not self.has_caching_allocator:
            return 0
        return fragment_bytes(self.budget_bytes, working_bytes)

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return None

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        return LiveBytes("meta", counts_scratch=self._optimizer_device.type == "cuda")
