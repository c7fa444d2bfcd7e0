"""Processes forked from one that has imported torch, so that each run to be killed starts in a fraction of a second."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmony_ds.checkpoint import tensor_files

Message = dict[str, Any]
Tell = Callable[[Message], None]
_PART_BYTES = 1 << 15  # files are torn between parts of this size
LONG_S = 600.0


@dataclass(frozen=True)
class Ended:
    """Result of a process: its messages, what it printed, its exit code, and the time of its end (the clock all share)."""

    told: list[Message]
    printed: str
    code: int
    at: float

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    def all(self, what: str) -> list[Message]:
        return [line for line in self.told if what in line]

    def last(self, what: str) -> Any:
        return next((line[what] for line in reversed(self.told) if what in line), None)


class Forked:
    """A process that runs `act`."""

    def __init__(self, act: Callable[[Tell], None]) -> None:
        self._pipe, write_end = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            _be(act, write_end)
        os.close(write_end)

    def end(self, after_s: float = LONG_S) -> Ended:
        """Wait for its end; it is killed after so many seconds."""
        killer = threading.Timer(after_s, os.kill, (self._process, signal.SIGKILL))
        killer.start()
        with os.fdopen(self._pipe, errors="replace") as pipe:
            lines = pipe.read().splitlines()
        at = time.monotonic()
        killer.cancel()
        _, status = os.waitpid(self._process, 0)
        told = [json.loads(line) for line in lines if line.startswith("{")]
        printed = "\n".join(line for line in lines if line and not line.startswith("{"))
        return Ended(told, printed, os.waitstatus_to_exitcode(status), at)


def _be(act: Callable[[Tell], None], write_end: int) -> None:
    def tell(message: Message) -> None:
        os.write(write_end, f"\n{json.dumps(message)}\n".encode())

    code = 1
    try:
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        act(tell)
        code = 0
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


class Moments:
    """Counts what this process does in `folder` from now on, and kills it before the chosen moment."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.count = 0
        self._folder = str(folder)
        self._fatal = fatal
        write, fsync = tensor_files._NewFile.write, os.fsync

        def counted_write(file: Any, content: memoryview) -> int:
            for start in range(0, len(content), _PART_BYTES):
                self()
                write(file, content[start : start + _PART_BYTES])
            return len(content)

        def counted_fsync(handle: int) -> None:
            self()
            fsync(handle)

        tensor_files._NewFile.write = counted_write  # type: ignore[method-assign]
        os.fsync = counted_fsync
        sys.addaudithook(self._audited)

    def __call__(self) -> None:
        self.count += 1
        if self.count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        named = event in ("open", "os.rename", "os.mkdir") and any(self._folder in str(a) for a in arguments)
        if named or event in ("os.remove", "os.rmdir"):  # these get names relative to an open folder
            self()
