"""The driver's side of the pipe: starts an engine's process, sends it commands, reads its answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from harmony_ds.bench.workload import Workload


class ChildFailedError(Exception):
    """The engine's process raised or ended; the message is what it said."""

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class Child:
    """One engine in a process of its own, which runs `program`. A context manager."""

    def __init__(
        self,
        engine: str,
        task: Workload,
        core: int | None = None,
        program: Sequence[str] = ("-m", "harmony_ds.bench.child"),
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_environment(task)},
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        self._first = {"engine": engine, "task": task.as_json()}

    def start(self) -> None:
        """Builds the engine.

        Raises:
            ChildFailedError: it cannot be built.
        """
        self.ask(self._first)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to `command`.

        Raises:
            ChildFailedError: there is none.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._last_words()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildFailedError(answer["error"], answer["out_of_memory"])
        return answer

    def _last_words(self) -> ChildFailedError:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        killed = code == -9  # what the kernel does to the largest process when memory is short
        said = lines[-1] if lines else "it said nothing"
        return ChildFailedError(f"the process ended with status {code}: {said}", out_of_memory=killed)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _environment(task: Workload) -> dict[str, str]:
    """As many threads for everyone, and none that spins while it waits."""
    threads = str(task.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])),  # noqa: PTH109
    }
