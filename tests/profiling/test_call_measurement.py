"""What follows from what a measurement saw: sums written out by hand (bytes are small, a place is a call); and its file."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
import torch

from harmony_ds.device import CpuDevice
from harmony_ds.model.targets import InterLayerGradient, OutputGradient
from harmony_ds.profiling.call_measurement import CallMeasurement, MicroBatchMeasurement
from harmony_ds.profiling.profile_cache import ProfileFile
from harmony_ds.scheduler.costs import BackwardBytes, CallCost, CostTable, ForwardBytes
from harmony_ds.scheduler.profile import Profile
from tests.scheduler.examples import CPU, graph_of
from tests.scheduler.examples import costs_of as table_of

TRAINED = CallCost(needs_backward=True)


def output_gradient(call: int, nbytes: int) -> OutputGradient:
    """The gradient of an output of that call."""
    return OutputGradient(call, torch.empty(nbytes, dtype=torch.uint8))


def inter_layer_gradient(deadline: int, nbytes: int) -> InterLayerGradient:
    """The gradient of a layer input that is made of that call's outputs."""
    return InterLayerGradient(deadline, torch.empty(nbytes, dtype=torch.uint8))


def costs_of(*calls: CallMeasurement, **seen: object) -> tuple[CallCost, ...]:
    return MicroBatchMeasurement(list(calls), **seen).table().costs  # type: ignore[arg-type]


def test_what_is_known_of_a_call_at_once_is_handed_on() -> None:
    call = CallMeasurement(cost=CallCost(forward=ForwardBytes(peak_bytes=10, graph_bytes=5)))
    call.note(backward=BackwardBytes(unsummed_bytes=9))
    call.note_forward(peak_bytes=8, graph_bytes=7)
    known = CallCost(forward=ForwardBytes(peak_bytes=10, graph_bytes=7), backward=BackwardBytes(unsummed_bytes=9))
    assert costs_of(call) == (known,)


def test_the_table_has_the_order_of_the_calls_and_what_is_behind_them() -> None:
    tail = CallMeasurement(cost=CallCost(forward=ForwardBytes(peak_bytes=30)))
    table = MicroBatchMeasurement(
        [CallMeasurement(layer=2), CallMeasurement(layer=0)], tail, held=7, held_and_stashed=5, scalar=4
    ).table()
    assert table == CostTable((2, 0), (CallCost(), CallCost()), 30, 7, scalar_bytes=4, held_and_stashed_bytes=5)


def chain() -> tuple[list[CallMeasurement], list[OutputGradient]]:
    """Three calls, each fed by the one before; the last one's output goes to the loss. 10, 20 and 40 bytes."""
    output_gradients = [output_gradient(call, nbytes) for call, nbytes in enumerate((10, 20, 40))]
    calls = [
        CallMeasurement(
            backward=100,
            cost=TRAINED,
            made=[output_gradients[place]],
            taken=output_gradients[place - 1 : place] if place else [],
        )
        for place in range(3)
    ]
    return calls, output_gradients


def test_through_a_chain_only_the_next_calls_gradient_waits() -> None:
    calls, output_gradients = chain()
    costs = costs_of(*calls, tail=CallMeasurement(taken=[output_gradients[2]]))
    assert [cost.backward.input_gradient_bytes for cost in costs] == [0, 10, 20]
    # The gradient of its output, and its own.
    assert [cost.backward.peak_bytes for cost in costs] == [110, 120, 140]


def test_a_gradient_waits_until_its_call_comes() -> None:
    """The loss looks at the output of the first call, too: 10 bytes wait beside everything."""
    calls, output_gradients = chain()
    costs = costs_of(*calls, tail=CallMeasurement(taken=[output_gradients[0], output_gradients[2]]))
    assert [cost.backward.input_gradient_bytes for cost in costs] == [0, 10, 30]
    # The second call's gradient of the first call's output is added to the one that waits, in a third tensor.
    assert [cost.backward.peak_bytes for cost in costs] == [110, 100 + 20 + 10 + 10, 100 + 40 + 10]


