"""What happens to device memory, one event after the other, as the recorder writes it down and the replay reads it."""

from __future__ import annotations

from dataclasses import dataclass

from harmony_ds.device.base import Stream


@dataclass(slots=True)
class Allocated:
    """A request for device memory.

    Attributes:
        number: of the allocation, by which later events name it.
        nbytes: what is asked for.
        stream: the one that is current, to whose pool the memory belongs.
        is_buffer: whether `Device.empty` makes it: weights that are swapped in, and masters of resident packs.
    """

    number: int
    nbytes: int
    stream: Stream
    is_buffer: bool


@dataclass(slots=True)
class Refused:
    """A request of measuring that the allocator could not serve: it ends in an error, which the engine catches.

    Attributes:
        nbytes, stream, is_buffer: see `Allocated`.
    """

    nbytes: int
    stream: Stream
    is_buffer: bool


@dataclass(slots=True)
class Used:
    """Work of `stream` uses an allocation of another stream (`Tensor.record_stream`)."""

    number: int
    stream: Stream


@dataclass(slots=True)
class Freed:
    """The last reference to an allocation has gone."""

    number: int


@dataclass(slots=True)
class PoolFilled:
    """The allocator takes the rest of the budget, but for `other_bytes` (`Device.fill_pool`)."""

    other_bytes: int


@dataclass(slots=True)
class TaskDone:
    """A task of the plan has been issued."""

    task: str


@dataclass(slots=True)
class StepBegun:
    """A step begins; before the first one, the engine is made."""

    step: int


Event = Allocated | Refused | Used | Freed | PoolFilled | TaskDone | StepBegun
