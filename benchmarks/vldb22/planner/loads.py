"""How long the streams of each device are busy at least: lower bounds of a schedule's time, without a simulation.

Everything is an array over streams and devices, so that thousands of pairs of a forward and a backward packing can be
bounded: the busy times of a pair are the sum of those of its two passes, once the devices of the backward pass have
been turned to where the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.vldb22.planner.graph import Mode, Setup
from benchmarks.vldb22.planner.machine import Server
from benchmarks.vldb22.planner.profile import PackCosts
from harmony_ds.scheduler.partition import Bounds

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class PassLoad:
    """Of one pass.

    Attributes:
        busy_ms: by stream (computing and what it waits for, swaps in, swaps out, host) and by device, counted from the
            device of the pass's first task.
        first_ms: the first micro-batch's way through all tasks.
        tasks: how many.
    """

    busy_ms: Array
    first_ms: float
    tasks: int


@dataclass(frozen=True, slots=True)
class PassLoads:
    """Of several passes: the arrays of `PassLoad`, one more axis in front."""

    busy_ms: Array
    first_ms: Array
    tasks: Array

    @staticmethod
    def of(loads: Sequence[PassLoad]) -> PassLoads:
        return PassLoads(
            np.stack([load.busy_ms for load in loads]),
            np.array([load.first_ms for load in loads]),
            np.array([load.tasks for load in loads]),
        )


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Milliseconds of tasks: of all micro-batches, by what they do. `taken` is the input or gradient that a task waits
    for, `chain` what keeps its device from the next task.
    """

    taken: Array
    chain: Array
    swapped_in: Array
    swapped_out: Array
    host: Array


