"""TRL's trainers under HarmonyMixin: the same weights, losses, norms and metrics as without it, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harmony_ds.integrations.transformers import HarmonyMixin
from tests.integrations.test_trainer import CONFIG, arguments, assert_same, llama

trl = pytest.importorskip("trl")


def trained(kind: Any, config: Any, folder: Path, rows: list[dict[str, Any]], tokenizer: Any, **more: Any) -> list[Any]:
    from datasets import Dataset

    trainers = []
    for cls, extra in ((kind, {}), (type("Ours", (HarmonyMixin, kind), {}), {"ds_config": CONFIG})):
        args = arguments(folder, config, bf16=False, max_length=16, gradient_checkpointing=False)
        made = {name: make() for name, make in more.items()}
        trainer = cls(
            model=llama(), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **made, **extra
        )
        trainer.train()
        trainers.append(trainer)
    return trainers


def metrics(trainer: Any) -> list[dict[str, float]]:
    timed = ("runtime", "per_second", "flos", "step_time", "loss", "grad_norm")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timed)} for entry in trainer.state.log_history
    ]


def assert_metrics_agree(stock: Any, ours: Any) -> None:
    for expected, actual in zip(metrics(stock), metrics(ours), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-7)  # means of what is appended in another order


def test_sft(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "the cat sat here" if i % 3 else "a dog ran there the dog sat"} for i in range(22)]
    stock, ours = trained(trl.SFTTrainer, trl.SFTConfig, tmp_path, rows, tokenizer)
    assert_same(stock, ours)
    assert_metrics_agree(stock, ours)


def test_evaluation_before_the_model_is_measured(tmp_path: Path, tokenizer: Any) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"text": "a dog ran there the dog sat"} for _ in range(4)])
    losses = []
    for kind, extra in (
        (trl.SFTTrainer, {}),
        (type("Ours", (HarmonyMixin, trl.SFTTrainer), {}), {"ds_config": CONFIG}),
    ):
        args = arguments(tmp_path, trl.SFTConfig, bf16=False, max_length=16, gradient_checkpointing=False)
        trainer = kind(
            model=llama(), args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, **extra
        )
        losses.append(trainer.evaluate()["eval_loss"])  # uses the head's weight outside of the head
    assert losses[0] == losses[1]


PAIRS = [
    {"prompt": "the cat", "chosen": " sat here" if i % 2 else " ran", "rejected": " ran there the dog"}
    for i in range(22)
]


def test_dpo_with_a_reference_model(tmp_path: Path, tokenizer: Any) -> None:
    def reference() -> nn.Module:
        model = llama()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        return model

    stock, ours = trained(trl.DPOTrainer, trl.DPOConfig, tmp_path, PAIRS, tokenizer, ref_model=reference)
    assert_same(stock, ours)
    assert_metrics_agree(stock, ours)


def test_dpo_with_lora_whose_reference_is_the_model_without_adapters(tmp_path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")

    def lora() -> Any:
        torch.manual_seed(1)
        return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")

    assert_same(*trained(trl.DPOTrainer, trl.DPOConfig, tmp_path, PAIRS, tokenizer, peft_config=lora))


# ---- trainers that generate in _prepare_inputs

PROMPTS = [{"prompt": "the cat sat" if i % 3 else "a dog"} for i in range(12)]


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [len({token % 7 for token in ids}) + sum(ids) / 100 for ids in completion_ids]


def grpo(folder: Path, kind: Any, config: Any, tokenizer: Any, **settings: Any) -> list[Any]:
    from datasets import Dataset

    trainers = []
    for cls, extra in ((kind, {}), (type("Ours", (HarmonyMixin, kind), {}), {"ds_config": CONFIG})):
        args = arguments(
            folder, config,
            **{
                "bf16": False, "gradient_checkpointing": False, "num_generations": 2, "max_completion_length": 5,
                "beta": 0.0, "max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
                **settings,
            },
        )  # fmt: skip
        trainer = cls(
            model=llama(), args=args, train_dataset=Dataset.from_list(PROMPTS), reward_funcs=spread,
            processing_class=tokenizer, **extra,
        )  # fmt: skip
        torch.manual_seed(5)  # completions are sampled
        trainer.train()
        trainers.append(trainer)
    return trainers


REUSED = {"steps_per_generation": 4, "num_iterations": 2, "num_generations": 4}
ENTROPY = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 1.0}


@pytest.mark.parametrize("settings", [{}, REUSED, ENTROPY], ids=["", "completions used again", "adaptive entropy"])
def test_grpo(tmp_path: Path, tokenizer: Any, settings: dict[str, Any]) -> None:
    stock, ours = grpo(tmp_path, trl.GRPOTrainer, trl.GRPOConfig, tokenizer, **settings)
    assert_same(stock, ours)
    assert_metrics_agree(stock, ours)
    assert ours._engine.swap_report().micro_batches == 2
    assert all(entry["reward_std"] > 0 for entry in stock.state.log_history if "reward" in entry)


def test_rloo(tmp_path: Path, tokenizer: Any) -> None:
    stock, ours = grpo(tmp_path, trl.RLOOTrainer, trl.RLOOConfig, tokenizer)
    assert_same(stock, ours)
    assert_metrics_agree(stock, ours)


def test_one_model_is_tuned_and_then_aligned(tmp_path: Path, tokenizer: Any) -> None:
    """SFT, then DPO of the same model, in one process; the reference is the model as SFT left it."""
    from datasets import Dataset

    rows = Dataset.from_list([{"text": "the cat sat here" if i % 3 else "a dog ran there"} for i in range(22)])
    trainers = []
    for mixins, extra in (((), {}), ((HarmonyMixin,), {"ds_config": CONFIG})):
        model = llama()
        for kind, config, data, reference in (
            (trl.SFTTrainer, trl.SFTConfig, rows, False),
            (trl.DPOTrainer, trl.DPOConfig, Dataset.from_list(PAIRS), True),
        ):
            args = arguments(tmp_path, config, bf16=False, max_length=16, gradient_checkpointing=False)
            frozen = {"ref_model": copy.deepcopy(model)} if reference else {}
            trainer = type("Trained", (*mixins, kind), {})(
                model=model, args=args, train_dataset=data, processing_class=tokenizer, **frozen, **extra
            )
            trainer.train()
        trainers.append(trainer)
    assert_same(*trainers)
    assert_metrics_agree(*trainers)
