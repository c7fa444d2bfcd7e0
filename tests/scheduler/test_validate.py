"""The rules that composed lists are tested against: valid lists pass, and every way to break one is caught."""

from __future__ import annotations

import itertools

import pytest

from harmony_ds.scheduler.compose import Group
from harmony_ds.scheduler.plan import ALL_PACKS, Pack, Policy
from tests.scheduler.examples import packs_of, parse, reused
from tests.scheduler.validate import PlanError, composed, validate

PACKS = packs_of(True, True, True)
GROUP = Group((0, 1))
IMMEDIATE = "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1 I2 L2.0 L2.1 O2 U2 E2 I1 B1.0 B1.1 G2 O1 U1 E1 I0 B0.0 B0.1 G1 O0 U0 E0 G0"
DEFERRED = "I0 F0.0 E0 I1 L1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 N U0 U1"


KEEPING = "I0 K0.0 F0.1 I1 L1.0 L1.1 O1 E1 P0.0 B0.1 G1 O0 E0 G0 N U0 U1"


def check(tasks: str, packs: tuple[Pack, ...] = PACKS, group: Group = GROUP) -> None:
    validate(reused(packs), parse(tasks), group)


def without(task: str, tasks: str = IMMEDIATE) -> str:
    words = tasks.split()
    words.remove(task)
    return " ".join(words)


def test_the_lists_that_are_broken_below_are_valid() -> None:
    check(IMMEDIATE)
    check(DEFERRED, packs_of(True, True), Group((0,)))
    check(KEEPING, packs_of(True, True))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("group", [Group((0,)), Group((0, 1, 2)), Group((0, 2), (1,)), Group((), (0, 1))])
def test_whatever_is_composed_is_valid(needs: tuple[bool, ...], group: Group) -> None:
    packs = packs_of(*needs)
    values = {"stash_on_host": [0, 1, ALL_PACKS], "graphs": [(), (1, 9)], "kept": [(0, 1)]}
    names = "prefetch stash_on_host crossing_on_host deferred_update grouping graphs kept".split()
    for chosen in itertools.product(*(values.get(name, [False, True]) for name in names)):
        packing = reused(packs)
        composed(packing, group, Policy(**dict(zip(names, chosen, strict=True))))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (without("I0"), r"task 0 \(F0.0\): its weights are not on the device"),
        ("I0 " + IMMEDIATE, r"task 1 \(I0\): it is on the device already"),
        (IMMEDIATE.replace("F0.1", "F0.1 F0.1", 1), r"\(F0.1\): out of forward order"),
        (IMMEDIATE.replace("B1.0", "B1.0 B1.0"), r"\(B1.0\): out of backward order"),
        (IMMEDIATE.replace("B1.0 B1.1 G2 O1", "B1.0 O1 B1.1 G2"), r"\(O1\): swapped out early or twice"),
        (IMMEDIATE.replace("O1 U1", "U1 O1"), r"\(U1\): updated early, twice or in the wrong place"),
        (IMMEDIATE.replace("L2.1", "B2.1"), "fused where it must not be"),
        (IMMEDIATE.replace("B1.0", "T1.0 B1.0"), "its stash never left"),
        (IMMEDIATE.replace("F1.0", "F1.0 S1.0"), "its stash is on the host"),
        (IMMEDIATE.replace("F0.1", "F0.1 F0.7"), "there is no such micro-batch"),
    ],
)
def test_a_broken_list_is_caught(tasks: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(tasks)


@pytest.mark.parametrize("task", sorted(set(without("G0", without("G1", without("G2"))).split())))
def test_no_task_but_the_freeing_of_gradients_can_be_dropped(task: str) -> None:
    with pytest.raises(PlanError):
        check(without(task))


@pytest.mark.parametrize(
    ("tasks", "packs", "group", "message"),
    [
        (DEFERRED.replace("N U0 U1", "U0 N U1"), packs_of(True, True), Group((0,)), "before the norm"),
        (IMMEDIATE, PACKS, Group((0,), (1,)), r"\(F0.1\): out of forward order"),
        (IMMEDIATE, packs_of(False, True, True), GROUP, r"\(B0.0\): out of backward order"),
        (KEEPING.replace("P0.0", "B0.0"), packs_of(True, True), GROUP, "recomputed though its graph is kept"),
        (KEEPING.replace("I1", "E0 I1"), packs_of(True, True), GROUP, r"\(E0\): its graphs are kept"),
    ],
)
def test_a_list_is_checked_against_its_packs_and_its_group(
    tasks: str, packs: tuple[Pack, ...], group: Group, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check(tasks, packs, group)


UNGROUPED = "I0 F0.0 E0 I1 L1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 I0 F0.1 E0 I1 L1.1 O1 U1 E1 I0 B0.1 G1 O0 U0 E0 G0"


@pytest.mark.parametrize(
    ("tasks", "policy", "message"),
    [
        (UNGROUPED, Policy(), r"\(O1\): swapped out early or twice"),
        (UNGROUPED.replace("O0 E0 G0 I0", "E0 I0"), Policy(grouping=False), r"\[0, 1, 1\] are swapped out"),
    ],
)
def test_grouping_is_a_promise_of_its_own(tasks: str, policy: Policy, message: str) -> None:
    packing = reused(packs_of(True, True))
    validate(packing, parse(UNGROUPED), GROUP, Policy(grouping=False))
    with pytest.raises(PlanError, match=message):
        validate(packing, parse(tasks), GROUP, policy)
