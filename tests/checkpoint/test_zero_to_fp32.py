"""DeepSpeed's own tool makes plain weights of a checkpoint of ours: the script beside it, and the module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import zero_to_fp32

import harmony_ds
from harmony_ds.checkpoint.deepspeed.zero_to_fp32 import teach
from tests.checkpoint import deepspeed_side as side
from tests.checkpoint.runs import scrambled

ROOT = Path(__file__).parents[2]
Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint, and the state dict that it is of, with masters in the place of weights."""
    folder = tmp_path_factory.mktemp(request.param)
    model = scrambled(side.Net())
    config = {**side.config(2, request.param), "harmony": {"device": "cpu"}}
    engine, *_ = harmony_ds.initialize(model=model, model_parameters=side.groups(model), config=config)
    side.train(engine, 0, 2)
    engine.save_checkpoint(folder)
    expected = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = harmony_ds.utils.safe_get_full_fp32_param(parameter)
            assert master is not None
            expected[name] = master
    expected["head.weight"] = expected["embed.weight"]
    engine.destroy()
    return folder, expected


def assert_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        value = expected[name]
        assert torch.equal(tensor, value.float() if value.is_floating_point() else value), name


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_get_fp32_state_dict_from_zero_checkpoint"
    monkeypatch.setattr(zero_to_fp32, name, getattr(zero_to_fp32, name))
    teach(vars(zero_to_fp32))
    known = getattr(zero_to_fp32, name)
    teach(vars(zero_to_fp32))
    assert getattr(zero_to_fp32, name) is known


def test_the_module_reads_a_checkpoint_of_ours(saved: Saved, taught: None, tmp_path: Path) -> None:
    folder, expected = saved
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert found.keys() == expected.keys()
    assert_weights(found, expected)
    assert found["head.weight"] is found["embed.weight"]
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=True)
    assert expected.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(side.Net(), str(folder))
    assert_weights(dict(model.state_dict()), expected)


def test_what_is_deepspeeds_stays_deepspeeds(saved: Saved, taught: None, tmp_path: Path) -> None:
    folder, expected = saved
    harmony_ds.checkpoint.convert(folder, tmp_path / "zero2", harmony_ds.checkpoint.Layout.ZERO2)
    assert_weights(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "zero2")), expected)


@pytest.mark.parametrize(("script", "options"), [("zero_to_fp32.py", []), ("zero_to_torch.py", ["--dtype", "float32"])])
def test_the_script_beside_a_checkpoint_reads_it(script: str, options: list[str], saved: Saved, tmp_path: Path) -> None:
    folder, expected = saved
    assert os.access(folder / script, os.X_OK)
    command = [sys.executable, script, ".", str(tmp_path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.load(tmp_path / "pytorch_model.bin")
    assert found.keys() == expected.keys()
    assert_weights(found, expected)
