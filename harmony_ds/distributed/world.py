"""The world of several processes that train one model; those of a server share memory."""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from harmony_ds.decomposer.graph import piece_of, share_of
from harmony_ds.device.base import Device, Stream
from harmony_ds.distributed.board import Board, PeerDiverged
from harmony_ds.distributed.exchange import Exchange, bucket_bytes, buffer_bytes
from harmony_ds.distributed.servers import Servers
from harmony_ds.distributed.shared_memory import SharedMemory, open_file
from harmony_ds.distributed.single_process import SingleProcess, Tensors
from harmony_ds.distributed.slots import GradientSlots, HostSum
from harmony_ds.errors import PeerFailedError, UnsupportedError

T = TypeVar("T")
_TRIED_BYTES = 16 * 2**20
_TRIES = 6
_GRAIN = 1024


class World(SingleProcess):
    """Several processes. They agree on the engine's thread; the update thread only posts and polls.

    Args of the constructor:
        objects: a process group for host objects.
        exchange: over process groups of the devices.
        ranks: of the processes of every server.
        parameters: names of those whose updates are counted.
    """

    def __init__(
        self,
        board: Board,
        memory: SharedMemory,
        objects: dist.ProcessGroup,
        exchange: Exchange,
        ranks: Sequence[Sequence[int]],
        parameters: Sequence[str],
    ) -> None:
        self.rank, self.size = board.number, sum(map(len, ranks))
        self.local_rank, self.local_size, self.servers = board.rank, board.size, len(ranks)
        self._board = board
        self._first = next(of_server[0] for of_server in ranks if self.rank in of_server)
        self._servers = Servers(board, ranks, exchange.groups.first, self._collective) if self.servers > 1 else None
        self._agreement: Board | Servers = self._servers or board
        self.memory = memory
        self._objects = objects
        self._exchange = exchange
        self._index = {name: index for index, name in enumerate(parameters)}
        self._issued = torch.zeros(len(parameters), dtype=torch.int64)
        self._done = torch.zeros_like(self._issued)
        self._norms = 0
        self._reported: BaseException | None = None  # the error that the others know already
        self._left = False
        self._rates: tuple[float, float] | None = None
        self._slots: GradientSlots | None = None

    def refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"{what}: that is not there with {self.size} processes, which share one copy of weights, masters and optimizer "
            "state (see docs/parallel.md). It works in one process (WORLD_SIZE=1)."
        )

    def pieces(self, numel: int) -> list[slice]:
        return [piece_of(numel, rank, self.local_size) for rank in range(self.local_size)]

    def lists(self, numel: int) -> list[Tensor]:
        memory = self.memory.empty((numel + self.local_size,), torch.int64)  # what is not written takes no memory
        return [memory[piece.start + rank : piece.stop + rank + 1] for rank, piece in enumerate(self.pieces(numel))]

    @property
    def is_local_first(self) -> bool:
        return self.local_rank == 0

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        if self._servers is not None:
            self.agree("spread")
            self._servers.broadcast(tensors)
            self.agree("have spread")

    def host_empty(self, device: Device, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self.memory.empty((numel,), dtype)
        device.host_lock(memory)
        return memory

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self.memory.empty(like.shape, dtype)

    def share_file(self, make: Callable[[], int]) -> int:
        made = make() if self.is_local_first else -1
        pid, number = self.all("open a file", (os.getpid(), made))[self._first]
        return made if self.is_local_first else open_file(pid, number)

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        with suppress(PeerFailedError):  # its pieces stay as they are
            self._board.wait_versions(torch.arange(len(self._issued)), self._issued)
        if self._slots is not None:
            self._slots.unlock()
        self.memory.make_private()
        self._board.close()
        self._end_groups()

    def _end_groups(self) -> None:
        """End the groups' threads: one that frees tensors while the interpreter exits aborts (pytorch/pytorch#179291)."""
        groups = [self._objects, *self._exchange.process_groups]
        if self._reported is None:  # else others may be in the middle of an exchange, and NCCL would wait for it
            for group in dict.fromkeys(groups):  # in the same order everywhere
                with suppress(ValueError):  # the program has destroyed them already
                    dist.destroy_process_group(group)
        # The groups, and so their threads, end with their last references.
        del self._objects, self._exchange, self._servers, self._agreement

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        try:
            return self._agreement.agree(kind, payload)
        except BaseException as error:
            self._reported = error
            raise

    def any(self, kind: str, flag: bool) -> bool:
        return any(said == b"1" for said in self.agree(kind, b"1" if flag else b"0"))

    def max(self, kind: str, number: int) -> int:
        return max(int(said) for said in self.agree(kind, str(number).encode()))

    def all(self, kind: str, value: T) -> list[T]:
        self.agree(kind)
        found: list[Any] = [None] * self.size
        with self._collective():
            dist.all_gather_object(found, value, group=self._objects)
        return found

    def first(self, kind: str, make: Callable[[], T]) -> T:
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made[0] = make()
            except Exception as error:  # noqa: BLE001 - raised in all processes
                made[1] = error if _is_picklable(error) else RuntimeError(repr(error))
        self.agree(kind)
        with self._collective():
            dist.broadcast_object_list(made, group=self._objects, group_src=0)
        if made[1] is not None:
            self._reported = made[1]
            raise made[1]
        result: T = made[0]
        return result

    def mean(self, value: Tensor) -> Tensor:
        self.agree("mean")
        with self._collective():
            return self._exchange.mean(value.detach())

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except PeerDiverged:
            raise
        except BaseException as error:
            if error is not self._reported and not self._left:
                self._reported = error
                with suppress(PeerFailedError):  # this error is raised, not that one
                    self._agreement.tell_failure(f"{type(error).__name__}: {error}")
            raise

    def tell_diverged(self) -> None:
        self._agreement.tell_diverged()

    def give_up(self, why: str) -> None:
        self._board.give_up(why)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Give up if a collective call fails: connections are broken then, and no process can go on."""
        try:
            yield
        except RuntimeError as error:
            peer = self._board.ended_peer()
            cause = error if peer is None else PeerFailedError(peer, "its process ended in an exchange with others")
            self._board.give_up(f"its connections to the others are broken: {cause}")
            if cause is error:
                raise
            raise cause from error

    def reduce(
        self, kind: str, device: Device, leaves: Mapping[str, Tensor], gradients: Tensors, dtype: torch.dtype
    ) -> Tensors:
        ranks = self._ranks_with_gradient(f"reduce {kind}", list(leaves), gradients)
        shapes = {name: leaves[name].numel() for name in ranks}
        if not shapes:
            return {}
        with self._collective():
            return self._exchange.reduce(device, shapes, gradients, dtype)

    def _ranks_with_gradient(self, kind: str, names: Sequence[str], here: Collection[str]) -> dict[str, list[int]]:
        """Return the ranks that have a gradient, for each of `names` that any process has one of."""
        told = self.agree(kind, bytes(name in here for name in names))
        ranks = {name: [rank for rank, flags in enumerate(told) if flags[place]] for place, name in enumerate(names)}
        return {name: having for name, having in ranks.items() if having}

    def make_slots(self, device: Device, count: int, nbytes: int) -> None:
        """Make `count` slots of `nbytes` or more in every process; called by all, when no update is under way."""
        self._slots = self._slots or GradientSlots(self._board, self.memory, device)
        if not self._slots.fits(count, nbytes):
            self.agree(f"make {count} slots of {nbytes} bytes")
            self._slots.make(count, nbytes)

    def begin_on_host(self, check: Callable[[], None]) -> Tensor:
        """Return the slot of this process's next gradients to be reduced on the host; see `GradientSlots.begin`."""
        assert self._slots is not None
        return self._slots.begin(check)

    def reduce_on_host(self, kind: str, elements: Mapping[str, slice], here: Collection[str]) -> HostSum:
        """Return the sum of the gradients that all processes have copied to the host, for the update thread.

        Args:
            elements: of the memory of `begin_on_host`, for every parameter that may have a gradient.
            here: the parameters that have one in this process.
        """
        assert self._slots is not None
        ranks = self._ranks_with_gradient(f"reduce {kind} on the host", list(elements), here)
        pieces, own = {}, {}
        for name in ranks:
            whole = elements[name]
            piece = self.piece(whole.stop - whole.start)
            pieces[name] = piece.stop - piece.start
            own[name] = slice(whole.start + piece.start, whole.start + piece.stop)
        return HostSum(pieces, self._slots, self._slots.take(), ranks, own)

    def gather(self, kind: str, device: Device, buffer: Tensor) -> None:
        self.agree(f"gather {kind}")
        share = share_of(len(buffer), self.local_size)
        if share:
            with self._collective():
                self._exchange.gather(device, buffer[: share * self.local_size])

    @property
    def slot_bytes(self) -> int:
        return 0 if self._slots is None else self._slots.nbytes

    @property
    def sent_bytes(self) -> int:
        return self._exchange.sent_bytes

    def reduce_rates(self, device: Device) -> tuple[float, float]:
        if self._rates is None:
            sent = self.sent_bytes
            large = min(_TRIED_BYTES, bucket_bytes(device.budget_bytes)) // 4
            few_ms, many_ms = (self._reduce_ms(device, numel) for numel in (_GRAIN * self.size, large))
            # With small buckets nearly all time may be fixed.
            local, others = self.local_size, self.servers - 1
            nbytes = 4 * large * (local - 1 + others) / local
            self._rates = nbytes / max(many_ms - few_ms, many_ms / 8), few_ms
            self._exchange.sent_bytes = sent
        return self._rates

    def _reduce_ms(self, device: Device, numel: int) -> float:
        leaf = torch.zeros(numel, device=device.torch_device)
        samples = []
        for _ in range(_TRIES):
            device.record(Stream.PEER).synchronize()
            self.agree("measure")
            begin = time.perf_counter()
            self.reduce("to measure", device, {"": leaf.requires_grad_()}, {"": leaf.detach()}, leaf.dtype)
            device.record(Stream.PEER).synchronize()
            samples.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(samples[1:])

    def reduce_bytes(self, device: Device) -> int:
        return buffer_bytes(device.budget_bytes, self.servers)

    def norm_part(self, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).double()
        return torch.dot(flat, flat)

    def number_norm(self) -> int:
        self._norms += 1
        return self._norms

    def post_norm(self, number: int, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        self._board.post_norm(number, sum((part.item() for part in parts), 0.0))

        def norm() -> Tensor:
            # Rounded once, so that the fp32 value does not depend on how gradients are cut into pieces.
            squares = torch.tensor(self._board.norm_parts(number), dtype=torch.float64)
            return sum(squares, torch.zeros((), dtype=torch.float64)).sqrt().float()

        return norm

    def issue(self, names: Sequence[str]) -> None:
        self._issued[self._indices(names)] += 1

    def updated(self, names: Sequence[str]) -> None:
        indices = self._indices(names)
        self._done[indices] += 1
        self._board.post_versions([(int(index), int(self._done[index])) for index in indices])

    def has_updated(self, names: Sequence[str]) -> bool:
        indices = self._indices(names)
        return self._left or self._board.have_versions(indices, self._issued[indices])

    def wait_updated(self, names: Sequence[str] | None = None) -> None:
        indices = torch.arange(len(self._issued)) if names is None else self._indices(names)
        if self._left or not len(indices):
            return
        self._board.wait_versions(indices, self._issued[indices])

    def _indices(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self._index[name] for name in names], dtype=torch.int64)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - attributes may raise anything
        return False
    return True
