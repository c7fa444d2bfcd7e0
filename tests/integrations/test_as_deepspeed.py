"""Unchanged accelerate and Trainer code after `install_as_deepspeed()`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.integrations import unset_hf_deepspeed_config

import harmony_ds
from tests.integrations.as_deepspeed import deepspeed_as_it_was, forget_accelerate
from tests.integrations.test_trainer import arguments, assert_same, llama, text
from tests.oracle import assert_same as assert_same_bits
from tests.oracle import train_plainly

pytestmark = pytest.mark.fixed_times

DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "harmony": {"device": "cpu"},
}


@pytest.fixture
def installed() -> Iterator[None]:
    with deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        yield


@pytest.mark.parametrize("devices", [1, 2])
def test_an_accelerate_loop(installed: None, devices: int) -> None:
    data = text(16)
    expected = llama()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    batches = [*DataLoader(data, batch_size=2)]
    groups = [batches[:4], batches[4:]]
    losses = train_plainly(expected, groups, optimizer, clip=0.5, seed_of=lambda *_: 0)

    model = llama()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config={**DS_CONFIG, "harmony": {"device": "cpu", "devices": devices, "pack_layers": 1}}
        ),
        gradient_accumulation_steps=4,
    )
    engine, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=2)
    )
    assert isinstance(engine, harmony_ds.HarmonyEngine)
    assert accelerator.unwrap_model(engine) is model
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no loss is read before its boundary
        for batch in loader:
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                seen.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(engine.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert [float(loss) for loss in seen] == [loss for group in losses for loss in group]
    assert_same_bits(model, expected, bitwise=True)
    assert len(engine.memory_report().device_peaks) == devices
    accelerator.free_memory()


def test_an_unchanged_trainer(installed: None, tmp_path: Path) -> None:
    stock = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=text(24))
    stock.train()
    forget_accelerate()
    ours = Trainer(
        model=llama(),
        args=arguments(tmp_path, use_cpu=False, deepspeed=dict(DS_CONFIG), logging_nan_inf_filter=False),
        train_dataset=text(24),
    )
    with warnings.catch_warnings():
        # Trainer adds losses up in place, and so reads them: it warns once, and they are right.
        warnings.filterwarnings("ignore", message="a loss or an output was looked at")
        ours.train()
    assert isinstance(ours.model_wrapped, harmony_ds.HarmonyEngine)
    assert_same(stock, ours)
    ours.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").is_file()
    ours.accelerator.free_memory()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_stock_trainer_evaluates_during_training_and_after_it(installed: None, tmp_path: Path, stage: int) -> None:
    found = []
    deepspeed_config = {**DS_CONFIG, "zero_optimization": {"stage": stage}}
    for more in {}, {"use_cpu": False, "deepspeed": deepspeed_config, "logging_nan_inf_filter": False}:
        forget_accelerate()
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, num_train_epochs=1, **more)
        trainer = Trainer(model=llama(), args=args, train_dataset=text(16), eval_dataset=text(6))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="a loss or an output was looked at")
            trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == 2
        found.append([*losses, trainer.evaluate()["eval_loss"], trainer.predict(text(4)).metrics["test_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    unset_hf_deepspeed_config()
    trainer.accelerator.free_memory()


def test_an_accelerator_that_ignores_its_plugin_warns_once_installed(installed: None) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=DS_CONFIG)
    harmony_ds.install_as_deepspeed()  # once more changes nothing
    with pytest.warns(RuntimeWarning, match="harmony_ds does not train what it prepares.*Leave cpu=True out") as warned:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    assert [Path(one.filename) for one in warned if "cpu=True" in str(one.message)] == [Path(__file__)]
    assert isinstance(accelerator.prepare(llama()), type(llama()))  # a plain model


def test_a_trainer_of_trl_with_zero_3(installed: None, tmp_path: Path, tokenizer: Any) -> None:
    """It uses the head's weight, once that says that it is gathered."""
    trl = pytest.importorskip("trl")
    rows = Dataset.from_list([{"text": "the cat sat here" if i % 3 else "a dog ran there"} for i in range(16)])
    trainers = []
    for more in {}, {"use_cpu": False, "deepspeed": {**DS_CONFIG, "zero_optimization": {"stage": 3}}}:
        forget_accelerate()
        plain = {"bf16": False, "gradient_checkpointing": False, "max_length": 16, "logging_nan_inf_filter": False}
        args = arguments(tmp_path, trl.SFTConfig, **plain, **more)
        trainers.append(trl.SFTTrainer(model=llama(), args=args, train_dataset=rows, processing_class=tokenizer))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="a loss or an output was looked at")
            trainers[-1].train()
    assert_same(*trainers)
    unset_hf_deepspeed_config()
    trainers[-1].accelerator.free_memory()


def test_fp16_as_accelerate_writes_it_trains(installed: None) -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="fp16")
    plugin.deepspeed_config.update(DS_CONFIG, gradient_accumulation_steps=2)
    assert plugin.deepspeed_config["fp16"] == {"enabled": True, "auto_cast": True}
    model = llama()
    engine, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(text(8), batch_size=2)
    )
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.fp16_enabled()
    assert engine.module.lm_head.weight.dtype == torch.float16
    assert engine.optimizer.cur_scale == engine.cur_scale > 1.0
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    accelerator.free_memory()


class Forwarding(torch.nn.Module):
    """Module as Lightning's DeepSpeedStrategy passes it to deepspeed.initialize: forward calls `training_step`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.steps: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
        self.steps.append(index)
        return {"loss": self.model(**batch).loss * (1 + index)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.training_step(*args, **kwargs)


def test_lightnings_calls(installed: None) -> None:
    data = list(DataLoader(text(8), batch_size=2))
    expected = llama()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    for index, batch in enumerate(data):
        (expected(**batch).loss * (1 + index) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()

    model = Forwarding(llama())
    config = {**DS_CONFIG, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    engine, made, _, _ = harmony_ds.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config, model_parameters=None
    )
    for index, batch in enumerate(data):  # DeepSpeedPrecision: backward, then step at every batch
        engine.backward(engine(batch, index)["loss"])
        engine.step()
    assert set(model.steps) == {0, 1, 2, 3}
    assert_same_bits(model.model, expected, bitwise=True)
    assert not made.overflow
    engine.destroy()


def test_the_helpers_of_one_process_share_are_whole_and_flat(installed: None) -> None:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_set_local_fp32_param

    model = torch.nn.Linear(4, 3)
    engine, *_ = deepspeed.initialize(model=model, config=DS_CONFIG, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert torch.equal(safe_get_local_fp32_param(model.weight), before.flatten())
    assert torch.equal(safe_get_local_grad(model.weight), torch.full((12,), 2 / 4))
    safe_set_local_fp32_param(model.weight, torch.zeros(12))
    assert torch.equal(model.weight, torch.zeros(3, 4))
    engine.destroy()
