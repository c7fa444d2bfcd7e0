"""Several servers: the processes of each share memory, and each server is a replica of the others.

    on a server       weights, masters and optimizer state once; a board; every process updates its piece of everything
    between servers   gradients, whose sums on each server are added up in the order of the servers

All servers have the same gradients and state and so compute the same weights: only gradients are exchanged, and weights,
masters and norms are read on a process's own server. Messages of an agreement go from a server's board to its first
process, from there to the first processes of the others, and back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from harmony_ds.distributed.board import DIFFERENT, Board, PeerDiverged
from harmony_ds.errors import PeerFailedError, UsageError

_BACK = "read the servers' messages"
_PIECE_BYTES = 8192
"""Bytes passed back in one agreement; a row of the board holds more."""
_SHARED = (PeerFailedError, PeerDiverged, UsageError)
"""Errors of one server's agreement that all servers raise; of several, the first in this order."""


@dataclass(frozen=True, slots=True)
class _ServerMessage:
    """Message of a server: the kind and payloads of its processes, by rank; or the error that all are to raise."""

    kind: str = ""
    rows: Sequence[bytes] = ()
    error: Exception | None = None


class Servers:
    """The servers of a training, seen by a process of one of them."""

    def __init__(
        self,
        board: Board,
        ranks: Sequence[Sequence[int]],
        first: dist.ProcessGroup | None,
        collective: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Connect a process of `board` with the other servers.

        Args:
            ranks: of the processes of every server.
            first: a process group of the servers' first processes; None: this is none of them.
            collective: makes the context of collective calls.
        """
        self._board = board
        self._ranks = ranks
        self._first = first
        self._collective = collective

    def agree(self, kind: str, payload: bytes) -> list[bytes]:
        """Return the payloads of all processes, by rank; raises as `Board.agree`."""
        try:
            rows = self._board.agree(kind, payload)
        except _SHARED as error:
            self._send(_ServerMessage(error=error))
            raise
        told = pickle.dumps(self._gather(_ServerMessage(kind, rows))) if self._first is not None else b""
        return self._combine(pickle.loads(self._hand_back(told)))

    def _hand_back(self, told: bytes) -> bytes:
        """Pass `told` from the server's first process to its others; return it."""
        found = b""
        while True:  # a piece that is not full is the last one
            piece = self._board.agree(_BACK, told[len(found) : len(found) + _PIECE_BYTES])[0]
            found += piece
            if len(piece) < _PIECE_BYTES:
                return found

    def tell_failure(self, message: str) -> None:
        """Report in place of the next agreement that this process has failed."""
        self._board.tell_failure(message)
        self._send(_ServerMessage(error=PeerFailedError(self._board.number, message)))

    def tell_diverged(self) -> None:
        """Report in place of the next agreement that all have to run the step again."""
        self._board.tell_diverged()
        self._send(_ServerMessage(error=PeerDiverged()))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy host `tensors` of the first server to all others."""
        if self._first is not None:
            with torch.no_grad(), self._collective():
                for tensor in tensors:
                    dist.broadcast(tensor, group=self._first, group_src=0)

    def _send(self, said: _ServerMessage) -> None:
        if self._first is not None:
            self._gather(said)

    def _gather(self, said: _ServerMessage) -> list[_ServerMessage]:
        found: list[Any] = [None] * len(self._ranks)
        with self._collective():
            dist.all_gather_object(found, said, group=self._first)
        return found

    def _combine(self, told: Sequence[_ServerMessage]) -> list[bytes]:
        errors = [said.error for said in told if said.error is not None]
        if errors:
            raise min(errors, key=lambda error: _SHARED.index(type(error)))
        if len({said.kind for said in told}) > 1:
            kinds = [f"ranks {[*ranks]}: {said.kind}" for ranks, said in zip(self._ranks, told, strict=True)]
            raise UsageError(DIFFERENT.format("servers", "; ".join(kinds)))
        by_rank: dict[int, bytes] = {}
        for ranks, said in zip(self._ranks, told, strict=True):
            by_rank |= dict(zip(ranks, said.rows, strict=True))
        return [by_rank[rank] for rank in sorted(by_rank)]
