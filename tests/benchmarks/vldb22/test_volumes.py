"""The bytes of a step are Harmony's formulas (VLDB'22, section 2)."""

from __future__ import annotations

from hypothesis import given

from benchmarks.vldb22.cost_model.schedule import Mode, Schedule, Setup, pinned, tasks_of
from benchmarks.vldb22.cost_model.volumes import volumes_of
from tests.benchmarks.vldb22.examples import LAYERS, costs_of, schedules, setups

COSTS = costs_of()


def total(first: int = 0, last: int = LAYERS) -> int:
    return COSTS.state_bytes(first, last)


def inputs(layers: tuple[int, ...], samples: int) -> int:
    return sum(COSTS.input_bytes(layer, samples) for layer in layers)


@given(setups(), schedules())
def test_data_parallel(setup: Setup, schedule: Schedule) -> None:
    devices, samples = setup.devices, setup.batch
    volumes = volumes_of(Setup(Mode.DATA_PARALLEL, devices, samples), schedule, COSTS)
    fused, stashed = schedule.backward[-2], schedule.backward[:-2]

    assert volumes["W_in"] == devices * (2 * total() - total(fused))
    assert volumes["dW_out"] == total()
    assert volumes["stash_in"] == volumes["stash_out"] == inputs(stashed, samples)
    handed_on = schedule.forward[1:] if fused else ()
    assert volumes["Y_in"] == volumes["Y_out"] == inputs(handed_on, samples)
    assert volumes["dY_in"] == volumes["dX_out"] == inputs(schedule.backward[1:-1], samples)
    assert volumes["data_in"] == COSTS.input_bytes(0, samples)
    assert volumes["p2p"] == 0
    assert volumes["allreduce"] == (devices * total() if devices > 1 else 0)


@given(setups(), schedules())
def test_pipeline(setup: Setup, schedule: Schedule) -> None:
    samples, setup = setup.batch, Setup(Mode.PIPELINE, setup.devices, setup.batch)
    volumes = volumes_of(setup, schedule, COSTS)
    fused, stashed = schedule.backward[-2], schedule.backward[:-2]
    stays = sum(total(*layers) for layers in pinned(tasks_of(setup, schedule)))

    assert volumes["W_in"] == 2 * total() - total(fused) - stays
    assert volumes["dW_out"] == total()
    assert volumes["stash_in"] == volumes["stash_out"] == inputs(stashed, samples)
    assert volumes["allreduce"] == 0
    handed_on = inputs(schedule.forward[1:], samples) if fused else 0
    handed_back = inputs(schedule.backward[1:-1], samples)
    if setup.devices == 1:
        assert (volumes["Y_in"], volumes["dY_in"], volumes["p2p"]) == (handed_on, handed_back, 0)
        return
    converts = fused and schedule.forward_micro_batch != schedule.backward_micro_batch
    over_host = inputs((fused,), samples) if converts else 0
    assert volumes["Y_in"] == volumes["Y_out"] == over_host
    assert volumes["dY_in"] == volumes["dX_out"] == 0
    assert volumes["p2p"] == handed_on - over_host + handed_back
