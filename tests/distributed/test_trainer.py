"""HarmonyTrainer in several processes against the stock Trainer under DistributedDataParallel.

That adds gradients up in another order: equal to the rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from harmony_ds.integrations.transformers import HarmonyTrainer
from tests.distributed.processes import run
from tests.integrations.test_trainer import CONFIG, arguments, llama, logged, text

SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVED}


def _trained(ours: bool, folder: str, more: dict[str, Any]) -> dict[str, Any]:
    """In one of several processes; the arguments of the Trainer, and `rows` of data, `evaluate`, `resume`."""
    more = dict(more)
    rows, evaluate, resume = more.pop("rows", 22), more.pop("evaluate", False), more.pop("resume", None)
    kind, extra = (HarmonyTrainer, {"ds_config": CONFIG}) if ours else (Trainer, {})
    given = arguments(Path(folder) / ("ours" if ours else "stock"), **more)
    seen = text(9) if evaluate else None
    trainer = kind(model=llama(), args=given, train_dataset=text(rows), eval_dataset=seen, **extra)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    best = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name
    return {
        "log": torch.tensor(logged(trainer), dtype=torch.float64),
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "evaluated": [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry],
        "best": best,
        "steps": state.global_step,
    }


def _both(folder: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    return [_trained(False, folder, more), _trained(True, folder, more)]


def _assert_close(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert ours["steps"] == stock["steps"] > 0
    assert torch.allclose(ours["log"], stock["log"], rtol=1e-5, atol=1e-7)
    assert ours["evaluated"] == pytest.approx(stock["evaluated"], rel=1e-5)
    assert ours["best"] == stock["best"]
    for name, value in stock["weights"].items():
        assert _distance(ours["weights"][name], value) < 2e-6, name


def _distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (2, {}),  # 11 micro-batches: the last group of an epoch is smaller, and one of its micro-batches is dealt twice
        (3, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "rows": 14}),
        (2, BEST),
    ],
)
def test_several_processes_train_as_the_stock_trainer_does(size: int, more: dict[str, Any], tmp_path: Path) -> None:
    found = run(size, _both, str(tmp_path), more, limit_s=200)
    for stock, ours in found:
        _assert_close(stock, ours)
        for name, value in found[0][1]["weights"].items():
            assert torch.equal(ours["weights"][name], value)


def _resumed(folder: str) -> list[dict[str, Any]]:
    """Train as a whole, and train on from a checkpoint."""
    constant = {"lr_scheduler_type": "constant"}
    _trained(True, folder, {**SAVED, **constant, "max_steps": 4})
    dist.barrier()
    resume = str(Path(folder) / "ours" / "checkpoint-3")
    return [_trained(True, f"{folder}/whole", constant), _trained(True, folder, {**constant, "resume": resume})]


def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for whole, again in run(2, _resumed, str(tmp_path), limit_s=200):
        assert torch.equal(whole["log"], again["log"])
        for name, value in whole["weights"].items():
            assert torch.equal(again["weights"][name], value)


def _weights_alone(folder: str) -> str:
    with pytest.raises(ValueError, match="find a valid checkpoint") as error:
        _trained(True, folder, {**BEST, "save_only_model": True, "max_steps": 1})
    return str(error.value)


def test_the_best_model_needs_a_whole_checkpoint(tmp_path: Path) -> None:
    assert all("checkpoint-1" in told for told in run(2, _weights_alone, str(tmp_path), limit_s=100))
