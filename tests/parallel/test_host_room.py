"""Processes of one server share its memory, and search with the room of the one that has least."""

from __future__ import annotations

import torch.distributed as dist

from harmony_ds.offload import host_limits
from harmony_ds.offload.host_limits import HostRoom
from tests.inside import planner_of
from tests.parallel.processes import run
from tests.parallel.training import Training, build, engine_of, train_with


def room_of(free: tuple[int | None, ...]) -> tuple[int | None, str]:
    """What the search was asked with, and the plan."""
    engine = engine_of(Training(steps=1))
    rooms = [HostRoom(one, 0, "the test") for one in free[dist.get_rank() : dist.get_rank() + 1] if one is not None]
    host_limits.host_rooms = lambda: rooms  # type: ignore[assignment]
    train_with(engine, Training(steps=1))
    planner = planner_of(engine)
    assert engine.plan is not None
    found = planner.request(planner.graph, 2).host_bytes, engine.plan.to_json()
    engine.destroy()
    return found


def test_each_has_its_share_of_the_least_that_any_sees_and_all_run_one_plan() -> None:
    state_bytes = 8 * sum(p.numel() for p in build("mlp").parameters())
    for free, room in (
        ((10**9, 6 * 10**8), (6 * 10**8 - state_bytes) // 2),
        ((None, 6 * 10**8), (6 * 10**8 - state_bytes) // 2),
        ((None, None), None),
        ((0, 10**9), 0),
    ):
        first, second = run(2, room_of, free)
        assert first == second
        assert first[0] == room
