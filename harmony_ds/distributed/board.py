"""Board: small messages between the processes of a server, in shared memory that is polled.

Every process has a place that only it writes:

    rows        two in turn: its message in agreement k; k + 2 is written over k when all have read k
    passed      the last agreement that it has read
    filled      the last exchange on the host (slots.py) for which it has copied its gradients
    read        the last exchange whose gradients it has read
    norms       a ring: its part of the norm of step s
    given up    why it cannot go on, once it cannot
    versions    for every parameter: how many updates of its piece are done

Rows and norms carry a checksum, so that a reader in the middle of a write reads again, in whatever order stores become
visible. A process that waits for another notices if that has ended.
"""

from __future__ import annotations

import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch

from harmony_ds.errors import PeerFailedError, UsageError

_ROW_BYTES = 16384
_HEAD = struct.Struct("<qII")  # stamp, bytes of the body, checksum
_KIND = struct.Struct("<BH")  # verdict, bytes of the kind
_NORM = struct.Struct("<qdI")
_NORMS = 64
_NUMBER = struct.Struct("<q")
_TEXT_BYTES = 4096
PASSED = 2 * _ROW_BYTES
FILLED = PASSED + 64
READ = FILLED + 64
_GIVEN_UP = READ + 64
_NORM_RING = _GIVEN_UP + _TEXT_BYTES
_VERSIONS = _NORM_RING + _NORMS * 32
_OK, _FAILED, _DIVERGED = range(3)
_CHECK_SECONDS = 0.02
"""How often a waiting process checks whether the others are alive."""
_ENDS_SECONDS = 2.0


DIFFERENT = (
    "the {} of this training do different things: {}. What an engine does with others (steps, evaluation by eval_batch, "
    "checkpoints) every process has to do, in the same order."
)


class PeerDiverged(Exception):  # noqa: N818 - not an error: the step is run again
    """Another process has to measure its micro-batches anew, so that all have to."""


def board_bytes(size: int, parameters: int) -> int:
    return size * _place_bytes(parameters)


