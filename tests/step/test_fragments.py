"""What plans leave of the budget to an allocator whose free memory is in pieces, and when its pool is filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harmony_ds import HarmonyEngine
from harmony_ds.device import CpuDevice
from harmony_ds.distributed import SingleProcess
from harmony_ds.scheduler.choose import PlanRequest
from harmony_ds.scheduler.plan import Policy
from harmony_ds.scheduler.search import Choice, search
from tests.engine.drive import config_of, engine_for, family, groups_of, sgd, train_groups

pytestmark = pytest.mark.fixed_times

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 2, 2)
LARGEST = GROUPS[0][0]
SHORTER = {name: tensor[:, : tensor.shape[1] // 2] for name, tensor in LARGEST.items()}


class Fragmented(CpuDevice):
    """A device whose allocator has half of a micro-batch's working memory in fragments."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.working_bytes: list[int] = []
        self.left_to_others: list[int] = []  # where the pool was filled

    def fragment_bytes(self, working_bytes: int) -> int:
        self.working_bytes.append(working_bytes)
        return working_bytes // 2

    def fill_pool(self, other_bytes: int) -> None:
        self.left_to_others.append(other_bytes)


@contextmanager
def engine_on(device: CpuDevice, **harmony: Any) -> Iterator[HarmonyEngine]:
    with engine_for(LLAMA.build(0.0), sgd, config_of(2, 0.5, {"residency": "off", **harmony}), device=device) as engine:
        train_groups(engine, GROUPS[:1])
        yield engine


def peak_of(device: CpuDevice, **harmony: Any) -> int:
    with engine_on(device, **harmony) as engine:
        assert engine.plan is not None
        return engine.plan.peak_bytes


def test_a_plan_leaves_fragments_of_its_largest_layer_free() -> None:
    most = peak_of(CpuDevice(2**30))
    device = Fragmented(most)
    with engine_on(device) as engine:
        assert engine.plan is not None
        costs = engine._state.planner.costs[0]
        largest = max(costs.tail_bytes, *(max(c.forward.peak_bytes, c.backward.peak_bytes) for c in costs.costs))
        assert device.working_bytes[-1] == costs.working_bytes == largest
        assert engine.plan.peak_bytes <= most - largest // 2
        assert engine.memory_report().beside_bytes == largest // 2


def test_where_no_plan_fits_beside_fragments_one_without_runs() -> None:
    frugal = {"pack_layers": 1, "stash": "host", "prefetch": False}
    smallest = peak_of(CpuDevice(2**30), **frugal)
    with engine_on(Fragmented(smallest), **frugal) as engine:
        assert engine.plan is not None and engine.plan.peak_bytes == smallest
        assert engine.memory_report().beside_bytes == 0


def test_calls_that_are_cut_until_a_plan_fits_leave_fragments_free_and_more_where_steps_need_it() -> None:
    frugal = {"pack_layers": 1, "stash": "host", "prefetch": False}
    smallest = peak_of(CpuDevice(2**30), **frugal)
    with engine_on(Fragmented(smallest - 1), **frugal) as engine:
        planner = engine._state.planner
        assert planner.rows.cuts
        assert engine.memory_report().beside_bytes == planner.costs[0].working_bytes // 2
        assert planner.leave_more_free()


