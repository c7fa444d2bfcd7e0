"""HarmonyTrainer in several processes against the stock Trainer under DistributedDataParallel.

That adds gradients up in another order: equal to the rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from harmony_ds.errors import UsageError
from harmony_ds.integrations.transformers import HarmonyTrainer
from tests.integrations.test_trainer import CONFIG, arguments, llama, logged, text
from tests.parallel.processes import run

SAVED = {"save_strategy": "steps", "save_steps": 1}


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
        (2, {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVED}),
    ],
)
def test_several_processes_train_as_the_stock_trainer_does(size: int, more: dict[str, Any], tmp_path: Path) -> None:
    found = run(size, _both, str(tmp_path), more, limit_s=200)
    for stock, ours in found:
        _assert_close(stock, ours)
        for name, value in found[0][1]["weights"].items():
            assert torch.equal(ours["weights"][name], value)


def test_a_training_goes_on_from_its_checkpoint_to_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    run(2, _trained, True, str(tmp_path), {**SAVED, "max_steps": 4, "lr_scheduler_type": "constant"}, limit_s=100)
    whole = run(2, _trained, True, str(tmp_path / "whole"), {"lr_scheduler_type": "constant"}, limit_s=100)
    resume = str(tmp_path / "ours" / "checkpoint-3")
    again = run(2, _trained, True, str(tmp_path), {"resume": resume, "lr_scheduler_type": "constant"}, limit_s=100)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one["log"], other["log"])
        for name, value in one["weights"].items():
            assert torch.equal(other["weights"][name], value)


def _weights_alone(folder: str) -> str:
    best = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **SAVED}
    with pytest.raises(UsageError) as error:
        _trained(True, folder, {**best, "save_only_model": True, "max_steps": 1})
    return str(error.value)


def test_the_best_model_needs_a_whole_checkpoint(tmp_path: Path) -> None:
    told = run(2, _weights_alone, str(tmp_path), limit_s=100)
    assert all("save_only_model" in one for one in told)
