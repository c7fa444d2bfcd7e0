"""Several servers: processes that share memory are one, and each server is a replica of the others.

    on a server       weights, masters and optimizer state once; a board; every process updates its piece of everything
    between servers   gradients, whose sums on each server are added up in the order of the servers

Since all servers have the same gradients and the same state, they make the same weights of them: nothing comes back, and
whoever reads a weight, a master or a norm finds it on its own server. What processes agree on goes from the board of a
server to its first process, from there to the first processes of the others, and back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from harmony_ds.errors import PeerFailedError, UsageError
from harmony_ds.parallel.board import Board, PeerStrayed

_BACK = "what the servers say"
_PIECE_BYTES = 8192
"""What is handed back in one agreement: a row of the board holds more, however many processes there are."""


class Agreeing(Protocol):
    """What processes agree by, on one server or several."""

    def agree(self, kind: str, payload: bytes) -> list[bytes]: ...
    def tell_failure(self, message: str) -> None: ...
    def tell_strayed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Said:
    """What a server says: what its processes do next and say of it, by rank; or which of them has failed, and how."""

    kind: str = ""
    rows: Sequence[bytes] = ()
    failed: tuple[int, str] | None = None
    strayed: bool = False
    differ: str = ""


class Servers:
    """The servers of a training, as a process of one of them sees them."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[Sequence[int]],
        first: dist.ProcessGroup | None,
        collective: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """What a process of `board` sees.

        Args:
            ranks: of the processes of every server.
            first: a process group of the servers' first processes; None: this is none of them.
            collective: makes what is put around calls that only other servers can end.
        """
        self._board = board
        self._ranks = ranks
        self._first = first
        self._collective = collective

    @property
    def leads(self) -> bool:
        """Whether this process speaks for its server."""
        return self._board.rank == 0

    def agree(self, kind: str, payload: bytes) -> list[bytes]:
        """What all processes say, by rank; errors as the board's."""
        try:
            rows = self._board.agree(kind, payload)
        except PeerFailedError as error:
            self._say(_Said(failed=(error.rank, error.message)))
            raise
        except PeerStrayed:
            self._say(_Said(strayed=True))
            raise
        except UsageError as error:
            self._say(_Said(differ=str(error)))
            raise
        told = pickle.dumps(self._gathered(_Said(kind, rows))) if self.leads else b""
        return self._combined(pickle.loads(self._handed_back(told)))

    def _handed_back(self, told: bytes) -> bytes:
        """Return what the server's first process hands to the others; `told`: what it is, in that process."""
        found = b""
        while True:  # a piece that is not full is the last one
            piece = self._board.agree(_BACK, told[len(found) : len(found) + _PIECE_BYTES])[0]
            found += piece
            if len(piece) < _PIECE_BYTES:
                return found

    def tell_failure(self, message: str) -> None:
        """Instead of the next agreement: this process has failed."""
        self._board.tell_failure(message)
        self._say(_Said(failed=(self._board.number, message)))

    def tell_strayed(self) -> None:
        """Instead of the next agreement: all have to run the step again."""
        self._board.tell_strayed()
        self._say(_Said(strayed=True))

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Every server's `tensors`, on the host, become those of the first."""
        if self.leads:
            with torch.no_grad(), self._collective():
                for tensor in tensors:
                    dist.broadcast(tensor, group=self._first, group_src=0)

    def _say(self, said: _Said) -> None:
        if self.leads:
            self._gathered(said)

    def _gathered(self, said: _Said) -> list[_Said]:
        found: list[Any] = [None] * len(self._ranks)
        with self._collective():
            dist.all_gather_object(found, said, group=self._first)
        return found

    def _combined(self, told: Sequence[_Said]) -> list[bytes]:
        for said in told:
            if said.failed is not None:
                raise PeerFailedError(*said.failed)
        if any(said.strayed for said in told):
            raise PeerStrayed
        differ = next((said.differ for said in told if said.differ), "")
        if differ:
            raise UsageError(differ)
        if len({said.kind for said in told}) > 1:
            raise UsageError(
                "the servers of this training do different things: "
                + "; ".join(f"ranks {[*ranks]}: {said.kind}" for ranks, said in zip(self._ranks, told, strict=True))
                + ". What an engine does with others (steps, evaluation by eval_batch, checkpoints) every process has to "
                "do, in the same order."
            )
        by_rank = {
            rank: row
            for ranks, said in zip(self._ranks, told, strict=True)
            for rank, row in zip(ranks, said.rows, strict=True)
        }
        return [by_rank[rank] for rank in sorted(by_rank)]
