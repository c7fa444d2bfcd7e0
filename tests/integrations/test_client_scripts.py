"""Training scripts of the packages TRL and accelerate, unchanged: under `install_as_deepspeed` the same as without.

Those of transformers and peft come with their repositories alone, not with what is installed from PyPI.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForSequenceClassification, get_linear_schedule_with_warmup

import harmony_ds
from tests.integrations.as_deepspeed import deepspeed_as_it_was, forget_accelerate
from tests.integrations.test_trainer import llama
from tests.oracle import assert_same, train_plainly

pytest.importorskip("trl")

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "harmony": {"device": "cpu"},
}
ANSWERS = ("the cat sat here", "a dog ran there the dog sat")
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"text": ANSWERS[row % 3 == 0]} for row in range(16)],
    "dpo": [{"prompt": "the dog", "chosen": ANSWERS[row % 2], "rejected": ANSWERS[1 - row % 2]} for row in range(16)],
    "reward": [{"chosen": ANSWERS[row % 2], "rejected": ANSWERS[1 - row % 2]} for row in range(16)],
    "distillation": [{"prompt": "the dog" if row % 2 else "a cat sat"} for row in range(16)],
    "grpo": [{"prompt": "the dog" if row % 2 else "a cat sat"} for row in range(16)],
    "rloo": [{"prompt": "the dog" if row % 2 else "a cat sat"} for row in range(16)],
    "kto": [{"prompt": "the dog", "completion": ANSWERS[row % 2], "label": row % 3 > 0} for row in range(16)],
}
ARGUMENTS = """
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 4 --learning_rate 1e-2 --use_cpu
    --bf16 false --gradient_checkpointing false --report_to none --save_strategy steps --save_steps 4 --logging_steps 1
    --disable_tqdm true --seed 3 --optim adamw_torch --dtype float32
""".split()
GENERATING = ["--num_generations", "2", "--max_completion_length", "6", "--reward_funcs", f"{__name__}.reward"]
MORE = {
    "distillation": ["--teacher_model_name_or_path", "{here}/teacher", "--max_completion_length", "6"],
    "grpo": GENERATING,
    "rloo": GENERATING,
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


SCRIPT_OF_ACCELERATE = (
    Path(accelerate.__file__).parent / "test_utils" / "scripts" / "external_deps" / "test_performance.py"
)
TWO_MODELS = "accelerate.test_utils.scripts.external_deps.test_ds_multiple_model"


@pytest.fixture
def here(tmp_path: Path, tokenizer: Any) -> Path:
    llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    teacher = llama()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(3)
    teacher.save_pretrained(tmp_path / "teacher")
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, script: str, here: Path, output: str, *more: str) -> Path:
    """Run the script in this process; return the folder that it has written."""
    given = ["--model_name_or_path", str(here / "model"), "--dataset_name", str(here / "data")]
    monkeypatch.setattr(sys, "argv", [script, *given, "--output_dir", str(here / output), *ARGUMENTS, *more])
    torch.manual_seed(5)
    runpy.run_module(f"trl.scripts.{script}", run_name="__main__")
    return here / output


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize("script", ROWS)
def test_a_script_of_trl(script: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "data").mkdir()
    (here / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS[script])))
    more = [word.format(here=here) for word in MORE.get(script, ())]
    stock = run(monkeypatch, script, here, "stock", *more)
    with deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        ours = run(monkeypatch, script, here, "ours", "--deepspeed", str(here / "ds_config.json"), *more)

    assert len(losses(stock)) == 4
    assert losses(ours) == losses(stock)
    assert_same(load_file(ours / "model.safetensors"), load_file(stock / "model.safetensors"), bitwise=True)


class Seen:
    """A metric of the package `evaluate`, and the losses that were propagated back from."""

    def __init__(self) -> None:
        self.computed = 0
        self.predictions: list[int] = []
        self.losses: list[torch.Tensor] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.predictions += predictions.tolist()

    def compute(self) -> dict[str, float]:
        self.computed += 1
        return {"accuracy": 0.1 * self.computed}


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Seen, pytest.MonkeyPatch]]:
    """Replace the hub's pairs of sentences; record what is computed from them."""
    from datasets import Dataset, DatasetDict

    seen, backward = Seen(), Accelerator.backward

    def watched(self: Accelerator, loss: torch.Tensor, **more: Any) -> None:
        backward(self, loss, **more)
        seen.losses.append(loss)

    pairs = [
        {"idx": row, "sentence1": ANSWERS[row % 2], "sentence2": ANSWERS[row % 3 > 0], "label": row % 2}
        for row in range(64)
    ]
    splits = DatasetDict(train=Dataset.from_list(pairs), validation=Dataset.from_list(pairs[:10]))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "evaluate", types.SimpleNamespace(load=lambda *_: seen))
        patch.setattr("datasets.load_dataset", lambda *_: splits)
        patch.setattr(Accelerator, "backward", watched)
        yield seen, patch


