"""Start the processes of an engine, ask them for steps and reports, and find out how they ended."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from harmony_ds.bench.child import ChildFailedError, merged, serve
from harmony_ds.bench.workload import Workload
from harmony_ds.model.patching import patched


class Child(AbstractContextManager["Child"]):
    """One engine in a process of its own, or in one for each device."""

    def __init__(self, engine: str, task: Workload) -> None:
        self._processes = [_EngineProcess(engine, task, rank) for rank in _ranks(task.devices)]

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the server in every process, once the engine is built; return the merged answers.

        Raises:
            ChildFailedError: a process raised, or ended.
        """
        for process in self._processes:
            with suppress(OSError):  # what ended it is the answer
                process.pipe.send((method, arguments))
        answers: dict[_EngineProcess, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            ready = wait([process.pipe for process in self._processes if process not in answers])
            for process in self._processes:
                if process.pipe in ready:  # the first to fail is heard, whichever rank it has
                    answers[process] = process.answer()
        return merged([answers[process] for process in self._processes])

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()


class _EngineProcess:
    """One process of an engine, which `child.serve` runs in, with its pipe and the file of what it prints."""

    def __init__(self, engine: str, task: Workload, rank: Mapping[str, str]) -> None:
        self._log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - lives as long as the process
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._log.name, engine, task))
        with _environment(task, rank):
            self._process.start()
        theirs.close()

    def answer(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] | ChildFailedError = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            answer = self._exit_error()
        if isinstance(answer, ChildFailedError):
            raise answer
        return answer

    def _exit_error(self) -> ChildFailedError:
        self._process.join()
        code = self._process.exitcode
        lines = [line.strip() for line in self._log if line.strip()]
        said = lines[-1] if lines else "it printed nothing"
        # The kernel kills the largest process when memory is short.
        return ChildFailedError(f"the process ended with status {code}: {said}", out_of_memory=code == -9)

    def end(self) -> None:
        """Kill the process: it waits for a request, or for one that failed."""
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._log.close()


def _ranks(devices: int) -> list[dict[str, str]]:
    """Return the environment that a launcher gives each of several processes of one training."""
    if devices == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)]


def _environment(task: Workload, rank: Mapping[str, str]) -> AbstractContextManager[object]:
    """Set the environment of a process that is started meanwhile: equal threads, of which none spins while it waits."""
    changed = {
        **rank,
        "OMP_NUM_THREADS": str(task.threads),
        "MKL_NUM_THREADS": str(task.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return patched((os.environ, name, value) for name, value in changed.items())
