"""Forecasts over costs that were made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.config import HarmonySettings, load_config
from harmony_ds.errors import DoesNotFitError
from harmony_ds.estimate.forecast import Forecast, changes, forecast
from harmony_ds.estimate.subject import Subject
from harmony_ds.estimate.survey import Survey, smallest_peak_bytes
from harmony_ds.scheduler.allocations import Allocations
from harmony_ds.scheduler.allocator_fit import Fitting, leaving
from harmony_ds.scheduler.choose import PlanRequest, make_plan
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.profile import Machine, Profile
from harmony_ds.scheduler.search import Choice, search
from harmony_ds.scheduler.simulate import simulate
from harmony_ds.scheduler.swaps import lower_bound_bytes
from tests.scheduler.examples import costs_of, graph_of

LAYERS = 8
ELEMENTS = 2**20
CONFIG = load_config({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}})
SUBJECT = Subject(nn.Identity(), {"input_ids": torch.zeros(1, 100)})
WEIGHT, GRADIENT = 2 * ELEMENTS, 4 * ELEMENTS
COST = CallCost(
    waiting=WaitingBytes(alive_bytes=2**12),
    stash=StashBytes(new_bytes=2**12),
    forward=ForwardBytes(peak_bytes=2**14, graph_bytes=2**14),
    backward=BackwardBytes(input_gradient_bytes=2**12, peak_bytes=2**15),
    needs_backward=True,
    forward_ms=1.0,
    backward_ms=3.0,
    fused_ms=3.0,
    propagate_ms=2.0,
)
MACHINE = Machine(
    name="made up",
    copies_overlap=True,
    swap_in_bytes_per_ms=WEIGHT,
    swap_out_bytes_per_ms=WEIGHT,
    link_bytes_per_ms=2 * WEIGHT,
    update_elements_per_ms=ELEMENTS / 4,
    norm_elements_per_ms=ELEMENTS,
    host_bytes_per_ms=1e18,
    device_update_elements_per_ms=1e12,
)


def situation(budget_bytes: int | None = None, micro_batches: int = 4, clipping: bool = True, **machine: Any) -> Survey:
    graph = graph_of([ELEMENTS] * LAYERS)
    costs = costs_of(graph.calls, COST, tail_bytes=2**12)
    request = PlanRequest(
        micro_batches=micro_batches,
        budget_bytes=budget_bytes,
        resident_bytes=0,
        settings=HarmonySettings(residency="off"),
        policy=Policy(deferred_update=clipping),
    )
    profile = Profile(replace(MACHINE, **machine), ((1, costs),))
    return Survey(SUBJECT, CONFIG, graph, profile, profile.tables[-1][1], request)


def tight(micro_batches: int = 4, clipping: bool = True, **machine: Any) -> Survey:
    """With memory for little more than the smallest plan."""
    wanted = situation(2**40, micro_batches, clipping, **machine)
    return situation(smallest_peak_bytes(wanted) + WEIGHT, micro_batches, clipping, **machine)


def test_the_smallest_peak_is_the_least_budget_that_fits() -> None:
    least = smallest_peak_bytes(tight())

    assert forecast(situation(least)).plan.peak_bytes == least
    with pytest.raises(DoesNotFitError):
        forecast(situation(least - 1))


def test_a_plan_takes_what_is_left_to_the_allocator_where_nothing_fits_beside_that() -> None:
    least = smallest_peak_bytes(tight())
    found = forecast(replace(situation(least - 50), fragment_bytes=50))

    assert found.plan.peak_bytes == found.survey.request.budget_bytes == least
    assert found.survey.fragment_bytes == 0
    with pytest.raises(DoesNotFitError):
        forecast(replace(situation(least - 51), fragment_bytes=50))


def test_host_memory_of_a_deferred_update_holds_every_gradient() -> None:
    found = forecast(tight())

    assert found.host_bytes == {
        "weights": LAYERS * WEIGHT,
        "masters": LAYERS * 4 * ELEMENTS,
        "optimizer": LAYERS * 8 * ELEMENTS,
        "casts": 0,
        "gradients": LAYERS * GRADIENT,
        "stash": found.prediction.swaps.stash_out,
    }
    assert found.host_total_bytes == sum(found.host_bytes.values())
    assert found.items_per_step == 400
    assert found.items_per_s == pytest.approx(400e3 / found.prediction.step_ms)


@pytest.mark.parametrize("clipping", [True, False])
def test_gradients_of_packs_that_stay_need_no_host_memory_and_the_rest_of_them_does(clipping: bool) -> None:
    roomy = situation(2**40, clipping=clipping)
    for count in (0, 3, LAYERS):
        settings = HarmonySettings(residency=count, pack_layers=1)
        found = forecast(replace(roomy, request=replace(roomy.request, settings=settings)))
        swapped = LAYERS - count

        assert len(found.plan.policy.resident) == count
        assert found.host_bytes["gradients"] == (swapped if clipping else min(3, swapped)) * GRADIENT
        assert found.host_bytes["weights"] == LAYERS * WEIGHT
        assert found.host_bytes["masters"] == LAYERS * 4 * ELEMENTS
        assert found.host_bytes["optimizer"] == LAYERS * 8 * ELEMENTS


def test_host_memory_that_lacks_is_said() -> None:
    found = forecast(tight(), 10)

    assert found.host_missing_bytes == found.host_total_bytes - 10
    assert forecast(tight()).host_missing_bytes == 0


@pytest.mark.parametrize(
    ("machine", "bottleneck", "helps"),
    [
        ({"update_elements_per_ms": 1e12}, "compute", "a device that computes twice as fast"),
        ({"update_elements_per_ms": ELEMENTS / 100}, "update", "host memory twice as fast"),
        (
            {
                "update_elements_per_ms": 1e12,
                "swap_in_bytes_per_ms": WEIGHT / 64,
                "swap_out_bytes_per_ms": WEIGHT / 2,
                "link_bytes_per_ms": WEIGHT,
            },
            "swap_in",
            "a link twice as fast",
        ),
    ],
)
def test_the_bottleneck_is_named_and_relieving_it_helps(machine: dict[str, Any], bottleneck: str, helps: str) -> None:
    asked = tight(**machine)
    found = forecast(asked)
    rates = [(what, rate) for what, rate in changes(found).items() if "fast" in what]

    assert found.prediction.bottleneck == bottleneck
    assert rates[0][0] == helps
    assert rates[0][1] > 1.3 * found.items_per_s


def test_where_swaps_limit_a_longer_step_helps() -> None:
    asked = tight(micro_batches=1, swap_in_bytes_per_ms=WEIGHT / 64, link_bytes_per_ms=WEIGHT)
    found = forecast(asked)
    longer = next(rate for what, rate in changes(found).items() if "micro-batches" in what)

    assert longer > 1.3 * found.items_per_s


def test_more_memory_never_hurts_and_is_left_out_where_there_is_no_limit() -> None:
    asked = tight()
    found: Forecast = forecast(asked)
    unlimited = situation(None)

    assert changes(found)["twice the device memory"] >= found.items_per_s * 0.999
    assert "twice the device memory" not in changes(forecast(unlimited))


def test_more_memory_of_several_devices_leaves_each_of_them_a_pack() -> None:
    request = situation(2**40).request
    several = replace(situation(2**40), request=replace(request, policy=replace(request.policy, pipeline=3)))
    found = forecast(several)
    assert changes(found)["twice the device memory"] >= found.items_per_s


def test_traffic_is_compared_with_the_bound_and_with_zero3() -> None:
    found = forecast(tight())
    swaps = found.prediction.swaps

    assert swaps.weights_in + swaps.gradients_out == lower_bound_bytes(found.plan)
    assert found.zero3_offload_bytes == LAYERS * ELEMENTS * (4 * (2 + 2 + 2 + 2) + 4)


def test_the_host_is_given_a_plan_that_it_has_room_for_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = forecast(tight())
    asked: list[int | None] = []

    def searched(*arguments: Any) -> tuple[Choice, ...]:
        asked.append(arguments[4].host_bytes)
        return (fastest.choice,)

    monkeypatch.setattr("harmony_ds.estimate.forecast.search", searched)
    state = sum(fastest.host_bytes[kind] for kind in ("weights", "masters", "optimizer"))
    for budget in (None, state + 7, state, state - 1):
        forecast(tight(), budget)
    assert asked == [None, 7, 0, 0]


def test_a_plan_is_left_what_the_allocator_needs_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    survey, asked = tight(), []
    less = leaving(survey.request, 50)
    fastest = forecast(survey)

    def fitting(search_with: Any, request: Any, costs: Any, fragment_bytes: int) -> Fitting:
        asked.append((request.budget_bytes, fragment_bytes))
        return Fitting((fastest.choice,), 80)

    monkeypatch.setattr("harmony_ds.estimate.forecast.search_fitting", fitting)
    known = replace(survey.costs, allocations=Allocations())
    found = forecast(replace(survey, request=less, costs=known, fragment_bytes=50))
    assert survey.request.budget_bytes is not None
    assert asked == [(survey.request.budget_bytes, 50)]
    assert found.survey.request.budget_bytes == survey.request.budget_bytes - 80
    assert found.survey.fragment_bytes == 80


def test_several_devices_hold_weights_and_state_once_and_take_their_pieces_of_the_gradients() -> None:
    one = tight()
    two = one.among(2)
    found, alone = forecast(replace(two, request=replace(two.request, budget_bytes=None))), forecast(one)

    assert one.among(1) is one
    asked = situation(2**30).among(4).request
    # The search takes the exchange off the budget, where devices exchange at all.
    assert (asked.budget_bytes, asked.exchange_bytes, asked.policy.devices) == (2**30, 3 * 2**24, 4)
    assert found.items_per_step == 2 * alone.items_per_step
    for kind in ("weights", "masters", "optimizer", "gradients"):
        assert found.host_bytes[kind] == alone.host_bytes[kind]
    assert found.prediction.swaps.gradients_out == LAYERS * GRADIENT // 2
    assert found.prediction.swaps.sent == LAYERS * GRADIENT // 2


def test_devices_on_one_host_share_its_memory_and_cores() -> None:
    shared = MACHINE.among(4)
    assert shared.host_bytes_per_ms == MACHINE.host_bytes_per_ms / 4
    assert shared.update_elements_per_ms == MACHINE.update_elements_per_ms / 4
    assert shared.swap_in_bytes_per_ms == MACHINE.swap_in_bytes_per_ms
    # Nothing is known of a way of their own.
    assert shared.peers_share_link and shared.peer_bytes_per_ms == MACHINE.link_bytes_per_ms / 2
    bridged = replace(MACHINE, peer_bytes_per_ms=1e9).among(2)
    assert not bridged.peers_share_link and bridged.peer_bytes_per_ms == 1e9


@pytest.mark.parametrize("clipping", [True, False])
@pytest.mark.parametrize("make", [tight, lambda *some: situation(2**40, *some), lambda *some: situation(2**25, *some)])
def test_a_few_micro_batches_stand_for_many_to_the_byte(
    make: Callable[..., Survey], clipping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmony_ds.estimate.forecast.MOST_LISTED", 4)
    survey = make(40, clipping)
    survey = replace(survey, request=replace(survey.request, thorough=False))
    found = forecast(survey)
    plan = found.plan
    listed = make_plan(plan.packing, survey.costs, survey.request, plan.policy)
    prediction = simulate(listed, survey.costs, MACHINE)

    assert len(plan.tasks) < len(listed.tasks) / 3
    assert (plan.peak_bytes, plan.micro_batches) == (listed.peak_bytes, 40)
    assert found.prediction.swaps == prediction.swaps
    assert found.prediction.step_ms == pytest.approx(prediction.step_ms, rel=1e-9)
    assert found.prediction.busy_ms == pytest.approx(prediction.busy_ms)
    assert found.host_bytes == Forecast(survey, replace(found.choice, plan=listed), None).host_bytes
    listed_choice = replace(found.choice, plan=listed, counts=())
    assert changes(found) == pytest.approx(changes(Forecast(survey, listed_choice, None)), rel=1e-9)


def test_any_number_of_micro_batches_is_forecast_with_as_few_tasks() -> None:
    budget = smallest_peak_bytes(tight()) + 2**30
    million, many = (forecast(situation(budget, count)) for count in (10**6, 10**9))

    assert len(many.plan.tasks) == len(million.plan.tasks) < 1000
    assert many.items_per_step == 100 * 10**9
    assert many.prediction.step_ms == pytest.approx(1000 * million.prediction.step_ms, rel=1e-3)
    assert len(changes(many)) == len(changes(million)) == 5


def test_a_plan_that_runs_lists_every_micro_batch() -> None:
    survey = tight(micro_batches=2000)
    listed = search(survey.graph, survey.costs, MACHINE, survey.element, replace(survey.request, thorough=False))[0]

    assert {task.micro_batch for task in listed.plan.tasks} == {-1, *range(2000)} and not listed.counts