class Loads:
    """Busy times under one cost model.

    Args:
        setup: what is to be run.
        costs: of packs.
        machine: constants.
        overlap: as in `simulate`.
        at_work: devices that have tasks.
    """

    def __init__(self, setup: Setup, costs: PackCosts, machine: Server, overlap: bool, at_work: int) -> None:
        self._costs = costs
        self._overlap = overlap
        self._free_ms = machine.free_ms
        self._samples = setup.share(0)
        self._pipeline = setup.mode is Mode.PIPELINE and setup.devices > 1
        self._rows = at_work if self._pipeline else 1
        self._swap = machine.swap / at_work
        self._hand_on = machine.peer if self._pipeline else self._swap
        reduces = setup.mode is Mode.DATA_PARALLEL and setup.devices > 1
        self._reduce = 2 * (setup.devices - 1) / setup.devices / machine.peer if reduces else 0.0
        layers = range(costs.count + 1)
        self._inputs = np.array([costs.input_bytes(layer, self._samples) for layer in layers], dtype=float)
        self._state = np.array([costs.state_bytes(0, layer) for layer in layers], dtype=float)
        self._update_ms = np.array([costs.update_ms(0, layer) for layer in layers])
        self._computed: dict[tuple[bool, int], Array] = {}

    def of(self, backward: bool, micro_batch: int, bounds: Bounds) -> PassLoad:
        """Of the pass whose packs lie between `bounds`."""
        cuts = np.array(bounds[::-1] if backward else bounds)
        make = self._backward_tasks if backward else self._forward_tasks
        tasks = make(micro_batch, np.minimum(cuts[:-1], cuts[1:]), np.maximum(cuts[:-1], cuts[1:]), in_turn=True)
        size = min(micro_batch, self._samples)
        compute_ms = self._costs.backward_ms if backward else self._costs.forward_ms
        first_ms = compute_ms(size, 0, bounds[-1]) + float(tasks.taken.sum()) * size / self._samples
        return PassLoad(self._by_device(tasks), first_ms, len(bounds) - 1)

    def pack_ms(self, backward: bool, micro_batch: int) -> Array:
        """How long a pack keeps a device from its other packs: from a first layer (axis 0) to before a last one."""
        places = np.arange(self._costs.count + 1)
        tasks = self._backward_tasks if backward else self._forward_tasks
        return tasks(micro_batch, places[:, None], places[None, :], in_turn=False).chain

    def bounds_ms(self, forward: PassLoads, backward: PassLoad) -> Array:
        """At least this long takes a step with each of the forward passes."""
        turned = np.stack([np.roll(backward.busy_ms, turn, axis=1) for turn in range(self._rows)])
        busy_ms = forward.busy_ms + turned[forward.tasks % self._rows]
        bounds_ms: Array = np.maximum(busy_ms.max(axis=(1, 2)), forward.first_ms + backward.first_ms)
        return bounds_ms

    def bound_ms(self, backward: PassLoad) -> float:
        """At least this long takes a step whose one pack is fused."""
        return max(float(backward.busy_ms.max()), backward.first_ms)

    def _forward_tasks(self, micro_batch: int, first: Array, last: Array, in_turn: bool) -> _Tasks:
        """Of packs from `first` to before `last`; whether they are tasks in their order, or any packs."""
        running = self._running_ms(False, micro_batch)
        compute = running[last] - running[first]
        weights = (self._state[last] - self._state[first]) / self._swap
        local = not self._pipeline
        taken = self._inputs[first] / np.where(first == 0, self._swap, self._hand_on)
        given = self._inputs[last] / self._swap * local
        if self._overlap:
            chain = compute + np.maximum(weights, self._before(0.0 * weights + self._free_ms, in_turn))
        else:
            chain = compute + weights + taken + given + self._free_ms
        swapped_in = weights + np.where((first == 0) | local, taken, 0.0)
        return _Tasks(taken, chain, swapped_in, given, 0.0 * chain)

    def _backward_tasks(self, micro_batch: int, first: Array, last: Array, in_turn: bool) -> _Tasks:
        running = self._running_ms(True, micro_batch)
        compute = running[last] - running[first]
        state = self._state[last] - self._state[first]
        weights = state / self._swap
        local = not self._pipeline
        fused = last == self._costs.count
        stash = self._inputs[first] / np.where(fused & (first > 0), self._hand_on, self._swap)
        gradient = self._inputs[last] / self._hand_on
        given = self._inputs[first] / self._swap * (first > 0) * local
        end = weights + state * self._reduce + self._free_ms
        if self._overlap:
            chain = compute + np.maximum(weights, self._before(end, in_turn))
        else:
            chain = compute + weights + stash + gradient + given + end
        swapped_in = weights + np.where(fused & (first > 0) & (not local), 0.0, stash) + gradient * local
        stashed = stash * local * ~fused  # it went out on the same device
        update = self._update_ms[last] - self._update_ms[first]
        if in_turn:  # behind the last task comes its own end, and its update beside the freeing
            chain[-1] += (end[-1] if self._overlap else 0.0) + max(0.0, update[-1] - self._free_ms)
        return _Tasks(gradient, chain, swapped_in, weights + given + stashed, update)

    def _before(self, end: Array, in_turn: bool) -> Array:
        """What the end of the task before on the same device takes; for a pack without a place, its own."""
        if not in_turn:
            return end
        return np.concatenate([np.zeros(min(self._rows, len(end))), end[: -self._rows]])

    def _by_device(self, tasks: _Tasks) -> Array:
        streams = (tasks.chain, tasks.swapped_in, tasks.swapped_out, tasks.host)
        device = np.arange(len(tasks.chain)) % self._rows
        return np.stack([np.bincount(device, weights=ms, minlength=self._rows) for ms in streams])

    def _running_ms(self, backward: bool, micro_batch: int) -> Array:
        """Running sums over layers of the times of all micro-batches."""
        key = (backward, micro_batch)
        if key not in self._computed:
            full, rest = divmod(self._samples, micro_batch)
            times = full * np.array(self._costs.times_ms(backward, micro_batch))
            if rest:
                times += np.array(self._costs.times_ms(backward, rest))
            self._computed[key] = np.concatenate([[0.0], np.cumsum(times)])
        return self._computed[key]
