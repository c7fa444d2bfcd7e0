"""Predicts a step: the jobs of a `Plan` (see `lowering`), run on the streams of a `Machine`.

Steps follow each other: the updates of one run under the forward pass of the next, so two are simulated and the second
one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.events import Timeline, run_alone, run_jobs
from harmony_ds.scheduler.lowering import STASH_PIECES, Lowering
from harmony_ds.scheduler.plan import Plan
from harmony_ds.scheduler.profile import Machine
from harmony_ds.scheduler.spans import COMPUTE, STREAMS, UPDATE, Span, of_device
from harmony_ds.scheduler.swaps import Swaps, swaps_of

_STEPS = 2
_ROUNDED = 1 + 1e-9
"""The same time is summed up in another order where jobs run alone."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time and bytes that a plan will take.

    Attributes:
        step_ms: from the end of one step to the end of the next, late updates apart.
        busy_ms: how long each stream works in a step.
        swaps: bytes between host and device.
        spans: the second of two steps, from its first task on.
    """

    step_ms: float
    busy_ms: Mapping[str, float]
    swaps: Swaps
    spans: tuple[Span, ...]

    @property
    def idle_share(self) -> float:
        """The part of the step in which the device does not compute."""
        computing = [ms for stream, ms in self.busy_ms.items() if stream.startswith(COMPUTE)]
        return max(0.0, 1.0 - sum(computing) / len(computing) / self.step_ms) if self.step_ms else 0.0

    @property
    def bottleneck(self) -> str:
        """The stream that works most."""
        return max(self.busy_ms, key=lambda stream: self.busy_ms[stream])


@dataclass(frozen=True, slots=True)
class SimulatedSteps:
    """Two steps of a plan, the second of which counts.

    Attributes:
        lowering: the jobs of both.
        places: of each step's jobs among them.
        timeline: when each job runs.
    """

    lowering: Lowering
    places: tuple[range, ...]
    timeline: Timeline

    @property
    def step_ms(self) -> float:
        """How long the second step takes."""
        return _last_step_ms(self.lowering, self.places, self.timeline)

    def busy_ms(self) -> dict[str, float]:
        """Return how long each stream works in the second step."""
        busy = dict.fromkeys(STREAMS, 0.0)
        for job in self.places[-1]:
            stream = self.lowering.work[job][0]
            busy[stream] = busy.get(stream, 0.0) + self.lowering.jobs[job].duration_ms
        return busy

    def prediction(self, swaps: Swaps) -> Prediction:
        """Return what the second step shows; `swaps`: what the plan moves."""
        last, timeline = self.places[-1], self.timeline
        begin = min((timeline.begin_ms[job] for job in last), default=0.0)
        spans = (
            Span(stream, timeline.begin_ms[job] - begin, timeline.end_ms[job] - begin, tasks)
            for job in last
            for stream, tasks in (self.lowering.work[job],)
            if timeline.end_ms[job] > timeline.begin_ms[job]
        )
        return Prediction(self.step_ms, self.busy_ms(), swaps, tuple(spans))


def simulate(plan: Plan, costs: CostTable, machine: Machine, counts: Sequence[int] = ()) -> Prediction:
    """Two steps of `plan`, the second of which is returned.

    Args:
        costs: of one micro-batch of the plan's size.
        counts: how many micro-batches each one of the plan stands for; empty: for itself.
    """
    return run_steps(plan, costs, machine, counts).prediction(swaps_of(plan, costs, counts=counts))


def run_steps(plan: Plan, costs: CostTable, machine: Machine, counts: Sequence[int] = ()) -> SimulatedSteps:
    """Return two steps of `plan`; `counts`: as above."""
    lowering = Lowering(plan, costs, machine, counts)
    places = tuple(lowering.step() for _ in range(_STEPS))
    return SimulatedSteps(lowering, places, _run(lowering, machine, plan.policy.pipeline))


def step_ms(
    plan: Plan,
    costs: CostTable,
    machine: Machine,
    counts: Sequence[int] = (),
    pieces: int = STASH_PIECES,
    wanted_ms: float = float("inf"),
) -> float:
    """How long a step takes, and no more; infinite if jobs alone, each at its full speed, take more than `wanted_ms`.

    Args:
        counts, pieces: see `Lowering`.
    """
    lowering = Lowering(plan, costs, machine, counts, pieces)
    steps = [lowering.step() for _ in range(_STEPS)]
    if wanted_ms < float("inf"):
        # Jobs that slow each other down end later. Updates need not, by their priorities (see `run_alone`), and the end of
        # the first step is taken off; but no random plan of tests/scheduler/test_simulate.py takes less than jobs alone.
        alone_ms = _last_step_ms(lowering, steps, run_alone(lowering.jobs))
        if alone_ms > _ROUNDED * wanted_ms:
            return float("inf")
    return _last_step_ms(lowering, steps, _run(lowering, machine, plan.policy.pipeline))


def _run(lowering: Lowering, machine: Machine, devices: int) -> Timeline:
    return run_jobs(lowering.jobs, _capacities(machine, devices), crowded=("cores",))


def _last_step_ms(lowering: Lowering, steps: Sequence[range], timeline: Timeline) -> float:
    """Return how long the second of two steps takes.

    Args:
        steps: of each step, the places of its jobs in `lowering` and `timeline`.
    """
    before, end = (
        max((timeline.end_ms[job] for job in jobs if lowering.work[job][0] != UPDATE), default=0.0) for jobs in steps
    )
    return end - before


def _capacities(machine: Machine, devices: int) -> dict[str, float]:
    return {
        **{of_device("link", device): machine.link_bytes_per_ms for device in range(devices)},
        "host memory": machine.host_bytes_per_ms,
        "cores": 2 * machine.beside_update,
        "disk": 1.0,
    }
