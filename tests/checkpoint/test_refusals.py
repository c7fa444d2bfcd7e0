"""Checkpoints that cannot be loaded or saved are refused by name, and the engine stays as it was."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmony_ds import CheckpointError, HarmonyEngine
from harmony_ds.checkpoint import layout
from tests.checkpoint.runs import Setup, assert_equal, data_folder, engine_of, masters_of, state_of, tag_folder, train
from tests.checkpoint.test_tensor_files import Bomb
from tests.engine.drive import adamw, engine_for

SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
SETUP = Setup(config={"bf16": {"enabled": True}})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    with engine_of(SETUP) as engine:
        train(engine, SETUP, range(2))
        engine.save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[HarmonyEngine]:
    with engine_of(SETUP, fresh=False) as engine:
        train(engine, SETUP, range(5, 6))
        yield engine


def refused(engine: HarmonyEngine, folder: Path, **options: Any) -> str:
    """Return the message of a refused load; the engine is as before."""
    before = state_of(engine)
    with pytest.raises(CheckpointError) as refusal:
        engine.load_checkpoint(folder, **options)
    assert_equal(state_of(engine), before)
    return str(refusal.value)


BOMB = pickle.dumps(Bomb())
Damage = Callable[[Path], object]


def file_in(folder: Path, name: str) -> Path:
    return next(folder.rglob(name))


def with_content(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Write what `change` makes of the content of a file."""
    return lambda folder: file_in(folder, name).write_bytes(change(file_in(folder, name).read_bytes()))


def manifest(**changes: Any) -> Damage:
    return with_content("manifest.json", lambda old: json.dumps({**json.loads(old), **changes}).encode())


def with_manifest(name: str, write: Callable[[Path], object]) -> Damage:
    """Write a file anew, and a manifest that agrees with it."""

    def change(folder: Path) -> None:
        write(file := file_in(folder, name))
        path = file_in(folder, "manifest.json")
        body = json.loads(path.read_bytes())
        del body["crc32"]
        body["files"][name] = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
        path.write_text(json.dumps({**body, "crc32": layout._crc(body)}))

    return change


def without(*names: str) -> Damage:
    return lambda folder: [file_in(folder, name).unlink() for name in names]


