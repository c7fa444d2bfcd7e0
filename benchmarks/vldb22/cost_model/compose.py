"""A schedule to its task graph: which task runs where, and by which way things pass. Knows no costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.vldb22.cost_model.graph import (
    Content,
    DeviceTask,
    DeviceTaskKind,
    Medium,
    Mode,
    Port,
    Schedule,
    Setup,
    TaskGraph,
)


def split_samples(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Sizes of the micro-batches; the last takes what is left."""
    full, rest = divmod(samples, micro_batch)
    return (micro_batch,) * full + ((rest,) if rest else ())


def compose(setup: Setup, schedule: Schedule, *, first_replica_only: bool = False) -> TaskGraph:
    """Return the task graph of a schedule.

    Args:
        setup: what is to be run.
        schedule: how.
        first_replica_only: of a data-parallel graph the tasks of device 0 alone; it has the largest share.

    Raises:
        ValueError: fewer samples than replicas.
    """
    if setup.mode is Mode.PIPELINE:
        tasks = list(_Chain(setup, schedule, 0, 0).tasks())
        return TaskGraph(setup, tuple(tasks), len({task.device for task in tasks}))
    if setup.batch < setup.devices:
        raise ValueError(f"{setup.batch} samples cannot be shared by {setup.devices} devices")
    tasks = []
    for rank in range(1 if first_replica_only else setup.devices):
        tasks += _Chain(setup, schedule, rank, len(tasks)).tasks()
    return TaskGraph(setup, tuple(tasks), setup.devices)


@dataclass(frozen=True, slots=True)
class _Step:
    """A forward or backward task before it knows its ports."""

    index: int
    kind: DeviceTaskKind
    device: int
    first: int
    last: int


class _Chain:
    """One list of tasks: the whole pipeline, or one replica."""

    def __init__(self, setup: Setup, schedule: Schedule, rank: int, begin: int) -> None:
        samples = setup.share(rank)
        self._setup = setup
        self._rank = rank
        self._updates = setup.mode is Mode.PIPELINE or rank == 0
        self._micro_batches = {
            DeviceTaskKind.FORWARD: split_samples(samples, schedule.forward_micro_batch),
            DeviceTaskKind.BACKWARD: split_samples(samples, schedule.backward_micro_batch),
        }
        packs = [(DeviceTaskKind.FORWARD, *pack) for pack in pairwise(schedule.forward)]
        self._forward = len(packs)
        packs += [(DeviceTaskKind.BACKWARD, *pack) for pack in reversed([*pairwise(schedule.backward)])]
        self._steps = [
            _Step(begin + self._place_of(turn), kind, self._device(turn), first, last)
            for turn, (kind, first, last) in enumerate(packs)
        ]
        self._stashes = {step.first: step for step in self._steps[self._forward + 1 :]}
        self._converts = schedule.forward_micro_batch != schedule.backward_micro_batch
        self._pins = dict(self._find_pins())

    def _place_of(self, turn: int) -> int:
        return turn + max(0, turn - self._forward) * self._updates

    def _device(self, turn: int) -> int:
        return turn % self._setup.devices if self._setup.mode is Mode.PIPELINE else self._rank

    def _find_pins(self) -> Iterator[tuple[int, Port]]:
        """Layers that a device's last forward and first backward task share stay there: the port of each of the two."""
        for device in {step.device for step in self._steps}:
            mine = [step for step in self._steps if step.device == device]
            forward = [step for step in mine if step.kind is DeviceTaskKind.FORWARD]
            backward = [step for step in mine if step.kind is DeviceTaskKind.BACKWARD]
            if forward and backward:
                one, other = forward[-1], backward[0]
                first, last = max(one.first, other.first), min(one.last, other.last)
                if first < last:
                    yield one.index, Port(Content.WEIGHTS, Medium.PIN, first, last, other.index)
                    yield other.index, Port(Content.WEIGHTS, Medium.PIN, first, last, one.index)

    def tasks(self) -> Iterator[DeviceTask]:
        for turn, step in enumerate(self._steps):
            before = self._steps[turn - 1] if turn else None
            after = self._steps[turn + 1] if turn + 1 < len(self._steps) else None
            takes = (*self._weights(step), *self._takes(step, before))
            pin = self._pins.get(step.index) if step.kind is DeviceTaskKind.FORWARD else None
            gives = (*self._gives(step, after), *((pin,) if pin else ()))
            sizes, fused = self._micro_batches[step.kind], turn == self._forward
            yield DeviceTask(step.index, step.kind, step.device, step.first, step.last, fused, sizes, takes, gives)
            if step.kind is DeviceTaskKind.BACKWARD and self._updates:
                yield self._update(step)

    def _weights(self, step: _Step) -> Iterator[Port]:
        pin = self._pins.get(step.index) if step.kind is DeviceTaskKind.BACKWARD else None
        kept = (pin.first, pin.last) if pin else (step.last, step.last)
        for first, last in ((step.first, kept[0]), (kept[1], step.last)):
            if first < last:
                yield Port(Content.WEIGHTS, Medium.SHARED, first, last)
        if pin:
            yield pin

    def _medium(self, source: _Step, target: _Step) -> Medium:
        if source.device == target.device:
            return Medium.SWAP
        return Medium.MESSAGE if source.kind is not target.kind and self._converts else Medium.PEER

    def _takes(self, step: _Step, before: _Step | None) -> Iterator[Port]:
        if before is None:
            yield Port(Content.INPUT, Medium.DATA, 0, 1)
        elif before.kind is DeviceTaskKind.FORWARD:
            yield Port(Content.INPUT, self._medium(before, step), step.first, step.first + 1, before.index)
        else:
            source = next(s for s in self._steps if s.kind is DeviceTaskKind.FORWARD and s.first <= step.first < s.last)
            yield Port(Content.STASH, Medium.MESSAGE, step.first, step.first + 1, source.index)
            yield Port(Content.GRADIENT, self._medium(before, step), step.last, step.last + 1, before.index)

    def _gives(self, step: _Step, after: _Step | None) -> Iterator[Port]:
        if step.kind is DeviceTaskKind.FORWARD:
            assert after is not None
            for layer in range(step.first, step.last):
                if layer in self._stashes:
                    yield Port(Content.STASH, Medium.MESSAGE, layer, layer + 1, self._stashes[layer].index)
            yield Port(Content.INPUT, self._medium(step, after), step.last, step.last + 1, after.index)
            return
        if after is not None:
            yield Port(Content.GRADIENT, self._medium(step, after), step.first, step.first + 1, after.index)
        if self._setup.mode is Mode.DATA_PARALLEL and self._setup.devices > 1:
            yield Port(Content.WEIGHT_GRADIENTS, Medium.REDUCE, step.first, step.last)
        if self._updates:
            yield Port(Content.WEIGHT_GRADIENTS, Medium.SHARED, step.first, step.last, step.index + 1)

    def _update(self, step: _Step) -> DeviceTask:
        takes = (Port(Content.WEIGHT_GRADIENTS, Medium.SHARED, step.first, step.last, step.index),)
        gives = (Port(Content.WEIGHTS, Medium.SHARED, step.first, step.last),)
        kind = DeviceTaskKind.UPDATE
        return DeviceTask(step.index + 1, kind, step.device, step.first, step.last, False, (), takes, gives)
