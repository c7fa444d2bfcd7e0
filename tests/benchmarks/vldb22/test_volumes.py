"""The bytes of a task graph are Harmony's formulas (VLDB'22, section 2)."""

from __future__ import annotations

from hypothesis import given

from benchmarks.vldb22.cost_model.compose import compose
from benchmarks.vldb22.cost_model.graph import Medium, Mode, Schedule, Setup
from benchmarks.vldb22.cost_model.volumes import count_volumes
from tests.benchmarks.vldb22.examples import LAYERS, costs_of, schedules, setups

COSTS = costs_of()


def total(first: int = 0, last: int = LAYERS) -> int:
    return COSTS.state_bytes(first, last)


def inputs(layers: tuple[int, ...], samples: int) -> int:
    return sum(COSTS.input_bytes(layer, samples) for layer in layers)


@given(setups(), schedules())
def test_data_parallel(setup: Setup, schedule: Schedule) -> None:
    devices, samples = setup.devices, setup.batch
    volumes = count_volumes(compose(Setup(Mode.DATA_PARALLEL, devices, samples), schedule), COSTS)
    fused, stashed = schedule.backward[-2], schedule.backward[:-2]

    assert volumes.weights_in == devices * (2 * total() - total(fused))
    assert volumes.weight_gradients_out == total()
    assert volumes.stash_in == volumes.stash_out == inputs(stashed, samples)
    handed_on = schedule.forward[1:] if fused else ()
    assert volumes.input_in == volumes.input_out == inputs(handed_on, samples)
    assert volumes.gradient_in == volumes.gradient_out == inputs(schedule.backward[1:-1], samples)
    assert volumes.data_in == COSTS.input_bytes(0, samples)
    assert volumes.peer == 0
    assert volumes.all_reduced == (devices * total() if devices > 1 else 0)


@given(setups(), schedules())
def test_pipeline(setup: Setup, schedule: Schedule) -> None:
    samples, graph = setup.batch, compose(Setup(Mode.PIPELINE, setup.devices, setup.batch), schedule)
    volumes = count_volumes(graph, COSTS)
    fused, stashed = schedule.backward[-2], schedule.backward[:-2]
    pinned = sum(
        total(port.first, port.last) for task in graph.tasks for port in task.takes if port.medium is Medium.PIN
    )

    assert volumes.weights_in == 2 * total() - total(fused) - pinned
    assert volumes.weight_gradients_out == total()
    assert volumes.stash_in == volumes.stash_out == inputs(stashed, samples)
    assert volumes.all_reduced == 0
    handed_on = inputs(schedule.forward[1:], samples) if fused else 0
    handed_back = inputs(schedule.backward[1:-1], samples)
    if setup.devices == 1:
        assert (volumes.input_in, volumes.gradient_in, volumes.peer) == (handed_on, handed_back, 0)
        return
    converts = fused and schedule.forward_micro_batch != schedule.backward_micro_batch
    over_host = inputs((fused,), samples) if converts else 0
    assert volumes.input_in == volumes.input_out == over_host
    assert volumes.gradient_in == volumes.gradient_out == 0
    assert volumes.peer == handed_on - over_host + handed_back
