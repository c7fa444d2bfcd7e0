"""TRL's trainers under HarmonyMixin: the same weights, losses, norms and metrics as without it, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from harmony_ds.integrations.transformers import HarmonyMixin
from tests.integrations.test_trainer import CONFIG, arguments, assert_same, llama, text

pytestmark = pytest.mark.fixed_times

trl = pytest.importorskip("trl")


def kinds(kind: Any, plan: dict[str, Any] | None = None) -> list[tuple[Any, dict[str, Any]]]:
    """Return the stock trainer, and ours with its further arguments; `plan`: settings of the ds_config's section."""
    config = {"harmony": {**CONFIG["harmony"], **(plan or {})}}
    return [(kind, {}), (type("Ours", (HarmonyMixin, kind), {}), {"ds_config": config})]


def settings_of(config: Any, folder: Path, **more: Any) -> Any:
    return arguments(folder, config, **{"bf16": False, "gradient_checkpointing": False, **more})


def assert_same_metrics(stock: Any, ours: Any) -> None:
    """Check that the weights are the same."""
    assert_same(stock, ours)
    timed = ("runtime", "per_second", "flos", "step_time", "loss", "grad_norm")
    for expected, actual in zip(stock.state.log_history, ours.state.log_history, strict=True):
        shown = {key: value for key, value in expected.items() if not key.endswith(timed)}
        # Means of what is appended in another order.
        assert {key: actual[key] for key in shown} == pytest.approx(shown, rel=1e-5, abs=1e-7)


def test_evaluation_before_the_model_is_measured(tmp_path: Path, tokenizer: Any) -> None:
    rows = Dataset.from_list([{"text": "a dog ran there the dog sat"} for _ in range(4)])
    losses = []
    for kind, extra in kinds(trl.SFTTrainer):
        args = settings_of(trl.SFTConfig, tmp_path, max_length=16)
        trainer = kind(
            model=llama(), args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer, **extra
        )
        losses.append(trainer.evaluate()["eval_loss"])  # uses the head's weight outside of the head
    assert losses[0] == losses[1]


PAIRS = [
    {"prompt": "the cat", "chosen": " sat here" if i % 2 else " ran", "rejected": " ran there the dog"}
    for i in range(22)
]


def test_one_model_is_tuned_and_then_aligned(tmp_path: Path, tokenizer: Any) -> None:
    """SFT, then DPO of the same model, in one process; the reference is the model as SFT left it."""
    rows = Dataset.from_list([{"text": "the cat sat here" if i % 3 else "a dog ran there"} for i in range(22)])
    tuned, aligned = [], []
    for (sft, extra), (dpo, _) in zip(kinds(trl.SFTTrainer), kinds(trl.DPOTrainer), strict=True):
        model = llama()
        args = settings_of(trl.SFTConfig, tmp_path, max_length=16)
        tuned.append(sft(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **extra))
        tuned[-1].train()
        args, pairs = settings_of(trl.DPOConfig, tmp_path, max_length=16), Dataset.from_list(PAIRS)
        frozen = copy.deepcopy(model)
        aligned.append(
            dpo(model=model, ref_model=frozen, args=args, train_dataset=pairs, processing_class=tokenizer, **extra)
        )
        aligned[-1].train()
    assert_same_metrics(*tuned)
    assert_same_metrics(*aligned)


