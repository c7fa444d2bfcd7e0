"""Bytes alive at each task, added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.profiler.costs import CallCost, CostTable
from harmony_ds.scheduler import (
    ALL_PACKS,
    Group,
    MemoryProfile,
    Pack,
    Packing,
    Policy,
    compose_forward,
    compose_step,
    pack_uniformly,
    walk_memory,
)
from harmony_ds.scheduler.memory import _LOSS_BYTES
from tests.scheduler.examples import FP32, costs_of, graph_of, packs_of, text

TWO = packs_of(True, True, weight_bytes=1000, gradient_bytes=500)
COST = CallCost(
    alive_bytes=10_000,
    stash_bytes=8_000,
    shared_bytes=4_000,
    forward_bytes=30_000,
    graph_bytes=20_000,
    backward_bytes=60_000,
    needs_backward=True,
)
HELD = 3_000 + _LOSS_BYTES  # of a micro-batch that ran to its end


def walk(packs: tuple[Pack, ...], costs: CostTable, micro_batches: int, policy: Policy) -> tuple[str, MemoryProfile]:
    tasks = compose_step(Packing.reused(packs), Group(tuple(range(micro_batches))), policy)
    return text(tasks), walk_memory(packs, tasks, costs)


def test_weights_are_there_from_swap_in_to_evict() -> None:
    tasks, profile = walk(TWO, costs_of((0, 1)), 1, Policy(prefetch=False, deferred_update=False))

    assert tasks == "I0 F0.0 E0 I1 L1.0 O1 U1 E1 I0 B0.0 G1 O0 U0 E0 G0"
    assert profile.weight_bytes == (*[1000] * 14, 0)


def test_a_pack_that_is_prefetched_counts_from_its_swap_in() -> None:
    packs = packs_of(True, True, True, weight_bytes=1000)
    tasks, profile = walk(packs, costs_of((0, 1, 2)), 1, Policy(prefetch=True, deferred_update=False))
    at = dict(zip(tasks.split(), profile.weight_bytes, strict=True))

    assert tasks == "I0 I1 F0.0 E0 I2 F1.0 E1 I1 L2.0 O2 U2 E2 I0 B1.0 G2 O1 U1 E1 B0.0 G1 O0 U0 E0 G0"
    assert [at[task] for task in ("F0.0", "F1.0", "L2.0", "B1.0", "B0.0", "G0")] == [2000, 2000, 2000, 2000, 1000, 0]


def test_activations_of_one_micro_batch_by_hand() -> None:
    """F0: what waited before the call, and the call. Then it waits before call 1, with its stash.
    L1: what waited, the graph, and the largest excess of forward, backward and tail; the gradients.
    Then: what it holds, and the gradient of its input.
    B0: that, the call, the stash; both packs' gradients until the first one's are freed.
    """
    costs = costs_of((0, 1), COST, tail_bytes=5_000, held_bytes=3_000)
    tasks, profile = walk(TWO, costs, 1, Policy(False, 0, False))
    at = dict(zip(tasks.split(), profile.activation_bytes, strict=True))

    assert at["F0.0"] == 10_000 + 30_000
    assert at["L1.0"] == 500 + 10_000 + 20_000 + (60_000 - 20_000) + 8_000
    assert at["E1"] == 500 + HELD + 4_000 + 8_000
    assert at["B0.0"] == 2 * 500 + HELD + 4_000 + 60_000 + 8_000
    assert at["O0"] == 500 + HELD + 4_000
    assert at["G0"] == HELD + 4_000


def test_a_large_tail_counts_in_the_fused_pack() -> None:
    costs = costs_of((0, 1), COST, tail_bytes=70_000, held_bytes=3_000)
    tasks, profile = walk(TWO, costs, 1, Policy(False, 0, False))

    assert dict(zip(tasks.split(), profile.activation_bytes, strict=True))["L1.0"] == 500 + 10_000 + 90_000 + 8_000


def test_waiting_micro_batches_add_up_while_one_runs() -> None:
    tasks, profile = walk(TWO, costs_of((0, 1), COST, held_bytes=3_000), 3, Policy(False, 0, False))
    at = dict(zip(tasks.split(), profile.activation_bytes, strict=True))

    assert [at[f"F0.{m}"] for m in range(3)] == [40_000 + m * (10_000 + 8_000) for m in range(3)]
    assert at["O1"] == 500 + 3 * (HELD + 4_000 + 8_000)


def test_a_stash_that_goes_to_the_host_is_gone_when_the_next_one_moves() -> None:
    tasks, profile = walk(TWO, costs_of((0, 1), COST, held_bytes=3_000), 3, Policy(False, ALL_PACKS, False))
    at = dict(zip(tasks.split(), profile.activation_bytes, strict=True))

    assert tasks.startswith("I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 E0 I1")
    assert [at[f"S0.{m}"] for m in range(3)] == [(m + 1) * 10_000 + 8_000 for m in range(3)]


def test_a_pack_of_several_calls_keeps_what_they_stash() -> None:
    packs = (replace(TWO[0], positions=(0, 1)), replace(TWO[1], positions=(2,)))
    tasks, profile = walk(packs, costs_of((0, 1, 2), COST), 1, Policy(False, 0, False))

    assert dict(zip(tasks.split(), profile.activation_bytes, strict=True))["F0.0"] == 8_000 + 10_000 + 30_000


def test_a_forward_pass_of_its_own_ends_with_what_it_holds_and_its_stash() -> None:
    tasks = compose_forward(Packing.reused(TWO), 0, Policy(prefetch=False))
    profile = walk_memory(TWO, tasks, costs_of((0, 1), COST, held_bytes=3_000))

    assert text(tasks) == "I0 F0.0 E0 I1 F1.0 E1"
    assert profile.activation_bytes == (0, 40_000, 18_000, 18_000, 48_000, HELD + 16_000)


def test_a_pack_without_backward_has_no_gradients() -> None:
    packs = packs_of(False, True, weight_bytes=1000, gradient_bytes=500)
    costs = CostTable((0, 1), (CallCost(), CallCost(needs_backward=True)), 0)
    tasks, profile = walk(packs, costs, 1, Policy(False, 0, False))
    held = _LOSS_BYTES

    assert tasks == "I0 F0.0 E0 I1 L1.0 O1 U1 E1 G1"
    assert profile.activation_bytes == (0, 0, 0, 0, *[500 + held] * 4, held)
    assert profile.peak_bytes == 1500 + held


def test_the_peak_is_over_weights_and_activations_at_the_same_task() -> None:
    assert MemoryProfile((100, 0, 50), (0, 100, 60)).peak_bytes == 110
    assert MemoryProfile((), ()).peak_bytes == 0


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Pack, ...], CostTable, Policy]:
    count = draw(st.integers(1, 6))
    graph = graph_of(draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count)))
    nbytes = st.integers(0, 10_000)
    costs = []
    for _ in range(count):
        stash, graph_bytes = draw(nbytes), draw(nbytes)
        costs.append(
            CallCost(
                alive_bytes=stash + draw(nbytes),
                stash_bytes=stash,
                shared_bytes=draw(nbytes),
                forward_bytes=graph_bytes + draw(nbytes),
                graph_bytes=graph_bytes,
                backward_bytes=draw(nbytes),
                needs_backward=draw(st.booleans()),
            )
        )
    table = CostTable(graph.calls, tuple(costs), draw(nbytes), draw(nbytes))
    policy = Policy(draw(st.booleans()), draw(st.integers(0, 3)), draw(st.booleans()))
    return pack_uniformly(graph, table, FP32, draw(st.integers(1, count))), table, policy


@given(cases())
def test_the_peak_holds_any_pack_and_its_gradients(case: tuple[tuple[Pack, ...], CostTable, Policy]) -> None:
    packs, costs, policy = case
    peak = walk(packs, costs, 2, policy)[1].peak_bytes

    assert peak >= max(pack.weight_bytes + pack.gradient_bytes for pack in packs)


@given(cases(), st.integers(1, 5))
def test_more_micro_batches_never_need_less(
    case: tuple[tuple[Pack, ...], CostTable, Policy], micro_batches: int
) -> None:
    packs, costs, policy = case
    fewer, more = (walk(packs, costs, count, policy)[1].peak_bytes for count in (micro_batches, micro_batches + 1))

    assert more >= fewer


@given(cases())
def test_nothing_is_ever_negative_and_nothing_but_what_is_held_is_left(
    case: tuple[tuple[Pack, ...], CostTable, Policy],
) -> None:
    packs, costs, policy = case
    _, profile = walk(packs, costs, 3, policy)

    assert min(profile.weight_bytes) >= 0
    assert min(profile.activation_bytes) >= 0


@given(cases())
def test_prefetch_never_needs_less(case: tuple[tuple[Pack, ...], CostTable, Policy]) -> None:
    packs, costs, policy = case
    with_prefetch, without = (
        walk(packs, costs, 2, replace(policy, prefetch=prefetch))[1].peak_bytes for prefetch in (True, False)
    )

    assert with_prefetch >= without


@pytest.mark.parametrize("field", ["alive_bytes", "stash_bytes", "forward_bytes", "backward_bytes"])
def test_every_cost_shows_in_the_peak(field: str) -> None:
    larger = replace(COST, **{field: 100_000})
    peaks = [walk(TWO, costs_of((0, 1), cost), 2, Policy(False, 0, False))[1].peak_bytes for cost in (COST, larger)]

    assert peaks[1] > peaks[0] + 30_000
