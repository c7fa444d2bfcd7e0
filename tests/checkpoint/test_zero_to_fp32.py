"""Plain weights of a checkpoint, by the scripts beside it and by the functions of DeepSpeed's `zero_to_fp32`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import harmony_ds
from harmony_ds.checkpoint import zero_to_fp32
from tests.checkpoint import deepspeed_side as side
from tests.checkpoint.runs import scrambled

ROOT = Path(__file__).parents[2]
FROZEN = {"frozen.weight", "frozen.bias"}
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
    expected = {name: tensor.clone().float() for name, tensor in engine.module.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            master = harmony_ds.utils.safe_get_full_fp32_param(parameter)
            assert master is not None
            expected[name] = master
    expected["head.weight"] = expected["embed.weight"]
    engine.destroy()
    return folder, expected


def assert_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: Any = torch.float32
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, expected[name].to(dtype)), name


def test_functions_read_a_checkpoint(saved: Saved, tmp_path: Path) -> None:
    folder, expected = saved
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), lazy_mode=True)
    assert_weights({name: tensor.contiguous() for name, tensor in found.items()}, expected)
    assert found["head.weight"] is found["embed.weight"]
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert expected.keys() - trained.keys() == FROZEN
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(side.Net(), str(folder), tag="global_step2")
    assert_weights(dict(model.state_dict()), expected)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, None, safe_serialization=True)
    assert_weights(load_file(tmp_path / "model.safetensors"), without(expected, "head.weight"))
    with pytest.raises(ValueError, match="5 potatoes"):  # Hugging Face's, as DeepSpeed raises it
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(folder, tmp_path, max_shard_size="5 potatoes")


def without(weights: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


@pytest.mark.parametrize(
    ("script", "options", "dtype"),
    [
        ("zero_to_fp32.py", [], torch.float32),
        ("zero_to_fp32.py", ["--max_shard_size", "1KB", "-t", "global_step2", "-d"], torch.float32),
        ("zero_to_fp32.py", ["--safe_serialization", "--max_shard_size", "1KB"], torch.float32),
        ("zero_to_torch.py", ["--dtype", "bfloat16", "--exclude_frozen_parameters"], torch.bfloat16),
    ],
)
def test_scripts_beside_a_checkpoint_write_its_weights(
    script: str, options: list[str], dtype: torch.dtype, saved: Saved, tmp_path: Path
) -> None:
    folder, expected = saved
    assert os.access(folder / script, os.X_OK)
    command = [sys.executable, script, ".", str(tmp_path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    files = [path for path in tmp_path.iterdir() if path.suffix != ".json"]
    read: Any = load_file if "--safe_serialization" in options else torch.load
    found = {name: tensor for path in files for name, tensor in read(path).items()}
    if "--max_shard_size" in options:
        (index,) = tmp_path.glob("*.index.json")
        assert len(files) > 1
        assert json.loads(index.read_text())["weight_map"].keys() == found.keys()
    left_out = FROZEN if "--exclude_frozen_parameters" in options else ()
    tied = ["head.weight"] if "--safe_serialization" in options else []
    assert_weights(found, without(expected, *left_out, *tied), dtype)
