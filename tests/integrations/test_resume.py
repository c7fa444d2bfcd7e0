"""A Trainer resumed in the middle of an epoch goes on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer

import harmony_ds
from harmony_ds.integrations.transformers import HarmonyTrainer
from tests.integrations.as_deepspeed import deepspeed_as_it_was
from tests.integrations.test_trainer import CONFIG, arguments, llama, logged, text

WARMUP = {"warmup_min_lr": 0, "warmup_type": "linear"}
WARMUP |= dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
SCHEDULED: dict[str, Any] = {
    **CONFIG,
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": WARMUP},
}


def trainer(folder: Path, config: dict[str, Any], make: Callable[[], Any] = llama) -> HarmonyTrainer:
    args = arguments(folder, save_strategy="steps", save_steps=2)
    return HarmonyTrainer(model=make(), args=args, train_dataset=text(), ds_config=config)


def adapters() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0))


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for name, weight in expected.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("config", "make"),
    [(CONFIG, llama), (SCHEDULED, llama), (CONFIG, adapters)],
    ids=["Trainer's optimizer", "ds_config's optimizer", "adapters"],
)
def test_resuming_in_the_middle_of_an_epoch(tmp_path: Path, config: dict[str, Any], make: Callable[[], Any]) -> None:
    whole = trainer(tmp_path, config, make)
    whole.train()
    if make is adapters:  # what they stand on is left out
        saved = load_file(next((tmp_path / "checkpoint-2").glob("global_step2/**/model*.safetensors")))
        assert saved and all("lora" in name for name in saved)
    torch.manual_seed(99)  # what is resumed depends on nothing but the checkpoint and the Trainer's own seed
    resumed = trainer(tmp_path, config, make)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed) == logged(whole)
    assert_same_weights(resumed.model, whole.model)


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_a_trainer_goes_on_from_what_the_stock_trainer_saved_of_adapters(tmp_path: Path) -> None:
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {**dict.fromkeys(keys, "auto"), "zero_optimization": {"stage": 2}, **CONFIG}
    config["zero_allow_untested_optimizer"] = True
    with deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, deepspeed=config, logging_nan_inf_filter=False)
        whole = Trainer(model=adapters(), args=args, train_dataset=text())
        whole.train()
        expected = copy.deepcopy(whole.model)
    resumed = HarmonyTrainer(model=adapters(), args=arguments(tmp_path), train_dataset=text(), ds_config=CONFIG)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(resumed.model, expected)


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    saved = trainer(tmp_path, CONFIG)
    saved.train()
    saved.save_model(str(tmp_path / "weights"))
    (tmp_path / "weights" / "trainer_state.json").write_text((tmp_path / "checkpoint-2/trainer_state.json").read_text())
    with pytest.raises(ValueError, match="find a valid checkpoint"):
        trainer(tmp_path, CONFIG).train(resume_from_checkpoint=str(tmp_path / "weights"))
