"""Bytes alive at each task, added up by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes, StashBytes, WaitingBytes
from harmony_ds.scheduler.memory import MemoryProfile, MemoryWalks, walk_memory
from harmony_ds.scheduler.plan import ALL_PACKS, Pack, Policy
from tests.scheduler.examples import FP32, costs_of, graph_of, pack_uniformly, packs_of, parse, reused, text

TWO = packs_of(True, True, weight_bytes=1000, gradient_bytes=500)
COST = CallCost(
    waiting=WaitingBytes(alive_bytes=10_000, after_forward_bytes=10_000),
    stash=StashBytes(new_bytes=8_000),
    forward=ForwardBytes(peak_bytes=30_000, graph_bytes=20_000, kept_graph_bytes=15_000),
    backward=BackwardBytes(input_gradient_bytes=4_000, peak_bytes=60_000),
    needs_backward=True,
)
ON_DEVICE = Policy(prefetch=False, stash_on_host=0, deferred_update=False)
ON_HOST = replace(ON_DEVICE, stash_on_host=ALL_PACKS)
HELD = 3_000  # of a micro-batch that ran to its end


def test_a_plan_of_two_packs_and_two_micro_batches_by_hand() -> None:
    """The worked example of `harmony_ds.scheduler.memory`: every task of a plan, every sum written out.

    Each pack has one call, 1000 bytes of weights and 500 of gradients. What a micro-batch has, in each of both calls:

        waiting     10 before the call; when its forward pass is over, 1 is held until its backward pass is over
        stash        8, the call's inputs
        forward     30 at its peak; the graph and the outputs are 20
        backward    60 at its peak; then 4, the gradient of the call's inputs, waits for the call before
        tail         5, the loss

    Weights are alive from swap-in to evict, gradients of a pack from its first backward to G. The rest of a task is what
    the micro-batches hold ("between"), and what the task itself adds to that.
    """
    cost = CallCost(
        waiting=WaitingBytes(alive_bytes=10, after_forward_bytes=10),
        stash=StashBytes(new_bytes=8),
        forward=ForwardBytes(peak_bytes=30, graph_bytes=20),
        backward=BackwardBytes(peak_bytes=60, input_gradient_bytes=4),
        needs_backward=True,
    )
    costs = CostTable((0, 1), (cost, cost), tail_bytes=5, held_bytes=1)
    tasks, profile = walk(TWO, costs, 2, ON_DEVICE)

    found = list(zip(tasks.split(), profile.weight_bytes, profile.activation_bytes, strict=True))
    assert found == [
        # task, weights, everything else
        ("I0", 1000, 0),  # nothing has run
        ("F0.0", 1000, 10 + 30),  # micro-batch 0 waits before call 0, and runs
        ("F0.1", 1000, (10 + 8) + 10 + 30),  # 0 waits before call 1 and has its stash; 1 waits before call 0, and runs
        ("E0", 1000, 2 * (10 + 8)),  # both wait before call 1, and have their stash
        ("I1", 1000, 2 * (10 + 8)),
        # The fused pack, on the way back: what waits, 10, and the backward peak, 60, which is more than on the way
        # forward (10 + 30) and at the loss (10 + 20 + 5). Beside it: the stash of 0, and 1, which waits. Gradients: 500.
        ("L1.0", 1000, 500 + (10 + 60) + 8 + (10 + 8)),
        # 0 holds 1 between its passes, 4 of gradients for call 0, and its stash for call 0.
        ("L1.1", 1000, 500 + (10 + 60) + 8 + (1 + 4 + 8)),
        ("O1", 1000, 500 + 2 * (1 + 4 + 8)),
        ("U1", 1000, 500 + 2 * (1 + 4 + 8)),  # on the host
        ("E1", 1000, 500 + 2 * (1 + 4 + 8)),
        ("I0", 1000, 500 + 2 * (1 + 4 + 8)),
        # Gradients of both packs; what 0 holds, its stash, the backward peak (its 4 are in that); and 1, which waits.
        ("B0.0", 1000, 2 * 500 + (1 + 8 + 60) + (1 + 4 + 8)),
        ("B0.1", 1000, 2 * 500 + (1 + 8 + 60)),  # nothing is left of 0: no call is before call 0
        ("G1", 1000, 500),  # the gradients of pack 1 are released
        ("O0", 1000, 500),
        ("U0", 1000, 500),
        ("E0", 1000, 500),
        ("G0", 0, 0),
    ]
    assert profile.device_peaks == (1000 + 2 * 500 + 69 + 13,)  # at B0.0


def walk(packs: tuple[Pack, ...], costs: CostTable, micro_batches: int, policy: Policy) -> tuple[str, MemoryProfile]:
    tasks = compose_step(reused(packs), Group.with_fresh(micro_batches), policy)
    return text(tasks), walk_memory(packs, tasks, costs)


def activations(
    packs: tuple[Pack, ...], costs: CostTable, micro_batches: int, policy: Policy
) -> tuple[str, dict[str, int]]:
    """The tasks, and bytes of activations at each; at its last occurrence, where a task comes twice."""
    tasks, profile = walk(packs, costs, micro_batches, policy)
    return tasks, dict(zip(tasks.split(), profile.activation_bytes, strict=True))


def test_the_input_of_a_head_waits_for_a_shared_loss_until_it_has_been_propagated_through() -> None:
    costs = CostTable((0, 1), (COST, replace(COST, runs_with_loss=True)), tail_bytes=5_000, held_bytes=3_000)
    both = ((0, 1),)
    tasks = compose_step(reused(TWO), Group(fresh=(0, 1), shared_losses=both), ON_DEVICE)
    waiting = walk_memory(TWO, tasks, replace(costs, output_bytes=7_000), shared_losses=both).activation_bytes
    without = walk_memory(TWO, tasks, costs, shared_losses=both).activation_bytes
    more = [f"{task} {a - b}" for task, a, b in zip(text(tasks).split(), waiting, without, strict=True) if a != b]

    assert more == ["L1.1 7000", "B1.0 7000"]


def test_outputs_that_no_graph_needs_are_gone_when_a_shared_loss_is_propagated_back_from() -> None:
    """Making the loss takes them all: at least so much is planned."""
    both = ((0, 1),)
    tasks = compose_step(reused(TWO), Group(fresh=(0, 1), shared_losses=both), ON_DEVICE)
    fused = text(tasks).split().index("L1.1")
    whole = CostTable((0, 1), (COST, COST), tail_bytes=90_000, output_bytes=7_000, making_bytes=90_000)

    def peak(costs: CostTable) -> int:
        return walk_memory(TWO, tasks, costs, shared_losses=both).activation_bytes[fused]

    for making_bytes, less in ((90_000, 0), (88_000, 2_000), (10_000, 4_000)):
        freeing = replace(whole, output_freed_bytes=4_000, making_bytes=making_bytes)
        assert peak(whole) - peak(freeing) == less
        assert peak(freeing.worst(whole)) == peak(whole.worst(freeing)) == peak(whole)


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
    L1: what waited, and the largest of forward, backward, and graph and tail; the stash; the gradients.
    Then: what it holds, and the gradient of its input.
    B0: what it holds, the call, the stash; both packs' gradients until the first one's are freed.
    Then: nothing, since no call is left.
    """
    costs = costs_of((0, 1), COST, tail_bytes=5_000, held_bytes=3_000)
    _, at = activations(TWO, costs, 1, ON_DEVICE)

    assert at["F0.0"] == 10_000 + 30_000
    assert at["L1.0"] == 500 + 10_000 + 60_000 + 8_000
    assert at["E1"] == 500 + HELD + 4_000 + 8_000
    assert at["B0.0"] == 2 * 500 + HELD + 60_000 + 8_000
    assert at["O0"] == 500
    assert at["G0"] == 0


def test_kept_graphs_by_hand() -> None:
    """K0.0: what waited, and the call. From then on its graph is there, until it has been propagated through: P0.0 takes
    what recomputing takes, beside the other micro-batch's graph.
    """
    costs = costs_of((0, 1), COST, tail_bytes=5_000, held_bytes=3_000)
    policy = Policy(prefetch=False, deferred_update=False, kept=(0,), graphs=(2,))
    tasks, at = activations(TWO, costs, 2, policy)
    waiting, held = 10_000 + 8_000, HELD + 4_000 + 8_000

    assert tasks == "I0 K0.0 K0.1 I1 L1.0 L1.1 O1 U1 E1 P0.0 P0.1 G1 O0 U0 E0 G0"
    assert at["K0.0"] == 10_000 + 30_000
    assert at["K0.1"] == waiting + 15_000 + 10_000 + 30_000
    assert at["I1"] == 2 * (waiting + 15_000)
    assert at["L1.0"] == at["I1"] + 500 + 60_000 - 0
    assert at["E1"] == 500 + 2 * (held + 15_000)
    assert at["P0.0"] == 2 * 500 + held + 15_000 + HELD + 60_000 + 8_000
    assert at["P0.1"] == 2 * 500 + HELD + 60_000 + 8_000


def test_a_kept_pack_of_several_calls_holds_the_graphs_of_the_calls_before() -> None:
    packs = (replace(TWO[0], positions=(0, 1)), replace(TWO[1], positions=(2,)))
    _, at = activations(packs, costs_of((0, 1, 2), COST), 1, Policy(prefetch=False, kept=(0,), graphs=(1,)))

    assert at["K0.0"] == 8_000 + 15_000 + 10_000 + 30_000
    assert at["I1"] == 10_000 + 2 * (8_000 + 15_000)
    assert at["P0.0"] == 2 * 500 + 2 * 8_000 + 15_000 + 60_000