def foreign(*names: str) -> Damage:
    """Replace the checkpoint by a folder that holds only these files."""

    def change(folder: Path) -> None:
        shutil.rmtree(tag_folder(folder))
        (folder / "global_step2").mkdir()
        for name in names:
            (folder / "global_step2" / name).write_bytes(b"numbers")

    return change


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (
        with_content("optimizer.safetensors", lambda old: old[:-10]),
        r"is torn or was changed: optimizer.safetensors has \d+ bytes, not \d+",
    ),
    "a flipped bit": (
        with_content("masters.safetensors", lambda old: old[:-33] + bytes([old[-33] ^ 4]) + old[-32:]),
        r"is torn or was changed: masters.safetensors has the checksum [0-9a-f]{8}, not [0-9a-f]{8}: bytes were",
    ),
    "two missing": (without("model.safetensors", "state.pt"), r"model.safetensors is missing; state.pt is missing"),
    "a pickle": (with_content("model.safetensors", lambda _: BOMB), r"model.safetensors has \d+ bytes, not \d+"),
    "a pickle that the manifest allows": (
        with_manifest("model.safetensors", lambda file: file.write_bytes(BOMB)),
        r"model.safetensors cannot be read as safetensors",
    ),
    "an object that the manifest allows": (
        with_manifest("state.pt", lambda file: torch.save({"bomb": Bomb()}, file)),
        r"state.pt holds an object of _pytest.outcomes._Fail, which is not executed here",
    ),
    "a pickled manifest": (
        with_content("manifest.json", lambda _: BOMB),
        r"manifest.json is not the manifest of a checkpoint of harmony_ds",
    ),
    "a pickled latest": (with_content("latest", lambda _: BOMB), r"latest names no tag"),
    "no manifest": (without("manifest.json"), r"global_step2 has no manifest.json: its save was never finished"),
    "an edited manifest": (
        with_content("manifest.json", lambda old: old.replace(b'"crc32": ', b'"crc32": 1', 1)),
        r"manifest.json was changed: its checksum is",
    ),
    "another version": (
        manifest(format="harmony_ds checkpoint"),
        r"says 'harmony_ds checkpoint', of another program or version: here, 'harmony_ds checkpoint 3' is read",
    ),
    "nothing": (foreign(), r"global_step2 is no checkpoint: it holds nothing"),
    "other files": (foreign("weights.npz"), r"global_step2 is no checkpoint: it holds weights.npz"),
    "no folder": (
        lambda folder: shutil.rmtree(tag_folder(folder)),
        r"there is no checkpoint .*global_step2; .* holds no folder at all",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: str, good: Path, engine: HarmonyEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    change, message = DAMAGES[damage]
    change(folder)

    text = refused(engine, folder)
    assert re.search(message, text), text


def test_every_flipped_byte_of_every_file_is_found(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    layout.verify(tag_folder(folder))
    for file in [child for child in tag_folder(folder).rglob("*") if child.is_file()]:
        content = file.read_bytes()
        for place in {0, 7, len(content) // 3, len(content) // 2, len(content) - 2}:
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match=re.escape(file.name)):
                layout.verify(tag_folder(folder))
        file.write_bytes(content)
    layout.verify(tag_folder(folder))


def test_an_unknown_tag_is_refused_and_the_known_ones_are_named(good: Path, engine: HarmonyEngine) -> None:
    assert "there is no checkpoint" in (text := refused(engine, good, tag="global_step9"))
    assert text.endswith("holds global_step2.")


def test_without_latest_there_is_a_warning_and_nothing(
    tmp_path: Path, engine: HarmonyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="harmony_ds"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert f"Unable to find latest file at {tmp_path / 'latest'}" in caplog.text


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def halves(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


MISFITS = {
    "another model": (
        SETUP.other(family="gpt2"),
        r"missing in the checkpoint: transformer.wpe.weight.* and \d+ more; not in this model: model.embed_tokens.weight",
    ),
    "another optimizer": (
        SETUP.other(optimizer=sgd),
        r"its optimizer is AdamW and this engine's SGD: load it with load_opt",
    ),
    "other groups": (SETUP.other(optimizer=halves), r"its 1 parameter groups divide .* this engine's 2"),
    "fewer trained": (
        SETUP.other(frozen="layers.0"),
        r"its optimizer has model.layers.0.\S+.*, which this engine's does",
    ),
    "a scheduler": (
        SETUP.other(config={**SETUP.config, "scheduler": {"type": "WarmupLR", "params": {}}}),
        r"it has no state for WarmupLR: load it with load_lr_scheduler_states=False",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_of_something_else_is_refused_by_name(name: str, good: Path) -> None:
    setup, message = MISFITS[name]
    with engine_of(setup) as engine:
        text = refused(engine, good)
    assert re.search(message, text), text


def test_other_shapes_are_refused_with_both(good: Path) -> None:
    model = SETUP.one.build(0.0)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    config = {"train_micro_batch_size_per_gpu": 2, "harmony": {"device": "cpu"}, **SETUP.config}
    message = r"model.norm.weight is \[32\] in the checkpoint and \[7\] in this model"
    with engine_for(model, adamw, config) as engine, pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(good)


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was(tmp_path: Path) -> None:
    setup = SETUP.other(config={**SETUP.config, "scheduler": {"type": "WarmupLR", "params": {}}})
    with engine_of(setup) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_of(setup, fresh=False) as engine:

        def load(state: Any) -> None:
            engine.lr_scheduler.last_batch_iteration = state["last_batch_iteration"]
            if state["last_batch_iteration"] < 5:
                raise KeyError("something")

        engine.lr_scheduler.last_batch_iteration = 9
        engine.lr_scheduler.load_state_dict = load
        assert "KeyError('something')" in refused(engine, tmp_path)
        assert engine.lr_scheduler.last_batch_iteration == 9


def test_parts_can_be_left_out(good: Path) -> None:
    with engine_of(SETUP) as reference:
        reference.load_checkpoint(good)
        saved = state_of(reference)
    with engine_of(SETUP.other(optimizer=sgd), fresh=False) as engine:
        engine.load_checkpoint(good, load_optimizer_states=False)
        assert engine.global_steps == 2
        assert_equal(only_weights(state_of(engine)), only_weights(saved))
    with engine_of(SETUP, fresh=False) as engine:
        engine.load_checkpoint(good, load_module_only=True)
        assert (engine.global_steps, len(engine.optimizer.state)) == (0, 0)
        assert_equal(only_weights(state_of(engine)), only_weights(saved))


def only_weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith(("weight ", "master ", "buffer "))}


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    setup = SETUP.other(frozen="layers.0")
    with engine_of(setup) as engine:
        train(engine, setup, range(1))
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = state_of(engine)
    with engine_of(setup) as engine:
        text = refused(engine, tmp_path)
        assert re.search(r"saved without frozen parameters \(model.layers.0\S+.*load_module_strict=False", text)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert_equal(state_of(engine), saved)


def test_a_function_of_the_users_loads_the_weights(good: Path) -> None:
    given: dict[str, Any] = {}

    def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
        given.update(src)
        with torch.no_grad():
            for parameter in dst.parameters():
                parameter.fill_(0.5)

    with engine_of(SETUP) as engine:
        engine.load_checkpoint(good, custom_load_fn=load)
        assert given.keys() == engine.module.state_dict().keys()
        masters = masters_of(engine)
        assert masters.keys() == dict(engine.module.named_parameters()).keys()
        assert all((master == 0.5).all() for master in masters.values())
        assert engine.global_steps == 2


def test_client_state_comes_back_as_it_was(tmp_path: Path) -> None:
    given = {
        "epoch": 3,
        "best": float("inf"),
        "name": "x",
        "nested": [{"a": (1, 2.5, None)}, {True: "yes", 4: {1, 2}, (1, 2): frozenset({"x"})}, b"bytes", torch.bfloat16],
        "large": 2**200,
        "tensors": {"ema": torch.randn(3, 2), "count": torch.tensor(7), "flags": torch.tensor([True])},
        "$odd": "key",
    }
    with engine_of(SETUP) as engine:
        engine.save_checkpoint(tmp_path, tag="t", client_state=given)
        _, found = engine.load_checkpoint(tmp_path)
    assert found is not None
    assert_equal(found.pop("tensors"), given.pop("tensors"))
    assert found == given


def test_client_state_becomes_plain_and_takes_no_more_than_its_own_bytes(tmp_path: Path) -> None:
    view = torch.randn(400, 400)[::2, :2]
    given = {"number": np.float64(0.5), "text": np.str_("x"), "counts": Counter("aab"), "view": view.requires_grad_()}
    with engine_of(SETUP) as engine:
        engine.save_checkpoint(tmp_path, client_state=given)
        _, found = engine.load_checkpoint(tmp_path)
    assert found is not None
    assert [type(found[name]) for name in given] == [float, str, dict, torch.Tensor]
    assert torch.equal(found["view"], view) and not found["view"].requires_grad
    assert (data_folder(tmp_path) / "state.pt").stat().st_size < 100_000
    found["view"].add_(1)  # its own memory
    assert found["counts"] == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, object()]}, r"client_state.x.a.1 is object"),
        (Path, r"client_state.x is type"),
        (Bomb(), r"x is .*Bomb"),
    ],
)
def test_client_state_that_cannot_be_held_is_refused_by_key(value: Any, where: str, tmp_path: Path) -> None:
    with engine_of(SETUP) as engine, pytest.raises(CheckpointError, match=where):
        engine.save_checkpoint(tmp_path, client_state={"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["", "../out", "/abs", "latest", ".hidden"])
def test_tags_that_are_no_folder_inside_are_refused(tag: str, engine: HarmonyEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be the tag of a checkpoint"):
        engine.save_checkpoint(tmp_path, tag=tag)


def test_tags_latest_and_save_latest(tmp_path: Path) -> None:
    with engine_of(SETUP) as engine:
        train(engine, SETUP, range(1))
        assert engine.save_checkpoint(tmp_path) is True
        engine.save_checkpoint(tmp_path, tag=7)
        assert (tmp_path / "latest").read_text() == "7"
        engine.save_checkpoint(str(tmp_path), tag="aside", save_latest=False)
        assert (tmp_path / "latest").read_text() == "7"
    assert {child.name for child in tmp_path.iterdir()} == {"global_step1", "7", "aside", "latest", *SCRIPTS}


def test_the_weights_are_stock_safetensors_and_the_plan_is_a_plan(good: Path) -> None:
    from safetensors.torch import load_file

    from harmony_ds import Plan

    weights = load_file(data_folder(good) / "model.safetensors")
    model = SETUP.one.build(0.0)
    assert weights.keys() == model.state_dict().keys()
    assert all(weights[name].shape == value.shape for name, value in model.state_dict().items())
    assert Plan.from_json((data_folder(good) / "plan.json").read_text()).tasks
