"""The test device behind the engine's device interface: every byte counted by its allocator, activations included."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from harmony_ds.device.host_streams import HostStreamDevice
from tests import simdevice


class SimDevice(HostStreamDevice):
    """Host memory that is not the host, under a hard limit (None: none)."""

    def __init__(self, budget_bytes: int | None = None, index: int = 0) -> None:
        simdevice.load()
        self.torch_device = torch.device("simdev", index)
        self.name = str(self.torch_device)
        self.budget_bytes = budget_bytes
        self._index = index
        self._before = simdevice.allocated_bytes(index)  # what other tests left behind
        simdevice.set_limit(None if budget_bytes is None else budget_bytes + self._before, index)

    def inherited(self) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(self._index)

    def enter(self, number: int) -> None:
        torch.accelerator.set_device_index(self._index)

    def current(self) -> object:
        return torch.accelerator.current_device_index()

    def make_current(self, place: object) -> None:
        assert isinstance(place, int)
        torch.accelerator.set_device_index(place)

    def allocated_bytes(self) -> int:
        return simdevice.allocated_bytes(self._index) - self._before

    def peak_bytes(self) -> int:
        return simdevice.peak_bytes(self._index) - self._before

    def reset_peak(self) -> None:
        simdevice.reset_peak(self._index)
