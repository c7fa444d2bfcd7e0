"""Agreements of the processes of several servers.

The processes of a server share memory, and each server is a replica of the others:

    on a server       weights, masters and optimizer state once; a board; every process updates its piece of everything
    between servers   gradients, whose sums on each server are added up in the order of the servers

All servers have the same gradients and state and so compute the same weights: only gradients are exchanged, and weights,
masters and norms are read on a process's own server. Messages of an agreement go from a server's board to its first
process, from there by gloo to the first processes of the others, and back by the board.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from harmony_ds.distributed.agreement import Agreement, PeerDiverged, different_kinds
from harmony_ds.errors import PeerFailedError, UsageError

_RETURN = "read the servers' messages"
_PART_BYTES = 8192
"""Bytes that the first process hands to the others in one agreement; a message on the board holds more."""
_COMMON_ERRORS = (PeerFailedError, PeerDiverged, UsageError)
"""Errors of one server's agreement that all servers raise; of several, the first in this order."""


@dataclass(frozen=True, slots=True)
class _ServerMessage:
    """Message of a server: the kind and payloads of its processes, by rank; or the error that all are to raise."""

    kind: str = ""
    payloads: Sequence[bytes] = ()
    error: Exception | None = None


class ServersAgreement:
    """Agreements of all servers' processes, as one of them takes part; used like `Agreement`."""

    def __init__(
        self,
        on_server: Agreement,
        rank: int,
        ranks: Sequence[Sequence[int]],
        first_processes: dist.ProcessGroup | None,
        collective: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Connect a process with the other servers.

        Args:
            on_server: the agreements of this process's server.
            rank: of this process, in the training.
            ranks: of the processes of every server.
            first_processes: the process group of the servers' first processes; None: this is none of them.
            collective: makes the context in which collective calls run.
        """
        self._on_server = on_server
        self._rank = rank
        self._ranks = ranks
        self._first_processes = first_processes
        self._collective = collective

    def agree(self, kind: str, payload: bytes) -> list[bytes]:
        """Return the payloads of all processes, by rank; raises as `Agreement.agree`."""
        try:
            payloads = self._on_server.agree(kind, payload)
        except _COMMON_ERRORS as error:
            self._send(_ServerMessage(error=error))
            raise
        gathered = b""
        if self._first_processes is not None:
            gathered = pickle.dumps(self._gather(_ServerMessage(kind, payloads)))
        messages: list[_ServerMessage] = pickle.loads(self._return_from_first(gathered))
        return self._combine(messages)

    def tell_failure(self, text: str) -> None:
        """Report in place of the next agreement that this process has failed."""
        self._on_server.tell_failure(text)
        self._send(_ServerMessage(error=PeerFailedError(self._rank, text)))

    def tell_diverged(self) -> None:
        """Report in place of the next agreement that all have to run the step again."""
        self._on_server.tell_diverged()
        self._send(_ServerMessage(error=PeerDiverged()))

    def _send(self, message: _ServerMessage) -> None:
        """Send a message in place of the one that the other servers wait for."""
        if self._first_processes is not None:
            self._gather(message)

    def _gather(self, message: _ServerMessage) -> list[_ServerMessage]:
        """Return the messages of all servers; called by the first process of each."""
        messages: list[Any] = [None] * len(self._ranks)
        with self._collective():
            dist.all_gather_object(messages, message, group=self._first_processes)
        return messages

    def _return_from_first(self, content: bytes) -> bytes:
        """Return, in every process of a server, the `content` of its first one."""
        found = b""
        while True:
            part = self._on_server.agree(_RETURN, content[len(found) : len(found) + _PART_BYTES])[0]
            found += part
            if len(part) < _PART_BYTES:  # only the last part is not full
                return found

    def _combine(self, messages: Sequence[_ServerMessage]) -> list[bytes]:
        """Return the payloads of all processes, by rank; raise the servers' common error, if there is one."""
        errors = [message.error for message in messages if message.error is not None]
        if errors:
            raise min(errors, key=lambda error: _COMMON_ERRORS.index(type(error)))
        if len({message.kind for message in messages}) > 1:
            names = [f"ranks {[*of_server]}" for of_server in self._ranks]
            raise different_kinds("servers", dict(zip(names, (m.kind for m in messages), strict=True)))
        by_rank: dict[int, bytes] = {}
        for of_server, message in zip(self._ranks, messages, strict=True):
            by_rank |= dict(zip(of_server, message.payloads, strict=True))
        return [by_rank[rank] for rank in sorted(by_rank)]
