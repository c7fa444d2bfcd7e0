"""Host memory that `initialize` takes: no more than it needs on its way, and nothing where there is too little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import harmony_ds
from harmony_ds import HostMemoryError
from harmony_ds.offload import host_memory
from harmony_ds.offload.host_memory import HostRoom, MappedFiles
from tests.engine.drive import (
    adamw,
    config_of,
    engine_for,
    family,
    groups_of,
    means_of,
    seed_of,
    sgd,
    train_groups,
    weights_of,
)
from tests.oracle import assert_same, train_plainly

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_initialize_takes_at_most_two_layers_more_than_the_final_state(tmp_path: Path) -> None:
    sizes = ["--layers", "8", "--width", "512", "--vocabulary", "256"]  # layers of 12 MiB
    cases = ["host:fp32", "from_pretrained:fp32"]
    command = [sys.executable, "-m", "benchmarks.init_peak.run", *sizes, "--folder", str(tmp_path), "--cases", *cases]
    # Large blocks go back to the system when they are freed: none of an earlier case's serves a later one, uncounted.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [row["source"] for row in rows] == ["host", "from_pretrained"]
    for row in rows:
        assert row["peak"] <= row["state"] + 2 * row["layer"], row
        assert row["state"] == 4 * row["parameters"] > 7 * row["layer"]
        assert row["after"] >= 0.95 * row["state"], row  # else nothing was measured


def rooms_of(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(host_memory, "host_rooms", lambda: [HostRoom(free_bytes, 0, "the test")])


def linear(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))


COUNT = 2 * 64 * 64


def needed(monkeypatch: pytest.MonkeyPatch, model: nn.Module, make: object, **more: object) -> str:
    """Return the memory that an engine says it needs when none is free."""
    rooms_of(monkeypatch, 0)
    clip = more.pop("clip", None)
    config = config_of(1, clip=clip, **more)  # type: ignore[arg-type]
    with pytest.raises(HostMemoryError) as caught, engine_for(model, make, config):
        pass
    return str(caught.value).partition(": ")[0]


def test_weights_masters_state_and_gradients_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = f", {4 * COUNT:,} of them in use by the model already"
    kinds = f"weights {4 * COUNT:,}, optimizer {8 * COUNT:,}, gradients {4 * COUNT // 2:,}"
    assert needed(monkeypatch, linear(), adamw) == (
        f"training needs at least {14 * COUNT:,} bytes of host memory ({kinds}){there}"
    )
    assert f"({18 * COUNT:,} bytes" not in needed(monkeypatch, linear(), adamw)
    kinds = f"weights {2 * COUNT:,}, masters {4 * COUNT:,}, optimizer {8 * COUNT:,}, gradients {4 * COUNT:,}"
    assert needed(monkeypatch, linear(), adamw, clip=1.0, **BF16) == (
        f"training needs at least {18 * COUNT:,} bytes of host memory ({kinds}){there}"
    )


def test_only_trained_parameters_have_state(monkeypatch: pytest.MonkeyPatch) -> None:
    half = linear()
    half[0].requires_grad_(False)  # type: ignore[operator]

    assert f"(weights {4 * COUNT:,}, optimizer {4 * COUNT:,}, " in needed(monkeypatch, half, adamw, clip=1.0)
    assert f"(weights {4 * COUNT:,}, gradients {4 * COUNT:,})" in needed(monkeypatch, linear(), sgd, clip=1.0)
    first = linear()
    rooms_of(monkeypatch, 0)
    with pytest.raises(HostMemoryError, match=f"optimizer {4 * COUNT:,}"):
        harmony_ds.initialize(
            model=first,
            model_parameters=first[0].parameters(),  # type: ignore[operator]
            config=config_of(1, clip=1.0, optimizer={"type": "AdamW", "params": {"torch_adam": True}}),
        )


def test_a_mapped_model_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert needed(monkeypatch, mapped(tmp_path), adamw).endswith(")")


def mapped(folder: Path) -> nn.Module:
    """Return a model whose parameters are those of a mapped file."""
    file = folder / "model.safetensors"
    save_file(linear().state_dict(), file)
    with torch.device("meta"):
        model = linear()
    model.load_state_dict(load_file(file), assign=True)
    assert all(MappedFiles().holds(p) for p in model.parameters())
    return model


def test_an_engine_takes_mapped_parameters_and_training_leaves_their_file(tmp_path: Path) -> None:
    model = mapped(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with engine_for(model, adamw, config_of(1)) as engine:
        assert not any(MappedFiles().holds(p) for p in model.parameters())
        engine.train_batch(iter([(torch.ones(2, 64),)]), loss_fn=torch.mean)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_training_a_model_from_pretrained_is_plain_training_of_it(tmp_path: Path) -> None:
    one = family("llama")
    one.build(0.0).save_pretrained(tmp_path)  # type: ignore[operator]
    groups = groups_of(one, 2, 2)
    plain, model = (AutoModelForCausalLM.from_pretrained(tmp_path).train() for _ in range(2))
    losses = means_of(train_plainly(plain, groups, adamw(plain.parameters()), clip=1.0, seed_of=seed_of))
    with engine_for(model, adamw, config_of(2, clip=1.0)) as engine:
        assert train_groups(engine, groups) == losses
    assert_same(model, plain, bitwise=True)


def test_a_refused_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one = family("llama")
    model = one.build(0.0)
    before, places = weights_of(model), [p.data_ptr() for p in model.parameters()]
    rooms_of(monkeypatch, 1000)
    with pytest.raises(HostMemoryError, match=r"[\d,]+ more, but 1,000 bytes are free \(the test\)"):
        harmony_ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config_of(1))
    assert [p.data_ptr() for p in model.parameters()] == places
    assert_same(model, before, bitwise=True)

    rooms_of(monkeypatch, 10**9)
    with engine_for(model, adamw, config_of(1)) as engine:
        train_groups(engine, groups_of(one, 1, 1))


def test_the_callers_own_references_stay_what_they_were() -> None:
    model = family("llama").build(0.0)
    held = model.state_dict()
    before = {name: tensor.clone() for name, tensor in held.items()}
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    with engine_for(model, lambda _: optimizer, config_of(1)) as engine:
        train_groups(engine, groups_of(family("llama"), 1, 1))
        engine.finish_updates()

        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert not torch.equal(model.state_dict()["lm_head.weight"], held["lm_head.weight"])
