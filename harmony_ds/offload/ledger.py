"""The ledger: counts the bytes of every copy between host and device, where the copy is issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from harmony_ds.device.base import Device


class TrafficKind(Enum):
    """What is copied between host and device."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    """Stashed inputs of layers."""
    DATA = "data"
    """Inputs of the model, and buffers."""
    RESIDENT = "resident"
    """Weights, masters and optimizer state of resident packs, and norms of gradients."""


SWAPPED = (TrafficKind.WEIGHTS, TrafficKind.GRADIENTS, TrafficKind.ACTIVATIONS)
"""Kinds whose bytes per step a plan predicts."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes copied, by direction and kind; those between devices by the numbers of source and target."""

    host_to_device: dict[TrafficKind, int] = field(default_factory=lambda: dict.fromkeys(TrafficKind, 0))
    device_to_host: dict[TrafficKind, int] = field(default_factory=lambda: dict.fromkeys(TrafficKind, 0))
    between_devices: Counter[tuple[int, int]] = field(default_factory=Counter)
    links: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """Swapped bytes over each device's link: by the device's number, and whether they go into the device."""


@dataclass(slots=True)
class Beside:
    """Calls of the model without gradients, which belong to no step.

    Attributes:
        calls: how many there were.
        weight_bytes: weights that they swapped in.
    """

    calls: int = 0
    weight_bytes: int = 0


class Ledger:
    """Counter of the bytes copied since the last `drain`."""

    def __init__(self, device: Device | None = None) -> None:
        """Begin at zero; `device`: the device of the copies, or the group whose current member it is."""
        self._traffic = Traffic()
        self._beside = Beside()
        self._is_beside = False
        self._device = device

    def book_in(self, kind: TrafficKind, nbytes: int) -> None:
        """Count `nbytes` from the host to the device."""
        self._traffic.host_to_device[kind] += nbytes
        self._book_link(kind, nbytes, into=True)

    def book_out(self, kind: TrafficKind, nbytes: int) -> None:
        """Count `nbytes` from the device to the host."""
        self._traffic.device_to_host[kind] += nbytes
        self._book_link(kind, nbytes, into=False)

    def _book_link(self, kind: TrafficKind, nbytes: int, into: bool) -> None:
        if self._device is not None and kind in SWAPPED:
            self._traffic.links[self._device.number, into] += nbytes

    def book_peer(self, source: int, target: int, nbytes: int) -> None:
        """Count `nbytes` of activations, or of their gradients, from one device to another."""
        self._traffic.between_devices[source, target] += nbytes

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Count no copies while open: those of measuring and evaluation belong to no step."""
        before = self.drain()
        try:
            yield
        finally:
            self._traffic = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Count copies separately while open: those of a call without gradients belong to no step's plan."""
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
        """Return what `beside` has counted so far, and start again from zero."""
        beside, self._beside = self._beside, Beside()
        return beside

    def drain(self) -> Traffic:
        """Return the bytes booked so far, and start again from zero."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic
