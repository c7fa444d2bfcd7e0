"""What a plan's steps ask of the allocator, replayed from what one micro-batch has allocated in each layer call."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from harmony_ds.scheduler.allocations import Allocations, CallAllocations, Event
from harmony_ds.scheduler.caching_allocator import Block, CachingAllocator, StreamKey
from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.costs import CostTable
from harmony_ds.scheduler.plan import ALL_PACKS, Plan, Policy
from harmony_ds.scheduler.replay import Replay, reserved_bytes, retries
from tests.scheduler.examples import costs_of, packs_of, reused, text

KIB = 2**10
MIB = 2**20
ON_DEVICE = Policy(prefetch=False, stash_on_host=0, deferred_update=False)


def call_of(number: int) -> CallAllocations:
    """A call that takes allocation `10 * number` and returns the one ten higher; it works with memory of its own.

    Sizes are in KiB: what is returned has 8, working memory 16, gradients of tensors 4, and those of the parameter 2.
    """
    taken, returned, own = 10 * number, 10 * number + 10, 1000 * (number + 1)
    return CallAllocations(
        forward=(Event(own, 16 * KIB), Event(returned, 8 * KIB), Event(own, 0)),
        code=(Event(taken, 0),),
        recompute=(Event(own + 1, 16 * KIB), Event(own + 2, 8 * KIB), Event(own + 2, 0)),
        propagate=(Event(own + 3, 0), Event(own + 4, 4 * KIB), Event(own + 5, 2 * KIB), Event(own + 1, 0)),
        outputs=(returned,),
        graph_outputs=(own + 2,),
        stashed=(taken,),
        incoming=(own + 3,),
        outgoing=(own + 4,),
        unsummed=(own + 5,),
        sums=(3 * KIB,),
    )


COSTS = replace(
    costs_of((0, 1)),
    allocations=Allocations(
        lead=(Event(0, 8 * KIB),),
        calls=(call_of(0), call_of(1)),
        loss=(Event(9000, 1 * KIB),),
        propagate=(Event(9001, 4 * KIB), Event(9000, 0)),
        incoming=(9001,),
    ),
)


def plan_of(policy: Policy, micro_batches: int = 2) -> Plan:
    packing = reused(packs_of(True, True, weight_bytes=100 * KIB, gradient_bytes=3 * KIB))
    return Plan(packing, policy, compose_step(packing, Group.with_fresh(micro_batches), policy), micro_batches, 0, 0)


class Noting(CachingAllocator):
    """The allocator's model, which writes down the KiB of all requests, and of all frees as negative numbers."""

    def __init__(self) -> None:
        super().__init__(expandable=True)
        self.noted: list[int] = []

    def malloc(self, nbytes: int, stream: StreamKey) -> Block:
        self.noted.append(nbytes // KIB)
        return super().malloc(nbytes, stream)

    def free(self, block: Block) -> None:
        self.noted.append(-block.nbytes // KIB)
        super().free(block)


def requests_of(plan: Plan, costs: CostTable = COSTS) -> dict[str, list[int]]:
    """The KiB that each task of a step asks for, and gives back, where it does."""
    allocator = Noting()
    replayed = Replay(plan, costs, allocator)
    replayed.load_resident()
    found: dict[str, list[int]] = {}
    for number, task in enumerate(plan.tasks):
        allocator.noted.clear()
        replayed.run_task(number, task)
        if allocator.noted:
            found[str(task)] = [*allocator.noted]
    return found


def test_every_task_of_a_plan_by_hand() -> None:
    plan = plan_of(ON_DEVICE, micro_batches=1)
    assert text(plan.tasks) == "I0 F0.0 E0 I1 L1.0 O1 U1 E1 I0 B0.0 G1 O0 U0 E0 G0"
    assert requests_of(plan) == {
        "I0": [100],
        "F0.0": [8, 16, 8, -16],  # what comes before the first call; working memory; the output. The input is stashed
        "E0": [-100],
        "I1": [100],
        # recomputed with its graph, whose output goes on to the loss; the model drops its outputs; the loss is propagated
        "L1.0": [16, 8, 1, -8, 4, -1, -4, 4, 2, -16, -8, 3, -2],
        "E1": [-100],
        "B0.0": [16, 8, -8, -4, 4, 2, -16, -8, 3, -2, -4],
        "G1": [-3],
        "G0": [-3],
    }


def test_what_waits_on_the_host_is_freed_with_the_next_copy_and_comes_back() -> None:
    requests = requests_of(plan_of(replace(ON_DEVICE, stash_on_host=ALL_PACKS)))
    assert "S0.0" not in requests  # it is being copied
    assert requests["S0.1"] == [-8]
    assert requests["T0.0"][-1] == requests["T0.1"][-1] == 8


def test_crossing_tensors_leave_with_the_next_run_and_come_back() -> None:
    policy = replace(ON_DEVICE, stash_on_host=ALL_PACKS, crossing_on_host=True)
    requests = requests_of(plan_of(policy, micro_batches=4))
    assert requests["F0.1"][-1] == -8  # what micro-batch 0 holds has been copied
    assert requests["Y1.0"] == [8]
    assert requests["Z0.0"] == [4]


def test_what_crosses_several_packs_leaves_again_after_each() -> None:
    """The first call's output is needed until the last call, as embeddings are that a model keeps in a variable."""
    calls = call_of(0), replace(call_of(1), code=()), replace(call_of(2), code=(Event(20, 0), Event(10, 0)))
    allocations = replace(COSTS.allocations or Allocations(), calls=calls)
    packing = reused(packs_of(True, True, True, weight_bytes=100 * KIB, gradient_bytes=3 * KIB))
    policy = replace(ON_DEVICE, stash_on_host=ALL_PACKS, crossing_on_host=True)
    plan = Plan(packing, policy, compose_step(packing, Group.with_fresh(4), policy), 4, 0, 0)
    requests = requests_of(plan, replace(costs_of((0, 1, 2)), allocations=allocations))
    assert requests["Y1.0"] == [8]
    assert requests["F1.1"] == [16, 8, -16, -8, -8]  # it and the second call's output, of micro-batch 0
    assert requests["Y2.0"] == [8, 8]


def test_what_slices_take_from_the_host_leaves_at_once_and_before_the_loss() -> None:
    policy = replace(ON_DEVICE, stash_on_host=ALL_PACKS, crossing_on_host=True, slices_from_host=True)
    requests = requests_of(plan_of(policy, micro_batches=2), replace(COSTS, in_slices=True))
    assert requests["S0.0"] == requests["S0.1"] == requests["X0.0"] == requests["X0.1"] == [-8]
    # Working memory and the output; the input, which is the stash, goes to the host; then the loss.
    assert requests["L1.0"][:5] == [16, 8, -16, -8, 1]
    assert requests["V1.0"] == [-4]


@pytest.mark.parametrize(
    "policy",
    [
        ON_DEVICE,
        Policy(deferred_update=True),
        replace(ON_DEVICE, stash_on_host=ALL_PACKS),
        replace(ON_DEVICE, stash_on_host=ALL_PACKS, crossing_on_host=True),
        replace(ON_DEVICE, stash_on_host=ALL_PACKS, crossing_on_host=True, slices_from_host=True),
        replace(ON_DEVICE, kept=(0,), graphs=(2, 0)),
        replace(ON_DEVICE, resident=(0,)),
        replace(ON_DEVICE, grouping=False),
    ],
)
@pytest.mark.parametrize("in_slices", [False, True])
def test_nothing_but_resident_packs_is_left_of_a_step(policy: Policy, in_slices: bool) -> None:
    costs = replace(COSTS, in_slices=in_slices)
    if in_slices:
        policy = replace(policy, graphs=())
    allocator = CachingAllocator(expandable=True)
    replayed = Replay(plan_of(policy, micro_batches=5), costs, allocator)
    replayed.load_resident()
    before = allocator.stats.allocated_bytes
    for _ in range(2):
        replayed.step()
        assert allocator.stats.allocated_bytes == before


def test_a_kept_graph_is_propagated_through_without_running_again() -> None:
    requests = requests_of(plan_of(replace(ON_DEVICE, kept=(0,), graphs=(2, 0))))
    assert requests["K0.0"] == [8, 16, 8]
    assert requests["P0.0"][:4] == [-4, 4, 2, -16]


def test_memory_in_pieces_is_reserved_beyond_what_is_in_use() -> None:
    """The output of the first call is put behind its working memory, of which the second one's does not fit in the rest."""
    first = CallAllocations(
        forward=(Event(1, 60 * MIB), Event(2, 20 * MIB), Event(1, 0)), outputs=(2,), recompute=(), stashed=()
    )
    second = CallAllocations(recompute=(Event(3, 80 * MIB), Event(3, 0)), stashed=(2,))
    costs = replace(COSTS, allocations=Allocations(calls=(first, second)))
    plan = plan_of(ON_DEVICE, micro_batches=1)
    assert reserved_bytes(plan, costs) - 2 * MIB == 160 * MIB  # in use at once: 100; weights are in a small segment
    assert retries(plan, costs, 160 * MIB) == 0
    assert retries(plan, costs, 140 * MIB) == 1


def test_smaller_micro_batches_take_less_but_for_gradients_of_parameters() -> None:
    plan = plan_of(ON_DEVICE)
    allocator = Noting()
    replayed = Replay(plan, COSTS, allocator, smallest_ratio=0.5)
    replayed.load_resident()
    allocator.noted.clear()
    replayed.step()
    first, second = ([nbytes for nbytes in part if nbytes > 0] for part in (allocator.noted[:4], allocator.noted[4:8]))
    assert 100 in first
    assert min(second) < 8
    assert allocator.noted.count(2) == 4  # of both parameters, in both micro-batches


def test_profiles_hold_what_is_allocated() -> None:
    allocations = COSTS.allocations
    assert allocations is not None
    assert Allocations.from_dict(json.loads(json.dumps(asdict(allocations)))) == allocations


def test_inputs_take_nothing_of_the_pool_that_is_computed_with() -> None:
    allocations = COSTS.allocations
    assert allocations is not None and allocations.upload_bytes == 0
    uploaded = replace(allocations, uploads=(0,))  # what `lead` allocates
    assert uploaded.upload_bytes == 8 * KIB
    requests = requests_of(plan_of(ON_DEVICE, micro_batches=1), replace(COSTS, allocations=uploaded))
    assert requests["F0.0"] == [16, 8, -16]
    assert requests["B0.0"] == [16, 8, -8, -4, 4, 2, -16, 3, -2, -4]


@pytest.mark.parametrize("policy", [ON_DEVICE, Policy(prefetch=True, stash_on_host=ALL_PACKS, deferred_update=True)])
def test_what_is_reserved_is_that_of_a_third_step(policy: Policy) -> None:
    allocator = CachingAllocator(expandable=True)
    replayed = Replay(plan_of(policy), COSTS, allocator)
    replayed.load_resident()
    for _ in range(3):
        allocator.stats.reset()
        replayed.step()
    assert reserved_bytes(plan_of(policy), COSTS) == allocator.stats.reserved_peak_bytes


# Of one size, the second step ends as it began: with every block where it was.
@pytest.mark.parametrize(("smallest_ratio", "steps"), [(1.0, 2), (0.5, 20)])
def test_micro_batches_of_several_sizes_are_replayed_for_more_steps(
    smallest_ratio: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Replay] = []
    step = Replay.step

    def noted_step(self: Replay) -> None:
        replayed.append(self)
        step(self)

    monkeypatch.setattr(Replay, "step", noted_step)
    reserved_bytes(plan_of(ON_DEVICE), COSTS, smallest_ratio)
    assert replayed == [replayed[0]] * steps
