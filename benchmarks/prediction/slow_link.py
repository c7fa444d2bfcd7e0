"""The CPU device with a link of a known rate: copies between host and device run on threads of their own, beside compute.

Each direction is a queue that its thread works off in order. A copy takes its bytes over the rate, whatever the machine
does meanwhile: the thread copies, and sleeps until the link would be done (a token bucket). So the engine meets the
schedule that a GPU would give it, overlapped copies and all, at a rate that is known.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice, Event, Stream

_COPY = torch.ops.aten.copy_.default


class SlowLinkDevice(CpuDevice):
    """Host memory under a byte budget, over a link of so many bytes per second in each direction."""

    copies_overlap = True

    def __init__(self, bytes_per_s: float, budget_bytes: int | None = None) -> None:
        super().__init__(budget_bytes)
        self.name = f"cpu over {bytes_per_s / 2**20:g} MiB/s"
        self._ways = {stream: _Way(bytes_per_s) for stream in (Stream.SWAP_IN, Stream.SWAP_OUT)}

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        if stream not in self._ways:
            return super().on(stream)
        context = _Queued(self._ways[stream])
        return context if self._watch is None else self._watch(stream, context)

    def record(self, stream: Stream) -> Event:
        return self._ways[stream].record() if stream in self._ways else super().record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        if stream in self._ways:
            self._ways[stream].put(event.synchronize)
        else:  # compute runs on the thread that issues it
            event.synchronize()

    def timestamp(self, stream: Stream) -> object:
        return self._ways[stream].record() if stream in self._ways else super().timestamp(stream)

    def read_timestamps(self, moments: Sequence[object]) -> list[float]:
        return [moment.passed_ms() if isinstance(moment, _Passing) else float(moment) for moment in moments]  # type: ignore[arg-type]


class _Way:
    """One direction of the link."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="slow-link").start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> _Passing:
        passing = _Passing()
        self.put(lambda: passing.passes(self._settle()))
        return passing

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Carry the bytes; the link is busy until they would be there."""
        self._free_at = max(self._free_at, time.perf_counter()) + target.nbytes / self._bytes_per_s
        target.copy_(source)

    def _settle(self) -> float:
        """Wait until the link is free, and return that time."""
        while (left := self._free_at - time.perf_counter()) > 0:
            time.sleep(left)
        return time.perf_counter()

    def _run(self) -> None:
        while True:
            self._work.get()()


class _Passing:
    """A point in a direction's order."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._at = 0.0

    def passes(self, at: float) -> None:
        self._at = at
        self._there.set()

    def synchronize(self) -> None:
        self._there.wait()

    def query(self) -> bool:
        return self._there.is_set()

    def passed_ms(self) -> float:
        self._there.wait()
        return self._at * 1e3


class _Queued(TorchDispatchMode):
    """Copies that may be late are; anything else waits for them, and is done at once."""

    def __init__(self, way: _Way) -> None:
        super().__init__()
        self._way = way

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if func is _COPY and late:
            target, source = args[0].data, args[1].data
            self._way.put(lambda: self._way.copy(target, source))
            return args[0]
        if not func.is_view and "empty" not in str(func):
            self._way.record().synchronize()
        return func(*args, **kwargs)
