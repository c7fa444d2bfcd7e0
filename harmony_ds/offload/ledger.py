"""Books every copy between host and device where it happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What a copy carries. RESIDENT: whatever of packs that live on the device, when they come there, when somebody looks
    at them on the host, and their gradients' norms.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"
    DATA = "data"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes copied, by direction and kind."""

    host_to_device: dict[Kind, int]
    device_to_host: dict[Kind, int]


@dataclass(slots=True)
class Ledger:
    """Counts since the last `close`."""

    _in: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    _out: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))

    def book_in(self, kind: Kind, nbytes: int) -> None:
        """`nbytes` were copied from host to device."""
        self._in[kind] += nbytes

    def book_out(self, kind: Kind, nbytes: int) -> None:
        """`nbytes` were copied from device to host."""
        self._out[kind] += nbytes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is copied while this is open belongs to no step: measuring, evaluation."""
        before = self._in, self._out
        self._in, self._out = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        try:
            yield
        finally:
            self._in, self._out = before

    def close(self) -> Traffic:
        """What was booked; counting starts again from zero."""
        traffic = Traffic(self._in, self._out)
        self._in, self._out = dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0)
        return traffic
