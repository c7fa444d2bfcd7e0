"""The process of one engine: JSON lines in, JSON lines out. It lives for the whole benchmark and waits in between.

    {"engine": "harmony", "workload": {...}, "core": null}   ->  {"ready": true}
    {"run": 2, "first": 4}       two steps, numbers 4 and 5  ->  {"losses": [...], "ms": ..., "drained_ms": ..., ...}
    {"profile": 2, "first": 6}   the same under cProfile     ->  {"parts": {...}, "functions": [...]}
    {"settings": true}                                       ->  {...}

An exception ends the process, as {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib import import_module
from typing import Any, TextIO

import torch
from profile_parts import profiled
from workload import Engine, Workload


def main() -> None:
    replies = _own_stdout()
    try:
        engine: Engine | None = None
        for line in sys.stdin:
            command = json.loads(line)
            if "engine" in command:
                workload, engine = _start(command)
                reply: dict[str, Any] = {"ready": True}
            else:
                assert engine is not None
                reply = _obey(command, workload, engine)
            _say(replies, reply)
    except Exception as error:  # noqa: BLE001 - any failure becomes a row of the report
        first_line = str(error).partition("\n")[0]
        _say(replies, {"error": f"{type(error).__name__}: {first_line}"})
    replies.flush()
    os._exit(0)  # background threads and process groups have nothing left to do


def _own_stdout() -> TextIO:
    """The pipe to the driver. What libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _start(command: dict[str, Any]) -> tuple[Workload, Engine]:
    torch.set_num_threads(1)
    workload = Workload(**command["workload"])
    return workload, import_module(command["engine"]).build(workload)


def _obey(command: dict[str, Any], workload: Workload, engine: Engine) -> dict[str, Any]:
    if "run" in command:
        return _run(workload, engine, command["first"], command["run"])
    if "profile" in command:
        groups = [workload.batches(command["first"] + index) for index in range(command["profile"])]
        return profiled(lambda: [engine.step(group).item() for group in groups])
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**engine.settings(), "process_peak_bytes": peak_kib * 1024, "affinity": len(os.sched_getaffinity(0))}


def _run(workload: Workload, engine: Engine, first: int, count: int) -> dict[str, Any]:
    """Steps back to back. The clock stops at the last loss, and once more when nothing is under way any longer.

    CPU time is that of all threads, to the same end.
    """
    groups = [workload.batches(first + index) for index in range(count)]
    cpu = time.process_time()
    start = time.perf_counter()
    losses = [engine.step(group).item() for group in groups]
    computed = time.perf_counter()
    engine.drain()
    drained = time.perf_counter()
    return {
        "losses": losses,
        "ms": (computed - start) * 1e3,
        "drained_ms": (drained - start) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
    }


if __name__ == "__main__":
    main()
