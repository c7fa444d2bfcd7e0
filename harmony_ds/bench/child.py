"""The process of one engine: JSON lines in, JSON lines out.

    {"engine": "harmony", "task": {...}}     ->  {"ready": true, "settings": {...}}
    {"run": 2, "first": 4}    steps 4 and 5  ->  {"losses": [...], "ms": ..., "drained_ms": ..., "cpu_ms": ...}
    {"count": 6}              step 6, its copies counted by the CUDA profiler  ->  {"host_to_device": ..., ...}
    {"report": true}                         ->  {...}

An exception ends the process, as {"error": "...", "out_of_memory": true or false}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from harmony_ds.bench.engines import Engine, adapter
from harmony_ds.bench.workload import Workload
from harmony_ds.errors import DoesNotFitError, UnsupportedError

_GIB = 2**30


def main(kind: type[Server] | None = None) -> None:
    """Serves until the pipe is closed."""
    replies = _own_stdout()
    try:
        server: Server | None = None
        for line in sys.stdin:
            command = json.loads(line)
            if "engine" in command:
                server = (kind or Server)(command["engine"], Workload(**command["task"]))
                reply: dict[str, Any] = {"ready": True}
            else:
                assert server is not None
                reply = server.obey(command)
            _say(replies, reply)
    except Exception as error:  # noqa: BLE001 - any failure becomes a row of the report
        first_line = str(error).strip().partition("\n")[0]
        _say(replies, {"error": f"{type(error).__name__}: {first_line}", "out_of_memory": _is_out_of_memory(error)})
    replies.flush()
    os._exit(0)  # background threads and process groups have nothing left to do


class Server:
    """The engine, and what can be asked of it."""

    def __init__(self, name: str, task: Workload) -> None:
        torch.set_num_threads(task.threads)
        self.task = task
        self._on_cuda = task.device == "cuda"
        if self._on_cuda and task.memory_gib is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, task.memory_gib * _GIB / total))
        reason = adapter(name).unavailable(task)
        if reason is not None:
            raise UnsupportedError(reason)
        self.engine: Engine = adapter(name).build(task)

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to one command but the first."""
        if "run" in command:
            return self._run(command["first"], command["run"])
        if "count" in command:
            return self._count(command["count"])
        return self._report()

    def _run(self, first: int, count: int) -> dict[str, Any]:
        """Steps back to back. The clock stops at the last loss, and once more when nothing is under way any longer.

        CPU time is that of all threads, to the same end.
        """
        groups = [self.task.batches(first + index) for index in range(count)]
        cpu, start = time.process_time(), time.perf_counter()
        losses = [float(self.engine.step(group)) for group in groups]
        computed = time.perf_counter()
        self.engine.drain()
        drained = time.perf_counter()
        return {
            "losses": losses,
            "ms": (computed - start) * 1e3,
            "drained_ms": (drained - start) * 1e3,
            "cpu_ms": (time.process_time() - cpu) * 1e3,
        }

    def _count(self, step: int) -> dict[str, Any]:
        """Bytes copied between host and device in one step, as CUDA's profiler saw them."""
        if not self._on_cuda:
            return {}
        from torch.profiler import ProfilerActivity, profile

        batches = self.task.batches(step)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            float(self.engine.step(batches))
            self.engine.drain()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return copied_bytes(events)

    def _report(self) -> dict[str, Any]:
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = {"host_peak_bytes": peak_kib * 1024, "affinity": len(os.sched_getaffinity(0))}
        if self._on_cuda:
            report["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            report["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
        return {**report, **self.engine.report()}


def copied_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Sums over the copies in a Chrome trace of torch's profiler."""
    sums = {"host_to_device": 0, "device_to_host": 0}
    for event in events:
        if event.get("cat") != "gpu_memcpy":
            continue
        nbytes = int(event.get("args", {}).get("bytes", 0))
        if "HtoD" in event["name"]:
            sums["host_to_device"] += nbytes
        elif "DtoH" in event["name"]:
            sums["device_to_host"] += nbytes
    return sums


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (DoesNotFitError, MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error)


def _own_stdout() -> TextIO:
    """The pipe to the driver. What libraries print goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