def test_a_large_tail_counts_in_the_fused_pack() -> None:
    costs = costs_of((0, 1), COST, tail_bytes=70_000, held_bytes=3_000)

    assert activations(TWO, costs, 1, ON_DEVICE)[1]["L1.0"] == 500 + 10_000 + 90_000 + 8_000


def test_waiting_micro_batches_add_up_while_one_runs() -> None:
    _, at = activations(TWO, costs_of((0, 1), COST, held_bytes=3_000), 3, ON_DEVICE)

    assert [at[f"F0.{m}"] for m in range(3)] == [40_000 + m * (10_000 + 8_000) for m in range(3)]
    assert at["O1"] == 500 + 3 * (HELD + 4_000 + 8_000)


def test_a_stash_that_goes_to_the_host_is_gone_when_the_next_one_moves() -> None:
    tasks, at = activations(TWO, costs_of((0, 1), COST, held_bytes=3_000), 3, ON_HOST)

    assert tasks.startswith("I0 F0.0 S0.0 F0.1 S0.1 F0.2 S0.2 E0 I1")
    assert [at[f"S0.{m}"] for m in range(3)] == [(m + 1) * 10_000 + 8_000 for m in range(3)]


def test_a_pack_of_several_calls_keeps_what_they_stash() -> None:
    packs = (replace(TWO[0], positions=(0, 1)), replace(TWO[1], positions=(2,)))

    assert activations(packs, costs_of((0, 1, 2), COST), 1, ON_DEVICE)[1]["F0.0"] == 8_000 + 10_000 + 30_000


def test_a_forward_pass_of_its_own_ends_with_what_it_holds_and_its_stash() -> None:
    tasks = compose_forward(reused(TWO), Group((0,)), Policy(prefetch=False))
    profile = walk_memory(TWO, tasks, costs_of((0, 1), COST, held_bytes=3_000))

    assert text(tasks) == "I0 F0.0 E0 I1 F1.0 E1"
    assert profile.activation_bytes == (0, 40_000, 18_000, 18_000, 48_000, HELD + 16_000)


