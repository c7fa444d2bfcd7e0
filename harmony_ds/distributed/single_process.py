"""The world of one process, which owns everything and waits for no other. `World` is that of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from harmony_ds.device.base import Device

T = TypeVar("T")
Tensors = dict[str, Tensor]


class SingleProcess:
    """Services of the processes that train a model, for a single one.

    All processes call `agree` and the like in the same order, on the engine's thread.

    Attributes:
        rank, size: of this process, and of the training.
        local_rank, local_size: the same among the processes of this server.
        servers: how many there are.
    """

    rank = local_rank = 0
    size = local_size = servers = 1

    @property
    def is_local_first(self) -> bool:
        """Whether this process writes the memory that its server's processes share."""
        return True

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy host `tensors` from the first server to all others."""

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError if there are several processes, which do not support `what`."""

    def pieces(self, numel: int) -> list[slice]:
        """Return the elements of a parameter of `numel` that each process of this server updates."""
        return [slice(0, numel)]

    def piece(self, numel: int) -> slice:
        """Return those that this process updates."""
        return self.pieces(numel)[self.local_rank]

    def lists(self, numel: int) -> list[Tensor]:
        """Return memory, zeros at first, for a list of integers of each piece; alone, one of a single integer."""
        return [torch.zeros(1, dtype=torch.int64)]

    def host_empty(self, device: Device, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for weights; see `Device.host_empty`."""
        return device.host_empty(numel, dtype)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return host memory for the master of a parameter."""
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    def share_file(self, make: Callable[[], int]) -> int:
        """Return a descriptor of the file that the first process of this server makes, and all of them open."""
        return make()

    def leave(self) -> None:
        """Stop training with the others; memory that was shared becomes this process's own."""

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return the payloads of all processes, by rank; waits until all do the same `kind` of thing."""
        return [payload]

    def any(self, kind: str, flag: bool) -> bool:
        """Return whether `flag` is set in any process."""
        return flag

    def max(self, kind: str, number: int) -> int:
        """Return the largest `number` of all processes."""
        return number

    def all(self, kind: str, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        return [value]

    def first(self, kind: str, make: Callable[[], T]) -> T:
        """Return the result of `make()` in the first process; all raise its error."""
        return make()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        return value

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report an error raised while open to the other processes."""
        yield

    def tell_diverged(self) -> None:
        """Tell the others that this process has to run the step again."""

    def give_up(self, why: str) -> None:
        """Tell the others, now and later, that this process cannot go on."""

    def reduce(
        self, kind: str, device: Device, leaves: Mapping[str, Tensor], gradients: Tensors, dtype: torch.dtype
    ) -> Tensors:
        """Return this process's pieces of the mean gradients, of the `leaves` that any process has a gradient of.

        They are ready after the work of the device's PEER stream, and overwrite `gradients`.

        Args:
            dtype: of gradients, in every process; this one may have none of its own to tell it by.
        """
        return gradients

    def gather(self, kind: str, device: Device, buffer: Tensor) -> None:
        """Fill `buffer` with the shares of all processes (see `share_of`), on the device's PEER stream."""

    def reduce_bytes(self, device: Device) -> int:
        """Return the device bytes that `reduce` needs at most, besides the gradients."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Host bytes of this process for gradients that are reduced on the host."""
        return 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and weights sent to other processes so far."""
        return 0

    def reduce_rates(self, device: Device) -> tuple[float, float]:
        """Return the bytes that this process sends per millisecond of `reduce`, and the fixed milliseconds of a call."""
        return 0.0, 0.0

    def norm_part(self, gradient: Tensor) -> Tensor:
        """Return the part of the global norm of one gradient (or piece of one), for `post_norm`."""
        norm: Tensor = torch.linalg.vector_norm(gradient, 2, dtype=torch.float32)
        return norm

    def number_norm(self) -> int:
        """Return the number of the next norm, the same in every process; on the engine's thread."""
        return 0

    def post_norm(self, number: int, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Post this process's `parts`; return a function that waits for all others' and returns the global norm."""
        # Like torch.nn.utils.clip_grad_norm_: the norm of the norms of all tensors, in the order of the parameters.
        total: Tensor = torch.linalg.vector_norm(torch.stack(list(parts)), 2) if parts else torch.zeros(())
        return lambda: total

    def issue(self, names: Sequence[str]) -> None:
        """Count an update of `names`, which every process will make; on the engine's thread."""

    def updated(self, names: Sequence[str]) -> None:
        """Post that this process has updated its pieces of `names`."""

    def has_updated(self, names: Sequence[str]) -> bool:
        """Return whether every process has made the issued updates of `names`."""
        return True

    def wait_updated(self, names: Sequence[str] | None = None) -> None:
        """Wait until every process has made the issued updates of `names` (None: of all)."""


ALONE = SingleProcess()
