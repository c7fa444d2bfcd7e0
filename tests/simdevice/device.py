"""The test device behind the engine's device interface: every byte counted by its allocator, activations included."""

from __future__ import annotations

import torch

from harmony_ds.device.host_streams import HostStreamDevice
from tests import simdevice


class SimDevice(HostStreamDevice):
    """Host memory that is not the host, under a hard limit (None: none)."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        simdevice.load()
        self.name = "simdev"
        self.torch_device = torch.device("simdev", 0)
        self.budget_bytes = budget_bytes
        self._before = simdevice.allocated_bytes()  # what other tests left behind
        simdevice.set_limit(None if budget_bytes is None else budget_bytes + self._before)

    def allocated_bytes(self) -> int:
        return simdevice.allocated_bytes() - self._before

    def peak_bytes(self) -> int:
        return simdevice.peak_bytes() - self._before

    def reset_peak(self) -> None:
        simdevice.reset_peak()
