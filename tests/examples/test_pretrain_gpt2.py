"""The example pretrain_gpt2: its defaults on each device, and its comparison with plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.examples.scripts import main_of

CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return everything that the script defines."""
    return SimpleNamespace(**main_of("pretrain_gpt2", monkeypatch, beside=("check", "data", "display")).__globals__)


def loaded(script: Any, *arguments: str) -> tuple[Any, float]:
    """Return the options, and the budget in GiB."""
    options = script.parse_options(arguments)
    return options, script.load_config(options)["harmony"]["device_memory_gib"]


@pytest.mark.parametrize("config", ["pretrain_gpt2.json", "pretrain_gpt2_bf16.json", "torch_adam.json"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_training_state_is_eight_times_the_budget_on_every_device(
    script: Any, config: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    options, budget_gib = loaded(script, "--config", str(CONFIGS / config))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in script.build_model(options, 2048).parameters())
    assert 8.0 <= parameters * script.STATE_BYTES_PER_PARAMETER / (budget_gib * 2**30) < 8.2
    assert (budget_gib >= 0.5) == on_gpu  # on a GPU, libraries take most of what is below


def test_what_the_user_says_is_done_on_a_gpu_too(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options, budget_gib = loaded(script, "--layers", "3", "--hidden", "128", "--budget-gib", "0.25")
    assert (options.layers, options.hidden, budget_gib) == (3, 128, 0.25)
    config = json.loads((CONFIGS / "torch_adam.json").read_text())
    for harmony, expected in (
        ({"device_memory_gib": 2.0}, (43, 2.0)),
        ({**config["harmony"], "device": "cpu"}, (12, 0.0185)),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "harmony": harmony}))
        options, budget_gib = loaded(script, "--config", str(tmp_path / "config.json"))
        assert (options.layers, budget_gib) == expected


def test_the_check_compares_the_same_steps(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i} of {i * i} is {i**3}, and so on to the end of line {i}." for i in range(900)))
    small = ["--layers", "2", "--hidden", "64", "--steps", "2", "--budget-gib", "0.03", "--text", str(text)]
    config = ["--config", str(CONFIGS / "torch_adam.json")]
    assert script.main([*small, *config, "--out", str(tmp_path), "--check"]) == 0
    assert "harmony_ds agrees with plain PyTorch after 2 steps" in capsys.readouterr().out
    said = json.loads((tmp_path / "losses.json").read_text())
    assert said["plain_losses"] == pytest.approx(said["losses"], abs=1e-4)
