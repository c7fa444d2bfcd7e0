"""Several processes, each on a late device: copies and exchanges are ordered by events alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.distributed.processes import run
from tests.distributed.training import Result, Training, differences, engine_of, train_plainly, train_with
from tests.inside import updater_of
from tests.simdevice.late import LateCpuDevice

TRAININGS = (
    Training(clip=0.05),
    Training(),
    Training(model="experts", clip=0.01),
    Training(bf16=True, harmony={"stash": "host"}),
    Training(clip=0.05, harmony={"weights": "share"}),
    Training(model="llama", steps=2, harmony={"weights": "share"}),
)


def _on_late_devices(several: Sequence[Training], seed: int | None) -> list[Result]:
    """In one of several processes; nothing may have been out of order."""
    results = []
    for training in several:
        device = LateCpuDevice(seed)
        with device.watched():
            engine = engine_of(training, device=device)
            updater_of(engine)._timed = lambda device=device: device.watched(None)
            results.append(train_with(engine, training))
            engine.destroy()
        del engine
        gc.collect()
        device.assert_in_order()
    return results


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("seed", [None, 1])
def test_gradients_are_reduced_after_compute_and_after_their_copies(seed: int | None, place: str) -> None:
    several = [replace(training, harmony={**training.harmony, "reduce": place}) for training in TRAININGS]
    found = run(2, _on_late_devices, several, seed, limit_s=300)
    for index, training in enumerate(several):
        assert not differences([of_rank[index] for of_rank in found], train_plainly(training, 2)), training
