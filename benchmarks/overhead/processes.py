"""The driver's side of the pipe: starts an engine's process, sends it commands, reads its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workload import Workload

# One thread everywhere: engines are compared by what one core has to do.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ChildFailedError(Exception):
    """The engine's process raised or ended; the message is what it said."""


class Child:
    """One engine in a process of its own."""

    def __init__(self, label: str, engine: str, workload: Workload, core: int | None) -> None:
        self.label = label
        self.error: str | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        self._first = {"engine": engine, "workload": asdict(workload)}

    def start(self) -> None:
        """Builds the engine."""
        self.ask(self._first)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to `command`.

        Raises:
            ChildFailedError: there is none; `error` says why from now on.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            self.error = answer["error"]
            raise ChildFailedError(self.error)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"the process ended with status {code}: {lines[-1] if lines else 'it said nothing'}"

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
