"""The board: shared memory in which each process of a server posts numbers and messages for the others to read.

Every process has a place on the board that only it writes:

    numbers     how far it is: one number for each `Posted`
    failure     why it cannot go on, once it cannot (a text; its length is a number)
    messages    two rows in turn: its message in agreement k; agreement k + 2 overwrites it (agreement.py)
    norms       a ring: its part of the global gradient norm number n (update_progress.py)
    versions    for every parameter: how many updates of its piece it has done (update_progress.py)

A writer writes the content first and then, with a second system call, the number that announces it, so that a reader
that sees the number sees the content. Readers poll, and so a wait can end with an error: when a process has given up, when
one that is waited for has ended (the kernel says so, by a pidfd), and when the time-out of `torch.distributed` is over.

torch.distributed could carry these messages: docs/parallel.md says what that would cost a step, and
`python -m benchmarks.agreements.run` measures it.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from harmony_ds.errors import PeerFailedError

NUMBER = struct.Struct("<q")
ROW_BYTES = 16384
NORMS = 64
NORM_BYTES = 16  # number and part of a norm


class Posted(IntEnum):
    """What a number on the board counts."""

    MESSAGE = 0
    """The last agreement for which the process has written its message."""
    MESSAGES_READ = 1
    """The last agreement for which it has read the messages of all others."""
    SLOT_FILLED = 2
    """The last reduction on the host for which it has left its gradients in a slot."""
    SLOTS_READ = 3
    """The last reduction on the host for which it has read all others' gradients."""
    FAILURE_BYTES = 4
    """The length of the text that says why it cannot go on; 0: it can."""


# Places of the contents in a process's part of the board; the numbers come first, each in a cache line of its own.
_CACHE_LINE = 64
_TEXT_BYTES = 4096
_FAILURE_PLACE = _CACHE_LINE * len(Posted)
MESSAGES_PLACE = _FAILURE_PLACE + _TEXT_BYTES
NORMS_PLACE = MESSAGES_PLACE + 2 * ROW_BYTES
VERSIONS_PLACE = NORMS_PLACE + NORMS * NORM_BYTES

_CHECK_SECONDS = 0.02
"""How often a waiting process checks whether the others are alive."""
_END_SECONDS = 2.0
"""How long a process takes to end at most, after its connections were closed."""


def board_bytes(processes: int, parameters: int) -> int:
    """Return the bytes of the board of a server."""
    return processes * _part_bytes(parameters)


