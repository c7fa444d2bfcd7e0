"""Books every copy between host and device where it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from harmony_ds.device.base import Device


class Kind(Enum):
    """What a copy carries. RESIDENT: whatever of packs that live on the device, when they come there, when somebody looks
    at them on the host, and their gradients' norms.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    DATA = "data"
    RESIDENT = "resident"


SWAPPED = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.ACTIVATIONS)
"""What a plan says of each step."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes copied, by direction and kind; between devices of one process by their numbers."""

    host_to_device: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    device_to_host: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    between_devices: dict[tuple[int, int], int] = field(default_factory=dict)
    links: Counter[tuple[int, bool]] = field(default_factory=Counter)
    """What steps swap over the link of each device: by its number, and whether that is into it."""


class Ledger:
    """Counts since the last `close`."""

    def __init__(self, device: Device | None = None) -> None:
        """`device`: of the copies; if it is a group, its current one."""
        self._traffic = Traffic()
        self._device = device

    def book_in(self, kind: Kind, nbytes: int) -> None:
        """`nbytes` were copied from host to device."""
        self._traffic.host_to_device[kind] += nbytes
        self._book_link(kind, nbytes, into=True)

    def book_out(self, kind: Kind, nbytes: int) -> None:
        """`nbytes` were copied from device to host."""
        self._traffic.device_to_host[kind] += nbytes
        self._book_link(kind, nbytes, into=False)

    def _book_link(self, kind: Kind, nbytes: int, into: bool) -> None:
        if self._device is not None and kind in SWAPPED:
            self._traffic.links[self._device.number, into] += nbytes

    def book_peer(self, source: int, target: int, nbytes: int) -> None:
        """`nbytes` of activations, or of their gradients, were copied from one device to another."""
        between = self._traffic.between_devices
        between[source, target] = between.get((source, target), 0) + nbytes

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What is copied while this is open belongs to no step: measuring, evaluation."""
        before = self.drain()
        try:
            yield
        finally:
            self._traffic = before

    def drain(self) -> Traffic:
        """What was booked; counting starts again from zero."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic
