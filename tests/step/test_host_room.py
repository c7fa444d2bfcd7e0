"""The host's room that plans are searched with: as much as was free when the engine first planned, whatever comes after."""

from __future__ import annotations

from typing import Any

import pytest

from harmony_ds.offload import host_memory
from harmony_ds.offload.host_memory import HostRoom
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.search import search
from harmony_ds.step import plan_search
from tests.engine.drive import adamw, config_of, engine_for, family, groups_of, sgd, train_groups
from tests.inside import planner_of
from tests.oracle import assert_same

ONE = family("llama")


def frees(monkeypatch: pytest.MonkeyPatch, *free_bytes: int) -> None:
    monkeypatch.setattr(host_memory, "host_rooms", lambda: [HostRoom(one, 10**15, "the test") for one in free_bytes])


def asked(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """What searches are asked for, from now on."""
    requests: list[PlanRequest] = []

    def searched(*arguments: Any, **named: Any) -> Any:
        requests.append(arguments[4])
        return search(*arguments, **named)

    monkeypatch.setattr(plan_search, "search", searched)
    return requests


@pytest.mark.parametrize(("make", "state_bytes"), [(adamw, 8), (sgd, 0)])
def test_the_search_knows_what_is_free_without_what_the_optimizer_is_still_to_make(
    monkeypatch: pytest.MonkeyPatch, make: Any, state_bytes: int
) -> None:
    model, requests = ONE.build(0.0), asked(monkeypatch)
    room = 10**9 - state_bytes * sum(p.numel() for p in model.parameters())
    with engine_for(model, make, config_of(2, clip=1.0)) as engine:
        frees(monkeypatch, 10**9, 2 * 10**9)
        train_groups(engine, groups_of(ONE, 1, 2))
        # Gradients and state are there by now: what they took is not missed for the next plan.
        frees(monkeypatch, 0)
        engine.set_train_batch_size(8)
        train_groups(engine, groups_of(ONE, 1, 4))
        assert [request.host_bytes for request in requests] == [room] * len(requests)
        assert {request.micro_batches for request in requests} == {2, 4}


def test_a_system_that_does_not_say_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for(ONE.build(0.0), adamw, config_of(1)) as engine:
        frees(monkeypatch)
        train_groups(engine, groups_of(ONE, 1, 1))
        assert planner_of(engine).search.request(planner_of(engine).graph, 1).host_bytes is None


def test_a_host_without_room_trains_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for free_bytes in (10**9, 0):
        model = ONE.build(0.0)
        with engine_for(model, adamw, config_of(2, clip=1.0, harmony={"stash": "host"})) as engine:
            frees(monkeypatch, free_bytes)
            train_groups(engine, groups_of(ONE, 2, 2))
        trained.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        monkeypatch.undo()
    assert_same(trained[0], trained[1], bitwise=True)
