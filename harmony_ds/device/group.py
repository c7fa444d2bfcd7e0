"""The devices that one process drives, as one `Device`: calls go to the current member.

The executor enters the device of each task; residency, stash and gradients need not know which one that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import HOME, Device, Stream, TakeTimestamp, Timestamp, Watch


def _of_current(method: Any) -> Any:
    """Return a method that calls `method` of a group's current member."""

    @wraps(method, updated=())  # it is not abstract
    def call(group: DeviceGroup, *given: Any) -> Any:
        return getattr(group.active, method.__name__)(*given)

    return call


class DeviceGroup(Device):
    """Several devices of one model; the smallest budget is the budget of each."""

    def __init__(self, members: Sequence[Device]) -> None:
        self.members = tuple(members)
        self.count = len(members)
        home = members[HOME]
        self.name = f"{len(members)} x {home.name}"
        budgets = [member.budget_bytes for member in members if member.budget_bytes is not None]
        self.budget_bytes = min(budgets, default=None)
        self.copies_overlap = home.copies_overlap
        self.host_type = home.host_type
        self.pins_host = home.pins_host
        self.has_values = home.has_values
        self.model = home.model
        self.active = home
        # Whether torch tells the members' tensors apart.
        self.has_distinct_devices = len({member.torch_device for member in members}) == len(members)

    @property
    def torch_device(self) -> torch.device:  # type: ignore[override]
        return self.active.torch_device

    @property
    def optimizer_device(self) -> torch.device:
        return self.active.optimizer_device

    def enter(self, number: int) -> None:
        """Make member `number` current. Its random numbers continue the former member's."""
        if number == self.number:
            return
        before, self.number, self.active = self.active, number, self.members[number]
        self.active.set_current()
        if self.active.torch_device != before.torch_device:
            self.active.set_random_state(before.random_state())

    def available_bytes(self) -> int | None:
        return min((n for member in self.members if (n := member.available_bytes()) is not None), default=None)

    @contextmanager
    def watching_copies(self, watch: Watch, take: TakeTimestamp | None = None) -> Iterator[None]:
        with ExitStack() as stack:
            for number, member in enumerate(self.members):
                stack.enter_context(member.watching_copies(watch, partial(self._timestamp, number)))
            yield

    @contextmanager
    def as_current(self) -> Iterator[None]:
        self.enter(HOME)
        with ExitStack() as stack:
            for member in reversed(self.members):  # HOME last, so that it is current
                stack.enter_context(member.as_current())
            try:
                yield
            finally:
                self.enter(HOME)

    def now_ms(self) -> float:
        return max(member.now_ms() for member in self.members)

    def issued_ms(self) -> float:
        return max(member.issued_ms() for member in self.members)

    def timestamp(self, stream: Stream) -> Timestamp:
        return self._timestamp(self.number, stream)

    def _timestamp(self, number: int, stream: Stream) -> Timestamp:
        return number, self.members[number].timestamp(stream)

    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        times: dict[int, float] = {}
        for number, member in enumerate(self.members):
            own = [(place, m[1]) for place, m in enumerate(timestamps) if isinstance(m, tuple) and m[0] == number]
            read = member.read_timestamps([timestamp for _, timestamp in own])
            times |= dict(zip([place for place, _ in own], read, strict=True))
        return [times[place] for place in range(len(timestamps))]

    def limit_process(self) -> None:
        for member in self.members:
            member.limit_process()

    def unlimit_process(self) -> None:
        for member in self.members:
            member.unlimit_process()

    def reset_peak(self) -> None:
        for member in self.members:
            member.reset_peak()

    def watch_peak(self) -> None:
        for member in self.members:
            member.watch_peak()

    def peak_has_risen(self) -> bool:
        return any(member.peak_has_risen() for member in self.members)

    def peak_bytes(self) -> int:
        return max(self.peaks())

    def peaks(self) -> tuple[int, ...]:
        return tuple(member.peak_bytes() for member in self.members)

    def host_copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return self.active.host_copy(tensor, non_blocking)

    def record_use(self, tensor: Tensor) -> None:
        self.active.record_use(tensor)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.members[HOME].host_empty(numel, dtype)

    def host_lock(self, buffer: Tensor) -> None:
        self.members[HOME].host_lock(buffer)

    def host_free(self, buffer: Tensor) -> None:
        for member in self.members[HOME + 1 :]:
            for stream in Stream:
                member.record(stream).synchronize()
        self.members[HOME].host_free(buffer)

    on, record, wait, current_member = map(_of_current, (Device.on, Device.record, Device.wait, Device.current_member))
    current, make_current, upload = map(_of_current, (Device.current, Device.make_current, Device.upload))
    _copy_in = _of_current(Device._copy_in)
    empty, free, charge, discharge = map(_of_current, (Device.empty, Device.free, Device.charge, Device.discharge))
    reserve_bytes, allocated_bytes = map(_of_current, (Device.reserve_bytes, Device.allocated_bytes))
    random_state, set_random_state = map(_of_current, (Device.random_state, Device.set_random_state))
    probe, seed = map(_of_current, (Device.probe, Device.seed))
