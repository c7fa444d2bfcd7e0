"""Several devices that one process drives, as one `Device`: calls go to the current member.

The executor enters the device of each task. Device copies, stash and gradients call the group, and need not know which
member is current.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from harmony_ds.device.base import (
    HOME,
    Device,
    Event,
    MemoryProbe,
    Stream,
    StreamContext,
    TakeTimestamp,
    Timestamp,
    Watch,
)


class DeviceGroup(Device):
    """Devices of one product; the smallest budget is the budget of each.

    Attributes:
        members: the devices, by number.
        active: the current one.
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
        self.model = home.model
        self.active = home
        # Logical devices of one GPU, or of the CPU, have one torch device: their tensors cannot be told apart.
        self.has_distinct_devices = len({member.torch_device for member in members}) == len(members)

    @property
    def torch_device(self) -> torch.device:  # type: ignore[override]
        return self.active.torch_device

    @property
    def optimizer_device(self) -> torch.device:
        return self.active.optimizer_device

    def enter(self, number: int) -> None:
        """Make member `number` current; its random numbers continue those of the member before."""
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

    def parts_to_run(self, sizes: Sequence[int]) -> Iterator[int]:
        return self.current_member().parts_to_run(sizes)

    def timestamp(self, stream: Stream) -> Timestamp:
        return self._timestamp(self.number, stream)

    def _timestamp(self, number: int, stream: Stream) -> Timestamp:
        return number, self.members[number].timestamp(stream)

    def read_timestamps(self, timestamps: Sequence[Timestamp]) -> list[float]:
        times: dict[int, float] = {}
        for number, member in enumerate(self.members):
            places: list[int] = []  # in `timestamps`, of this member's
            own: list[Timestamp] = []
            for place, timestamp in enumerate(timestamps):
                if isinstance(timestamp, tuple) and timestamp[0] == number:
                    places.append(place)
                    own.append(timestamp[1])
            times |= dict(zip(places, member.read_timestamps(own), strict=True))
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

    def reserved_bytes(self) -> int | None:
        return max((n for member in self.members if (n := member.reserved_bytes()) is not None), default=None)

    def allocator_retries(self) -> int:
        # Logical devices of one GPU have one allocator.
        retries = {member.torch_device: member.allocator_retries() for member in self.members}
        return sum(retries.values())

    def allocations(self) -> tuple[int, ...]:
        return tuple(member.allocated_bytes() for member in self.members)

    def peaks(self) -> tuple[int, ...]:
        return tuple(member.peak_bytes() for member in self.members)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.members[HOME].host_empty(numel, dtype)

    def host_lock(self, buffer: Tensor) -> None:
        self.members[HOME].host_lock(buffer)

    def host_free(self, buffer: Tensor) -> None:
        # HOME waits for its own copies alone; those of the other members may still read or write the buffer.
        for member in self.members[HOME + 1 :]:
            for stream in Stream:
                member.record(stream).synchronize()
        self.members[HOME].host_free(buffer)

    # ---- calls of the current member

    def current_member(self) -> Device:
        return self.active.current_member()

    def on(self, stream: Stream) -> StreamContext:
        return self.active.on(stream)

    def record(self, stream: Stream) -> Event:
        return self.active.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.active.wait(stream, event)

    def current(self) -> object:
        return self.active.current()

    def make_current(self, place: object) -> None:
        self.active.make_current(place)

    def upload(self, tensor: Tensor) -> Tensor:
        return self.active.upload(tensor)

    def _copy_in(self, tensor: Tensor) -> Tensor:
        return self.active._copy_in(tensor)

    def host_copy(self, tensor: Tensor, non_blocking: bool) -> Tensor:
        return self.active.host_copy(tensor, non_blocking)

    def record_use(self, tensor: Tensor) -> None:
        self.active.record_use(tensor)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.active.empty(numel, dtype)

    def free(self, buffer: Tensor) -> None:
        self.active.free(buffer)

    def charge(self, nbytes: int, what: str) -> None:
        self.active.charge(nbytes, what)

    def discharge(self, nbytes: int) -> None:
        self.active.discharge(nbytes)

    def reserve_bytes(self) -> int:
        return self.active.reserve_bytes()

    def fragment_bytes(self, working_bytes: int) -> int:
        return self.active.fragment_bytes(working_bytes)

    def peer_reserve_bytes(self) -> int:
        return self.active.peer_reserve_bytes()

    def allocated_bytes(self) -> int:
        return self.active.allocated_bytes()

    def probe(self) -> AbstractContextManager[MemoryProbe]:
        return self.active.probe()

    def random_state(self) -> tuple[Tensor, ...]:
        return self.active.random_state()

    def set_random_state(self, state: tuple[Tensor, ...]) -> None:
        self.active.set_random_state(state)

    def random_states_of_all(self) -> list[tuple[Tensor, ...]]:
        return [member.random_state() for member in self.members]

    def set_random_states_of_all(self, states: Sequence[tuple[Tensor, ...]]) -> None:
        for member, state in zip(self.members, states, strict=True):
            member.set_random_state(state)

    def seed(self, seed: int) -> None:
        self.active.seed(seed)
