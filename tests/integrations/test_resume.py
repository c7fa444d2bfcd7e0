"""A Trainer resumed in the middle of an epoch goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds.errors import HarmonyError
from harmony_ds.integrations.transformers import HarmonyTrainer
from tests.integrations.test_trainer import CONFIG, arguments, llama, logged, text

SCHEDULED: dict[str, Any] = {
    **CONFIG,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def trainer(folder: Path, config: dict[str, Any]) -> HarmonyTrainer:
    args = arguments(folder, save_strategy="steps", save_steps=2)
    return HarmonyTrainer(model=llama(), args=args, train_dataset=text(), ds_config=config)


@pytest.mark.parametrize("config", [CONFIG, SCHEDULED], ids=["Trainer's optimizer", "ds_config's optimizer"])
def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path, config: dict[str, Any]) -> None:
    whole = trainer(tmp_path, config)
    whole.train()
    torch.manual_seed(99)  # what is resumed depends on nothing but the checkpoint and the Trainer's own seed
    resumed = trainer(tmp_path, config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, resumed.model.get_parameter(name)), name


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    saved = trainer(tmp_path, CONFIG)
    saved.train()
    saved.save_model(str(tmp_path / "weights"))
    (tmp_path / "weights" / "trainer_state.json").write_text((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    with pytest.raises(HarmonyError, match="holds no checkpoint of harmony_ds"):
        trainer(tmp_path, CONFIG).train(resume_from_checkpoint=str(tmp_path / "weights"))
