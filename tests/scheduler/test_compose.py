"""Task lists, as they print. Packs and micro-batches count from 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.plan import ALL_PACKS, Pack, Policy
from tests.scheduler.examples import packs_of, reused, text

TWO, THREE = packs_of(True, True), packs_of(True, True, True)
PLAIN = Policy(prefetch=False, stash_on_host=0, deferred_update=False)
DEFERRED, AHEAD = replace(PLAIN, deferred_update=True), Policy(prefetch=True, deferred_update=True)
ON_HOST, ALONE = replace(PLAIN, stash_on_host=ALL_PACKS), replace(PLAIN, grouping=False)


def step(packs: tuple[Pack, ...], group: Group, policy: Policy) -> str:
    return text(compose_step(reused(packs), group, policy))


LISTS: dict[str, tuple[tuple[Pack, ...], Group, Policy, str]] = {
    "immediate updates follow each swap-out": (THREE, Group((0, 1)), PLAIN,
        "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1 I2 L2.0 L2.1 O2 U2 E2 I1 B1.0 B1.1 G2 O1 U1 E1 I0 B0.0 B0.1 G1 O0 U0 E0 G0"),
    "deferred updates follow the norm in forward order": (THREE, Group((0, 1)), DEFERRED,
        "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1 I2 L2.0 L2.1 O2 E2 I1 B1.0 B1.1 G2 O1 E1 I0 B0.0 B0.1 G1 O0 E0 G0 N U0 U1 U2"),
    "prefetch swaps a pack in while the one before computes": (packs_of(True, True, True, True), Group((0,)), AHEAD,
        "I0 I1 F0.0 E0 I2 F1.0 E1 I3 F2.0 E2 I2 L3.0 O3 E3 I1 B2.0 G3 O2 E2 I0 B1.0 G2 O1 E1 B0.0 G1 O0 E0 G0 "
        "N U0 U1 U2 U3"),
    "a stash on the host leaves behind each forward and comes back one ahead": (THREE, Group((0, 1, 2)), ON_HOST,
        "I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 E0 I1 F1.0 S1.0 F1.1 S1.1 F1.2 S1.2 E1 I2 L2.0 L2.1 L2.2 O2 U2 E2 "
        "I1 T1.0 T1.1 B1.0 T1.2 B1.1 B1.2 G2 O1 U1 E1 I0 T0.0 T0.1 B0.0 T0.2 B0.1 B0.2 G1 O0 U0 E0 G0"),
    "a stash comes back ahead of the next pack's weights, the first one during the last run of the pack before": (
        packs_of(True, True, True, True), Group((0, 1, 2)), replace(AHEAD, stash_on_host=ALL_PACKS),
        "I0 I1 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 E0 I2 F1.0 S1.0 F1.1 S1.1 F1.2 S1.2 E1 I3 F2.0 S2.0 F2.1 S2.1 F2.2 S2.2 E2 "
        "I2 L3.0 L3.1 T2.0 L3.2 O3 E3 T2.1 I1 B2.0 T2.2 B2.1 T1.0 B2.2 G3 O2 E2 T1.1 I0 B1.0 T1.2 B1.1 T0.0 B1.2 G2 O1 E1 "
        "T0.1 B0.0 T0.2 B0.1 B0.2 G1 O0 E0 G0 N U0 U1 U2 U3"),
    "of a single micro-batch no second stash is on the device": (
        THREE, Group((0,)), replace(AHEAD, stash_on_host=ALL_PACKS),
        "I0 I1 F0.0 S0.0 E0 I2 F1.0 S1.0 E1 I1 L2.0 O2 E2 T1.0 I0 B1.0 G2 O1 E1 T0.0 B0.0 G1 O0 E0 G0 N U0 U1 U2"),
    "where graphs are kept the stash of later micro-batches comes one run early": (
        THREE, Group((0, 1, 2, 3)), replace(AHEAD, stash_on_host=ALL_PACKS, kept=(1,), graphs=(0, 2)),
        "I0 I1 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 F0.3 S0.3 E0 I2 K1.0 K1.1 F1.2 S1.2 F1.3 S1.3 "
        "L2.0 L2.1 L2.2 T1.2 L2.3 O2 E2 I0 P1.0 P1.1 T1.3 B1.2 T0.0 B1.3 G2 O1 E1 "
        "T0.1 B0.0 T0.2 B0.1 T0.3 B0.2 B0.3 G1 O0 E0 G0 N U0 U1 U2"),
    "what ran forward early is recomputed in the last pack too": (THREE, Group(fresh=(0, 2), forwarded=(1,)), PLAIN,
        "I0 F0.0 F0.2 E0 I1 F1.0 F1.2 E1 "
        "I2 L2.0 B2.1 L2.2 O2 U2 E2 I1 B1.0 B1.1 B1.2 G2 O1 U1 E1 I0 B0.0 B0.1 B0.2 G1 O0 U0 E0 G0"),
    "nothing runs forward if everything did": (THREE, Group(fresh=(), forwarded=(0, 1)), PLAIN,
        "I2 B2.0 B2.1 O2 U2 E2 I1 B1.0 B1.1 G2 O1 U1 E1 I0 B0.0 B0.1 G1 O0 U0 E0 G0"),
    "only what was forwarded is fetched for the last pack": (TWO, Group(fresh=(1,), forwarded=(0, 2)), ON_HOST,
        "I0 F0.1 S0.1 E0 I1 T1.0 T1.2 B1.0 L1.1 B1.2 O1 U1 E1 I0 T0.0 T0.1 B0.0 T0.2 B0.1 B0.2 G1 O0 U0 E0 G0"),
    "a pack that stays keeps the graphs of the first micro-batches and their stash never moves": (
        THREE, Group((0, 1, 2, 3)), replace(ON_HOST, kept=(1,), graphs=(2, 2)),
        "I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 F0.3 S0.3 E0 I1 K1.0 K1.1 F1.2 S1.2 F1.3 S1.3 "
        "I2 L2.0 L2.1 L2.2 L2.3 O2 U2 E2 T1.2 P1.0 P1.1 T1.3 B1.2 B1.3 G2 O1 U1 E1 "
        "I0 T0.0 T0.1 B0.0 T0.2 B0.1 T0.3 B0.2 B0.3 G1 O0 U0 E0 G0"),
    "what ran forward early has no graph": (
        THREE, Group(fresh=(1, 2), forwarded=(0,)), replace(PLAIN, kept=(0, 1), graphs=(2, 1, 9)),
        "I0 K0.1 K0.2 I1 K1.1 F1.2 I2 B2.0 L2.1 L2.2 O2 U2 E2 B1.0 P1.1 B1.2 G2 O1 U1 E1 B0.0 P0.1 P0.2 G1 O0 U0 E0 G0"),
    "a group that ran forward early has no graphs": (
        THREE, Group(fresh=(), forwarded=(0,)), replace(PLAIN, kept=(0, 1), graphs=(2, 1, 9)),
        "I2 B2.0 O2 U2 E2 I1 B1.0 G2 O1 U1 E1 I0 B0.0 G1 O0 U0 E0 G0"),
    "a pack without backward is not swapped in again": (packs_of(False, True, True), Group((0,)), PLAIN,
        "I0 F0.0 E0 I1 F1.0 E1 I2 L2.0 O2 U2 E2 I1 B1.0 G2 O1 U1 E1 G1"),
    "what it owns is updated last": (
        (replace(packs_of(False)[0], owned=("p0",)), *packs_of(False, True, True)[1:]), Group((0,)), PLAIN,
        "I0 F0.0 E0 I1 F1.0 E1 I2 L2.0 O2 U2 E2 I1 B1.0 G2 O1 U1 E1 G1 U0"),
    "nor where updates are deferred": (packs_of(False, True, True), Group((0,)), DEFERRED,
        "I0 F0.0 E0 I1 F1.0 E1 I2 L2.0 O2 E2 I1 B1.0 G2 O1 E1 G1 N U1 U2"),
    "a pack without backward between two others is passed over": (
        packs_of(True, False, True), Group((0,)), replace(PLAIN, prefetch=True),
        "I0 I1 F0.0 E0 I2 F1.0 E1 I0 L2.0 O2 U2 E2 B0.0 G2 O0 U0 E0 G0"),
    "a model without any gradient only runs": (packs_of(False, False), Group((0,)), PLAIN, "I0 F0.0 E0 I1 L1.0 E1"),
    "a single pack is fused": (packs_of(True), Group((0, 1)), DEFERRED, "I0 L0.0 L0.1 O0 E0 G0 N U0"),
    "a single pack is fused with prefetch": (packs_of(True), Group((0, 1)), AHEAD, "I0 L0.0 L0.1 O0 E0 G0 N U0"),
    "without grouping each micro-batch passes all packs and the last one brings the updates": (
        TWO, Group((0, 1)), ALONE,
        "I0 F0.0 E0 I1 L1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 I0 F0.1 E0 I1 L1.1 O1 U1 E1 I0 B0.1 G1 O0 U0 E0 G0"),
    "without grouping prefetch begins anew with each micro-batch": (TWO, Group((0, 1)), Policy(grouping=False),
        "I0 I1 F0.0 E0 I0 L1.0 O1 E1 B0.0 G1 O0 E0 G0 I0 I1 F0.1 E0 I0 L1.1 O1 E1 B0.1 G1 O0 E0 G0 N U0 U1"),
    "without grouping what ran forward early only runs back": (TWO, Group(fresh=(1,), forwarded=(0,)), ALONE,
        "I1 B1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 I0 F0.1 E0 I1 L1.1 O1 U1 E1 I0 B0.1 G1 O0 U0 E0 G0"),
    "the last of those that share a loss turns and the others go back after it": (
        TWO, Group(fresh=(0, 1, 2, 3, 4), shared_losses=((0, 1, 3),)), PLAIN,
        "I0 F0.0 F0.1 F0.2 F0.3 F0.4 E0 I1 F1.0 F1.1 L1.2 L1.3 B1.1 B1.0 L1.4 O1 U1 E1 "
        "I0 B0.2 B0.3 B0.1 B0.0 B0.4 G1 O0 U0 E0 G0"),
    "without grouping those that share a loss pass all packs together": (
        TWO, Group(fresh=(0, 1, 2), shared_losses=((0, 1),)), ALONE,
        "I0 F0.0 F0.1 E0 I1 F1.0 L1.1 B1.0 O1 E1 I0 B0.1 B0.0 G1 O0 E0 G0 "
        "I0 F0.2 E0 I1 L1.2 O1 U1 E1 I0 B0.2 G1 O0 U0 E0 G0"),
}  # fmt: skip


@pytest.mark.parametrize(("packs", "group", "policy", "tasks"), LISTS.values(), ids=LISTS)
def test_a_step_is_composed(packs: tuple[Pack, ...], group: Group, policy: Policy, tasks: str) -> None:
    assert step(packs, group, policy) == tasks


def test_a_forward_pass_of_its_own_passes_every_pack() -> None:
    def alone(policy: Policy) -> str:
        return text(compose_forward(reused(THREE), Group((4,)), policy))

    assert alone(Policy(prefetch=False)) == "I0 F0.4 E0 I1 F1.4 E1 I2 F2.4 E2"
    assert alone(Policy(prefetch=True)) == "I0 I1 F0.4 E0 I2 F1.4 E1 F2.4 E2"
    assert alone(Policy(prefetch=False, stash_on_host=ALL_PACKS)) == "I0 F0.4 S0.4 E0 I1 F1.4 S1.4 E1 I2 F2.4 S2.4 E2"


def test_swaps_do_not_depend_on_the_number_of_micro_batches() -> None:
    lists = [step(THREE, Group.with_fresh(count), Policy()).split() for count in (1, 8)]
    swaps = [[task for task in tasks if task[0] in "IEOGUN"] for tasks in lists]
    assert swaps[0] == swaps[1]
