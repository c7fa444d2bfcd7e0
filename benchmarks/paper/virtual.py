"""Devices in virtual time: the engine runs as it is, while compute and copies take the time of a given profile.

A `VirtualDevice` is the CPU device with streams that keep clocks. What is issued on a stream is done at once, as there, but
counts as done only when its time is over: it begins when the stream has done what was issued before and every event that
the stream waits for has passed. Events pass at that time, and a host thread that waits for one sleeps until then. The
host's own work takes what it takes; it includes the real arithmetic, so models are small and profiles slow.

How compute time enters: `keep_pace` puts it around the engine's layer calls, and the engine plans with the same profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harmony_ds.device import CpuDevice, Device, DeviceGroup, Event, Stream
from harmony_ds.model.trees import tensors_in
from harmony_ds.scheduler.profile import Machine, Profile

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclass(frozen=True, slots=True)
class Pace:
    """A profile: milliseconds of one layer call with one micro-batch, and bytes per millisecond of each kind of copy."""

    forward_ms: float
    propagate_ms: float
    swap: float
    peer: float

    def of(self, measured: Profile) -> Profile:
        """Return the bytes that were measured, with these times and rates."""
        ms = {
            "forward_ms": self.forward_ms,
            "backward_ms": self.forward_ms + self.propagate_ms,
            "fused_ms": self.forward_ms + self.propagate_ms,
            "propagate_ms": self.propagate_ms,
        }
        tables = tuple(
            (rows, replace(table, costs=tuple(replace(call, **ms) for call in table.costs), head_ms=0.0, tail_ms=0.0))
            for rows, table in measured.tables
        )
        return replace(measured, tables=tables, machine=self.machine(measured.machine.device_bytes))

    def machine(self, budget_bytes: int | None) -> Machine:
        """Return the rates for the planner; updates and issuing are the host's own, about what this engine takes."""
        return Machine(
            name="virtual",
            copies_overlap=True,
            swap_in_bytes_per_ms=self.swap,
            swap_out_bytes_per_ms=self.swap,
            link_bytes_per_ms=2 * self.swap,
            update_elements_per_ms=1e5,
            norm_elements_per_ms=1e6,
            host_bytes_per_ms=1e9,
            device_update_elements_per_ms=1e6,
            task_ms=0.3,
            device_bytes=budget_bytes,
            peer_bytes_per_ms=self.peer,
        )


def now_ms() -> float:
    return time.perf_counter() * 1e3


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """A moment of the clock that all streams and threads share."""

    at_ms: float

    def synchronize(self) -> None:
        while (left := self.at_ms - now_ms()) > 0:
            time.sleep(left / 1e3)

    def query(self) -> bool:
        return now_ms() >= self.at_ms


class VirtualDevice(CpuDevice):
    """Streams with clocks, over links of so many bytes per ms; `computes`: compute takes the time that it takes here."""

    copies_overlap = True

    def __init__(self, swap: float, peer: float, budget_bytes: int | None = None, *, computes: bool = False) -> None:
        super().__init__(budget_bytes)
        self.name = f"virtual, {swap / 2**20 * 1e3:g} MiB/s"
        self._rates = dict.fromkeys(Stream, swap) | {Stream.PEER: peer}
        self._computes = computes
        self._free_ms = dict.fromkeys(Stream, 0.0)  # when each stream has done what was issued so far

    def take(self, stream: Stream, duration_ms: float) -> None:
        """Issue work of so many milliseconds on `stream`."""
        self._free_ms[stream] = max(self._free_ms[stream], now_ms()) + duration_ms

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        if stream is Stream.COMPUTE:
            yield
            return
        with _Copied() as copied:
            yield
        self.take(stream, copied.nbytes / self._rates[stream])

    def record(self, stream: Stream) -> Event:
        return VirtualEvent(self._free_ms[stream])

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, VirtualEvent)
        self._free_ms[stream] = max(self._free_ms[stream], event.at_ms)
        if self._computes and stream is Stream.COMPUTE:  # by the thread that issues it
            event.synchronize()

    def timestamp(self, stream: Stream) -> object:
        return max(self._free_ms[stream], now_ms())


class _Copied(TorchDispatchMode):
    """Counts the bytes of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            self.nbytes += result.numel() * result.element_size()
        return result


def devices_of(pace: Pace, count: int) -> Device:
    """Return so many virtual devices, as one process drives them."""
    made = [VirtualDevice(pace.swap, pace.peer) for _ in range(count)]
    return made[0] if count == 1 else DeviceGroup(made)


def keep_pace(engine: Any, device: Device, pace: Pace) -> None:
    """Let each later layer call of `engine` take the time of `pace` on its device's compute stream, and be planned so."""
    assembly = engine._state
    profiler = assembly.planner.profiler
    measured = profiler.profile
    profiler.profile = lambda *wanted: pace.of(measured(*wanted))
    calls = assembly.runtime.layer_calls
    attached, backward = calls.run_attached, calls.backward

    def take(duration_ms: float) -> None:
        here = device.members[device.number] if isinstance(device, DeviceGroup) else device
        assert isinstance(here, VirtualDevice)
        here.take(Stream.COMPUTE, duration_ms)

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            take(pace.forward_ms)
            return result

        return timed

    def timed_attached(*args: Any, **kwargs: Any) -> Any:
        outputs = attached(*args, **kwargs)
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:  # before the gradient goes on to where the layer's inputs came from
                tensor.register_hook(timed_gradient)
        return outputs

    def timed_gradient(_: Tensor) -> None:
        take(pace.propagate_ms)

    def timed_backward(call: Any, *args: Any) -> None:
        again = 0.0 if call.graph else pace.forward_ms
        backward(call, *args)
        take(again + pace.propagate_ms)

    calls.forward, calls.run_attached = after(calls.forward), after(timed_attached)
    calls.backward, calls.recompute = timed_backward, after(calls.recompute)
