"""Training, saving, and going on in an engine where everything was different, is training on: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import Setup, assert_equal, engine_of, state_of, train

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}}
CLIP = {"gradient_clipping": 0.5}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}}


def named(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def two_groups(parameters: list[Any]) -> torch.optim.Optimizer:
    slow = [p for p in parameters if p.dim() < 2]
    fast = [p for p in parameters if p.dim() >= 2]
    return torch.optim.AdamW([{"params": fast, "lr": 1e-2}, {"params": slow, "lr": 1e-3, "weight_decay": 0.0}])


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


RESIDENT = {"residency": 2, "pack_layers": 1}
SETUPS = {
    "fp32": Setup(),
    "fp32, clipped: updates are under way when it is saved": Setup(config=CLIP),
    "bf16": Setup(config=BF16),
    "bf16, clipped, DeepSpeed's warm-up": Setup(config=BF16 | CLIP | WARMUP),
    "fp16 with overflows and growth": Setup(config=FP16),
    "torch_adam": Setup(optimizer=None, config=BF16 | named("AdamW", lr=1e-2, torch_adam=True)),
    "DeepSpeedCPUAdam": Setup(optimizer=None, config=BF16 | CLIP | named("AdamW", lr=1e-2)),
    "SGD with momentum, cosine": Setup(optimizer=momentum, scheduler=cosine),
    "two parameter groups": Setup(optimizer=two_groups, config=BF16),
    "resident packs": Setup(harmony=RESIDENT),
    "resident packs, bf16, clipped": Setup(config=BF16 | CLIP, harmony=RESIDENT),
    "tied weights": Setup(family="gpt2", dropout=0.0),
    "frozen parameters": Setup(frozen="layers.0", config=BF16),
    "buffers that change": Setup(family="BatchNormNet"),
}


def interrupted(setup: Setup, folder: Path, later: Setup | None = None, **options: Any) -> tuple[dict[str, Any], list]:
    """Three steps, a save, and three more in an engine that began otherwise."""
    with engine_of(setup) as engine:
        losses = train(engine, setup, range(3))
        assert engine.save_checkpoint(folder, client_state={"epoch": 1}) is True
    later = later or setup
    with engine_of(later, fresh=False) as engine:
        assert engine.load_checkpoint(folder, **options) == (str(folder / "global_step3"), {"epoch": 1})
        losses += train(engine, later, range(3, 6))
        return state_of(engine), losses


def straight(setup: Setup) -> tuple[dict[str, Any], list]:
    with engine_of(setup) as engine:
        return_losses = train(engine, setup, range(6))
        return state_of(engine), return_losses


@pytest.mark.timeout(600)  # DeepSpeed compiles each of its optimizers at its first use on a machine
@pytest.mark.parametrize("name", SETUPS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    expected, losses = straight(setup)
    actual, resumed_losses = interrupted(setup, tmp_path)

    assert resumed_losses == losses
    assert_equal(actual, expected)
    if name.startswith("fp16"):
        assert expected["skipped_steps"] > 0
