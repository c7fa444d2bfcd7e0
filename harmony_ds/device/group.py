"""The devices that one process drives, as one `Device`: one of them is current, and all calls go to that one.

The executor enters the device of each task. What holds bytes (residency, stash, gradients) never asks which one that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from harmony_ds.device.base import HOME, Device, Issuing, Moment, Stream


def _of_current(method: Any) -> Any:
    """The same method of a group's current member."""

    @wraps(method, updated=())  # it is not abstract
    def call(group: DeviceGroup, *given: Any) -> Any:
        return getattr(group.now, method.__name__)(*given)

    return call


class DeviceGroup(Device):
    """Several devices of one kind. Each may use what the one with least memory has.

    Attributes:
        is_apart: whether torch tells the members' tensors apart.
    """

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
        self.modes = home.modes
        self.model = home.model
        self.now = home
        self._copying: int | None = None
        self.is_apart = len({member.torch_device for member in members}) == len(members)

    @property
    def torch_device(self) -> torch.device:  # type: ignore[override]
        """That of the current member."""
        return self.now.torch_device

    @property
    def steps_as(self) -> torch.device:
        return self.now.steps_as

    def enter(self, number: int) -> None:
        """From now on member `number` is current. The random numbers go on where they were."""
        if number == self.number:
            return
        before, self.number, self.now = self.now, number, self.members[number]
        self.now.enter(0)
        if self.now.torch_device != before.torch_device:
            self.now.set_random_state(before.random_state())

    # ---- all members

    @contextmanager
    def copies_watched(self, watch: Callable[[Stream, Issuing], Issuing]) -> Iterator[None]:
        with ExitStack() as stack:
            for number, member in enumerate(self.members):
                stack.enter_context(member.copies_watched(partial(self._watched, watch, number)))
            yield

    @contextmanager
    def _watched(
        self, watch: Callable[[Stream, Issuing], Issuing], number: int, stream: Stream, issuing: Issuing
    ) -> Iterator[None]:
        """Around copies of member `number`, whose moments are taken meanwhile."""
        before, self._copying = self._copying, number
        try:
            with watch(stream, issuing):
                yield
        finally:
            self._copying = before

    @contextmanager
    def inherited(self) -> Iterator[None]:
        self.enter(HOME)  # where this thread is again afterwards
        with ExitStack() as stack:
            for member in reversed(self.members):  # the home device last, so that it is current
                stack.enter_context(member.inherited())
            try:
                yield
            finally:
                self.enter(HOME)

    def now_ms(self) -> float:
        return max(member.now_ms() for member in self.members)

    def issued_ms(self) -> float:
        return max(member.issued_ms() for member in self.members)

    def moment(self, stream: Stream) -> Moment:
        number = self.number if self._copying is None else self._copying
        return number, self.members[number].moment(stream)

    def read_moments(self, moments: Sequence[Moment]) -> list[float]:
        times: dict[int, float] = {}
        for number, member in enumerate(self.members):
            own = [(place, m[1]) for place, m in enumerate(moments) if isinstance(m, tuple) and m[0] == number]
            read = member.read_moments([moment for _, moment in own])
            times |= dict(zip([place for place, _ in own], read, strict=True))
        return [times[place] for place in range(len(moments))]

    def limit_process(self) -> None:
        for member in self.members:
            member.limit_process()

    def unlimit_process(self) -> None:
        for member in self.members:
            member.unlimit_process()

    def reset_peak(self) -> None:
        for member in self.members:
            member.reset_peak()

    def peak_bytes(self) -> int:
        return max(self.peaks())

    def peaks(self) -> tuple[int, ...]:
        return tuple(member.peak_bytes() for member in self.members)

    # ---- host memory, which is page-locked for all by the home device

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.members[HOME].host_empty(numel, dtype)

    def host_lock(self, buffer: Tensor) -> None:
        self.members[HOME].host_lock(buffer)

    def host_free(self, buffer: Tensor) -> None:
        for member in self.members[HOME + 1 :]:
            for stream in Stream:
                member.record(stream).synchronize()
        self.members[HOME].host_free(buffer)

    # ---- the current one

    on, record, wait = map(_of_current, (Device.on, Device.record, Device.wait))
    current, make_current, upload = map(_of_current, (Device.current, Device.make_current, Device.upload))
    empty, free, charge, discharge = map(_of_current, (Device.empty, Device.free, Device.charge, Device.discharge))
    reserve_bytes, allocated_bytes = map(_of_current, (Device.reserve_bytes, Device.allocated_bytes))
    random_state, set_random_state = map(_of_current, (Device.random_state, Device.set_random_state))
    probe, seed = map(_of_current, (Device.probe, Device.seed))