def test_a_pack_without_backward_has_no_gradients() -> None:
    packs = packs_of(False, True, weight_bytes=1000, gradient_bytes=500)
    costs = CostTable((0, 1), (CallCost(), CallCost(needs_backward=True)), 0)
    tasks, profile = walk(packs, costs, 1, ON_DEVICE)
    assert tasks == "I0 F0.0 E0 I1 L1.0 O1 U1 E1 G1"
    assert profile.activation_bytes == (0, 0, 0, 0, *[500] * 4, 0)
    assert profile.device_peaks == (1500,)


def test_the_peak_is_over_weights_and_activations_at_the_same_task() -> None:
    assert MemoryProfile((100, 0, 50), (0, 100, 60), (0, 0, 0)).device_peaks == (110,)
    assert MemoryProfile((), (), ()).device_peaks == (0,)


def peaks(packs: tuple[Pack, ...], costs: CostTable, task: str, policy: Policy, micro_batches: int = 1) -> list[int]:
    """Activation bytes at every occurrence of `task`."""
    tasks, profile = walk(packs, costs, micro_batches, policy)
    return [nbytes for name, nbytes in zip(tasks.split(), profile.activation_bytes, strict=True) if name == task]


def test_graphs_of_a_fused_pack_add_up_and_go_one_by_one() -> None:
    """Forward of call 1: call 0's graph. Backward of call 0: nothing of call 1's graph is left."""
    (pack,) = packs_of(True)
    pack = replace(pack, positions=(0, 1), layers=(0, 1), gradient_bytes=0)
    first = CallCost(
        waiting=WaitingBytes(alive_bytes=100),
        forward=ForwardBytes(peak_bytes=2_000, graph_bytes=1_000),
        backward=BackwardBytes(peak_bytes=5_000),
        needs_backward=True,
    )
    second = CallCost(
        waiting=WaitingBytes(alive_bytes=9_000),
        forward=ForwardBytes(peak_bytes=300, graph_bytes=200),
        backward=BackwardBytes(peak_bytes=400),
        needs_backward=True,
    )
    at = [
        peaks((pack,), CostTable((0, 1), calls, tail), "L0.0", ON_DEVICE)
        for calls, tail in (
            ((first, second), 0),
            (
                (
                    replace(first, backward=replace(first.backward, peak_bytes=0)),
                    replace(second, forward=replace(second.forward, peak_bytes=3_000)),
                ),
                0,
            ),
            (
                (
                    replace(
                        first,
                        forward=replace(first.forward, peak_bytes=0),
                        backward=replace(first.backward, peak_bytes=0),
                    ),
                    second,
                ),
                0,
            ),
            ((replace(first, backward=replace(first.backward, peak_bytes=0)), second), 4_000),
            ((replace(first, keeps_graph=True), second), 0),
        )
    ]

    assert at == [[5_100], [100 + 1_000 + 3_000], [100 + 1_000 + 400], [100 + 1_200 + 4_000], [100 + 1_200 + 5_000]]


def test_gradients_of_a_layer_that_a_fused_pack_calls_twice_wait_for_the_earlier_call() -> None:
    (pack,) = packs_of(True)
    pack = replace(pack, positions=(0, 1), layers=(0,), gradient_bytes=700)
    cost = CallCost(backward=BackwardBytes(peak_bytes=5_000, summed_bytes=700), needs_backward=True)

    costs = CostTable((0, 0), (cost, cost), 0)

    assert peaks((pack,), costs, "L0.1", ON_DEVICE, micro_batches=2) == [700 + 5_000 + 700]


def test_gradients_of_a_parameter_that_two_layers_of_a_fused_pack_share_wait_for_the_earlier_layer() -> None:
    (pack,) = packs_of(True)
    pack = replace(pack, positions=(0, 1), layers=(0, 1), gradient_bytes=900)
    calls = (
        CallCost(backward=BackwardBytes(peak_bytes=5_000, summed_bytes=700), needs_backward=True),
        CallCost(backward=BackwardBytes(peak_bytes=6_000, summed_bytes=700), needs_backward=True),
    )

    assert peaks((pack,), CostTable((0, 1), calls, 0), "L0.1", ON_DEVICE, 2) == [900 + max(6_000, 5_000 + 500)]


