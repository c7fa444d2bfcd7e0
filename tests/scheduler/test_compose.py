"""Task lists, as they print. Packs and micro-batches count from 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.plan import ALL_PACKS, Pack, Policy
from tests.scheduler.examples import packs_of, reused, text

THREE = packs_of(True, True, True)
TWO_FRESH = Group((0, 1))
PLAIN = Policy(prefetch=False, stash_on_host=0, deferred_update=False)


def step(packs: tuple[Pack, ...], group: Group, policy: Policy) -> str:
    return text(compose_step(reused(packs), group, policy))


def test_immediate_updates_follow_each_swap_out() -> None:
    assert step(THREE, TWO_FRESH, PLAIN) == (
        "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1 I2 L2.0 L2.1 O2 U2 E2 I1 B1.0 B1.1 G2 O1 U1 E1 I0 B0.0 B0.1 G1 O0 U0 E0 G0"
    )


def test_deferred_updates_follow_the_norm_in_forward_order() -> None:
    assert step(THREE, TWO_FRESH, Policy(prefetch=False, deferred_update=True)) == (
        "I0 F0.0 F0.1 E0 I1 F1.0 F1.1 E1 I2 L2.0 L2.1 O2 E2 I1 B1.0 B1.1 G2 O1 E1 I0 B0.0 B0.1 G1 O0 E0 G0 N U0 U1 U2"
    )


def test_prefetch_swaps_a_pack_in_while_the_one_before_computes() -> None:
    packs = packs_of(True, True, True, True)
    assert step(packs, Group((0,)), Policy(prefetch=True, deferred_update=True)) == (
        "I0 I1 F0.0 E0 I2 F1.0 E1 I3 F2.0 E2 "
        "I2 L3.0 O3 E3 I1 B2.0 G3 O2 E2 I0 B1.0 G2 O1 E1 B0.0 G1 O0 E0 G0 "
        "N U0 U1 U2 U3"
    )


def test_a_stash_on_the_host_leaves_behind_each_forward_and_comes_back_one_ahead() -> None:
    assert step(THREE, Group((0, 1, 2)), Policy(prefetch=False, stash_on_host=ALL_PACKS, deferred_update=False)) == (
        "I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 E0 I1 F1.0 S1.0 F1.1 S1.1 F1.2 S1.2 E1 "
        "I2 L2.0 L2.1 L2.2 O2 U2 E2 "
        "I1 T1.0 T1.1 B1.0 T1.2 B1.1 B1.2 G2 O1 U1 E1 "
        "I0 T0.0 T0.1 B0.0 T0.2 B0.1 B0.2 G1 O0 U0 E0 G0"
    )


def test_what_ran_forward_early_is_recomputed_in_the_last_pack_too() -> None:
    assert step(THREE, Group(fresh=(0, 2), forwarded=(1,)), PLAIN) == (
        "I0 F0.0 F0.2 E0 I1 F1.0 F1.2 E1 "
        "I2 L2.0 B2.1 L2.2 O2 U2 E2 I1 B1.0 B1.1 B1.2 G2 O1 U1 E1 I0 B0.0 B0.1 B0.2 G1 O0 U0 E0 G0"
    )


def test_nothing_runs_forward_if_everything_did() -> None:
    assert step(THREE, Group(fresh=(), forwarded=(0, 1)), PLAIN) == (
        "I2 B2.0 B2.1 O2 U2 E2 I1 B1.0 B1.1 G2 O1 U1 E1 I0 B0.0 B0.1 G1 O0 U0 E0 G0"
    )


def test_only_what_was_forwarded_is_fetched_from_the_host_for_the_last_pack() -> None:
    policy = Policy(prefetch=False, stash_on_host=ALL_PACKS, deferred_update=False)
    assert step(packs_of(True, True), Group(fresh=(1,), forwarded=(0, 2)), policy) == (
        "I0 F0.1 S0.1 E0 I1 T1.0 T1.2 B1.0 L1.1 B1.2 O1 U1 E1 I0 T0.0 T0.1 B0.0 T0.2 B0.1 B0.2 G1 O0 U0 E0 G0"
    )


def test_a_pack_that_stays_keeps_the_graphs_of_the_first_micro_batches_and_their_stash_never_moves() -> None:
    policy = replace(PLAIN, stash_on_host=ALL_PACKS, kept=(1,), graphs=(2, 2))
    assert step(THREE, Group((0, 1, 2, 3)), policy) == (
        "I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 F0.3 S0.3 E0 I1 K1.0 K1.1 F1.2 S1.2 F1.3 S1.3 "
        "I2 L2.0 L2.1 L2.2 L2.3 O2 U2 E2 T1.2 P1.0 P1.1 T1.3 B1.2 B1.3 G2 O1 U1 E1 "
        "I0 T0.0 T0.1 B0.0 T0.2 B0.1 T0.3 B0.2 B0.3 G1 O0 U0 E0 G0"
    )


def test_what_ran_forward_early_has_no_graph() -> None:
    policy = replace(PLAIN, kept=(0, 1), graphs=(2, 1, 9))
    assert step(THREE, Group(fresh=(1, 2), forwarded=(0,)), policy) == (
        "I0 K0.1 K0.2 I1 K1.1 F1.2 I2 B2.0 L2.1 L2.2 O2 U2 E2 B1.0 P1.1 B1.2 G2 O1 U1 E1 B0.0 P0.1 P0.2 G1 O0 U0 E0 G0"
    )
    assert "K" not in step(THREE, Group(fresh=(), forwarded=(0,)), policy)


@pytest.mark.parametrize(
    ("deferred", "expected"),
    [
        (False, "I0 F0.0 E0 I1 F1.0 E1 I2 L2.0 O2 U2 E2 I1 B1.0 G2 O1 U1 E1 G1"),
        (True, "I0 F0.0 E0 I1 F1.0 E1 I2 L2.0 O2 E2 I1 B1.0 G2 O1 E1 G1 N U1 U2"),
    ],
)
def test_a_pack_without_backward_is_not_swapped_in_again(deferred: bool, expected: str) -> None:
    policy = Policy(prefetch=False, deferred_update=deferred)
    assert step(packs_of(False, True, True), Group((0,)), policy) == expected


def test_a_pack_without_backward_between_two_others_is_passed_over() -> None:
    assert step(packs_of(True, False, True), Group((0,)), Policy(prefetch=True, deferred_update=False)) == (
        "I0 I1 F0.0 E0 I2 F1.0 E1 I0 L2.0 O2 U2 E2 B0.0 G2 O0 U0 E0 G0"
    )


def test_a_model_without_any_gradient_only_runs() -> None:
    assert step(packs_of(False, False), Group((0,)), PLAIN) == "I0 F0.0 E0 I1 L1.0 E1"


def test_a_single_pack_is_fused() -> None:
    for prefetch in (False, True):
        policy = Policy(prefetch=prefetch, deferred_update=True)
        assert step(packs_of(True), TWO_FRESH, policy) == "I0 L0.0 L0.1 O0 E0 G0 N U0"


def test_a_forward_pass_of_its_own_passes_every_pack() -> None:
    def alone(policy: Policy) -> str:
        return text(compose_forward(reused(THREE), Group((4,)), policy))

    assert alone(Policy(prefetch=False)) == "I0 F0.4 E0 I1 F1.4 E1 I2 F2.4 E2"
    assert alone(Policy(prefetch=True)) == "I0 I1 F0.4 E0 I2 F1.4 E1 F2.4 E2"
    assert alone(Policy(prefetch=False, stash_on_host=ALL_PACKS)) == "I0 F0.4 S0.4 E0 I1 F1.4 S1.4 E1 I2 F2.4 S2.4 E2"


def test_swaps_do_not_depend_on_the_number_of_micro_batches() -> None:
    lists = [step(THREE, Group.of(count), Policy()).split() for count in (1, 8)]
    swaps = [[task for task in tasks if task[0] in "IEOGUN"] for tasks in lists]

    assert swaps[0] == swaps[1]


def test_without_grouping_each_micro_batch_passes_all_packs_and_the_last_one_brings_the_updates() -> None:
    policy = Policy(prefetch=False, deferred_update=False, grouping=False)
    assert step(packs_of(True, True), TWO_FRESH, policy) == (
        "I0 F0.0 E0 I1 L1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 I0 F0.1 E0 I1 L1.1 O1 U1 E1 I0 B0.1 G1 O0 U0 E0 G0"
    )


def test_without_grouping_prefetch_begins_anew_with_each_micro_batch() -> None:
    assert step(packs_of(True, True), TWO_FRESH, Policy(grouping=False)) == (
        "I0 I1 F0.0 E0 I0 L1.0 O1 E1 B0.0 G1 O0 E0 G0 I0 I1 F0.1 E0 I0 L1.1 O1 E1 B0.1 G1 O0 E0 G0 N U0 U1"
    )


def test_without_grouping_what_ran_forward_early_only_runs_back() -> None:
    policy = Policy(prefetch=False, deferred_update=False, grouping=False)
    assert step(packs_of(True, True), Group(fresh=(1,), forwarded=(0,)), policy) == (
        "I1 B1.0 O1 E1 I0 B0.0 G1 O0 E0 G0 I0 F0.1 E0 I1 L1.1 O1 U1 E1 I0 B0.1 G1 O0 U0 E0 G0"
    )