def run_accelerates(monkeypatch: pytest.MonkeyPatch, here: Path, output: str) -> Seen:
    """accelerate's `test_performance.py`: pairs of sentences; it checks learning rates and what it saved."""
    (here / output).mkdir()
    given = ["--model_name_or_path", str(here / "model"), "--output_dir", str(here / output), "--num_epochs", "2"]
    with watching(monkeypatch) as (seen, patch):
        patch.setattr(sys, "argv", ["test_performance.py", *given, "--add_pad_token", "true"])
        runpy.run_path(str(SCRIPT_OF_ACCELERATE), run_name="__main__")
    return seen


def test_a_script_of_accelerate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_accelerate()
    stock = run_accelerates(monkeypatch, here, "stock")
    (here / "ds_config.json").write_text(
        json.dumps({**DS_CONFIG, "gradient_clipping": 0, "gradient_accumulation_steps": 1})
    )
    with deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(here / "ds_config.json"))
        ours = run_accelerates(monkeypatch, here, "ours")

    assert len(stock.losses) == 8
    assert torch.equal(torch.stack(ours.losses), torch.stack(stock.losses).detach())
    assert ours.predictions == stock.predictions
    assert_same(
        load_file(here / "ours" / "model.safetensors"), load_file(here / "stock" / "model.safetensors"), bitwise=True
    )


class InOrder(DataLoader[Any]):
    """Leave batches in order when a script asks to shuffle them."""

    def __init__(self, *args: Any, shuffle: bool, **more: Any) -> None:
        super().__init__(*args, **more)


def in_fp32(*given: Any, mixed_precision: str = "no", **more: Any) -> Accelerator:
    return Accelerator(*given, **more)


def trained_plainly(script: Any, model: str, settings: dict[str, Any]) -> list[float]:
    """Return the losses of each of the script's models."""
    plain = LlamaForSequenceClassification.from_pretrained(model)
    batches, _ = script.get_dataloaders(types.SimpleNamespace(distributed_type=None), settings["batch_size"], model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=settings["lr"])
    schedule = get_linear_schedule_with_warmup(optimizer, 0, settings["num_epochs"] * len(batches))
    groups = [[batch] for _ in range(settings["num_epochs"]) for batch in batches]
    losses = train_plainly(plain, groups, optimizer, clip=None, scheduler=schedule, seed_of=lambda *_: 0)
    return [loss for (loss,) in losses]


@pytest.mark.filterwarnings("ignore:a loss or an output was looked at")
def test_a_script_of_accelerate_with_two_models_and_two_ds_configs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model beside one for inference, then two that are trained; in fp32, where the script asks for bf16."""
    settings = {"lr": 2e-2, "num_epochs": 2, "batch_size": 8}
    torch.manual_seed(2)
    LlamaForSequenceClassification.from_pretrained(here / "model", pad_token_id=0).save_pretrained(here / "model")
    arguments = types.SimpleNamespace(model_name_or_path=str(here / "model"))
    with watching(monkeypatch) as (seen, patch), deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        patch.delitem(sys.modules, TWO_MODELS, raising=False)
        script = importlib.import_module(TWO_MODELS)
        patch.setattr(script, "DataLoader", InOrder)
        patch.setattr(script, "Accelerator", in_fp32)
        for stage in (2, 3):
            config = {**DS_CONFIG, "zero_optimization": {"stage": stage}, "gradient_clipping": 0}
            config |= {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": settings["batch_size"]}
            (here / f"zero{stage}.json").write_text(json.dumps(config))
            script.ds_config_file[f"zero{stage}"] = str(here / f"zero{stage}.json")
        expected = torch.tensor(trained_plainly(script, str(here / "model"), settings))

        script.single_model_training(settings, arguments)
        single = torch.stack(seen.losses).detach()
        seen.losses.clear()
        forget_accelerate()
        script.multiple_model_training(settings, arguments)
        first, second = torch.stack(seen.losses).detach().unflatten(0, (-1, 2)).unbind(1)

    assert len(expected) == 16
    assert torch.equal(single, expected + expected * 0.1)  # of the untrained model that the loss is put through
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
