"""Work on streams, and when it ran or will run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harmony_ds.scheduler.plan import Task, TaskKind

HOST, SWAP_IN, COMPUTE, SWAP_OUT, UPDATE = STREAMS = ("host", "swap_in", "compute", "swap_out", "update")
PEER, DISK = "peer", "disk"
"""Beside these, where there are several devices: what they send each other; and where weights come from a disk."""


def of_device(stream: str, device: int) -> str:
    """Return the name of a stream, or of a link, of one of several devices, which share the host."""
    return stream if not device or stream in (HOST, UPDATE) else f"{stream} {device}"


def streams_of(devices: int, peers: bool) -> tuple[str, ...]:
    """Return the streams of a process's devices, and of their host. `peers`: other processes have devices, too."""
    own = (SWAP_IN, COMPUTE, SWAP_OUT, PEER)
    more = tuple(of_device(stream, device) for device in range(1, devices) for stream in own)
    return (*STREAMS, *((PEER,) if peers or more else ()), *more)


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a stream, predicted or executed: when it ran, and its task or tasks."""

    stream: str
    begin_ms: float
    end_ms: float
    tasks: tuple[Task, ...]

    @property
    def name(self) -> str:
        """The name by which its tasks print; the host takes the norm of gradients that have arrived, or their sum."""
        first, more = self.tasks[0], len(self.tasks) - 1
        arrived = self.stream == UPDATE and first.kind is TaskKind.SWAP_OUT
        return f"{'gradients ' if arrived else ''}{first}{f'+{more}' if more else ''}"


def busy_of(spans: Sequence[Span]) -> dict[str, float]:
    """How long each stream works, in ms; what shares a link, host memory or cores takes longer than it would alone."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for span in spans:
        busy[span.stream] = busy.get(span.stream, 0.0) + span.end_ms - span.begin_ms
    return busy
