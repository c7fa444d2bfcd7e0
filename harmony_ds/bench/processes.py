"""The driver's side: starts an engine's process, asks it, and hears how it ended."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from harmony_ds.bench.child import Server, merged, serve
from harmony_ds.bench.workload import Workload
from harmony_ds.calls.patching import patched


class ChildFailedError(Exception):
    """The engine's process raised or ended; the message is what it said."""

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class Child:
    """One engine in a process of its own, or in one for each device, which answer as `kind` does. A context manager."""

    def __init__(self, engine: str, task: Workload, core: int | None = None, kind: type[Server] = Server) -> None:
        ranks = _ranks(task.devices)
        self._processes = [_Process(engine, task, core, kind, rank) for rank in ranks]

    def start(self) -> None:
        """Returns when the engine is built.

        Raises:
            ChildFailedError: it cannot be.
        """
        self._answer()

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What a method of the process's server returns.

        Raises:
            ChildFailedError: nothing.
        """
        for process in self._processes:
            process.send(method, arguments)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answers: dict[_Process, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            waiting = {process.pipe: process for process in self._processes if process not in answers}
            for pipe in wait(list(waiting)):
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = waiting[pipe].answer()
        return merged([answers[process] for process in self._processes])

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and len(self._processes) > 1  # the others may wait for the one that failed
        for process in self._processes:
            process.pipe.close()
        for process in self._processes:
            process.end(0.0 if failed else 30.0)


class _Process:
    def __init__(
        self, engine: str, task: Workload, core: int | None, kind: type[Server], rank: Mapping[str, str]
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - lives as long as the process
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self._log.name, kind, engine, task.as_json())
        self._process = context.Process(target=serve, args=arguments)
        with _environment(task, rank):
            self._process.start()
        theirs.close()
        if core is not None:
            assert self._process.pid is not None
            os.sched_setaffinity(self._process.pid, {core})

    def send(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self.pipe.send((method, arguments))
        except BrokenPipeError:
            raise self._last_words() from None

    def answer(self) -> dict[str, Any]:
        try:
            kind, answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._last_words() from None
        if kind == "error":
            raise ChildFailedError(*answer)
        found: dict[str, Any] = answer
        return found

    def _last_words(self) -> ChildFailedError:
        self._process.join()
        code = self._process.exitcode
        lines = [line.strip() for line in self._log if line.strip()]
        killed = code == -9  # what the kernel does to the largest process when memory is short
        said = lines[-1] if lines else "it said nothing"
        return ChildFailedError(f"the process ended with status {code}: {said}", out_of_memory=killed)

    def end(self, seconds: float) -> None:
        """Leaves it so long to end by itself."""
        self._process.join(timeout=seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()


def _ranks(devices: int) -> list[dict[str, str]]:
    """What a launcher tells each of several processes of one training."""
    if devices == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)]


def _environment(task: Workload, rank: Mapping[str, str]) -> AbstractContextManager[object]:
    """As a process finds it that is started meanwhile: as many threads for everyone, and none that spins while it waits."""
    threads = str(task.threads)
    changed = {
        **rank,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])),  # noqa: PTH109
    }
    return patched((os.environ, name, value) for name, value in changed.items())