def test_dpo_with_lora_whose_reference_is_the_model_without_adapters(tmp_path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    trainers = []
    for kind, extra in kinds(trl.DPOTrainer):
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        args, pairs = settings_of(trl.DPOConfig, tmp_path, max_length=16), Dataset.from_list(PAIRS)
        trainers.append(
            kind(model=llama(), args=args, train_dataset=pairs, processing_class=tokenizer, peft_config=lora, **extra)
        )
        trainers[-1].train()
    assert_same(*trainers)


PLANS = [{"pack_layers": 1}, {"device_memory_gib": 0.02}]
COMPLETIONS = [
    {"prompt": "the cat", "completion": " sat here" if i % 2 else " ran there", "label": i % 3 > 0} for i in range(24)
]


def tuned(peft: Any, *names: str) -> Any:
    """A model whose LoRA has been trained: none of its adapters is zero."""
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(llama(), lora)
    for name in names:
        model.add_adapter(name, lora)
    return model


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("name", "rows"), [("DPO", PAIRS), ("KTO", COMPLETIONS)])
def test_a_reference_that_is_an_adapter(
    tmp_path: Path, tokenizer: Any, name: str, rows: list[dict[str, Any]], plan: dict[str, Any]
) -> None:
    """After supervised tuning with LoRA, TRL keeps a copy of the adapter, and switches to it for the reference."""
    peft = pytest.importorskip("peft")
    trainers = []
    for kind, extra in kinds(getattr(trl, f"{name}Trainer"), plan):
        args = settings_of(getattr(trl, f"{name}Config"), tmp_path, max_length=16)
        data = Dataset.from_list(rows)
        trainers.append(kind(model=tuned(peft), args=args, train_dataset=data, processing_class=tokenizer, **extra))
        assert "ref" in trainers[-1].model.peft_config
        trainers[-1].train()
    assert_same_metrics(*trainers)
    assert trainers[1].harmony_engine.swap_report().ratio <= 1.0
    assert all(entry["grad_norm"] > 0 for entry in trainers[1].state.log_history if "grad_norm" in entry)


@pytest.mark.parametrize("taken_back", [True, False])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_adapter_for_each_task(tmp_path: Path, plan: dict[str, Any], taken_back: bool) -> None:
    """`compute_loss` chooses an adapter by its data; PEFT lets no other one be trained meanwhile."""
    peft = pytest.importorskip("peft")

    class Tasks(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            own = self.accelerator.unwrap_model(model)
            before = own.active_adapter
            own.set_adapter("default" if int(inputs["input_ids"].sum()) % 2 else "other")
            loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
            if taken_back:
                own.set_adapter(before)
            return loss

    trainers = []
    for kind, extra in kinds(Tasks, plan):
        model = tuned(peft, "other")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
        trainers.append(kind(model=model, args=arguments(tmp_path), train_dataset=text(), **extra))
        trainers[-1].train()
    assert_same(*trainers)
    assert trainers[0].model.active_adapter == trainers[1].model.active_adapter
    assert trainers[1].harmony_engine.swap_report().ratio <= 1.0


# ---- trainers that generate in _prepare_inputs

PROMPTS = [{"prompt": "the cat sat" if i % 3 else "a dog"} for i in range(12)]


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [len({token % 7 for token in ids}) + sum(ids) / 100 for ids in completion_ids]


REUSED = {"steps_per_generation": 4, "num_iterations": 2, "num_generations": 4}
ENTROPY = {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 1.0}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("GRPO", {}), ("GRPO", REUSED), ("GRPO", ENTROPY), ("RLOO", {})],
    ids=["GRPO", "completions used again", "adaptive entropy", "RLOO"],
)
def test_trainers_that_generate(tmp_path: Path, tokenizer: Any, name: str, settings: dict[str, Any]) -> None:
    trainers = []
    for kind, extra in kinds(getattr(trl, f"{name}Trainer")):
        few = {"num_generations": 2, "max_completion_length": 5, "beta": 0.0, "max_steps": 4}
        few |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
        args = settings_of(getattr(trl, f"{name}Config"), tmp_path, **{**few, **settings})
        trainer = kind(
            model=llama(), args=args, train_dataset=Dataset.from_list(PROMPTS), reward_funcs=spread,
            processing_class=tokenizer, **extra,
        )  # fmt: skip
        torch.manual_seed(5)  # completions are sampled
        trainer.train()
        trainers.append(trainer)
    stock, ours = trainers
    assert_same_metrics(stock, ours)
    assert ours._engine.swap_report().micro_batches == 2
    assert all(entry["reward_std"] > 0 for entry in stock.state.log_history if "reward" in entry)
