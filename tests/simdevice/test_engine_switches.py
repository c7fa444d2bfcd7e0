"""Mechanisms switched off, on a device that counts every byte and that is not the host."""

from __future__ import annotations

from typing import Any

import pytest

import harmony_ds
from harmony_ds.config.ablations import ABLATIONS
from tests.oracle import assert_same, train_plainly
from tests.simdevice.device import SimDevice
from tests.simdevice.test_engine_exactness import ALL, GROUP, SEED, STEPS, optimizer_for

MOST = 1.25
"""The planned peak over the measured one. A micro-batch that runs alone hides less of what is planned with care."""
OFF: dict[str, dict[str, Any]] = {
    a.name: dict(a.harmony) for a in ABLATIONS if a.exact_on("cpu") and not a.device and a.harmony.keys() != {"stash"}
}
CASES = [
    *((("llama", 2, "device"), name, clip) for name in OFF for clip in (0.0, 0.5)),
    *((way, "everything", 0.5) for way in (("bert", 1, "host"), ("t5", 2, "host"), ("mixtral", 100, "device"))),
    *((way, "fused-last-pack", 0.0) for way in (("gpt2", 1, "host"), ("SkipNet", 2, "device"))),
]


@pytest.mark.parametrize(("way", "off", "clip"), CASES, ids=str)
def test_same_weights_as_plain_accumulation_and_a_peak_within_the_plan(
    way: tuple[str, int, str], off: str, clip: float
) -> None:
    family = ALL[way[0]]
    model, plain = family.build(0.0).train(), family.build(0.0).train()
    groups: list[list[dict[str, Any]]] = [[family.batch(s * GROUP + i) for i in range(GROUP)] for s in range(STEPS)]
    train_plainly(
        plain,
        groups,
        optimizer_for(family, plain),
        clip=clip or None,
        seed_of=lambda step, index: harmony_ds.micro_batch_seed(SEED, step, index),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GROUP,
        "gradient_clipping": clip,
        "harmony": {"seed": SEED, "pack_layers": way[1], "stash": way[2], **OFF[off]},
    }
    optimizer = optimizer_for(family, model)
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config, device=SimDevice())
    measured = 0
    for group in groups:
        engine.train_batch(iter(group))
        measured = max(measured, engine.memory_report().device_peak_bytes)
    engine.finish_updates()
    planned = engine.memory_report().planned_peak_bytes
    engine.destroy()

    assert_same(model, plain, family.bitwise)
    assert measured <= planned <= MOST * measured
