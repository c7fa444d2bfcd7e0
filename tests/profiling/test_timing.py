"""What layer calls take, on a clock that a script moves: cold calls do not count, and no millisecond is another's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from harmony_ds.device.base import Stream
from harmony_ds.profiling.sample import Sample
from harmony_ds.profiling.timing import Timing, typical
from harmony_ds.scheduler.costs import CallCost, CostTable, StashBytes
from tests.runtime.scripted import ScriptedDevice, assembled, spending

COLD_MS = 1000.0
SWAP_MS = 0.125


class Count:
    """Counts calls; attributes and configurations are put back after measuring, and other objects are not."""

    calls = 0


class Layer(nn.Linear):
    """Takes as long as it says, and longer the first time that it runs."""

    def __init__(
        self, device: ScriptedDevice, forward_ms: float, backward_ms: float, cold_ms: float = COLD_MS, width: int = 4
    ) -> None:
        super().__init__(width, width)
        self.scripted, self.forward_ms, self.backward_ms, self.cold_ms = device, forward_ms, backward_ms, cold_ms
        self.seen = Count()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.calls += 1
        cold = self.cold_ms if self.seen.calls == 1 else 0.0
        return super().forward(spending(x, self.scripted, self.forward_ms + cold, self.backward_ms))


class Net(nn.Module):
    """Layers with code before, between and behind them."""

    def __init__(
        self, device: ScriptedDevice, layers: list[Layer], head: float, inter_layer: float, tail: float
    ) -> None:
        super().__init__()
        self.scripted, self.layers = device, nn.ModuleList(layers)
        self.head, self.inter_layer, self.tail = head, inter_layer, tail
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        cold = COLD_MS if self.passes == 1 else 0.0
        self.scripted.spend(self.head + cold)
        for layer in self.layers:
            x = layer(x)
            self.scripted.spend((self.inter_layer if layer is not self.layers[-1] else self.tail) + cold)
        return x


def timed(net: Net, trained: bool = True) -> tuple[CostTable, list[tuple[int, float]]]:
    """The times of a micro-batch, and its swap-ins."""
    device = net.scripted
    device.stream_ms = {Stream.SWAP_IN: SWAP_MS}
    with assembled(net, device) as assembly:
        parts = assembly.runtime
        watch = Timing(parts, assembly.layers)
        x = torch.ones(2, 4, requires_grad=trained)  # or the first layer's call would be of another structure
        calls = tuple(range(len(net.layers)))
        costs = CostTable(calls, tuple(CallCost(stash=StashBytes(new_bytes=7)) for _ in calls), tail_bytes=3)
        sample = Sample(x, net, lambda out: out.sum() if trained else None, seed=1)
        table = watch.time(costs, sample)
    return table, watch.swaps


def test_the_first_of_several_samples_was_cold() -> None:
    assert typical([100.0, 2.0, 4.0, 3.0]) == 3.0
    assert typical([100.0, 2.0]) == 2.0
    assert typical([100.0]) == 100.0
    assert typical([]) == 0.0


def test_cold_calls_do_not_count() -> None:
    """The first pass is cold; the second has every time as it was scripted, whichever code it was spent in."""
    device = ScriptedDevice()
    layers = [Layer(device, 2.0, 5.0) for _ in range(3)]
    table, _ = timed(Net(device, layers, head=0.5, inter_layer=0.25, tail=0.25))

    assert (table.head_ms, table.tail_ms, table.tail_bytes) == (0.5, 0.25, 3)
    for cost in table.costs:
        assert cost.forward_ms == 2.0 + 0.25
        assert cost.backward_ms == 2.0 + 5.0  # run again, and then propagated through
        assert cost.fused_ms == 7.0 + 0.25  # the graph is built while running forward
        assert (cost.propagate_ms, cost.saved_ms, cost.stash.new_bytes) == (5.0, 2.0, 7)


@pytest.mark.parametrize(("overlaps", "share"), [(True, 2 / 9), (False, 0.0)])
def test_what_the_host_issues_is_timed_where_a_device_computes_beside_it(
    overlaps: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(ScriptedDevice, "issued_ms", lambda _: float(next(ticks)))
    monkeypatch.setattr(ScriptedDevice, "copies_overlap", overlaps)
    device = ScriptedDevice()
    table, _ = timed(Net(device, [Layer(device, 2.0, 5.0) for _ in range(3)], 0.5, inter_layer=0.25, tail=0.25))
    assert table.issue_share == pytest.approx(share)  # a millisecond each way, of 2 and 2 + 5


class Other(Layer):
    pass


def test_equal_layers_share_their_median_and_others_have_times_of_their_own() -> None:
    device = ScriptedDevice()
    layers = [Layer(device, ms, 2.0, cold_ms=0.0) for ms in (1.0, 2.0, 9.0)]
    table, _ = timed(Net(device, [*layers, Other(device, 8.0, 16.0)], 0.0, 0.0, 0.0))
    assert [cost.forward_ms for cost in table.costs] == [2.0, 2.0, 2.0, 8.0]
    assert [cost.backward_ms for cost in table.costs] == [4.0, 4.0, 4.0, 24.0]


def test_only_the_first_few_of_equal_calls_are_propagated_through() -> None:
    device = ScriptedDevice()
    layers = [Layer(device, 1.0, 2.0) for _ in range(6)]
    table, _ = timed(Net(device, layers, 0.0, 0.0, 0.0))

    # Once and, of the first four, again, in two passes.
    assert [layer.seen.calls for layer in layers] == [4, 4, 4, 4, 2, 2]
    assert [cost.backward_ms for cost in table.costs] == [3.0] * 6


def test_swap_ins_are_timed_and_are_in_nobodys_time() -> None:
    device = ScriptedDevice()
    net = Net(device, [Layer(device, 1.0, 2.0) for _ in range(2)], 0.5, 0.0, 0.0)
    table, swaps = timed(net)

    (one,) = {nbytes for nbytes, _ in swaps if nbytes}
    assert one >= (4 * 4 + 4) * 4
    assert swaps == [(0, SWAP_MS), *[(one, SWAP_MS)] * 4]  # the unlayered parameters; two layers in two passes
    assert table.head_ms == 0.5
    assert [cost.forward_ms for cost in table.costs] == [1.0] * 2


def test_nothing_is_propagated_through_what_is_not_trained() -> None:
    device = ScriptedDevice()
    net = Net(device, [Layer(device, 1.0, 2.0)], 0.0, 0.0, 0.0)
    net.requires_grad_(False)
    table, _ = timed(net, trained=False)
    (cost,) = table.costs
    assert (cost.forward_ms, cost.backward_ms, cost.fused_ms, cost.propagate_ms) == (1.0, 0.0, 1.0, 0.0)
