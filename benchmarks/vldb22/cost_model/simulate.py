"""How long a schedule takes: task graph, jobs, event kernel."""

from __future__ import annotations

from benchmarks.vldb22.cost_model.compose import compose
from benchmarks.vldb22.cost_model.graph import Schedule, Setup
from benchmarks.vldb22.cost_model.lowering import lower
from benchmarks.vldb22.cost_model.profile import PackCosts
from benchmarks.vldb22.cost_model.server import Server
from harmony_ds.scheduler.events import run_jobs


def step_ms(setup: Setup, schedule: Schedule, costs: PackCosts, server: Server, overlap: bool) -> float:
    """Return how long one optimizer step takes.

    Args:
        overlap: whether swaps, and hand-overs between tasks, go on while layers are computed.
    """
    graph = compose(setup, schedule, first_replica_only=True)
    return run_jobs(lower(graph, costs, server, overlap)).makespan_ms
