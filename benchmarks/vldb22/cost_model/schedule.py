"""A schedule, and the tasks of one optimizer step on several devices. Knows no costs.

    forward packs in order, then each backward pack from the last, followed at once by its update on the host

Every task runs all its micro-batches. Harmony-PP deals the tasks out in turn, forward and backward in one circle, and
all samples go through each; Harmony-DP has the whole list on every device, each with its share of the samples
(Harmony, VLDB'22). The last backward pack is fused: it has no forward task and no stash.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from harmony_ds.scheduler.partition import Bounds


class Mode(Enum):
    DATA_PARALLEL = "vDP"
    PIPELINE = "vPP"


@dataclass(frozen=True, slots=True)
class Setup:
    """A run: the mode, the number of devices, and the samples of one optimizer step over all of them."""

    mode: Mode
    devices: int
    batch: int

    @property
    def replicas(self) -> int:
        return self.devices if self.mode is Mode.DATA_PARALLEL else 1

    @property
    def share(self) -> int:
        """Samples of the first replica, which has the most."""
        return -(-self.batch // self.replicas)


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

    def __str__(self) -> str:
        """Return the sizes and the numbers of packs."""
        return (
            f"({self.forward_micro_batch}, {len(self.forward) - 1}, "
            f"{self.backward_micro_batch}, {len(self.backward) - 1})"
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One pack in one pass on one device: layers `first` to before `last`; `fused`: a backward task that holds the loss."""

    device: int
    first: int
    last: int
    backward: bool
    fused: bool
    micro_batch: int
    micro_batches: tuple[int, ...]

    @property
    def is_stashed(self) -> bool:
        """Whether its input is kept from the forward pass."""
        return self.backward and not self.fused

    def handed_layer(self) -> int:
        """Return the layer whose input, or whose input's gradient, the next task takes."""
        return self.first if self.backward else self.last


class Way(Enum):
    """How an output or gradient reaches the next task."""

    PEER = "from device to device"
    MESSAGE = "over the host, from one device's process to another's, which may change the micro-batch size"
    SWAP = "over the host, back to the same device"


def way(source: Task, target: Task) -> Way:
    if source.device == target.device:
        return Way.SWAP
    return Way.PEER if source.micro_batch == target.micro_batch else Way.MESSAGE


def split_samples(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of the micro-batches; the last takes what is left."""
    full, rest = divmod(samples, micro_batch)
    return (micro_batch,) * full + ((rest,) if rest else ())


def tasks_of(setup: Setup, schedule: Schedule) -> list[Task]:
    """Return the tasks in their order: of the whole pipeline, or of the first replica."""
    passes = [(False, schedule.forward_micro_batch, pack) for pack in pairwise(schedule.forward)]
    forward = len(passes)
    passes += [(True, schedule.backward_micro_batch, pack) for pack in reversed([*pairwise(schedule.backward)])]
    tasks = []
    for turn, (backward, size, pack) in enumerate(passes):
        device = turn % setup.devices if setup.mode is Mode.PIPELINE else 0
        tasks.append(Task(device, *pack, backward, turn == forward, size, split_samples(setup.share, size)))
    return tasks


def pinned(tasks: list[Task]) -> list[tuple[int, int]]:
    """Return the layers that each device's last forward and first backward task share: they stay there."""
    found = []
    for device in {task.device for task in tasks}:
        forward, backward = ([t for t in tasks if t.device == device and t.backward is back] for back in (False, True))
        if forward and backward:
            layers = max(forward[-1].first, backward[0].first), min(forward[-1].last, backward[0].last)
            found += [layers] if layers[0] < layers[1] else []
    return found