def test_gradients_of_another_dtype_than_their_sums_wait_for_the_end_of_the_pack() -> None:
    packs = (replace(TWO[0], positions=(0, 1, 2)), replace(TWO[1], positions=(3,)))
    cost = CallCost(backward=BackwardBytes(peak_bytes=5_000, unsummed_bytes=700), needs_backward=True)

    assert peaks(packs, costs_of((0, 1, 2, 3), cost), "B0.0", ON_DEVICE) == [2 * 500 + 2 * 700 + 5_000]


def test_sums_of_gradients_come_with_the_first_micro_batch_call_by_call() -> None:
    packs = (replace(TWO[0], positions=(0, 1), gradient_bytes=1_000), replace(TWO[1], positions=(2,), gradient_bytes=0))
    early = CallCost(backward=BackwardBytes(peak_bytes=5_000, summed_bytes=400), needs_backward=True)
    late = CallCost(backward=BackwardBytes(peak_bytes=6_000, summed_bytes=600), needs_backward=True)
    costs = CostTable((0, 1, 2), (early, late, CallCost(needs_backward=True)), 0)

    assert peaks(packs, costs, "B0.0", ON_DEVICE, 2) == [6_000 + 600]
    assert peaks(packs, costs, "B0.1", ON_DEVICE, 2) == [6_000 + 1_000]


def test_a_stash_is_counted_once_on_the_device_and_once_per_pack_on_the_host() -> None:
    """Call 1 takes again what call 0 took: on the device that is the same memory."""
    packs = packs_of(True, True, True, gradient_bytes=0)
    first = CallCost(stash=StashBytes(new_bytes=1_000), needs_backward=True)
    second = CallCost(
        waiting=WaitingBytes(stashed_too_bytes=1_000), stash=StashBytes(again_at_cut_bytes=1_000), needs_backward=True
    )
    costs = CostTable((0, 1, 2), (first, second, CallCost(needs_backward=True)), 0)

    assert peaks(packs, costs, "E1", ON_DEVICE) == [1_000, 1_000]
    assert peaks(packs, costs, "T1.0", ON_HOST) == [1_000]
    assert peaks(packs, costs, "T0.0", ON_HOST) == [1_000]
    # It lingers after call 0, and is on its way to the host with pack 1.
    assert peaks(packs, costs, "F1.0", ON_HOST) == [2_000]


def test_a_view_keeps_the_memory_it_is_a_view_of_until_it_has_been_to_the_host() -> None:
    cost = CallCost(stash=StashBytes(new_bytes=10, base_bytes=1_000), needs_backward=True)

    assert peaks(TWO, costs_of((0, 1), cost), "E1", ON_DEVICE) == [500 + 1_010]
    assert peaks(TWO, costs_of((0, 1), cost), "T0.0", ON_HOST) == [500 + 10]


def test_each_tensor_takes_a_grain_of_a_coarse_allocator_more() -> None:
    packs = packs_of(True, True, weight_bytes=1000, gradient_bytes=500)
    costs = replace(costs_of((0, 1)), scalar_bytes=512)
    tasks, profile = walk(packs, costs, 1, ON_DEVICE)
    at = tasks.split().index("L1.0")

    assert profile.weight_bytes[at] == 1000 + 512
    assert profile.activation_bytes[at] == 500 + 512 + 2 * 512  # and the loss, scaled


def test_a_micro_batch_that_stands_for_several_is_moved_as_often() -> None:
    packs = (TWO[0], replace(TWO[1], device=1))
    costs = replace(costs_of((0, 1), COST), held_bytes=HELD, scalar_bytes=8)
    tasks = parse("I0 I1 F0.0 M1.0 F0.1 M1.1 E1 W0.1 E0")
    found = MemoryWalks(costs).walk(packs, tasks, counts=(1, 3)).activation_bytes
    assert found[6] == (1 + 3) * 10_000  # both wait before call 1
    # On device 0, micro-batch 0 is as it left; 1 is back from call 1, with the gradient of its inputs.
    assert found[8] == 10_000 + 3 * (HELD + 2 * 8 + 4_000) + (1 + 3) * 8_000


