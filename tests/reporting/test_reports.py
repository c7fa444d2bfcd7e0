"""Reports as people read them: units, order, and how many plans that were not chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harmony_ds.reporting.reports import MemoryReport, PlanReport, SwapReport
from harmony_ds.scheduler.plan import Policy

GIB = 2**30


def choice(step_ms: float, peak_bytes: int, reason: str = "a plan") -> Any:
    plan = SimpleNamespace(peak_bytes=peak_bytes, policy=Policy())
    return SimpleNamespace(
        plan=plan,
        prediction=SimpleNamespace(step_ms=step_ms, bottleneck="link", idle_share=0.25),
        reason=reason,
        reserved_bytes=None,
    )


def plan_report(*choices: Any, measured: tuple[float, ...] = ()) -> PlanReport:
    planned: Any = SimpleNamespace(total=3 * GIB, sent=0, moved=0)
    return PlanReport(choices, measured, 2 * GIB, 3 * GIB, 0, planned, last_step_ms=1234.0)


def test_a_plan_report_is_in_units_for_people() -> None:
    lines = str(plan_report(choice(17_100.0, 2 * GIB, "20 packs of 1 call"), measured=(17_000.0,))).splitlines()
    assert lines == [
        "plan: 20 packs of 1 call",
        "  step          17.1 s predicted, 17.0 s measured (0.99 x the prediction); link works most, the device computes "
        "75% of the time",
        "  device peak   2.0 GiB planned, 2.0 GiB measured",
        "  swapped       3.0 GiB planned, 3.0 GiB counted",
    ]


def test_the_first_step_of_a_plan_is_told_and_does_not_count() -> None:
    assert "not measured yet (a plan's first step, 1.2 s, does not count)" in str(plan_report(choice(17.0, GIB)))


def test_at_most_three_alternatives_are_shown_that_differ_the_fastest_first() -> None:
    best, same = choice(100.0, GIB), choice(100.9, GIB, "hardly slower")
    others = [choice(120.0 + 10 * i, GIB, f"plan {i}") for i in (3, 0, 2, 1)]
    smaller, like_it = choice(100.0, GIB // 2, "smaller"), choice(100.1, GIB // 2 + 1, "like that")
    report = plan_report(best, same, *others, smaller, like_it)
    assert [one.reason for one in report.alternatives] == ["smaller", "plan 0", "plan 1"]
    assert [line for line in str(report).splitlines() if "instead" in line] == [
        "  instead       100.0 ms, peak 512.0 MiB: smaller",
        "  instead       120.0 ms, peak 1.0 GiB: plan 0",
        "  instead       130.0 ms, peak 1.0 GiB: plan 1",
    ]
    assert len(report.choices) == 8  # the report has them all


def test_a_memory_report_names_what_takes_most_first_and_nothing_that_takes_nothing() -> None:
    host = {"weights": GIB, "masters": 0, "optimizer": 4 * GIB, "gradients": GIB // 2}
    report = MemoryReport(GIB, 2 * GIB, 3 * GIB, host, "plan", beside_bytes=2**20, disk_bytes=5 * GIB)
    assert str(report).splitlines() == [
        "device peak 1.0 GiB (as the plan counts), planned 2.0 GiB, budget 3.0 GiB",
        "beside the plan 1.0 MiB",
        "host 5.5 GiB: optimizer 4.0 GiB, weights 1.0 GiB, gradients 512.0 MiB",
        "disk 5.0 GiB",
    ]


def test_a_memory_report_before_the_first_micro_batch_names_no_plan() -> None:
    report = MemoryReport(0, 0, None, {"weights": GIB}, "allocator")
    assert str(report).splitlines() == [
        "device peak 0 B (as the allocator counts), no plan yet, budget unlimited",
        "host 1.0 GiB: weights 1.0 GiB",
    ]


def test_reports_say_what_the_allocator_reserves_beyond_the_plan() -> None:
    report = MemoryReport(
        GIB, 2 * GIB, 3 * GIB, {}, "allocator", reserved_bytes=11 * GIB // 4, planned_reserved_bytes=9 * GIB // 4
    )
    assert str(report).splitlines()[1:3] == [
        "reserved by the allocator 2.8 GiB (+0.75 GiB beyond the planned peak), retries 0",
        "to be reserved for the plan 2.2 GiB (+0.25 GiB beyond the planned peak), as replayed",
    ]
    best = choice(17.0, 2 * GIB)
    assert "allocator" not in str(plan_report(best))
    best.reserved_bytes = 9 * GIB // 4
    lines = str(plan_report(best)).splitlines()
    assert lines[3] == "  allocator     2.2 GiB to be reserved (+0.25 GiB beyond the planned peak), as replayed"


def test_a_swap_report_says_that_nothing_is_swapped() -> None:
    nothing = {"weights": 0, "gradients": 0, "activations": 0, "data": 0}
    assert str(SwapReport(nothing, nothing, 0, 0, 1)).splitlines()[1:] == [
        "  weights and gradients 0 B: nothing is swapped"
    ]


def test_a_swap_report_is_sorted_by_bytes() -> None:
    into = {"weights": 2 * GIB, "gradients": 0, "activations": 0, "data": 2**10}
    out = {"weights": 0, "gradients": 3 * GIB, "activations": 0, "data": 0}
    lines = str(SwapReport(into, out, 5 * GIB, 50 * GIB, 4)).splitlines()
    assert lines[0].split() == ["swaps", "of", "one", "step,", "4", "micro-batches", "to", "device", "to", "host"]
    assert [line.split() for line in lines[1:4]] == [
        ["gradients", "0", "B", "3.0", "GiB"],
        ["weights", "2.0", "GiB", "0", "B"],
        ["data", "1.0", "KiB", "0", "B"],
    ]
    assert lines[4:] == [
        "  weights and gradients 5.0 GiB = 1.0000 x the lower bound",
        "  ZeRO-3 offload would move 50.0 GiB, 10.0 x as much",
    ]