def _part_bytes(parameters: int) -> int:
    return -(-(VERSIONS_PLACE + NUMBER.size * parameters) // 4096) * 4096


class Board:
    """The board of a server, as one of its processes sees it.

    Attributes:
        rank: of this process, among those of its server.
        size: the number of the server's processes.
        ranks: the ranks in the training of the server's processes.
        others: all ranks of the server but this process's.
    """

    def __init__(
        self,
        file: int,
        rank: int,
        pids: Sequence[int],
        parameters: int,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Open the board.

        Args:
            file: the descriptor of the shared memory, which begins with the board.
            rank: of this process, among those of its server.
            pids: of the server's processes.
            parameters: the number of the model's parameters.
            timeout_s: how long to wait for another process.
            ranks: in the training, of the server's processes (None: there are no others).
        """
        self._file = file
        self.rank, self.size = rank, len(pids)
        self.ranks = tuple(range(self.size) if ranks is None else ranks)
        self.others = [other for other in range(self.size) if other != rank]
        self._part_bytes = _part_bytes(parameters)
        self._timeout_s = timeout_s
        self._pidfds = {other: os.pidfd_open(pids[other]) for other in self.others}

    @property
    def world_rank(self) -> int:
        """The rank of this process in the training."""
        return self.ranks[self.rank]

    def close(self) -> None:
        """Close the handles of the other processes."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    # ---- posting and reading

    def post(self, what: Posted, number: int) -> None:
        """Set one of this process's numbers."""
        self.write(what * _CACHE_LINE, NUMBER.pack(number))

    def posted(self, other: int, what: Posted) -> int:
        """Return a number of process `other`; 0: it has posted none."""
        return int(NUMBER.unpack(self.read(other, what * _CACHE_LINE, NUMBER.size))[0])

    def write(self, place: int, content: bytes) -> None:
        """Write into this process's part of the board."""
        os.pwrite(self._file, content, self.rank * self._part_bytes + place)

    def read(self, other: int, place: int, nbytes: int) -> bytes:
        """Read from the part of process `other`."""
        return os.pread(self._file, nbytes, other * self._part_bytes + place)

    # ---- failures

    def give_up(self, why: str) -> None:
        """Post that this process cannot go on; processes that wait for any other raise PeerFailedError."""
        text = why.encode()[:_TEXT_BYTES]
        self.write(_FAILURE_PLACE, text)
        self.post(Posted.FAILURE_BYTES, len(text))

    def failed(self, other: int, message: str) -> PeerFailedError:
        """Return the error that names process `other`."""
        return PeerFailedError(self.ranks[other], message)

    def find_cause(self) -> PeerFailedError | None:
        """Return the error that names the process by which this one has lost a connection; None: no process is known.

        The end of a process that had not given up before is the cause of all other ends. Where no process ends like that
        (connections can break by themselves), the reason of one that has given up is passed on.
        """
        deadline = time.monotonic() + _END_SECONDS
        while True:
            for other in self.others:
                if self._has_ended(other) and not self.posted(other, Posted.FAILURE_BYTES):
                    return self.failed(other, "its process ended in an exchange with others")
            if time.monotonic() > deadline:
                return self._posted_failure()
            time.sleep(_CHECK_SECONDS)

    def _posted_failure(self) -> PeerFailedError | None:
        """Return the error of a process that has given up, with the reason that it has posted; None: no process has."""
        for other in self.others:
            length = self.posted(other, Posted.FAILURE_BYTES)
            if length:
                text = self.read(other, _FAILURE_PLACE, length)  # may have been cut within a character
                return self.failed(other, text.decode(errors="replace"))
        return None

    def _has_ended(self, other: int) -> bool:
        poll = select.poll()
        poll.register(self._pidfds[other], select.POLLIN)
        return bool(poll.poll(0))

    # ---- waiting

    def wait(self, is_done: Callable[[int], bool], what: str, among: Sequence[int] | None = None) -> None:
        """Wait until `is_done(other)` holds for every process.

        Args:
            is_done: reads from the board what process `other` has posted.
            what: the thing waited for, as the end of "it has not ..."; for errors.
            among: the processes to wait for (None: all others).

        Raises:
            PeerFailedError: a process has given up, has ended, or took too long.
        """
        waiting = list(self.others if among is None else among)
        began = time.monotonic()
        next_check = began  # the first check comes at once: what has given up is not waited for
        while True:
            waiting = [other for other in waiting if not is_done(other)]
            if not waiting:
                return
            now = time.monotonic()
            if now >= next_check:
                next_check = now + _CHECK_SECONDS
                self._check_failures(waiting, is_done, now - began, what)
            time.sleep(_pause_seconds(now - began))

    def _check_failures(
        self, waiting: Sequence[int], is_done: Callable[[int], bool], waited_s: float, what: str
    ) -> None:
        """Raise PeerFailedError if waiting any longer makes no sense."""
        failure = self._posted_failure()
        if failure is not None:
            raise failure
        for other in waiting:
            # It may have posted what is waited for just before it ended.
            if other != self.rank and self._has_ended(other) and not is_done(other):
                raise self.failed(other, f"its process ended before it had {what}")
            if waited_s > self._timeout_s:
                raise self.failed(other, f"it has not {what} within {self._timeout_s:.0f} s")


def _pause_seconds(waited_s: float) -> float:
    """Return how long to sleep before the next look at the board: the longer the wait was, the longer."""
    if waited_s < 1e-3:
        return 2e-5
    return 2e-4 if waited_s < 0.1 else 1e-3
