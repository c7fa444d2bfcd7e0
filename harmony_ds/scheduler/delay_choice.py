"""Chooses how many runs later swap-ins are issued whose weights the host is still updating (see `delays`).

What enters: a plan without delays, and what predicts its step. What leaves: delays by pack, for `Policy.swap_in_delays`;
empty where no pack has to wait for its update, or where delays do not make the step shorter. Else they are, for every pack
whose first swap-in follows an update, by time (0 where none is needed) or, if that is clearly faster, one run before the
weights are needed: a swap-in copies after the runs that were issued before it, and the last run hides the copy.

The places come from a simulated step in which every such swap-in is issued that late, so that hardly a run and no update is
held up. A swap-in then comes after the runs that had to be issued there before its update ended. While the host waits for
the update, these runs are what the device computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.delays import delay_swap_ins
from harmony_ds.scheduler.plan import RUNS, Plan, Task, TaskKind
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.simulate import SimulatedSteps, run_steps, step_ms
from harmony_ds.scheduler.spans import COMPUTE, HOST

_FASTER, _CLEARLY_FASTER = 1 - 1e-6, 1 - 2e-3
"""By so much a step is shorter with delays than without, and with the longest delays than with those told by time."""


def choose_delays(plan: Plan, costs: CostTable, machine: Machine, composed: SimulatedSteps) -> tuple[int, ...]:
    """Return the delays, by pack, with which a step of `plan` takes the shortest time; empty: none.

    Args:
        composed: two steps of `plan` without delays.

    Swap-ins that several processes issue together keep their places, and so do those of a device whose copies do not run
    beside its computing: the order is theirs to agree on, or nothing is gained.
    """
    if plan.policy.swaps_in_shares or not machine.copies_overlap:
        return ()
    computing_ms = max(ms for stream, ms in composed.busy_ms().items() if stream.startswith(COMPUTE))
    if computing_ms >= _FASTER * composed.step_ms:  # which no delay makes shorter
        return ()
    as_composed = _waits_in(composed, machine)
    if not any(as_composed.is_held_up(pack.index) for pack in plan.packing.covering):
        return ()
    # One that is not held up may be as soon as another one before it no longer is.
    latest = tuple(
        _runs_until_needed(plan, pack.index) - 1 if pack.positions and pack.index in as_composed.updated_ms else 0
        for pack in plan.packs
    )
    at_latest = _waits_in(run_steps(_with_delays(plan, latest), costs, machine), machine)
    by_time = tuple(_runs_before(plan, at_latest, pack) if delay else 0 for pack, delay in enumerate(latest))
    best: tuple[int, ...] = ()
    best_ms = as_composed.step_ms
    by_time_ms = step_ms(_with_delays(plan, by_time), costs, machine)
    if by_time_ms < _FASTER * best_ms:
        best, best_ms = by_time, by_time_ms
    if at_latest.step_ms < _CLEARLY_FASTER * best_ms:
        best = latest
    return best


def _with_delays(plan: Plan, delays: tuple[int, ...]) -> Plan:
    return replace(plan, tasks=tuple(delay_swap_ins(plan.tasks, plan.packing, delays)))


@dataclass(frozen=True, slots=True)
class _Waits:
    """What one simulated step shows.

    Attributes:
        reached_ms: by pack, when the host came to its first swap-in.
        updated_ms: by pack, when the update had ended which that swap-in comes after.
        issued_by_ms: by task, when a run had to be issued at the latest, to begin to compute when it did.
        step_ms: how long the step takes.
    """

    reached_ms: Mapping[int, float]
    updated_ms: Mapping[int, float]
    issued_by_ms: Mapping[Task, float]
    step_ms: float

    def is_held_up(self, pack: int) -> bool:
        """Return whether the host had to wait at the first swap-in of `pack`."""
        return pack in self.updated_ms and self.updated_ms[pack] > self.reached_ms[pack]


def _waits_in(steps: SimulatedSteps, machine: Machine) -> _Waits:
    lowering, timeline = steps.lowering, steps.timeline
    reached_ms: dict[int, float] = {}
    updated_ms: dict[int, float] = {}
    issued_by_ms: dict[Task, float] = {}
    host_free_ms = 0.0
    for job in steps.places[-1]:
        stream, tasks = lowering.work[job]
        first = tasks[0]
        if stream == HOST:
            if first.kind is TaskKind.SWAP_IN and first.pack not in reached_ms:
                reached_ms[first.pack] = host_free_ms
                if updates := lowering.jobs[job].after:
                    updated_ms[first.pack] = max(timeline.end_ms[update] for update in updates)
            host_free_ms = timeline.end_ms[job]
        elif stream.startswith(COMPUTE) and first.kind in RUNS:
            share_ms = (timeline.end_ms[job] - timeline.begin_ms[job]) / len(tasks)
            for number, task in enumerate(tasks):
                begin_ms = timeline.begin_ms[job] + number * share_ms
                issued_by_ms[task] = begin_ms - machine.task_ms * len(tasks)  # those of one job are issued together
    return _Waits(reached_ms, updated_ms, issued_by_ms, steps.step_ms)


def _runs_before(plan: Plan, waits: _Waits, pack: int) -> int:
    """Return how many runs after the swap-in of `pack` have to be issued before its update has ended."""
    place = plan.tasks.index(Task(TaskKind.SWAP_IN, pack))
    runs = 0
    for task in plan.tasks[place:]:
        if task.kind in RUNS:
            if task.pack == pack or waits.issued_by_ms[task] >= waits.updated_ms[pack]:
                break
            runs += 1
    return runs


def _runs_until_needed(plan: Plan, pack: int) -> int:
    """Return how many runs there are between the swap-in of `pack` and its own first run; at least 1."""
    place = plan.tasks.index(Task(TaskKind.SWAP_IN, pack))
    runs = 0
    for task in plan.tasks[place:]:
        if task.kind in RUNS:
            if task.pack == pack:
                break
            runs += 1
    return max(1, runs)
