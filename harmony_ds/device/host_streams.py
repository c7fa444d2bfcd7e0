"""A device without real streams: copies and kernels are done when their call returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream, Timestamp


class PassedEvent:
    """An event that has always passed."""

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


_PASSED = PassedEvent()


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

    def upload(self, tensor: Tensor) -> Tensor:
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
