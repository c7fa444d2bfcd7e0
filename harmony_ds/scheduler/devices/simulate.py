"""How long a schedule takes: task graph, jobs, event kernel."""

from __future__ import annotations

from harmony_ds.scheduler.devices.compose import compose
from harmony_ds.scheduler.devices.graph import Schedule, Setup
from harmony_ds.scheduler.devices.lowering import lower
from harmony_ds.scheduler.devices.machine import Machine
from harmony_ds.scheduler.devices.profile import PackCosts
from harmony_ds.scheduler.events import run_jobs


def simulate(setup: Setup, schedule: Schedule, costs: PackCosts, machine: Machine, overlap: bool) -> float:
    """Milliseconds of one optimizer step.

    Args:
        overlap: whether swaps, and hand-overs between tasks, go on while layers are computed.
    """
    graph = compose(setup, schedule, first_replica_only=True)
    return run_jobs(lower(graph, costs, machine, overlap)).makespan_ms
