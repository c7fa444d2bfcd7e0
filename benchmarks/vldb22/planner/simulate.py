"""How long a schedule takes: task graph, jobs, event kernel."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.vldb22.planner.compose import compose
from benchmarks.vldb22.planner.graph import Schedule, Setup
from benchmarks.vldb22.planner.lowering import lower
from benchmarks.vldb22.planner.machine import Server
from benchmarks.vldb22.planner.profile import PackCosts
from harmony_ds.scheduler.events import run_jobs


@dataclass(frozen=True, slots=True)
class Simulated:
    """Milliseconds of one optimizer step, and how many jobs were run to know it."""

    time_ms: float
    jobs: int


def simulate(setup: Setup, schedule: Schedule, costs: PackCosts, machine: Server, overlap: bool) -> Simulated:
    """How long one optimizer step takes.

    Args:
        overlap: whether swaps, and hand-overs between tasks, go on while layers are computed.
    """
    graph = compose(setup, schedule, first_replica_only=True)
    jobs = lower(graph, costs, machine, overlap)
    return Simulated(run_jobs(jobs).makespan_ms, len(jobs))
