"""The ledger: every copy between host and device is booked where it is issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from harmony_ds.device.base import Device


class TrafficKind(Enum):
    """Kinds of copies. RESIDENT: tensors of resident packs, in either direction, and norms of gradients."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    DATA = "data"
    RESIDENT = "resident"


SWAPPED = (TrafficKind.WEIGHTS, TrafficKind.GRADIENTS, TrafficKind.ACTIVATIONS)
"""Kinds whose bytes a plan predicts for each step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes copied, by direction and kind; between devices of one process, by their numbers."""

    host_to_device: dict[TrafficKind, int] = field(default_factory=lambda: dict.fromkeys(TrafficKind, 0))
    device_to_host: dict[TrafficKind, int] = field(default_factory=lambda: dict.fromkeys(TrafficKind, 0))
    between_devices: Counter[tuple[int, int]] = field(default_factory=Counter)
    links: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """Swapped bytes over each device's link, by the device's number and whether they go into it."""


@dataclass(slots=True)
class Beside:
    """Passes without gradients beside a step: how many calls of the engine, and the bytes of weights they swapped in."""

    calls: int = 0
    weight_bytes: int = 0


class Ledger:
    """Counts the bytes copied since the last `drain`."""

    def __init__(self, device: Device | None = None) -> None:
        """`device`: the copies' device, or group with its current member."""
        self._traffic = Traffic()
        self._beside = Beside()
        self._is_beside = False
        self._device = device

    def book_in(self, kind: TrafficKind, nbytes: int) -> None:
        self._traffic.host_to_device[kind] += nbytes
        self._book_link(kind, nbytes, into=True)

    def book_out(self, kind: TrafficKind, nbytes: int) -> None:
        self._traffic.device_to_host[kind] += nbytes
        self._book_link(kind, nbytes, into=False)

    def _book_link(self, kind: TrafficKind, nbytes: int, into: bool) -> None:
        if self._device is not None and kind in SWAPPED:
            self._traffic.links[self._device.number, into] += nbytes

    def book_peer(self, source: int, target: int, nbytes: int) -> None:
        """Book `nbytes` of activations, or of their gradients, from one device to another."""
        self._traffic.between_devices[source, target] += nbytes

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave out copies while the context is open, which belong to no step: of measuring, of evaluation."""
        before = self.drain()
        try:
            yield
        finally:
            self._traffic = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Count copies apart while the context is open: of a call without gradients, which is no part of a step's plan."""
        if self._is_beside:
            yield
            return
        self._is_beside, before = True, self.drain()
        try:
            yield
        finally:
            self._beside.calls += 1
            self._beside.weight_bytes += self._traffic.host_to_device[TrafficKind.WEIGHTS]
            self._is_beside, self._traffic = False, before

    def drain_beside(self) -> Beside:
        """Return what was counted apart so far, and start again from zero."""
        beside, self._beside = self._beside, Beside()
        return beside

    def drain(self) -> Traffic:
        """Return the bytes booked so far, and start again from zero."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic
