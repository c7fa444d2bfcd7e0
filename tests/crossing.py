"""Plans whose crossing tensors go to the host where a search would leave them on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.plan import Plan, TaskKind
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.step import plan_search


def move_crossing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, what waits between packs waits on the host, as all of the stash does; no graph is kept."""

    def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
        choice, (_, costs, _, _, request) = search(*args, **more)[0], args
        packing, policy = choice.plan.packing, choice.plan.policy
        moved = replace(policy, stash_on_host=len(packing.forward), crossing_on_host=True, graphs=())
        return (replace(choice, plan=make_plan(packing, costs, request, moved)),)

    monkeypatch.setattr(plan_search, "search", found)


def crossing_in(plan: Plan) -> int:
    """Return how often crossing tensors go to the host in `plan`."""
    return sum(task.kind in (TaskKind.CROSSING_OUT, TaskKind.CROSSING_GRADIENTS_OUT) for task in plan.tasks)
