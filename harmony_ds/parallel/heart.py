"""Signs of life: a thread of each process counts up in shared memory, and looks whether the others' do.

A process that has ended is found by its descriptor. One that is stopped (SIGSTOP, a debugger) is not, and whoever waits for
it would wait as long as `torch.distributed` does: half an hour.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harmony_ds.parallel.board import Board

_logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 60.0
"""Without a beat for so long a process is taken for stopped: code may hold the interpreter's lock for a while."""
STOPPED = 75
"""The exit code of a process that was left in a collective: EX_TEMPFAIL, a launcher may start it again."""


class Heart:
    """Beats, and watches, until `stop`.

    What is counted is this process's own beats: while it is stopped itself, nobody seems silent to it.
    """

    def __init__(self, board: Board, others: list[int]) -> None:
        self._board = weakref.ref(board)  # which ends with its engine, though nobody may have said so
        self._seen = dict.fromkeys(others, (-1, 0))  # the others' counts, and since how many beats of ours they stand
        self._exchanging = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, name="harmony_ds heartbeat", daemon=True)
        self._thread.start()

    def silence_s(self, other: int) -> float:
        """For how long it has given no sign of life."""
        return self._seen[other][1] * BEAT_S

    @contextmanager
    def in_collective(self) -> Iterator[None]:
        """A call that only the others can end: if one of them is silent for too long, this process ends."""
        self._exchanging += 1
        try:
            yield
        finally:
            self._exchanging -= 1

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _live(self) -> None:
        beats = 0
        while not self._stopped.wait(BEAT_S):
            board = self._board()
            if board is None:
                return
            beats += 1
            board.post_beat(beats)
            for other, (count, silent) in self._seen.items():
                now = board.beats_of(other)
                self._seen[other] = (now, 0) if now != count else (count, silent + 1)
                if self._exchanging and self.silence_s(other) > SILENCE_S:
                    _logger.critical(
                        "rank %d has given no sign of life for %.0f s, in the middle of an exchange of gradients: its "
                        "process is stopped. This process cannot go on, and ends.",
                        board.numbers[other],
                        self.silence_s(other),
                    )
                    os._exit(STOPPED)
            del board
