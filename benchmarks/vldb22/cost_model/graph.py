"""The tasks of one optimizer step on several devices, and what passes between them. Pure data; knows no costs.

    forward packs in order, then each backward pack from the last, followed at once by its update on the host

Every task runs all its micro-batches. Harmony-PP deals the tasks out in turn, forward and backward in one circle, and
all samples go through each; Harmony-DP has the whole list on every device, each with its share of the samples
(Harmony, VLDB'22). The last backward pack is fused: it has no forward task and no stash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harmony_ds.scheduler.partition import Bounds


class Mode(Enum):
    DATA_PARALLEL = "vDP"
    PIPELINE = "vPP"


class DeviceTaskKind(Enum):
    FORWARD = "FWD"
    BACKWARD = "BWD"
    UPDATE = "UPD"


class Content(Enum):
    """Contents of ports: of a layer's tensors, or of a range of layers."""

    INPUT = "X"
    STASH = "stash"
    GRADIENT = "dX"
    WEIGHTS = "W"
    WEIGHT_GRADIENTS = "dW"


class Medium(Enum):
    DATA = "DAT"
    """The data loader's, on the host."""
    PEER = "P2P"
    """From device to device."""
    MESSAGE = "MSG"
    """Over the host, from one device's process to another's, which may change the micro-batch size."""
    SWAP = "SWP"
    """Over the host, back to the same device."""
    PIN = "PIN"
    """It stays on the device."""
    SHARED = "SHM"
    """The weights and optimizer state that all processes share on the host."""
    REDUCE = "ARD"
    """All-reduced between devices."""


@dataclass(frozen=True, slots=True)
class Port:
    """One thing that a task takes or gives.

    Attributes:
        content: of which the bytes are those of the input of layer `first` (weights: of layers `first` to before `last`).
        medium: the way.
        first, last: layers.
        peer: index of the task at the other end (None: the host).
    """

    content: Content
    medium: Medium
    first: int
    last: int
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceTask:
    """One pack in one pass on one device.

    Attributes:
        index: in the graph.
        kind: forward, backward (with recomputation, or fused), or update.
        device: an update runs in the host process of this device.
        first, last: its layers, from `first` to before `last`.
        fused: a backward task that holds the loss.
        micro_batches: samples in each.
        takes, gives: what passes in and out.
    """

    index: int
    kind: DeviceTaskKind
    device: int
    first: int
    last: int
    fused: bool
    micro_batches: tuple[int, ...]
    takes: tuple[Port, ...]
    gives: tuple[Port, ...]

    @property
    def samples(self) -> int:
        return sum(self.micro_batches)

    def taken(self, content: Content) -> Port | None:
        """Return the first thing of this kind that it takes."""
        return next((port for port in self.takes if port.content is content), None)

    def given(self, *contents: Content) -> tuple[Port, ...]:
        """Everything of these kinds that it gives."""
        return tuple(port for port in self.gives if port.content in contents)


@dataclass(frozen=True, slots=True)
class Setup:
    """A run: the mode, the number of devices, and the samples of one optimizer step over all of them."""

    mode: Mode
    devices: int
    batch: int

    def share(self, rank: int) -> int:
        """Return the samples of one device: all of them in a pipeline; in data parallel the first devices have one more."""
        if self.mode is Mode.PIPELINE:
            return self.batch
        return self.batch // self.devices + (rank < self.batch % self.devices)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: sizes and cuts.

    Attributes:
        forward_micro_batch, backward_micro_batch: samples in one; the last one of a device may be smaller.
        forward: bounds of the forward packs, from 0 to where the last backward pack begins; (0,) where that is all.
        backward: bounds of the backward packs, from 0 to the number of layers.
    """

    forward_micro_batch: int
    forward: Bounds
    backward_micro_batch: int
    backward: Bounds

    def __post_init__(self) -> None:
        if self.forward[0] != 0 or self.backward[0] != 0 or self.forward[-1] != self.backward[-2]:
            raise ValueError(
                f"forward packs {self.forward} do not end where the last of the backward packs {self.backward} begins"
            )

    def __str__(self) -> str:
        """Return the sizes and the numbers of packs."""
        return (
            f"({self.forward_micro_batch}, {len(self.forward) - 1}, "
            f"{self.backward_micro_batch}, {len(self.backward) - 1})"
        )


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """All tasks in the order of their indices, which is an order in which they could run."""

    setup: Setup
    tasks: tuple[DeviceTask, ...]
    devices_at_work: int
