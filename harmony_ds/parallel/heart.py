"""Signs of life: a thread of each process counts up in shared memory, and looks whether the others' do.

A process that has ended is found by its descriptor. One that is stopped (SIGSTOP, a debugger) is not, and whoever waits for
it would wait as long as `torch.distributed` does: half an hour.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harmony_ds.errors import PeerFailedError

if TYPE_CHECKING:
    from harmony_ds.parallel.board import Board

_logger = logging.getLogger(__name__)

BEAT_S = 0.5
SILENCE_S = 60.0
"""Without a beat for so long a process is taken for stopped: code may hold the interpreter's lock for a while."""
GONE_BEATS = 4
"""An exchange with a process that is gone for so many beats never ends: what that one had sent has arrived by then."""
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
        self._gone_beats = 0
        self.cut_off: Callable[[PeerFailedError], None] | None = None
        """Ends exchanges that are under way on the device; called, maybe often, while another process is gone."""
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
        self.cut_off = None  # which holds process groups

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
            self._look_for_gone(board)
            del board

    def _look_for_gone(self, board: Board) -> None:
        gone = board.gone()
        self._gone_beats = 0 if gone is None else self._gone_beats + 1
        if gone is not None and self._gone_beats > GONE_BEATS and self.cut_off is not None:
            self.cut_off(PeerFailedError(gone, "its process is gone, in an exchange between devices"))