def test_the_pool_is_filled_where_one_request_more_could_exceed_the_budget() -> None:
    frugal = {"pack_layers": 1, "stash": "host", "prefetch": False}
    with engine_on(CpuDevice(2**30), **frugal) as engine:
        assert engine.plan is not None
        smallest, working = engine.plan.peak_bytes, engine._state.planner.costs[0].working_bytes
    for budget_bytes, fills in ((smallest + working // 2, 1), (smallest + 2 * working, 0)):
        device = Fragmented(budget_bytes)
        with engine_on(device, **frugal) as engine:
            assert device.left_to_others == [0] * fills
            train_groups(engine, GROUPS[1:])
            assert device.left_to_others == [0] * fills  # nothing was measured again


def test_a_filled_pool_leaves_room_to_exchange_gradients_with_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleProcess, "reduce_bytes", lambda self, device: 2**16)
    monkeypatch.setattr(Policy, "reduces_on_device", True)
    frugal = {"pack_layers": 1, "stash": "host", "prefetch": False}
    smallest = peak_of(CpuDevice(2**30), **frugal)
    device = Fragmented(smallest)
    with engine_on(device, **frugal):
        assert device.left_to_others == [2**16]


class Caching(Fragmented):
    """A device whose memory is a caching allocator's, whose needs are replayed."""

    @property
    def has_caching_allocator(self) -> bool:
        return True


def test_measuring_records_what_the_allocator_has_to_serve() -> None:
    with engine_on(Caching(2**30)) as engine:
        costs = engine._state.planner.costs[0]
        assert costs.allocations is not None
        assert [bool(call.forward and call.propagate) for call in costs.allocations.calls] == [True] * len(costs.calls)
        weights = [call.sums for call in costs.allocations.calls]
        assert sum(map(sum, weights)) >= 4 * sum(parameter.numel() for parameter in engine.module.parameters())
        report, reserved_bytes = engine.memory_report(), engine._state.planner.choices[0].reserved_bytes
        assert report.planned_reserved_bytes == reserved_bytes
        assert reserved_bytes is not None and reserved_bytes > report.planned_peak_bytes
    with engine_on(CpuDevice(2**30)) as engine:
        assert engine._state.planner.costs[0].allocations is None
        assert engine.memory_report().planned_reserved_bytes is None


def test_a_plan_is_replayed_again_when_micro_batches_differ_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def replayed(choice: Choice, request: Any, costs: Any, smallest_ratio: float) -> Choice:
        shares.append(smallest_ratio)
        return replace(choice, reserved_bytes=1)

    monkeypatch.setattr("harmony_ds.step.plan_search.replayed", replayed)
    config = config_of(2, 0.5, {"residency": "off"})
    with engine_for(LLAMA.build(0.0), sgd, config, device=Caching(2**30)) as engine:
        train_groups(engine, [[LARGEST, LARGEST]])
        plan = engine.plan
        assert shares == []
        train_groups(engine, [[LARGEST, SHORTER], [SHORTER, LARGEST]])
        assert shares == [0.5]  # once
        assert engine.plan is plan and engine.memory_report().planned_reserved_bytes == 1


def test_a_plan_that_is_not_served_any_more_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harmony_ds.step.plan_search.is_served", lambda *_: False)
    config = config_of(2, 0.5, {"residency": "off"})
    with engine_for(LLAMA.build(0.0), sgd, config, device=Caching(2**30)) as engine:
        train_groups(engine, [[LARGEST, LARGEST]])
        plan = engine.plan
        train_groups(engine, [[LARGEST, SHORTER]])
        assert engine.plan is not plan


def test_layer_calls_are_cut_where_the_allocator_could_serve_no_plan_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "harmony_ds.step.plan_search.is_served", lambda choice, _: choice.plan.policy.backward_rows == 1
    )
    with engine_on(Caching(2**30)) as engine:
        assert engine.plan is not None and engine.plan.policy.backward_rows == 1
        assert engine._state.planner.leave_more_free()
    assert "torch's allocator has to reserve" not in caplog.text


def test_where_the_allocator_can_serve_no_plan_none_is_searched_that_leaves_it_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []

    def noting_search(*args: Any, **options: Any) -> tuple[Choice, ...]:
        request: PlanRequest = args[4]
        left.append(request.beside_bytes)
        return search(*args, **options)

    for module in ("step.plan_search", "scheduler.allocator_fit"):
        monkeypatch.setattr(f"harmony_ds.{module}.is_served", lambda *_: False)
    monkeypatch.setattr("harmony_ds.step.plan_search.search", noting_search)
    with engine_on(Caching(2**30)) as engine:
        planner = engine._state.planner
        assert min(left) > 0
        assert planner.leave_more_free()


def test_whole_calls_run_with_a_warning_where_the_allocator_could_serve_no_plan_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("harmony_ds.step.plan_search.is_served", lambda *_: False)
    with engine_on(Caching(2**30)) as engine:
        assert engine.plan is not None and engine.plan.policy.backward_rows == 0
        assert not engine._state.planner.cuts.now.tiles.cut
    assert "torch's allocator has to reserve" in caplog.text


def test_a_saved_plan_is_replayed_and_a_warning_says_that_the_allocator_needs_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    with engine_on(Caching(2**30)) as engine:
        assert engine.plan is not None
        path.write_text(engine.plan.to_json())
        peak_bytes, reserved_bytes = engine.plan.peak_bytes, engine.memory_report().planned_reserved_bytes
        assert reserved_bytes is not None
    with engine_on(Caching(2**30), plan=str(path)) as engine:
        assert engine.memory_report().planned_reserved_bytes == reserved_bytes
        assert "has to reserve" not in caplog.text
    with engine_on(Caching(peak_bytes + 2**10), plan=str(path)) as engine:
        assert engine.plan is not None and engine.plan.peak_bytes == peak_bytes
        assert engine.memory_report().planned_reserved_bytes == reserved_bytes
    assert "torch's allocator has to reserve" in caplog.text


def test_a_warning_says_that_the_allocator_cannot_serve_the_plan_that_was_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_on(Caching(2**30)) as engine:
        assert engine.plan is not None
        peak_bytes = engine.plan.peak_bytes
    assert "has to reserve" not in caplog.text
    with engine_on(Caching(peak_bytes + 2**10), residency="off") as engine:
        choice = engine._state.planner.choices[0]
        assert choice.reserved_bytes is not None and choice.reserved_bytes > peak_bytes
    assert "torch's allocator has to reserve" in caplog.text
    assert "take smaller micro-batches" in caplog.text
