"""Processes of a server share its memory, and all search with the least room of any."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from harmony_ds.offload import host_memory
from harmony_ds.offload.host_memory import HostRoom
from tests.distributed.processes import run
from tests.distributed.training import Training, build, engine_of, train_with
from tests.inside import planner_of


def rooms_of(several: Sequence[tuple[int | None, ...]]) -> list[tuple[int | None, str]]:
    """Return the request of each search, and its plan."""
    found = []
    for free in several:
        engine, one = engine_of(Training(steps=1)), free[dist.get_rank()]
        rooms = [] if one is None else [HostRoom(one, 0, "the test")]
        host_memory.host_rooms = lambda rooms=rooms: rooms  # type: ignore[assignment]
        train_with(engine, Training(steps=1))
        planner = planner_of(engine)
        assert engine.plan is not None
        found.append((planner.search.request(planner.graph, 2).host_bytes, engine.plan.to_json()))
        engine.destroy()
        host_memory.host_rooms = list
    return found


def test_each_process_has_a_share_of_the_least_room_and_all_run_one_plan() -> None:
    share = (6 * 10**8 - 8 * sum(p.numel() for p in build("mlp").parameters())) // 2
    first, second = run(2, rooms_of, [(10**9, 6 * 10**8), (None, 6 * 10**8), (None, None), (0, 10**9)])
    assert first == second
    assert [room for room, _ in first] == [share, share, None, 0]
