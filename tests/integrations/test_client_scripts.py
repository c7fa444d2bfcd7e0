"""TRL's own training scripts, as they come in its package, behind `--deepspeed`: what they do without it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import harmony_ds
from tests.integrations.as_deepspeed import deepspeed_as_it_was
from tests.integrations.test_trainer import llama
from tests.integrations.test_trl import tokenizer as tokenizer
from tests.oracle import assert_same

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
    "kto": [{"prompt": "the dog", "completion": ANSWERS[row % 2], "label": row % 3 > 0} for row in range(16)],
}
ARGUMENTS = """
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 4 --learning_rate 1e-2 --use_cpu
    --bf16 false --gradient_checkpointing false --report_to none --save_strategy steps --save_steps 4 --logging_steps 1
    --disable_tqdm true --seed 3 --optim adamw_torch --dtype float32
""".split()


@pytest.fixture
def here(tmp_path: Path, tokenizer: Any) -> Path:
    llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, script: str, here: Path, output: str, *more: str) -> Path:
    """Runs the script in this process; the folder that it has written."""
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
    stock = run(monkeypatch, script, here, "stock")
    with deepspeed_as_it_was():
        harmony_ds.install_as_deepspeed()
        ours = run(monkeypatch, script, here, "ours", "--deepspeed", str(here / "ds_config.json"))

    assert len(losses(stock)) == 4
    assert losses(ours) == losses(stock)
    assert_same(load_file(ours / "model.safetensors"), load_file(stock / "model.safetensors"), bitwise=True)
