"""What the engine asks of the processes that train one model, and its answers for one process.

A single process owns everything, waits for no other and agrees with itself. `World` (world.py) is the same for several
processes, so that no caller asks how many there are.
"""

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
    """The processes that train a model, when there is one.

    All processes call `agree` and the methods that call it (`any`, `max`, `gather_values`, `compute_on_first`, `mean`,
    `reduce`, `gather_shares`, ...) in the same order, on the engine's thread. `kind` says what a process does, for the
    error when another one does something else.

    Attributes:
        rank, size: of this process in the training, and how many processes that has.
        local_rank, local_size: the same among the processes of this server.
        servers: how many servers there are.
    """

    rank = local_rank = 0
    size = local_size = servers = 1

    @property
    def is_local_first(self) -> bool:
        """Whether this process is the first of its server: it fills the memory that the server's processes share."""
        return True

    def refuse(self, what: str) -> None:
        """Raise UnsupportedError if there are several processes, which do not support `what`."""

    def leave(self) -> None:
        """Stop training with the others; memory that was shared becomes this process's own."""

    # ---- agreements

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        """Return the payloads of all processes, by rank, when all have come to the same `kind` of agreement.

        Raises:
            PeerFailedError: another process has failed, or has ended.
            PeerDiverged: another process has to run the step again.
            UsageError: another process does something else.
        """
        return [payload]

    def any(self, kind: str, flag: bool) -> bool:
        """Return whether `flag` is set in any process."""
        return flag

    def max(self, kind: str, number: int) -> int:
        """Return the largest `number` of all processes."""
        return number

    def gather_values(self, kind: str, value: T) -> list[T]:
        """Return the values of all processes, by rank; any value that can be pickled."""
        return [value]

    def compute_on_first(self, kind: str, make: Callable[[], T]) -> T:
        """Call `make` in the process of rank 0 alone, and return its result, or raise its error, in all processes."""
        return make()

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes, added in the order of the ranks."""
        return value

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report an error that is raised within this context to the other processes, at their next agreement."""
        yield

    def tell_diverged(self) -> None:
        """Tell the others, in place of the next agreement, that all have to run the step again."""

    def give_up(self, why: str) -> None:
        """Tell the others that this process cannot go on, now and whenever they wait for it; on any thread."""

    # ---- shared host memory

    def broadcast_to_servers(self, tensors: Sequence[Tensor]) -> None:
        """Copy host `tensors` from the first server to all others."""

    def pieces(self, numel: int) -> list[slice]:
        """Return the elements of a parameter of `numel` that each process of this server updates, by local rank."""
        return [slice(0, numel)]

    def piece(self, numel: int) -> slice:
        """Return the elements of a parameter of `numel` that this process updates."""
        return self.pieces(numel)[self.local_rank]

    def piece_lists(self, numel: int) -> list[Tensor]:
        """Return memory, zeros at first, for a count and as many integers as each piece has elements, by local rank.

        A single process needs no list, and gets memory for the count alone.
        """
        return [torch.zeros(1, dtype=torch.int64)]

    def host_empty(self, device: Device, numel: int, dtype: torch.dtype) -> Tensor:
        """Return host memory for weights, which the device copies from; see `Device.host_empty`."""
        return device.host_empty(numel, dtype)

    def host_empty_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return host memory in the shape of a parameter, for its master."""
        return torch.empty(like.shape, dtype=dtype, device=like.device)

    def share_file(self, make: Callable[[], int]) -> int:
        """Return a descriptor of the file that the first process of this server makes, and all of them open."""
        return make()

    # ---- gradients and weights

    def reduce(
        self, kind: str, device: Device, leaves: Mapping[str, Tensor], gradients: Tensors, dtype: torch.dtype
    ) -> Tensors:
        """Return this process's pieces of the mean gradients, of the `leaves` that any process has a gradient of.

        They are ready after the work of the device's PEER stream, and overwrite `gradients`.

        Args:
            dtype: of gradients, in every process; a process may have no gradients of its own that have one.
        """
        return gradients

    def gather_shares(self, kind: str, device: Device, buffer: Tensor) -> None:
        """Fill `buffer` with the shares of all processes (see `share_of`), on the device's PEER stream."""

    def reduce_bytes(self, device: Device) -> int:
        """Return the device bytes that `reduce` needs at most, besides the gradients."""
        return 0

    def reduce_rates(self, device: Device) -> tuple[float, float]:
        """Return the bytes that this process sends per millisecond of `reduce`, and the fixed milliseconds of a call."""
        return 0.0, 0.0

    @property
    def slot_bytes(self) -> int:
        """Host bytes of this process for gradients that are reduced on the host."""
        return 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients and weights sent to other processes so far."""
        return 0

    # ---- norms and updates

    def norm_part(self, gradient: Tensor) -> Tensor:
        """Return the part of the global norm of one gradient (or piece of one), for `post_norm`."""
        norm: Tensor = torch.linalg.vector_norm(gradient, 2, dtype=torch.float32)
        return norm

    def next_norm_number(self) -> int:
        """Return the number of the next norm, the same in every process; on the engine's thread."""
        return 0

    def post_norm(self, number: int, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Post this process's `parts`; return a function that waits for all others' and returns the global norm."""
        # Like torch.nn.utils.clip_grad_norm_: the norm of the norms of all tensors, in the order of the parameters.
        total: Tensor = torch.linalg.vector_norm(torch.stack(list(parts)), 2) if parts else torch.zeros(())
        return lambda: total

    def count_issued(self, names: Sequence[str]) -> None:
        """Count an update of `names` that every process will do; on the engine's thread."""

    def post_updated(self, names: Sequence[str]) -> None:
        """Post that this process has updated its pieces of `names`; on the update thread."""

    def wait_updated(self, names: Sequence[str] | None = None) -> None:
        """Wait until every other process has done the issued updates of `names` (None: of all)."""


SINGLE_PROCESS = SingleProcess()
