"""Weights that a thread reads from a disk, on late devices: the memory tier's bits, and every access in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from harmony_ds.offload import disk_weights
from tests.checkpoint.runs import assert_equal
from tests.engine.drive import config_of, family, groups_of, loop, weights_of
from tests.offload.test_disk import WEIGHTS, on
from tests.simdevice.test_engine_late import late_devices, late_engine

LLAMA = family("llama")
pytestmark = [
    pytest.mark.fixed_times,
    pytest.mark.filterwarnings("ignore:a loss or an output was looked at:RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("devices", "seed", "clip"), [(1, None, 0.5), (1, 1, None), (1, 2, 0.5), (2, None, None), (2, 3, 0.5)]
)
def test_chunks_are_read_copied_and_used_in_order(
    devices: int, seed: int | None, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_weights, "CHUNK_BYTES", 4096)  # several for a pack
    results = []
    for where in (on(tmp_path, WEIGHTS), {}):
        model = LLAMA.build(0.1)
        config = config_of(3, clip, {"pack_layers": 1, "stash": "host"}, **where)
        with late_engine(model, config, seed, device=late_devices(devices, seed)) as engine:
            losses = loop(engine, groups_of(LLAMA, 2, 3))
            losses.append([engine.eval_batch(iter(groups_of(LLAMA, 1, 3)[0])).item()])
            results.append((losses, weights_of(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])
