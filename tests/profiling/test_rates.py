"""The machine's rates on a clock that a script moves: each is its own, and none is taken for another."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.device.base import Event, Stream
from harmony_ds.optim.host_optimizer import HostOptimizer
from harmony_ds.profiling import rates
from harmony_ds.profiling.rates import measure_rates
from harmony_ds.scheduler.profile import UPDATE_BYTES_PER_ELEMENT, Machine
from tests.runtime.scripted import ScriptedDevice

BYTES = 4 * 2**20  # of the tensor that is copied
SWAPS = [(1000, 1.0), (2000, 1.5), (4000, 2.5)]  # 0.5 ms, and 2000 bytes in each further ms
NAMES = (f"scripted {number}" for number in itertools.count())  # rates are measured once for each name


class Machinery(ScriptedDevice):
    """Swap-outs take 4 ms, swap-ins 1 ms; with copies that overlap, or without."""

    def __init__(self, copies_overlap: bool, budget_bytes: int = 64 * 2**20) -> None:
        super().__init__(budget_bytes, next(NAMES))
        self.copies_overlap = copies_overlap
        self.stream_ms = {Stream.SWAP_IN: 1.0, Stream.SWAP_OUT: 4.0}
        self.host_buffers = 0

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.host_buffers += 1
        return super().host_empty(numel, dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        raise AssertionError("what is uploaded takes memory of the upload stream's, which keeps it")


class Reading:
    """`time.perf_counter` in the place of a device's clock; `tick_s` goes by at every look."""

    def __init__(self) -> None:
        self.device: Machinery | None = None
        self.tick_s = 0.0
        self._looks = itertools.count()  # whose next() is one step: two threads look

    def perf_counter(self) -> float:
        ms = 0.0 if self.device is None else self.device.clock_ms
        return ms / 1e3 + next(self._looks) * self.tick_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Reading:
    made = Reading()
    monkeypatch.setattr(rates, "time", made)
    return made


class SlowUpdates(HostOptimizer):
    """`ms` for a step, on the clock of `device`."""

    def __init__(self, device: Machinery, ms: float = 8.0) -> None:
        master = nn.Parameter(torch.zeros(4))
        super().__init__(torch.optim.SGD([master], lr=0.1), {"weight": master})
        self._device, self._ms = device, ms

    def scratch_optimizer(self, master: nn.Parameter) -> torch.optim.Optimizer:
        scratch = super().scratch_optimizer(master)
        scratch.register_step_post_hook(lambda *_: self._device.spend(self._ms))
        return scratch


def measured(device: Machinery, clock: Reading, optimizer: HostOptimizer | None = None) -> Machine:
    clock.device = device
    return measure_rates(device, optimizer, torch.float32, SWAPS)


def test_swaps_out_and_in_have_rates_of_their_own(clock: Reading) -> None:
    machine = measured(Machinery(copies_overlap=True), clock)
    assert machine.swap_in_bytes_per_ms == pytest.approx(2000.0)
    assert machine.swap_ms == pytest.approx(0.5)
    assert machine.swap_out_bytes_per_ms == pytest.approx(BYTES / 4.0)
    assert machine.link_bytes_per_ms == pytest.approx(2 * BYTES / 5.0)  # on this clock one copy comes behind the other
    assert machine.copies_overlap


def test_where_copies_do_not_overlap_the_link_carries_the_sum_of_both_ways(clock: Reading) -> None:
    machine = measured(Machinery(copies_overlap=False), clock)
    assert machine.swap_out_bytes_per_ms == pytest.approx(BYTES / 4.0)
    assert machine.link_bytes_per_ms == pytest.approx(2000.0 + BYTES / 4.0)
    assert machine.device_update_elements_per_ms == machine.update_elements_per_ms
    assert machine.beside_update == 1.0  # without an optimizer nothing runs beside compute


@pytest.mark.parametrize(("ms", "elements"), [(8.0, 2**20), (80.0, 2**16)], ids=["", "few, where many would take long"])
def test_updates_take_what_the_optimizer_takes(clock: Reading, ms: float, elements: int) -> None:
    device = Machinery(copies_overlap=True)
    machine = measured(device, clock, SlowUpdates(device, ms))
    assert machine.update_elements_per_ms == pytest.approx(elements / ms)
    assert machine.beside_update == 1.0


