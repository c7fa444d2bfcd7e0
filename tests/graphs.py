"""Plans that keep autograd graphs where a search would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harmony_ds.scheduler.choose import make_plan
from harmony_ds.scheduler.plan import Plan, TaskKind
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.step import plan_search


def keep_graphs(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]) -> None:
    """From now on, packs stay from forward to backward, and keep so many graphs: of pack 0, 1, ..., and from the front."""

    def found(*args: Any, **more: Any) -> tuple[Choice, ...]:
        choice, (_, costs, _, _, request) = search(*args, **more)[0], args
        packing, policy = choice.plan.packing, choice.plan.policy
        both = (i for i in packing.forward if i in packing.backward and packing.packs[i].needs_backward)
        kept = tuple(i for i in both if i not in policy.resident)
        graphs = tuple(counts[i % len(counts)] for i in packing.backward)
        plan = make_plan(packing, costs, request, replace(policy, kept=kept, graphs=graphs))
        return (replace(choice, plan=plan),)

    monkeypatch.setattr(plan_search, "search", found)


def graphs_in(plan: Plan) -> int:
    """Return the number of packs and micro-batches whose graphs are kept."""
    return sum(task.kind is TaskKind.FORWARD_FOR_GRAPH for task in plan.tasks)