def test_a_call_through_which_nothing_flows_takes_nothing_backward_but_for_the_first() -> None:
    first, second = costs_of(CallMeasurement(backward=5), CallMeasurement(backward=5), tail=CallMeasurement(settle=8))
    assert first.backward.peak_bytes == 8  # the code before the first call comes last
    assert second.backward.peak_bytes == 0


def test_bytes_of_gradients_are_rounded_up_as_the_device_does() -> None:
    calls, output_gradients = chain()
    costs = costs_of(*calls, tail=CallMeasurement(taken=[output_gradients[2]]), grain=16)
    assert [cost.backward.input_gradient_bytes for cost in costs] == [0, 16, 32]


@pytest.mark.parametrize("inter_layer_bytes", [5, 25])
def test_an_inter_layer_gradient_waits_at_its_tensor_or_at_the_outputs_behind_it(inter_layer_bytes: int) -> None:
    """The second call takes what inter-layer operations made of the first call's output: 10 bytes."""
    output, inter_layer = output_gradient(0, 10), inter_layer_gradient(0, inter_layer_bytes)
    costs = costs_of(
        CallMeasurement(made=[output], settled=[output]), CallMeasurement(taken=[inter_layer]), CallMeasurement()
    )
    assert [cost.backward.input_gradient_bytes for cost in costs] == [0, max(10, inter_layer_bytes), 0]


def test_inter_layer_gradients_of_several_calls_may_wait_at_both() -> None:
    output, first, second = output_gradient(0, 10), inter_layer_gradient(0, 5), inter_layer_gradient(0, 7)
    calls = [
        CallMeasurement(cost=TRAINED, made=[output], settled=[output]),
        CallMeasurement(cost=TRAINED, taken=[first]),
        CallMeasurement(cost=TRAINED, taken=[second]),
    ]
    assert costs_of(*calls)[1].backward.input_gradient_bytes == 5 + 7 + 10


def test_what_runs_through_the_code_behind_a_call_counts_with_what_waits() -> None:
    """30 bytes while it settles; the gradient of the call before (10 bytes) waits, and takes a sum's place."""
    calls, output_gradients = chain()
    calls[1].settle, calls[1].settled = 30, [output_gradients[1]]
    costs = costs_of(*calls, tail=CallMeasurement(taken=[output_gradients[1], output_gradients[2]]))
    assert costs[1].backward.code_peak_bytes == 20 + 30 + 20
    assert costs[0].backward.code_peak_bytes == 0  # nothing runs there


def test_gradients_of_resident_parameters_wait_for_those_of_earlier_calls() -> None:
    calls = [
        CallMeasurement(cost=TRAINED, unlayered={"tied": 4}),
        CallMeasurement(cost=TRAINED),
        CallMeasurement(cost=TRAINED, unlayered={"tied": 4, "own": 100}),
    ]
    costs = costs_of(*calls, tail=CallMeasurement(unlayered={"tied": 6}))
    # Later ones wait as long as an earlier call, or this one, gives one of the same parameter.
    assert [cost.backward.peak_bytes for cost in costs] == [6, 6, 6]


def test_a_fused_pack_that_begins_within_a_shared_inter_layer_graph_keeps_its_graphs() -> None:
    costs = costs_of(*(CallMeasurement() for _ in range(5)), spans={(1, 3)})
    assert [cost.keeps_graph for cost in costs] == [False, False, True, True, False]


def test_two_processes_that_write_at_once_both_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, path = graph_of([4, 4]), tmp_path / "a new folder" / "profile.json"
    file = ProfileFile(path, graph, "float32", CpuDevice(None))
    profile = Profile(CPU, ((1, table_of(graph.calls)),), file.key(graph.calls, ()))
    replaced, pids = Path.replace, count(100)
    monkeypatch.setattr(os, "getpid", lambda: next(pids))

    def in_between(beside: Path, target: Path) -> Path:
        """Another process has written, and renamed, since this one has written."""
        monkeypatch.setattr(Path, "replace", replaced)
        file.save(profile)
        return replaced(beside, target)

    monkeypatch.setattr(Path, "replace", in_between)
    file.save(profile)
    assert file.load(profile.key) == profile
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]
