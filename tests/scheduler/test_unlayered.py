"""Parameters that no layer call covers are packs without calls: their tasks print, parse, are checked and counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.decomposer import LayerGraph
from harmony_ds.scheduler.compose import Group, compose_end, compose_evaluation, compose_forward, compose_step
from harmony_ds.scheduler.costs import CallCost
from harmony_ds.scheduler.grid import format_plan
from harmony_ds.scheduler.memory import walk_memory
from harmony_ds.scheduler.packing import Packer
from harmony_ds.scheduler.plan import Pack, Packing, Plan, Policy
from harmony_ds.scheduler.swaps import swaps_of
from tests.scheduler.examples import FP32, costs_of, graph_of, packs_of, parse, reused, text, with_unlayered
from tests.scheduler.validate import PlanError, validate

TWO = with_unlayered(reused(packs_of(True, True)), weight_bytes=7, gradient_bytes=5)
LATE = Policy(prefetch=False)
SOON = Policy(prefetch=False, deferred_update=False)
IMMEDIATE = "I2 I0 F0.0 E0 I1 L1.0 O1 U1 E1 I0 B0.0 G1 O0 U0 E0 G0 O2 G2 E2 U2"
DEFERRED = "I2 I0 F0.0 E0 I1 L1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 O2 G2 E2 N U0 U1 U2"


def with_uncalled(packing: Packing) -> Packing:
    number = len(packing.packs)
    pack = Pack(number, (), (), (), ("unused",), 0, 0, False)
    return replace(packing, packs=(*packing.packs, pack), uncalled=number)


def test_they_are_there_from_the_first_task_to_the_last_backward_pass() -> None:
    assert text(compose_step(TWO, Group((0,)), SOON)) == IMMEDIATE
    assert text(compose_step(TWO, Group((0,)), LATE)) == DEFERRED
    assert text(compose_end(TWO, LATE)) == "O2 G2 E2 N U0 U1 U2"
    # What the model does not use is only updated.
    assert text(compose_step(with_uncalled(TWO), Group((0,)), SOON)) == IMMEDIATE + " U3"
    assert text(compose_step(with_uncalled(TWO), Group((0,)), LATE)) == DEFERRED + " U3"


def test_what_is_there_already_is_not_swapped_in_again() -> None:
    second_part = Group((0,), has_unlayered=True)

    assert text(compose_step(TWO, second_part, SOON)) == IMMEDIATE.removeprefix("I2 ")
    assert text(compose_forward(TWO, Group((0,)), LATE)) == "I2 I0 F0.0 E0 I1 F1.0 E1"
    assert text(compose_forward(TWO, second_part, LATE)) == "I0 F0.0 E0 I1 F1.0 E1"


def test_an_evaluation_leaves_behind_what_it_found() -> None:
    both = "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1"

    assert text(compose_evaluation(TWO, Group((0, 1)), LATE)) == f"I2 {both} E2"
    assert text(compose_evaluation(TWO, Group((0, 1), has_unlayered=True), LATE)) == both


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (IMMEDIATE.removeprefix("I2 "), r"\(F0.0\): the unlayered parameters are not on the device"),
        (IMMEDIATE.replace(" E2", ""), r"packs \[2\] are left on the device"),
        (IMMEDIATE.replace("O2 G2 ", ""), r"\(U2\): updated early, twice or in the wrong place"),
        (IMMEDIATE.replace(" U2", ""), r"\[0, 1\] are updated, and not \[0, 1, 2\]"),
        (IMMEDIATE.replace(" G2", ""), r"\[0, 1\] are freed, and not \[0, 1, 2\]"),
        (IMMEDIATE.replace("B0.0", "O2 B0.0"), r"\(O2\): swapped out early or twice"),
        (IMMEDIATE.replace("B0.0", "E2 B0.0"), r"\(B0.0\): the unlayered parameters are not on the device"),
        (DEFERRED.replace("O2 G2 E2 N", "N O2 G2 E2"), r"\(N\): not every gradient has been swapped out"),
    ],
)
def test_every_way_to_break_that_is_caught(tasks: str, message: str) -> None:
    for valid, policy in ((IMMEDIATE, SOON), (DEFERRED, LATE)):
        validate(TWO, parse(valid), Group((0,)), policy)
    with pytest.raises(PlanError, match=message):
        validate(TWO, parse(tasks), Group((0,)), LATE if "N" in tasks else SOON)


def test_their_bytes_are_alive_from_swap_in_to_evict() -> None:
    costs = costs_of((0, 1), CallCost(needs_backward=True))
    bare = reused(TWO.packs[:2])
    for policy in (SOON, LATE):
        tasks = compose_step(TWO, Group((0,)), policy)
        mine = walk_memory(TWO.packs, tasks, costs)
        others = walk_memory(bare.packs, compose_step(bare, Group((0,)), policy), costs)
        end = text(tasks).split().index("O2")
        assert mine.weight_bytes[1:end] == tuple(7 + nbytes for nbytes in others.weight_bytes[: end - 1])
        assert mine.activation_bytes[1:end] == tuple(5 + nbytes for nbytes in others.activation_bytes[: end - 1])
        assert max(mine.device_peaks) == max(others.device_peaks) + 12
        assert (mine.weight_bytes[-1], mine.activation_bytes[-1]) == (0, 0)
        # Of a part that an earlier one began, they are there from its first task on.
        later = walk_memory(TWO.packs, tasks[1:], costs)
        assert later.weight_bytes == mine.weight_bytes[1:] and later.activation_bytes == mine.activation_bytes[1:]


def test_their_swaps_are_counted_and_the_plan_prints_and_saves() -> None:
    costs = costs_of((0, 1), CallCost(needs_backward=True))
    packing = with_uncalled(TWO)
    plan = Plan(packing, LATE, compose_step(packing, Group((0,)), LATE), 1, 0, 0, (0, 1))
    swaps = swaps_of(plan, costs)

    assert (swaps.weights_in, swaps.gradients_out) == (3 * 100 + 7, 2 * 10 + 5)
    assert Plan.from_json(plan.to_json()) == plan
    assert "A pack without a row: parameters outside all layer calls." in format_plan(plan)


def test_packs_are_made_of_what_the_graph_says() -> None:
    graph: LayerGraph = replace(graph_of([16, 16, 16, 8]), calls=(0, 1), unlayered=("p2",), uncalled=("p3",))
    packing = Packer(graph, costs_of((0, 1)), FP32).packing((0, 1, 2))
    unlayered, uncalled = packing.packs[2:]

    assert (packing.unlayered, packing.uncalled) == (2, 3)
    assert unlayered.parameters == unlayered.owned == ("p2",)
    assert (unlayered.weight_bytes, unlayered.gradient_bytes, unlayered.update_elements) == (64, 64, 16)
    assert (uncalled.parameters, uncalled.owned, uncalled.weight_bytes) == ((), ("p3",), 0)
    assert [pack.needed_at for pack in sorted(packing.packs, key=lambda pack: pack.needed_at)][:3] == [-1, 0, 1]
