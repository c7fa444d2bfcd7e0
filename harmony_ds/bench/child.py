"""Run one engine in a process of its own, and answer the driver (processes.py), which asks for steps and reports."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harmony_ds.bench.engines import adapter
from harmony_ds.bench.engines.adapter import Engine
from harmony_ds.bench.workload import Batch, Workload


class ChildFailedError(Exception):
    """The engine's process raised or ended; the message is its last line."""

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)  # with which a pickle makes it anew, and then sets attributes
        self.out_of_memory = out_of_memory


class Server:
    """An engine in its process; each public method answers one kind of request."""

    def __init__(self, name: str, task: Workload) -> None:
        torch.set_num_threads(task.threads)
        self.task = task
        self._rank = int(os.environ.get("RANK", "0"))
        self._on_cuda = task.device == "cuda"
        if self._on_cuda:
            torch.cuda.set_device(self._rank)
            total = torch.cuda.get_device_properties(self._rank).total_memory
            allowed = total if task.memory_gib is None else task.memory_gib * 2**30
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
        self.engine: Engine = adapter(name).build(task)
        self._step = 0

    def run(self, count: int) -> dict[str, Any]:
        """Take the next `count` steps back to back, and time them until their last update has ended."""
        first, self._step = self._step, self._step + count
        groups = [self.task.batches(step, self._rank) for step in range(first, self._step)]
        start = time.perf_counter()
        losses = [float(self.engine.step(group)) for group in groups]
        self.engine.drain()
        return {"first": first, "losses": losses, "drained_ms": (time.perf_counter() - start) * 1e3}

    def report(self) -> dict[str, Any]:
        """Return the engine's report, peaks of memory (of several processes each its share of what is shared), and counts.

        A step of its own is counted: bytes that are copied, as CUDA's profiler sees them, and sent to other processes.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.task.devices > 1:
            peak = psutil.Process().memory_full_info().pss
        report: dict[str, Any] = {"host_peak_bytes": peak}
        batches = self.task.batches(self._step, self._rank)
        if self._on_cuda:
            report["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        report |= self.engine.report()
        if self._on_cuda:
            report["copied_bytes"] = self._copied_bytes(batches)
        # harmony_ds counts itself, and takes no modes of torch.
        if self.task.devices > 1 and "sent_bytes" not in report:
            with SentBytes(self.task.devices) as sent:
                self.engine.step(batches)
            report["sent_bytes"] = sent.nbytes
        return report

    def _copied_bytes(self, batches: list[Batch]) -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.engine.step(batches)
            self.engine.drain()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return copied_bytes(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


class SentBytes(TorchDispatchMode):
    """Counter of the bytes that one of `size` processes must send at least in collectives, a ring's share of the whole."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self._share = 0, (size - 1) / size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func._schema.name)
        if name.startswith("c10d::"):  # the whole is what is gathered, or what is reduced: the larger argument
            passes = 2 if name.startswith("c10d::allreduce") else 1
            sizes = [sum(one.nbytes for one in tree_leaves(arg) if isinstance(one, Tensor)) for arg in args]
            self.nbytes += int(self._share * passes * max(sizes, default=0))
        return func(*args, **dict(kwargs or {}))


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the answers of several processes: losses are means, host memory the sum, other numbers the largest."""
    found = dict(answers[0])
    for key, value in found.items():
        if key == "losses":
            found[key] = [sum(of_step) / len(answers) for of_step in zip(*(one[key] for one in answers), strict=True)]
        elif key == "host_peak_bytes":
            found[key] = sum(one[key] for one in answers)
        elif isinstance(value, (int, float)):
            found[key] = max(one[key] for one in answers)
    return found


def serve(pipe: Connection, log: str, name: str, task: Workload) -> None:
    """Answer (method, arguments) until the pipe is closed; a ChildFailedError is the last answer.

    Args:
        log: the file for all that is printed.
    """
    into = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(into, stream)
    try:
        server = Server(name, task)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(server, method)(*arguments))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - any failure becomes a row of the report
        first_line = str(error).strip().partition("\n")[0]
        out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error)
        pipe.send(ChildFailedError(f"{type(error).__name__}: {first_line}", out_of_memory))
    sys.stderr.flush()
    os._exit(0)  # background threads and process groups have nothing left to do


def copied_bytes(events: list[dict[str, Any]]) -> dict[str, int]:
    """Sum up the copies in a Chrome trace of torch's profiler."""
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    marks = {"host_to_device": "HtoD", "device_to_host": "DtoH"}
    return {
        way: sum(one.get("args", {}).get("bytes", 0) for one in copies if mark in one["name"])
        for way, mark in marks.items()
    }