def _place_bytes(parameters: int) -> int:
    return -(-(_VERSIONS + 8 * parameters) // 4096) * 4096


class Board:
    """One process's view of the board."""

    def __init__(
        self,
        file: int,
        rank: int,
        pids: Sequence[int],
        parameters: int,
        timeout_s: float,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Open the board for one of the processes `pids` of a server.

        Args:
            file: of the shared memory, which begins with the board.
            rank: of this process, among `pids`.
            numbers: ranks of the processes in the training, for errors.
        """
        self._file = file
        self.rank, self.size = rank, len(pids)
        self.numbers = tuple(range(self.size) if numbers is None else numbers)
        self._stride = _place_bytes(parameters)
        self._parameters = parameters
        self._timeout_s = timeout_s
        self._others = [other for other in range(self.size) if other != rank]
        self._alive = {other: os.pidfd_open(pids[other]) for other in self._others}
        self._agreements = 0

    @property
    def number(self) -> int:
        """This process's rank in the training."""
        return self.numbers[self.rank]

    def close(self) -> None:
        """Close the handles of the other processes."""
        for file in self._alive.values():
            os.close(file)
        self._alive.clear()

    # ---- agreements: on the engine's thread

    def agree(self, kind: str, payload: bytes) -> list[bytes]:
        """Post `payload` and return the payloads of all, by rank.

        Raises:
            PeerFailedError: another process has failed, or has ended.
            PeerDiverged: another process has to run the step again.
            UsageError: another process does another `kind` of thing.
        """
        number = self._post_row(_OK, kind, payload)
        rows: dict[int, tuple[int, str, bytes]] = {self.rank: (_OK, kind, payload)}

        def said(other: int) -> bool:
            row = self._row(other, number)
            if row is not None:
                rows[other] = row
            return row is not None

        try:
            self.wait(said, f"said what it does next (here: {kind})")
        finally:
            self.post(PASSED, number)
        for other, (verdict, _, told) in sorted(rows.items()):
            if verdict == _FAILED:
                raise self._failed(other, told.decode(errors="replace"))
        if any(verdict == _DIVERGED for verdict, _, _ in rows.values()):
            raise PeerDiverged
        if len({said_kind for _, said_kind, _ in rows.values()}) > 1:
            kinds = [f"rank {self.numbers[other]}: {said_kind}" for other, (_, said_kind, _) in sorted(rows.items())]
            raise UsageError(DIFFERENT.format("processes", "; ".join(kinds)))
        return [rows[other][2] for other in range(self.size)]

    def tell_failure(self, message: str) -> None:
        """Report in place of the next agreement that this process has failed, without waiting for answers."""
        self.post(PASSED, self._post_row(_FAILED, "failed", message.encode()[:_TEXT_BYTES]))

    def tell_diverged(self) -> None:
        """Report in place of the next agreement that all have to run the step again."""
        self.post(PASSED, self._post_row(_DIVERGED, "strayed", b""))

    def _post_row(self, verdict: int, kind: str, payload: bytes) -> int:
        number = self._agreements + 1
        # This row replaces the last but one, which all must have read.
        self.wait(lambda other: self.posted(other, PASSED) >= number - 2, "come this far")
        self._agreements = number
        named = kind.encode()
        body = _KIND.pack(verdict, len(named)) + named + payload
        assert len(body) + _HEAD.size <= _ROW_BYTES, f"{kind}: {len(payload)} bytes are too many to agree on"
        head = _HEAD.pack(number, len(body), zlib.crc32(_NUMBER.pack(number) + body))
        os.pwrite(self._file, head + body, self._place(self.rank, number % 2 * _ROW_BYTES))
        return number

    def _row(self, other: int, number: int) -> tuple[int, str, bytes] | None:
        at = self._place(other, number % 2 * _ROW_BYTES)
        stamp, length, check = _HEAD.unpack(os.pread(self._file, _HEAD.size, at))
        if stamp != number or length > _ROW_BYTES:
            return None
        body = os.pread(self._file, length, at + _HEAD.size)
        if zlib.crc32(_NUMBER.pack(stamp) + body) != check:
            return None
        verdict, named = _KIND.unpack(body[: _KIND.size])
        rest = body[_KIND.size :]
        return verdict, rest[:named].decode(), rest[named:]

    # ---- exchanges on the host, norms and versions: on the update thread

    def post(self, what: int, number: int) -> None:
        """Post a number: in an exchange on the host, FILLED or READ."""
        os.pwrite(self._file, _NUMBER.pack(number), self._place(self.rank, what))

    def posted(self, other: int, what: int) -> int:
        return int(_NUMBER.unpack(os.pread(self._file, 8, self._place(other, what)))[0])

    def post_norm(self, number: int, part: float) -> None:
        packed = struct.pack("<qd", number, part)
        at = self._place(self.rank, _NORM_RING + number % _NORMS * 32)
        os.pwrite(self._file, packed + struct.pack("<I", zlib.crc32(packed)), at)

    def norm_parts(self, number: int) -> list[float]:
        """Wait for the parts of all processes, and return them by rank."""
        found: dict[int, float] = {}

        def there(other: int) -> bool:
            raw = os.pread(self._file, _NORM.size, self._place(other, _NORM_RING + number % _NORMS * 32))
            stamp, part, check = _NORM.unpack(raw[: _NORM.size])
            if stamp == number and zlib.crc32(raw[:16]) == check:
                found[other] = part
                return True
            return False

        self.wait(there, "measured its part of the gradients", among=range(self.size))
        return [found[other] for other in range(self.size)]

    def post_versions(self, versions: Iterable[tuple[int, int]]) -> None:
        """Post how many updates of parameters this process has done, as (index, count)."""
        for index, count in versions:
            os.pwrite(self._file, _NUMBER.pack(count), self._place(self.rank, _VERSIONS + 8 * index))

    def wait_versions(self, indices: torch.Tensor, wanted: torch.Tensor) -> None:
        """Wait until all processes have updated the parameters `indices` as often as `wanted`."""
        if self._parameters:
            self.wait(lambda other: self._has_versions(other, indices, wanted), "updated its pieces of the weights")

    def have_versions(self, indices: torch.Tensor, wanted: torch.Tensor) -> bool:
        return all(self._has_versions(other, indices, wanted) for other in self._others)

    def _has_versions(self, other: int, indices: torch.Tensor, wanted: torch.Tensor) -> bool:
        if not len(indices):
            return True
        raw = os.pread(self._file, 8 * self._parameters, self._place(other, _VERSIONS))
        done = torch.frombuffer(bytearray(raw), dtype=torch.int64)
        return bool((done[indices] >= wanted).all())

    def give_up(self, why: str) -> None:
        """Post that this process cannot go on, which processes that wait for any other will raise."""
        text = why.encode()[: _TEXT_BYTES - 8]
        os.pwrite(self._file, text, self._place(self.rank, _GIVEN_UP + 8))
        self.post(_GIVEN_UP, len(text))

    def ended_peer(self) -> int | None:
        """Return the rank in the training of an ended process, preferably of one that had not given up before."""
        # Polls for a while, since a process's connections are closed before it ends.
        end = time.monotonic() + _ENDS_SECONDS
        while True:
            ended = [other for other in self._others if self._has_ended(other)]
            silent = [other for other in ended if not self.posted(other, _GIVEN_UP)]
            if silent or time.monotonic() > end:
                return next((self.numbers[other] for other in silent or ended), None)
            time.sleep(_CHECK_SECONDS)

    def wait(self, there: Callable[[int], bool], what: str, among: Sequence[int] | None = None) -> None:
        """Wait until `there(rank)` holds for all others (or for `among`); PeerFailedError: one has not `what` in time."""
        waiting = list(self._others if among is None else among)
        began = checked = time.monotonic()
        while True:
            waiting = [other for other in waiting if not there(other)]
            if not waiting:
                return
            now = time.monotonic()
            if now - checked > _CHECK_SECONDS or now == began:
                checked = now
                self._check(waiting, there, now - began, what)
            waited = now - began
            time.sleep(2e-5 if waited < 1e-3 else 2e-4 if waited < 0.1 else 1e-3)

    def _check(self, waiting: Sequence[int], there: Callable[[int], bool], waited: float, what: str) -> None:
        for other in self._others:
            length = self.posted(other, _GIVEN_UP)
            if length:
                text = os.pread(self._file, length, self._place(other, _GIVEN_UP + 8))  # may be cut within a character
                raise self._failed(other, text.decode(errors="replace"))
        for other in waiting:
            if other != self.rank and self._has_ended(other) and not there(other):
                raise self._failed(other, f"its process ended before it had {what}")
            if waited > self._timeout_s:
                raise self._failed(other, f"it has not {what} within {self._timeout_s:.0f} s")

    def _failed(self, other: int, message: str) -> PeerFailedError:
        return PeerFailedError(self.numbers[other], message)

    def _has_ended(self, other: int) -> bool:
        poll = select.poll()
        poll.register(self._alive[other], select.POLLIN)
        return bool(poll.poll(0))

    def _place(self, rank: int, offset: int) -> int:
        return rank * self._stride + offset
