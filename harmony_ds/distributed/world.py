"""The processes that train one model together, of one server or several, as one of them sees them.

`World` puts together what the other modules here offer: agreements, the exchange of gradients between devices or through
host memory, the progress of updates, and what becomes of all that when a process fails.
"""

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
from harmony_ds.distributed.agreement import Agreement, PeerDiverged
from harmony_ds.distributed.board import Board
from harmony_ds.distributed.exchange import Exchange, bucket_bytes, buffer_bytes
from harmony_ds.distributed.servers import ServersAgreement
from harmony_ds.distributed.shared_memory import SharedMemory, open_file
from harmony_ds.distributed.single_process import SingleProcess, Tensors
from harmony_ds.distributed.slots import GradientSlots, HostSum
from harmony_ds.distributed.update_progress import UpdateProgress
from harmony_ds.errors import PeerFailedError, UnsupportedError

T = TypeVar("T")
_MEASURED_BYTES = 16 * 2**20
"""Bytes of gradients whose reduction is timed, at most."""
_TRIES = 6
_FEW_ELEMENTS = 1024
"""Elements for each process in a reduction whose time is all fixed cost."""


class World(SingleProcess):
    """Several processes that train one model; `SingleProcess` says what the methods do.

    An agreement comes before every collective call of torch.distributed: a process that has failed does not come to the
    call, and the others would wait there; at the agreement it tells them, and they raise its error. A process that is
    killed within a collective call closes its connections, by which the call fails (`_collective`).

    Processes agree on the engine's thread. The update thread only posts on the board and polls it: there, a collective
    call would have to come in the same order in all processes, and updates run in the order of their priorities.
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
        """Put the parts together that `join_world` has made.

        Args:
            board, memory: of this process's server.
            objects: the process group, of all processes, for Python objects.
            exchange: of gradients, over process groups of the devices.
            ranks: of the processes of every server.
            parameters: the names of the parameters whose updates are counted.
        """
        self.rank, self.size = board.world_rank, sum(len(of_server) for of_server in ranks)
        self.local_rank, self.local_size, self.servers = board.rank, board.size, len(ranks)
        self.memory = memory
        self._board = board
        self._server_ranks = next(of_server for of_server in ranks if self.rank in of_server)
        self._agreement: Agreement | ServersAgreement = Agreement(board)
        if self.servers > 1:
            first_processes = exchange.groups.first
            self._agreement = ServersAgreement(self._agreement, self.rank, ranks, first_processes, self._collective)
        self._objects = objects
        self._exchange = exchange
        self._progress = UpdateProgress(board, parameters)
        self._slots: GradientSlots | None = None
        self._known_error: BaseException | None = None  # the last error that the others know of already
        self._left = False
        self._rates: tuple[float, float] | None = None

    def refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"{what}: that is not there with {self.size} processes, which share one copy of weights, masters and optimizer "
            "state (see docs/parallel.md). It works in one process (WORLD_SIZE=1)."
        )

    def pieces(self, numel: int) -> list[slice]:
        return [piece_of(numel, rank, self.local_size) for rank in range(self.local_size)]

    def piece_lists(self, numel: int) -> list[Tensor]:
        # One integer more for each piece, its count. Pages that nobody writes take no memory.
        memory = self.memory.empty((numel + self.local_size,), torch.int64)
        return [memory[piece.start + rank : piece.stop + rank + 1] for rank, piece in enumerate(self.pieces(numel))]

    @property
    def is_local_first(self) -> bool:
        return self.local_rank == 0

    def broadcast_to_servers(self, tensors: Sequence[Tensor]) -> None:
        if self.servers > 1:
            self.agree("broadcast")
            with self._collective():
                self._exchange.broadcast_to_servers(tensors)
            self.agree("broadcast is done")

    def host_empty(self, device: Device, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self.memory.empty((numel,), dtype)
        device.host_lock(memory)
        return memory

    def host_empty_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self.memory.empty(like.shape, dtype)

    def share_file(self, make: Callable[[], int]) -> int:
        made = make() if self.is_local_first else -1
        pid, descriptor = self.gather_values("open a file", (os.getpid(), made))[self._server_ranks[0]]
        return made if self.is_local_first else open_file(pid, descriptor)

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        with suppress(PeerFailedError):  # the pieces of a process that failed stay as they are
            self._progress.wait_done()
        if self._slots is not None:
            self._slots.unlock()
        self.memory.make_private()
        self._board.close()
        self._end_groups()

    def _end_groups(self) -> None:
        """End the groups' threads: one that frees tensors while the interpreter exits aborts (pytorch/pytorch#179291)."""
        groups = [self._objects, *self._exchange.process_groups]
        if (
            self._known_error is None
        ):  # after an error others may be in a collective call, whose end NCCL would wait for
            for group in dict.fromkeys(groups):  # each once, in the same order everywhere
                with suppress(ValueError):  # the program has destroyed it already
                    dist.destroy_process_group(group)
        # The groups, and so their threads, end with their last references.
        del self._objects, self._exchange, self._agreement

    def agree(self, kind: str, payload: bytes = b"") -> list[bytes]:
        try:
            return self._agreement.agree(kind, payload)
        except BaseException as error:
            self._known_error = error
            raise

    def any(self, kind: str, flag: bool) -> bool:
        return any(payload == b"1" for payload in self.agree(kind, b"1" if flag else b"0"))

    def max(self, kind: str, number: int) -> int:
        return max(int(payload) for payload in self.agree(kind, str(number).encode()))

    def gather_values(self, kind: str, value: T) -> list[T]:
        self.agree(kind)
        values: list[Any] = [None] * self.size
        with self._collective():
            dist.all_gather_object(values, value, group=self._objects)
        return values

    def compute_on_first(self, kind: str, make: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]  # result and error
        if self.rank == 0:
            try:
                outcome[0] = make()
            except Exception as error:  # noqa: BLE001 - raised in all processes
                outcome[1] = error if _is_picklable(error) else RuntimeError(repr(error))
        self.agree(kind)
        with self._collective():
            dist.broadcast_object_list(outcome, group=self._objects, group_src=0)
        result: T = outcome[0]
        if outcome[1] is not None:
            self._known_error = outcome[1]
            raise outcome[1]
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
            if error is not self._known_error and not self._left:
                self._known_error = error
                with suppress(PeerFailedError):  # `error` is raised, and not another process's failure
                    self._agreement.tell_failure(f"{type(error).__name__}: {error}")
            raise

    def tell_diverged(self) -> None:
        self._agreement.tell_diverged()

    def give_up(self, why: str) -> None:
        self._board.give_up(why)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Give up if a collective call fails within: connections are broken then, and no process can go on."""
        try:
            yield
        except RuntimeError as error:
            cause = self._board.find_cause() or error
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
        """Return the ranks that have a gradient, for each of `names` that any process has one of.

        Args:
            here: the names that this process has a gradient of.
        """
        flags_by_rank = self.agree(kind, bytes(name in here for name in names))
        found = {}
        for place, name in enumerate(names):
            ranks = [rank for rank, flags in enumerate(flags_by_rank) if flags[place]]
            if ranks:
                found[name] = ranks
        return found

    def make_slots(self, device: Device, count: int, nbytes: int) -> None:
        """Make `count` slots of `nbytes` or more in every process; called by all, when no update is under way."""
        self._slots = self._slots or GradientSlots(self._board, self.memory, device)
        if not self._slots.fits(count, nbytes):
            self.agree(f"make {count} slots of {nbytes} bytes")
            self._slots.allocate(count, nbytes)

    def wait_free_slot(self, check: Callable[[], None]) -> Tensor:
        """Return this process's slot of the next reduction on the host; see `GradientSlots.wait_free_slot`."""
        assert self._slots is not None
        return self._slots.wait_free_slot(check)

    def reduce_on_host(self, kind: str, elements: Mapping[str, slice], here: Collection[str]) -> HostSum:
        """Return the sum of the gradients that all processes have copied to the host, for the update thread.

        Args:
            elements: of the slot that `wait_free_slot` returned, for every parameter that may have a gradient.
            here: the parameters that have one in this process.
        """
        assert self._slots is not None
        ranks = self._ranks_with_gradient(f"reduce {kind} on the host", list(elements), here)
        lengths, own = {}, {}
        for name in ranks:
            whole = elements[name]
            piece = self.piece(whole.stop - whole.start)
            lengths[name] = piece.stop - piece.start
            own[name] = slice(whole.start + piece.start, whole.start + piece.stop)
        return HostSum(lengths, self._slots, self._slots.next_reduction(), ranks, own)

    def gather_shares(self, kind: str, device: Device, buffer: Tensor) -> None:
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
            large = min(_MEASURED_BYTES, bucket_bytes(device.budget_bytes)) // 4
            few_ms, many_ms = (self._reduce_ms(device, numel) for numel in (_FEW_ELEMENTS * self.size, large))
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

    def next_norm_number(self) -> int:
        return self._progress.next_norm_number()

    def post_norm(self, number: int, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        self._progress.post_norm_part(number, sum((part.item() for part in parts), 0.0))

        def norm() -> Tensor:
            # Rounded once, so that the fp32 value does not depend on how gradients are cut into pieces.
            squares = torch.tensor(self._progress.norm_parts(number), dtype=torch.float64)
            return sum(squares, torch.zeros((), dtype=torch.float64)).sqrt().float()

        return norm

    def count_issued(self, names: Sequence[str]) -> None:
        self._progress.count_issued(names)

    def post_updated(self, names: Sequence[str]) -> None:
        self._progress.post_done(names)

    def wait_updated(self, names: Sequence[str] | None = None) -> None:
        if not self._left:
            self._progress.wait_done(names)


def _is_picklable(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - attributes may raise anything
        return False
    return True
