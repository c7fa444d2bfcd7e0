"""Agreements of the processes of one server: each posts a message, waits for those of all, and reads them.

All processes agree in the same order, on the engine's thread. A message says what its process does (its kind), so that
processes that do different things end with an error that says which. In place of its next message, a process may report
that it has failed, or that all have to run the step again: then no process gets further than this agreement.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from harmony_ds.distributed.board import MESSAGES_PLACE, ROW_BYTES, Board, Posted
from harmony_ds.errors import UsageError

_HEAD = struct.Struct("<BII")  # verdict, bytes of the kind, bytes of the payload
_FAILURE_BYTES = 4096


class PeerDiverged(Exception):  # noqa: N818 - not an error: the step is run again
    """Another process met a call that was not measured, so that all processes have to measure and run the step again."""


class _Verdict(IntEnum):
    """Whether a process goes on after an agreement."""

    OK = 0
    FAILED = 1
    DIVERGED = 2


@dataclass(frozen=True, slots=True)
class _Message:
    """Message of one process in an agreement; the payload of a failure is its text."""

    verdict: _Verdict
    kind: str
    payload: bytes


def different_kinds(what: str, kinds: Mapping[str, str]) -> UsageError:
    """Return the error of processes, or servers, that do different things: `kinds`, by name."""
    told = "; ".join(f"{name}: {kind}" for name, kind in kinds.items())
    return UsageError(
        f"the {what} of this training do different things: {told}. What an engine does with others (steps, evaluation "
        "by eval_batch, checkpoints) every process has to do, in the same order."
    )


class Agreement:
    """Agreements of a server's processes, as one of them takes part."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._number = 0  # of the last agreement

    def agree(self, kind: str, payload: bytes) -> list[bytes]:
        """Post `payload` and return the payloads of all processes, by rank.

        Raises:
            PeerFailedError: another process has failed, or has ended.
            PeerDiverged: another process has to run the step again.
            UsageError: another process does another `kind` of thing.
        """
        messages = self._exchange(_Message(_Verdict.OK, kind, payload))
        for other, message in enumerate(messages):
            if message.verdict is _Verdict.FAILED:
                raise self._board.failed(other, message.payload.decode(errors="replace"))
        if any(message.verdict is _Verdict.DIVERGED for message in messages):
            raise PeerDiverged
        if len({message.kind for message in messages}) > 1:
            names = [f"rank {rank}" for rank in self._board.ranks]
            raise different_kinds("processes", dict(zip(names, (m.kind for m in messages), strict=True)))
        return [message.payload for message in messages]

    def tell_failure(self, text: str) -> None:
        """Report in place of the next agreement that this process has failed, without waiting for the others' messages."""
        self._post(_Message(_Verdict.FAILED, "", text.encode()[:_FAILURE_BYTES]))
        self._board.post(Posted.MESSAGES_READ, self._number)

    def tell_diverged(self) -> None:
        """Report in place of the next agreement that all have to run the step again."""
        self._post(_Message(_Verdict.DIVERGED, "", b""))
        self._board.post(Posted.MESSAGES_READ, self._number)

    def _exchange(self, message: _Message) -> Sequence[_Message]:
        """Post a message and return the messages of all processes, by rank."""
        self._post(message)
        number = self._number
        try:
            self._board.wait(
                lambda other: self._board.posted(other, Posted.MESSAGE) >= number,
                f"said what it does next (here: {message.kind})",
            )
            return [self._read(other) if other != self._board.rank else message for other in range(self._board.size)]
        finally:
            self._board.post(Posted.MESSAGES_READ, number)

    def _post(self, message: _Message) -> None:
        """Write a message where that of the last agreement but one was, which all others must have read."""
        number = self._number + 1
        self._board.wait(lambda other: self._board.posted(other, Posted.MESSAGES_READ) >= number - 2, "come this far")
        self._number = number
        kind = message.kind.encode()
        row = _HEAD.pack(message.verdict, len(kind), len(message.payload)) + kind + message.payload
        assert len(row) <= ROW_BYTES, f"{message.kind}: {len(message.payload)} bytes are too many to agree on"
        self._board.write(self._row_place(), row)
        self._board.post(Posted.MESSAGE, number)

    def _read(self, other: int) -> _Message:
        place = self._row_place()
        verdict, kind_bytes, payload_bytes = _HEAD.unpack(self._board.read(other, place, _HEAD.size))
        content = self._board.read(other, place + _HEAD.size, kind_bytes + payload_bytes)
        return _Message(_Verdict(verdict), content[:kind_bytes].decode(), content[kind_bytes:])

    def _row_place(self) -> int:
        return MESSAGES_PLACE + self._number % 2 * ROW_BYTES
