"""Plans as tables: readable, within the width, and the same for the same plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harmony_ds.scheduler.compose import Group, compose_step
from harmony_ds.scheduler.grid import format_plan
from harmony_ds.scheduler.plan import Plan, Policy
from tests.scheduler.examples import packs_of, reused


def plan_of(packs: int, micro_batches: int, policy: Policy) -> Plan:
    packing = reused(packs_of(*[True] * packs, weight_bytes=3 * 2**20, gradient_bytes=2**20))
    tasks = compose_step(packing, Group.with_fresh(micro_batches), policy)
    return Plan(packing, policy, tasks, micro_batches, resident_bytes=64, peak_bytes=5 * 2**30)


def test_a_row_for_each_time_that_a_pack_runs() -> None:
    assert format_plan(plan_of(3, 4, Policy())).splitlines() == [
        "2 packs forward, 3 backward (the same packs both ways), 4 micro-batches in a group",
        "device peak 5.0 GiB planned, 64 B of it all the time",
        "stash on the device; updates when the norm of all gradients is known; swap-ins one pack ahead",
        "",
        "pass      pack  calls  weights  gradients  swap in  runs   swap out  then",
        "forward      0  0      3.0 MiB             0-1      F 0-3            evicted",
        "forward      1  1      3.0 MiB             2        F 0-3            evicted",
        "fused        2  2      3.0 MiB    1.0 MiB  1        L 0-3  2         evicted",
        "backward     1  1      3.0 MiB    1.0 MiB  0        B 0-3  1         evicted",
        "backward     0  0      3.0 MiB    1.0 MiB           B 0-3  0         evicted",
        "then      norm of all gradients; updates of 0-2 on the host, under the next forward pass",
        "",
        "swap in, swap out, update: packs. runs, stash, crossing: micro-batches; F forward, L forward, loss and backward,",
        "B recompute and backward; K forward, its graph is kept; P back through that. A kept pack waits on the device for",
        "its backward pass. A pack without a row: parameters outside all layer calls.",
    ]


def test_one_pack_and_one_micro_batch_are_singular() -> None:
    told = "(the same packs both ways), 1 micro-batch in a group"
    assert format_plan(plan_of(2, 1, Policy())).startswith(f"1 pack forward, 2 backward {told}")
    assert format_plan(plan_of(1, 1, Policy())).startswith(f"0 packs forward, 1 backward {told}")


def test_stash_updates_kept_and_resident_packs_are_shown() -> None:
    policy = Policy(prefetch=False, stash_on_host=1, deferred_update=False, kept=(2,), resident=(3,))
    lines = format_plan(plan_of(4, 2, policy)).splitlines()

    assert lines[2] == "stash of 1 forward packs on the host; updates as gradients arrive; swap-ins when needed"
    assert [line.split() for line in lines[5:12]] == [
        "forward 0 0 3.0 MiB 0 F 0-1 out 0-1 evicted".split(),
        "forward 1 1 3.0 MiB 1 F 0-1 evicted".split(),
        "forward 2 2 3.0 MiB 2 F 0-1 kept".split(),
        "fused 3 3 3.0 MiB 1.0 MiB L 0-1 on device resident".split(),
        "backward 2 2 3.0 MiB 1.0 MiB B 0-1 2 on host 2 evicted".split(),
        "backward 1 1 3.0 MiB 1.0 MiB 1 B 0-1 1 on host 1 evicted".split(),
        "backward 0 0 3.0 MiB 1.0 MiB 0 B 0-1 in 0-1 0 on host 0 evicted".split(),
    ]


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 60), st.integers(1, 12), st.booleans(), st.booleans(), st.booleans())
def test_any_plan_prints_within_the_width_and_always_the_same(
    data: st.DataObject, packs: int, micro_batches: int, prefetch: bool, defer: bool, grouping: bool
) -> None:
    some = st.sets(st.integers(0, packs - 1), max_size=5).map(lambda numbers: tuple(sorted(numbers)))
    policy = Policy(
        prefetch=prefetch,
        stash_on_host=data.draw(st.integers(0, packs)),
        crossing_on_host=data.draw(st.booleans()),
        deferred_update=defer,
        grouping=grouping,
        kept=data.draw(some),
        resident=data.draw(some),
    )
    plan = plan_of(packs, micro_batches, policy)
    lines = format_plan(plan).splitlines()

    assert max(map(len, lines)) <= 120
    assert len(lines) < 120
    assert format_plan(plan) == format_plan(Plan.from_json(plan.to_json()))
    rows = [line for line in lines if line.startswith(("forward", "fused", "backward"))]
    more = sum(int(line.split()[1]) for line in lines if line.startswith("..."))
    passes = 1 if grouping else micro_batches
    assert len(rows) + more == passes * (len(plan.packing.forward) + len(plan.packing.backward))
