"""The engine's device interface for the test device, whose allocator counts every byte, activations included."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import harmony_ds
from harmony_ds.device.cpu import HostStreamDevice
from tests import simdevice
from tests.engine.drive import config_of


class SimDevice(HostStreamDevice):
    """A device in host memory, which torch does not take for the host, under a hard limit (None: none)."""

    def __init__(self, budget_bytes: int | None = None, index: int = 0) -> None:
        simdevice.load()
        gc.collect()
        self.torch_device = torch.device("simdev", index)
        self.name = str(self.torch_device)
        self.budget_bytes = budget_bytes
        self._index = index
        self._before = simdevice.allocated_bytes(index)  # left over from other tests
        simdevice.set_limit(None if budget_bytes is None else budget_bytes + self._before, index)

    def as_current(self) -> AbstractContextManager[object]:
        return torch.accelerator.device_index(self._index)

    def set_current(self) -> None:
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


def engine_of(
    model: nn.Module, make: Any, group: int, clip: float = 0.0, budget_bytes: int | None = None, **config: Any
) -> tuple[Any, SimDevice]:
    """Return an engine that the test destroys, and its device. `make`: makes the optimizer; None: the config's."""
    device = SimDevice(budget_bytes)
    optimizer = None if make is None else make(model.parameters())
    made = harmony_ds.initialize(
        model=model, optimizer=optimizer, config=config_of(group, clip, **config), device=device
    )
    return made[0], device
