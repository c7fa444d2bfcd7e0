"""What runs in the process of one engine, and answers what it is asked."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harmony_ds.bench.engines import Engine, adapter
from harmony_ds.bench.workload import Workload
from harmony_ds.errors import DoesNotFitError, UnsupportedError

_GIB = 2**30


class Server:
    """The engine, and what can be asked of it: its public methods."""

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

    def run(self, first: int, count: int) -> dict[str, Any]:
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

    def count(self, step: int) -> dict[str, Any]:
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

    def report(self) -> dict[str, Any]:
        """The engine's own, and peaks of memory."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = {"host_peak_bytes": peak_kib * 1024, "affinity": len(os.sched_getaffinity(0))}
        if self._on_cuda:
            report["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            report["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
        return {**report, **self.engine.report()}


def serve(pipe: Connection, log: str, kind: type[Server], name: str, task: dict[str, Any]) -> None:
    """Answers (method, arguments) with ("answer", ...) until the pipe is closed; an error, ("error", ...), is the end.

    Args:
        log: the file for all that is printed.
    """
    into = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(into, stream)
    try:
        server = kind(name, Workload(**task))
        pipe.send(("answer", {}))
        while True:
            method, arguments = pipe.recv()
            pipe.send(("answer", getattr(server, method)(*arguments)))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - any failure becomes a row of the report
        first_line = str(error).strip().partition("\n")[0]
        pipe.send(("error", (f"{type(error).__name__}: {first_line}", _is_out_of_memory(error))))
    sys.stderr.flush()
    os._exit(0)  # background threads and process groups have nothing left to do


def copied_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Sums over the copies in a Chrome trace of torch's profiler."""
    sums = {"host_to_device": 0, "device_to_host": 0}
    for event in events:
        for direction, mark in (("host_to_device", "HtoD"), ("device_to_host", "DtoH")):
            if event.get("cat") == "gpu_memcpy" and mark in event["name"]:
                sums[direction] += int(event.get("args", {}).get("bytes", 0))
    return sums


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (DoesNotFitError, MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error)
