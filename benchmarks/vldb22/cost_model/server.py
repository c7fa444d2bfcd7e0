"""The server that a schedule is simulated on: constants, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Server:
    """Bandwidths in bytes per ms at full speed.

    Attributes:
        swap: between the host and the devices, each way; the devices that work share it.
        peer: between two devices, each way.
        message: of the host's memory, when one process hands a tensor to another; the devices that work share it.
        free_ms: what it takes to free a task's memory.
    """

    swap: float
    peer: float
    message: float
    free_ms: float


HARMONY_VLDB22 = Server(swap=11.5 * _GIB / 1000, peer=8.2 * _GIB / 1000, message=16 * _GIB / 1000, free_ms=40.0)
"""Four or eight GTX 1080 Ti on PCIe 3: the defaults of Harmony's scheduler (VLDB'22, msr-fiddle/harmony)."""
