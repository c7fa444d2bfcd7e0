"""What the search gives fits, and is the same each time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.vldb22.planner.candidates import DEEP, Packings
from benchmarks.vldb22.planner.graph import Mode, Schedule, Setup
from benchmarks.vldb22.planner.loads import Loads
from benchmarks.vldb22.planner.profile import PassCosts
from benchmarks.vldb22.planner.search import Effort, Question, search
from benchmarks.vldb22.planner.simulate import simulate
from tests.benchmarks.vldb22.examples import LAYERS, MACHINE, bounds, costs_of, setups

COSTS = costs_of()
LOADS = Loads(Setup(Mode.PIPELINE, 2, 4), COSTS, MACHINE, True, 2)


@settings(max_examples=25, deadline=None)
@given(setups(), st.booleans(), st.integers(600, 8000))
def test_an_answer_fits_and_takes_what_it_says(setup: Setup, overlap: bool, cap_bytes: int) -> None:
    answer = search(Question(setup, overlap, cap_bytes, 4, 4), COSTS, MACHINE)
    assert answer is not None
    schedule = answer.schedule
    forward = COSTS.memory(False, schedule.forward_micro_batch)
    backward = COSTS.memory(True, schedule.backward_micro_batch)

    assert all(forward(*pack) <= cap_bytes for pack in pairwise(schedule.forward))
    assert all(backward(*pack) <= cap_bytes for pack in pairwise(schedule.backward))
    assert answer.time_ms == simulate(setup, schedule, COSTS, MACHINE, overlap).time_ms
    assert answer == search(Question(setup, overlap, cap_bytes, 4, 4), COSTS, MACHINE)


def everything(count: int) -> list[tuple[int, ...]]:
    cuts: list[tuple[int, ...]] = [(0,)]
    for layer in range(1, count):
        cuts += [(*cut, layer) for cut in cuts]
    return [(*cut, count) for cut in cuts] if count else [(0,)]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_nothing_is_faster(mode: Mode, devices: int, overlap: bool) -> None:
    """Beside every schedule of a small model: the answer is the best, or within 2 % of it."""
    costs, setup, cap_bytes = costs_of(4), Setup(mode, devices, 6), 900
    sizes = [size for size in (1, 2, 3, 4) if setup.share(0) % size == 0]
    times_ms = [
        simulate(setup, Schedule(u_forward, forward, u_backward, backward), costs, MACHINE, overlap).time_ms
        for u_backward in sizes
        for backward in everything(4)
        if all(costs.memory(True, u_backward)(*pack) <= cap_bytes for pack in pairwise(backward))
        for u_forward in sizes
        if u_forward >= u_backward
        for forward in everything(backward[-2])
        if all(costs.memory(False, u_forward)(*pack) <= cap_bytes for pack in pairwise(forward))
    ]
    answer = search(Question(setup, overlap, cap_bytes, 4, 4), costs, MACHINE)

    assert answer is not None
    assert min(times_ms) <= answer.time_ms <= 1.02 * min(times_ms)


def test_nothing_fits() -> None:
    assert search(Question(Setup(Mode.PIPELINE, 2, 4), True, 599, 4, 4), COSTS, MACHINE) is None


@given(bounds(LAYERS), st.integers(300, 4000), st.booleans())
def test_candidates_cover_every_feasible_number_of_packs(cut: tuple[int, ...], cap_bytes: int, backward: bool) -> None:
    """Whatever fits, there is a candidate with as many packs."""
    packings = Packings(COSTS, LOADS, backward, 2, cap_bytes, LAYERS)
    parts = len(cut) - 1
    found = list(packings.of_number(parts, LAYERS))
    alone = list(packings.any_number(LAYERS))

    assert all(packings.fits(*pack) for bounds in (*found, *alone) for pack in pairwise(bounds))
    assert all(len(bounds) - 1 == parts for bounds in found)
    if all(packings.fits(*pack) for pack in pairwise(cut)):
        assert found


@pytest.mark.parametrize("mode", Mode)
def test_no_schedule_of_the_originals_methods_is_faster_for_a_deep_model(mode: Mode) -> None:
    """Its cuts of either pass, and the backward pass's own again, at all micro-batch sizes."""
    costs, setup, cap_bytes = costs_of(DEEP + 12), Setup(mode, 2, 4), 100_000
    loads = Loads(setup, costs, MACHINE, True, setup.devices)
    sizes = [size for size in (1, 2, 4) if setup.share(0) % size == 0]

    def cuts(backward: bool, size: int, layers: int) -> list[tuple[int, ...]]:
        return list(Packings(costs, loads, backward, size, cap_bytes, layers).published(layers))

    schedules = [
        Schedule(u_forward, forward, u_backward, backward)
        for u_backward in sizes
        for backward in cuts(True, u_backward, costs.count)
        for u_forward in sizes
        if u_forward >= u_backward
        for forward in (*cuts(False, u_forward, backward[-2]), backward[:-1])
        if all(costs.memory(False, u_forward)(*pack) <= cap_bytes for pack in pairwise(forward))
    ]
    answer = search(Question(setup, True, cap_bytes, 4, 4), costs, MACHINE, Effort(2, 2, 1000, 1, 1000))

    assert len(schedules) > 10
    assert answer is not None
    assert answer.time_ms <= min(simulate(setup, one, costs, MACHINE, True).time_ms for one in schedules)


def test_costs_between_and_beyond_the_measured_sizes() -> None:
    measured = PassCosts((1, 2, 4), ((1.0,), (3.0,), (5.0,)), ((10,), (20,), (40,)))

    assert measured.at(2) == ([3.0], [20])
    assert measured.at(3) == ([4.0], [30])
    assert measured.at(8) == ([9.0], [80])  # on the line through 2 and 4
