"""The world of one process: it owns everything, and nobody waits for anybody. `World` is that of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from harmony_ds.device.base import Device

T = TypeVar("T")


class SingleProcess:
    """What an engine asks of the processes that train its model, answered by one that is alone.

    Attributes:
        rank, size: of this process; how many there are.
        local_rank, local_size: the same among those of this server.
        servers: how many there are.
    """

    rank = local_rank = 0
    size = local_size = servers = 1

    @property
    def is_first(self) -> bool:
        """Whether this process says, and writes to disk, what is said once for all."""
        return self.rank == 0

    @property
    def is_local_first(self) -> bool:
        """Whether this process writes what is there once for each server."""
        return True

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """What `tensors` on the host hold on the first server, they hold on all."""

    def refuse(self, what: str) -> None:
        """Raises UnsupportedError if there are several processes, with which `what` is not there."""

    # ---- memory

    def piece(self, numel: int) -> slice:
        """Which elements of a parameter of `numel` this process updates."""
        return slice(0, numel)

    def host_empty(self, device: Device, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory for weights, as `Device.host_empty`."""
        return device.host_empty(numel, dtype)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory for the master of a parameter."""
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    def leave(self) -> None:
        """This process trains no more: its memory is its own from here on."""

    # ---- agreeing, on the engine's thread

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """What every process says, by rank, when it does `kind`; each waits for all."""
        return [payload]

    def any(self, kind: str, flag: bool) -> bool:
        """Whether any process says yes."""
        return flag

    def max(self, kind: str, number: int) -> int:
        """The largest number that any process says."""
        return number

    def all(self, kind: str, value: T) -> list[T]:
        """The value of every process, by rank."""
        return [value]

    def first(self, kind: str, make: Callable[[], T]) -> T:
        """What the first process makes; its error is everybody's."""
        return make()

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        return value

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Around what all processes do: an error in it is told to the others."""
        yield

    def tell_diverged(self) -> None:
        """This process has to do again what all are doing."""

    def give_up(self, why: str) -> None:
        """This process cannot go on, and none can without it."""

    # ---- gradients and updates

    def reduce(
        self, kind: str, device: Device, leaves: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """This process's pieces of the mean of all processes' `gradients`, of those of `leaves` that any has one of.

        They are there behind the device's PEER stream, and lie in `gradients`, which are not to be used otherwise.
        """
        return gradients

    def gather(self, kind: str, device: Device, buffer: Tensor) -> None:
        """Fills `buffer`, of which each process has its share (see `share_of`), on the device's PEER stream."""

    def reduce_bytes(self, device: Device) -> int:
        """Device memory that `reduce` takes at most, beside the gradients."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Host memory of this process that gradients take which are reduced there."""
        return 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and weights that this process has sent to others so far."""
        return 0

    def reduce_rates(self, device: Device) -> tuple[float, float]:
        """Bytes that this process sends in a millisecond of `reduce`, and the milliseconds that any `reduce` takes."""
        return 0.0, 0.0

    def norm_part(self, gradient: Tensor) -> Tensor:
        """What `total` wants to know of one gradient (a piece)."""
        norm: Tensor = torch.linalg.vector_norm(gradient, 2, dtype=torch.float32)
        return norm

    def number_norm(self) -> int:
        """The number of the next norm: the same in every process, if asked for on the engine's thread."""
        return 0

    def post_norm(self, number: int, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Tells the others of this process's `parts`; what is returned waits for theirs, and is the norm of all."""
        # As torch.nn.utils.clip_grad_norm_: a norm per tensor, the norm of those, in the order of the parameters.
        total: Tensor = torch.linalg.vector_norm(torch.stack(list(parts)), 2) if parts else torch.zeros(())
        return lambda: total

    def issue(self, names: Sequence[str]) -> None:
        """An update of `names` has been asked for, in every process; on the engine's thread."""

    def updated(self, names: Sequence[str]) -> None:
        """This process has updated its pieces of `names`."""

    def has_updated(self, names: Sequence[str]) -> bool:
        """Whether every process has updated what was issued of `names`."""
        return True

    def wait_updated(self, names: Sequence[str] | None = None) -> None:
        """Waits until every process has updated what was issued of `names` (None: of all)."""
