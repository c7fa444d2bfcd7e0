"""A device of which only the shapes exist: tensors on torch's meta device, and a clock that says what they would take.

Nothing is allocated and nothing is computed, so a model of any size passes through the engine's own code in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from harmony_ds.device.base import MemoryProbe
from harmony_ds.device.host_streams import HostStreamDevice
from harmony_ds.device.live_bytes import LiveBytes


class MetaDevice(HostStreamDevice):
    """Both its own memory and the host's are on the meta device. Nothing is counted but by `probe`."""

    copies_overlap = True
    host_type = "meta"
    has_values = False

    def __init__(
        self,
        clock_ms: Callable[[], float],
        issued_ms: Callable[[], float],
        budget_bytes: int | None = None,
        steps_as: str = "cuda",
    ) -> None:
        """Make a device that is timed by clocks.

        Args:
            clock_ms, issued_ms: what computing has taken, and what issuing has.
            budget_bytes: its memory; measuring takes none of it.
            steps_as: torch's kind of the device that is meant.
        """
        self.name = "meta"
        self.torch_device = torch.device("meta")
        self.budget_bytes = budget_bytes
        self._clock_ms = clock_ms
        self._issued_ms = issued_ms
        self._steps_as = torch.device(steps_as)

    @property
    def steps_as(self) -> torch.device:
        return self._steps_as

    def now_ms(self) -> float:
        return self._clock_ms()

    def issued_ms(self) -> float:
        return self._issued_ms()

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.empty(numel, dtype)

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return None

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        return LiveBytes("meta")