def test_a_margin_is_added_to_whatever_computes() -> None:
    costs = costs_of((0, 1), COST)
    for task in ("F0.0", "L1.0", "B0.0"):
        (without,), (with_margin,) = (
            peaks(TWO, table, task, ON_DEVICE) for table in (costs, replace(costs, margin_bytes=77))
        )
        assert with_margin == without + 77


def test_micro_batches_whose_forward_pass_ran_before_hold_their_stash_until_they_are_propagated() -> None:
    costs = costs_of((0, 1), COST, held_bytes=3_000)
    tasks = compose_step(reused(TWO), Group((), (0, 1)), ON_DEVICE)
    profile = walk_memory(TWO, tasks, costs, forwarded=(0, 1))
    at = dict(zip(text(tasks).split(), profile.activation_bytes, strict=True))

    other = HELD + 2 * 8_000
    assert at["B1.0"] == 500 + HELD + 60_000 + 2 * 8_000 + other
    assert at["B1.1"] == 500 + HELD + 60_000 + 2 * 8_000 + HELD + 4_000 + 8_000
    assert at["B0.1"] == 2 * 500 + HELD + 60_000 + 8_000


def test_what_has_left_of_micro_batches_whose_forward_pass_ran_before_is_not_there() -> None:
    costs = costs_of((0, 1), COST, held_bytes=3_000)
    tasks = compose_step(reused(TWO), Group((), (0, 1)), ON_HOST)
    profile = walk_memory(TWO, tasks, costs, forwarded=(0, 1))
    at = dict(zip(text(tasks).split(), profile.activation_bytes, strict=True))

    assert at["I1"] == 2 * HELD


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
                waiting=WaitingBytes(stash + draw(nbytes), draw(nbytes), draw(nbytes)),
                stash=StashBytes(stash, draw(nbytes), draw(nbytes), draw(nbytes)),
                forward=ForwardBytes(graph_bytes + draw(nbytes), graph_bytes, draw(nbytes)),
                backward=BackwardBytes(draw(nbytes), draw(nbytes), draw(nbytes), draw(nbytes), draw(nbytes)),
                needs_backward=draw(st.booleans()),
                keeps_graph=draw(st.booleans()),
            )
        )
    table = CostTable(graph.calls, tuple(costs), *(draw(nbytes) for _ in range(5)))
    flags = st.booleans()
    policy = Policy(
        prefetch=draw(flags),
        stash_on_host=draw(st.integers(0, 3)),
        deferred_update=draw(flags),
        kept=(0, 2),
        graphs=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
    )
    return pack_uniformly(graph, table, FP32, draw(st.integers(1, count))), table, policy


@given(cases(), st.integers(1, 5))
def test_what_holds_for_any_plan(case: tuple[tuple[Pack, ...], CostTable, Policy], micro_batches: int) -> None:
    packs, costs, policy = case
    profile = walk(packs, costs, micro_batches, replace(policy, prefetch=False))[1]
    more = walk(packs, costs, micro_batches + 1, replace(policy, prefetch=False))[1]
    ahead = walk(packs, costs, micro_batches, replace(policy, prefetch=True))[1]

    assert max(profile.device_peaks) >= max(pack.weight_bytes + pack.gradient_bytes for pack in packs)
    assert more.device_peaks >= profile.device_peaks
    # The stash that left last is freed when the next one moves: with prefetch a run earlier.
    left = max(sum(_leaving_bytes(costs.costs[p]) for p in pack.positions) for pack in packs)
    assert ahead.device_peaks[0] + left >= profile.device_peaks[0]
    assert min(*profile.weight_bytes, *profile.activation_bytes, *ahead.weight_bytes, *ahead.activation_bytes) >= 0


def _leaving_bytes(cost: CallCost) -> int:
    """The most that a call's stash takes on the device while it is on its way to the host."""
    stash = cost.stash
    return stash.new_bytes + stash.again_bytes + stash.again_at_cut_bytes + stash.base_bytes
