"""A device whose streams run at once: copies and kernels are finished when the call returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harmony_ds.device.base import Device, Event, Stream, Timestamp


class PassedEvent:
    """An event of a stream that never lags behind."""

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


_PASSED = PassedEvent()


class HostStreamDevice(Device):
    """Null streams and the host's generator; what the CPU device and test devices have in common."""

    copies_overlap = False

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext() if self._watch is None else self._watch(stream, nullcontext())

    def timestamp(self, stream: Stream) -> Timestamp:
        return time.perf_counter() * 1e3

    def read_timestamps(self, moments: Sequence[Timestamp]) -> list[float]:
        return [moment for moment in moments if isinstance(moment, float)]

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
        # The default generator alone: torch.manual_seed would also seed devices that this one does not own.
        torch.default_generator.manual_seed(seed)
