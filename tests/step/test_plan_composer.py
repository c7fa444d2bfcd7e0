"""Plans of runs that are parts of a step, beside what other micro-batches hold."""

from __future__ import annotations

import pytest

from harmony_ds.device import CpuDevice
from tests.engine.drive import config_of, engine_for, family, groups_of, loop, plainly, sgd
from tests.oracle import assert_same

LLAMA = family("llama")
GROUPS = groups_of(LLAMA, 2, 6)
FRUGAL = config_of(6, 0.5, {"residency": "off", "pack_layers": 1, "stash": "host", "prefetch": False})


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning")
def test_outputs_that_are_read_and_held_train_where_the_budget_holds_the_plan_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_for(LLAMA.build(0.0), sgd, FRUGAL, device=CpuDevice(2**30)) as engine:
        loop(engine, GROUPS)
        assert engine.plan is not None
        least_bytes = engine.plan.peak_bytes
    model = LLAMA.build(0.0)
    with engine_for(model, sgd, FRUGAL, device=CpuDevice(least_bytes)) as engine:
        for group in GROUPS:
            held = []
            for batch in group:
                held.append(engine(**batch))
                held[-1].logits.argmax(-1).tolist()
                engine.backward(held[-1].loss)
                engine.step()
        report = engine.memory_report()
    assert report.device_peak_bytes <= least_bytes < report.planned_peak_bytes
    assert f"more than plans have ({least_bytes:,} bytes)" in caplog.text
    expected, _ = plainly(LLAMA, 0.0, GROUPS, sgd, 0.5)
    assert_same(model, expected, bitwise=True)