@pytest.mark.parametrize(("trained", "timed"), [(4, 2**20), (2**25, 2**22), (2**40, 2**25)])
def test_updates_of_a_large_model_are_timed_from_memory_and_not_from_caches(
    clock: Reading, monkeypatch: pytest.MonkeyPatch, trained: int, timed: int
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(HostOptimizer, "trained_elements", trained)
    monkeypatch.setattr(rates, "_update_of", lambda _, dtype, elements: lambda: seen.append(elements))
    monkeypatch.setattr(rates, "_host_rates", lambda elements: (1.0, 1.0))
    device = Machinery(copies_overlap=True)
    measured(device, clock, SlowUpdates(device))
    assert set(seen) == {2**16, timed}


def test_the_optimizer_of_a_device_whose_copies_overlap_is_as_fast_as_its_memory(
    clock: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU's bandwidths, little is lost to what an event takes."""
    device = Machinery(copies_overlap=True, budget_bytes=24 * 2**30)
    device.stream_ms = {}

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        ms = source.nbytes / 54e6 if non_blocking else 2 * source.nbytes / 3e9  # to the host, or within the device
        device.spend(ms)
        return target

    def record(stream: Stream) -> Event:
        device.spend(0.008)
        return ScriptedDevice.record(device, stream)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(device, "record", record)
    machine = measured(device, clock)
    assert machine.swap_out_bytes_per_ms == pytest.approx(54e6, rel=0.05)
    assert machine.device_update_elements_per_ms * UPDATE_BYTES_PER_ELEMENT == pytest.approx(3e9, rel=0.1)


def test_the_first_of_several_repetitions_does_not_count(clock: Reading) -> None:
    class Cold(Machinery):
        swapped_out = 0

        def spend(self, ms: float) -> None:
            if ms == 4.0:
                self.swapped_out += 1
                ms = (1000.0, 2.0, 2.0, 6.0, 6.0)[self.swapped_out - 1]  # of the others, 4 is the median
            super().spend(ms)

    machine = measured(Cold(copies_overlap=False), clock)
    assert machine.swap_out_bytes_per_ms == pytest.approx(BYTES / 4.0)


def test_the_same_machine_is_measured_once_and_its_swap_ins_each_time(clock: Reading) -> None:
    device = Machinery(copies_overlap=True)
    once = measured(device, clock)
    again = measure_rates(device, None, torch.float32, [(500, 1.0)])
    assert device.host_buffers == 2
    assert (again.swap_ms, again.swap_in_bytes_per_ms) == (0.0, 500.0)
    assert again.swap_out_bytes_per_ms == once.swap_out_bytes_per_ms
    measure_rates(device, None, torch.bfloat16, SWAPS)
    assert device.host_buffers == 4  # masters are cast to the weights' dtype after an update


def test_the_device_s_budget_is_its_memory_and_bounds_what_is_copied(clock: Reading) -> None:
    machine = measured(Machinery(copies_overlap=True, budget_bytes=64 * 1000), clock)
    assert machine.device_bytes == 64_000
    assert machine.swap_out_bytes_per_ms == pytest.approx(4 * 1000 / 4.0)


@pytest.mark.parametrize("tick_s", [0.001, 0.002])
def test_compute_and_updates_that_take_turns_have_half_of_their_speeds(clock: Reading, tick_s: float) -> None:
    """Either takes a tick, and so does each look of both threads at the clock: who is beside the other loses half."""
    clock.tick_s = tick_s
    device = Machinery(copies_overlap=False)
    clock.device = None
    machine = measure_rates(device, SlowUpdates(device), torch.float32, SWAPS)
    assert machine.beside_update == pytest.approx(0.5, rel=0.1)


# ---- the line through the swap-ins


@pytest.mark.parametrize(
    ("swaps", "fixed", "rate"),
    [
        ([(1000, 2.0), (3000, 4.0)], 1.0, 1000.0),
        ([(1000, 1.0), (3000, 3.0)], 0.0, 1000.0),
        ([(1000, 2.0), (1000, 2.0)], 0.0, 500.0),  # no slope can be told
        ([(1000, 3.0), (3000, 2.0)], 0.0, 800.0),  # the larger was faster: noise
        ([(1000, 0.5), (3000, 3.0)], 0.0, 4000 / 3.5),  # less than nothing fixed: noise
        ([(0, 5.0), (1000, 0.0), (1000, 2.0)], 0.0, 500.0),
        ([], 0.0, 1e9),
    ],
)
def test_swap_ins_take_a_fixed_time_and_a_rate(
    clock: Reading, swaps: list[tuple[int, float]], fixed: float, rate: float
) -> None:
    device = Machinery(copies_overlap=True)
    clock.device = device
    machine = measure_rates(device, None, torch.float32, swaps)
    assert machine.swap_ms == pytest.approx(fixed, abs=1e-9)
    assert machine.swap_in_bytes_per_ms == pytest.approx(rate)
