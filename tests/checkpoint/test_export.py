"""Weights alone, read by stock transformers, torch.load and safetensors; and the command that converts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harmony_ds.checkpoint import Layout, convert, read_any
from harmony_ds.checkpoint.convert import export_weights
from harmony_ds.checkpoint.snapshot import TensorSource
from tests.checkpoint.runs import Setup, engine_of, tag_folder, train
from tests.cli import shell

BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.5}
SETUPS = {
    "llama": Setup(harmony={"residency": 2, "pack_layers": 1}),
    "tied": Setup(family="gpt2", config=BF16),
    "T5": Setup(family="t5"),
}


@pytest.mark.parametrize("name", SETUPS)
def test_stock_from_pretrained_reads_what_save_pretrained_and_the_converter_write(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    with engine_of(setup) as engine:
        train(engine, setup, range(2))
        engine.module.save_pretrained(tmp_path / "saved", max_shard_size="40KB" if name == "llama" else "5GB")
        engine.save_checkpoint(tmp_path / "run")
        convert(tmp_path / "run", tmp_path / "hf", Layout.HF)
        export_weights(read_any(tag_folder(tmp_path / "run")).tensors, tmp_path / "shards", shard_size=20_000)
        for folder in ("saved", "hf", "shards"):
            engine.module.config.save_pretrained(tmp_path / folder)
            loaded = type(engine.module).from_pretrained(tmp_path / folder, dtype="auto")
            assert_same_weights(loaded.state_dict(), engine.module.state_dict())
            if name == "tied":
                assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2


def test_an_export_leaves_no_weights_of_an_earlier_one_beside_its_own(tmp_path: Path) -> None:
    tensors = {name: TensorSource.from_tensor(torch.ones(4)) for name in "abc"}
    other = tmp_path / "model-card.safetensors"
    other.touch()
    for shard_bytes in (100, 16, 32, 100):
        written = export_weights(tensors, tmp_path, shard_bytes)
        assert set(tmp_path.iterdir()) == {*written, other}


@pytest.mark.parametrize("filename", ["pytorch_model.bin", "weights.safetensors"])
def test_save_16bit_model(filename: str, tmp_path: Path) -> None:
    setup = SETUPS["tied"].other(frozen="h.0.")
    with engine_of(setup) as engine:
        train(engine, setup, range(1))
        assert engine.save_16bit_model(tmp_path / "new", filename) is True
        expected = engine.module.state_dict()
        assert engine.save_fp16_model(tmp_path, filename, exclude_frozen_parameters=True) is True
    path = tmp_path / "new" / filename
    read = load_file if filename.endswith("safetensors") else torch.load
    weights = read(path)
    if filename == "pytorch_model.bin":
        assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    else:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    assert_same_weights(weights, expected)
    assert all(w.dtype == torch.bfloat16 for w in weights.values())
    size = sum(w.numel() * w.element_size() for n, w in weights.items() if n != "lm_head.weight")
    assert size < path.stat().st_size < 1.5 * size + 20_000  # each weight once, and nothing of its neighbours
    without = read(tmp_path / filename)
    assert {n for n in expected.keys() - without.keys() if n != "lm_head.weight"} == {
        n for n in expected if "h.0." in n
    }


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    setup = Setup(config=BF16)
    with engine_of(setup) as engine:
        for step in range(2):
            train(engine, setup, [step])
            engine.save_checkpoint(folder)
    return folder


def invoke(*arguments: object) -> Any:
    return shell.run("convert", *map(str, arguments))


def test_convert_takes_the_latest_or_a_tag_or_the_folder_itself(run: Path, tmp_path: Path) -> None:
    for number, arguments in enumerate([(run,), (run, "--tag", "global_step1"), (run / "global_step1",)]):
        result = invoke(arguments[0], tmp_path / str(number), "--to", "harmony", *arguments[1:], "--json")
        assert result.exit_code == 0, result.output
        tag = "global_step1" if number else "global_step2"
        written = tmp_path / str(number) / tag
        assert json.loads(result.stdout) == {"written": str(written), "layout": "harmony"}
        assert read_any(written).progress == read_any(run / tag).progress


def test_convert_says_what_it_wrote(run: Path, tmp_path: Path) -> None:
    result = invoke(run, tmp_path / "hf", "--to", "hf")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'hf'} is a checkpoint of the layout hf.\n"
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == Setup().one.build(0.0).state_dict().keys()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("nowhere", "out", "--to", "hf"), 1, "error: there is no folder nowhere"),
        ((".", "out", "--to", "hf", "--tag", "x"), 1, "error: there is no checkpoint x"),
        ((".", "out"), 2, "arguments are required: --to"),
        ((".", "out", "--to", "zip"), 2, "invalid choice: 'zip'"),
    ],
)
def test_convert_refuses_in_one_sentence(
    arguments: tuple[str, ...], code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == code
    assert text in " ".join(result.output.replace("│", " ").split())
