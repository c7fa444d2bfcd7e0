"""How fast are updates on the host, by setting, relative to DeepSpeed's CPU optimizer alone?

    OMP_NUM_THREADS=1 python -m benchmarks.updates.run       # a minute; the disk is that of the current folder

DeepSpeed's step of an fp32 parameter takes turns with the engine's updates, which cast to bf16, too. Medians of ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import harmony_ds
from benchmarks.common import Stack, interleaved, quiet, ratio
from benchmarks.host_bytes.run import SETTINGS
from harmony_ds.offload.native import make_native

ROUNDS, WIDTH = 15, 2896  # 8.4 million numbers
DISK = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}}


def update_of(optimizer: str, setting: dict[str, Any]) -> Callable[[], None]:
    """Return the update of an engine's only parameter."""
    config = {"bf16": {"enabled": True}, "optimizer": {"type": optimizer, "params": {}}, "train_batch_size": 1}
    config |= setting
    config["harmony"] = {"device": "cpu", **setting.get("harmony", {})}
    engine, *_ = harmony_ds.initialize(model=Stack([nn.Linear(WIDTH, WIDTH, bias=False)]), config=config)
    parts = engine._state.runtime
    gradients = {"layers.0.weight": torch.randn(WIDTH, WIDTH, dtype=parts.optimizer.master_dtype)}

    def update() -> None:
        engine._state.runtime.optimizer.step(gradients, parts.optimizer.hyper())  # the engine stays as long as this
        parts.copy_masters_to_weights(gradients)

    return update


def main() -> None:
    quiet()
    for name in ("Adam", "Lion", "Adagrad"):
        parameter = nn.Parameter(torch.randn(WIDTH, WIDTH))
        parameter.grad = torch.randn_like(parameter)
        updates = {"": make_native(f"DeepSpeedCPU{name}", [parameter], {}).step}
        updates |= {one: update_of(name, SETTINGS[one]) for one in ("as it is", "split masters", "16-bit state")}
        took = interleaved(updates | {"on a disk": update_of(name, DISK)}, ROUNDS)
        alone = took.pop("")
        shares = ", ".join(f"{one} {ratio(alone, seconds):.2f}" for one, seconds in took.items())
        print(f"{name}: alone {WIDTH**2 / median(alone) / 1e6:,.0f} million numbers a second; {shares}", flush=True)


if __name__ == "__main__":
    main()
