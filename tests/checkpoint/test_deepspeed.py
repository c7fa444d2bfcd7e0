"""A run moves from DeepSpeed to harmony_ds and back, with its optimizer; both of their engines are the real ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import harmony_ds
from harmony_ds import CheckpointError, HarmonyEngine
from harmony_ds.checkpoint import Layout, convert, read_any
from harmony_ds.checkpoint.deepspeed.universal import write_universal
from harmony_ds.checkpoint.deepspeed.zero_read import split_each, split_whole
from harmony_ds.checkpoint.snapshot import ParameterGroup, Progress, SavedOptimizer, Snapshot, TensorSource
from harmony_ds.checkpoint.tensor_files import load_pickle
from tests.checkpoint import deepspeed_side as side
from tests.checkpoint.runs import data_folder, masters_of, scrambled
from tests.inside import scaler_of

ROOT = Path(__file__).parents[2]


def in_deepspeed(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run `jobs` in DeepSpeed's engine."""
    command = [sys.executable, str(ROOT / "tests/checkpoint/deepspeed_side.py"), json.dumps(jobs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line[3:]) for line in run.stdout.splitlines() if line.startswith("JOB")]


@contextmanager
def engine_of(precision: str = "fp32", optimizer: str = "torch") -> Iterator[HarmonyEngine]:
    model = scrambled(side.Net())
    config = {**side.config(2, precision, optimizer=optimizer), "harmony": {"device": "cpu"}}
    engine, *_ = harmony_ds.initialize(model=model, model_parameters=side.groups(model), config=config)
    try:
        yield engine
    finally:
        engine.destroy()


@dataclass(frozen=True)
class Case:
    """Checkpoints of DeepSpeed after three steps, and DeepSpeed's results of the next three."""

    folder: Path
    expected: dict[str, dict[str, Any]]


RUNS: dict[str, dict[str, Any]] = {
    "zero2": {"stage": 2},
    "zero2 bf16": {"stage": 2, "precision": "bf16"},
    "zero2 fp16": {"stage": 2, "precision": "fp16"},
    "zero3 offload": {"stage": 3, "optimizer": "cpu"},
}
"""Checkpoints of two processes, at every stage, and universal ones: `tests/distributed/test_deepspeed.py`."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = [{**run, "steps": [0, 3], "save": str(folder / name), "then": [3, 6]} for name, run in RUNS.items()]
    return Case(folder, dict(zip(RUNS, in_deepspeed(jobs), strict=True)))


@pytest.mark.parametrize("name", RUNS)
def test_harmony_goes_on_from_deepspeed(name: str, saved: Case) -> None:
    precision, expected = RUNS[name].get("precision", "fp32"), saved.expected[name]
    with engine_of(precision, RUNS[name].get("optimizer", "torch")) as engine:
        folder, client_state = engine.load_checkpoint(saved.folder / name)
        assert Path(str(folder)).name == "global_step3"
        assert client_state == {"epoch": 3}
        assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 12, 6)
        assert engine.get_lr() == expected["lr"]
        assert engine.skipped_steps == expected["skipped_steps"]
        snapshot = read_any(saved.folder / name / "global_step3")
        for parameter, master in masters_of(engine).items():
            assert torch.equal(master, snapshot.masters[parameter].read())
        for parameter, weight in engine.module.named_parameters() if precision != "fp32" else ():
            assert torch.equal(weight, snapshot.parameters[parameter].read())
        if precision == "fp16":
            assert scaling_of(engine) == expected["saved_scaler"]
            assert engine.cur_scale < 2**18
        losses = side.train(engine, 3, 6)
    assert losses == pytest.approx(expected["then"], rel=1e-6 if precision == "fp32" else 0.02)


def scaling_of(engine: HarmonyEngine) -> list[float]:
    state = scaler_of(engine).state_dict()
    assert state is not None
    return [float(state[name]) for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_every_stage_of_deepspeed_goes_on_from_harmony(precision: str, saved: Case, tmp_path: Path) -> None:
    """DeepSpeed trains steps 0 to 2, harmony_ds 3, and DeepSpeed 4 and 5, from a universal checkpoint."""
    name = "zero2" if precision == "fp32" else f"zero2 {precision}"
    with engine_of(precision) as engine:
        engine.load_checkpoint(saved.folder / name)
        side.train(engine, 3, 4)
        scaler = scaling_of(engine) if precision == "fp16" else [1.0, 0.0, 0.0, 0.0]
        engine.save_checkpoint(tmp_path / "harmony", client_state={"epoch": 4})
    convert(tmp_path / "harmony", tmp_path / "universal", Layout.UNIVERSAL)
    common = {"precision": precision, "universal": True, "load": str(tmp_path / "universal"), "steps": [4, 6]}
    stages = [(1, "torch"), (2, "torch"), (2, "cpu"), (3, "cpu")]  # DeepSpeedCPUAdam goes on from torch's
    jobs = [{"stage": stage, "optimizer": optimizer, **common} for stage, optimizer in stages]

    for job, found in zip(jobs, in_deepspeed(jobs), strict=True):
        assert (found["epoch"], found["global_steps"]) == (4, 4)
        assert found["scaler"] == scaler, job
        expected = saved.expected[name]["then"][2:]
        assert found["losses"] == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 0.02), job


@pytest.mark.parametrize("count", [1, 2])
def test_sub_groups_of_zero3_share_no_tensor_that_counts_steps(count: int, tmp_path: Path) -> None:
    """DeepSpeed gives all of them one object, which torch's Adam counts up in place."""
    names = "ab"[:count]
    values = {name: TensorSource.from_tensor(torch.ones(2)) for name in names}
    groups = tuple(
        ParameterGroup((name,), {"lr": 0.1, "weight_decay": float(place)}) for place, name in enumerate(names)
    )
    states = {name: {"exp_avg": values[name], "step": TensorSource.from_tensor(torch.tensor(7.0))} for name in names}
    snapshot = Snapshot(Progress(7, 7, 0), values, {}, optimizer=SavedOptimizer("AdamW", groups, states))
    written = write_universal(snapshot, tmp_path, "a")
    found = load_pickle(written / "zero" / "optimizer_state.pt")["optimizer_state_dict"]
    assert isinstance(found["state"][0]["step"], torch.Tensor if count == 1 else int)
    assert found["state"][0]["step"] == 7
    assert ("weight_decay" in found["param_groups"][0]) == (count == 1)


def test_a_universal_checkpoint_is_read_back(saved: Case, tmp_path: Path) -> None:
    convert(saved.folder / "zero2 bf16", tmp_path / "harmony", Layout.HARMONY)
    source = read_any(tmp_path / "harmony" / "global_step3")
    again = read_any(convert(tmp_path / "harmony", tmp_path / "universal", Layout.UNIVERSAL))
    assert again.optimizer is not None and source.optimizer is not None
    assert [g.parameters for g in again.optimizer.groups] == [g.parameters for g in source.optimizer.groups]
    for name in source.masters:
        assert torch.equal(again.masters[name].read(), source.masters[name].read())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(again.optimizer.states[name][key].read(), source.optimizer.states[name][key].read())
    assert again.tied == {"head.weight": "embed.weight"}
    assert set(again.frozen) == {"frozen.weight", "frozen.bias"}
    assert torch.equal(again.parameters["frozen.weight"].read(), source.parameters["frozen.weight"].read())


def test_vectors_that_processes_share_are_put_together() -> None:
    shapes = {"a": (2, 3), "b": (5,), "c": ()}
    values = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(10.0, 15.0), "c": torch.tensor(20.0)}
    flat = torch.cat([v.reshape(-1) for v in values.values()])
    for count in (1, 2, 3, 5):
        share = -(-flat.numel() // count)
        assert_values(split_whole(shapes, flat.split(share), "x"), values)
        padded = {n: torch.cat([v.reshape(-1), torch.zeros(-v.numel() % count)]) for n, v in values.items()}
        ranks = [torch.cat([v.chunk(count)[rank] for v in padded.values()]) for rank in range(count)]
        assert_values(split_each(shapes, ranks, "x"), values)
    spaced = torch.cat([flat[:6], torch.zeros(2), flat[6:11], torch.zeros(3), flat[11:]])
    assert_values(split_whole(shapes, [spaced], "x", paddings=[2, 3, 0]), values)
    with pytest.raises(CheckpointError, match="the x of b has 3 elements instead of 5"):
        split_whole(shapes, [flat[:9]], "x")


def assert_values(found: dict[str, Any], values: dict[str, torch.Tensor]) -> None:
    assert found.keys() == values.keys()
    for name, source in found.items():
        assert torch.equal(source.read(), values[name])


def test_torn_and_foreign_checkpoints_of_deepspeed_are_refused(saved: Case, tmp_path: Path) -> None:
    tag = tmp_path / "global_step3"
    shutil.copytree(saved.folder / "zero2" / "global_step3", tag)
    optim = tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with optim.open("r+b") as file:
        file.truncate(2000)
    with engine_of() as engine:
        with pytest.raises(CheckpointError, match=r"optim_states.pt is no whole file of torch.save"):
            engine.load_checkpoint(tmp_path, tag="global_step3")
        shutil.copy(saved.folder / "zero2" / "global_step3" / optim.name, optim)
        shutil.copy(optim, tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
        with pytest.raises(CheckpointError, match=r"saved by 1 processes and holds the \*_optim_states.pt of 2"):
            engine.load_checkpoint(tmp_path, tag="global_step3")
        shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
        with pytest.raises(CheckpointError, match=r"model-parallel or expert-parallel processes \(mp_rank_01"):
            engine.load_checkpoint(tmp_path, tag="global_step3")
        with pytest.raises(CheckpointError, match="holds a checkpoint of DeepSpeed"):
            engine.save_checkpoint(tmp_path, tag="global_step3")


def test_parameters_that_were_stepped_less_often_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine:
        side.train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
    snapshot = read_any(tmp_path / "global_step3")
    assert snapshot.optimizer is not None
    snapshot.optimizer.states["norm.weight"]["step"] = 2.0
    write_universal(snapshot, tmp_path, "a")
    assert "norm.weight had fewer than 3" in caplog.text
    again = read_any(tmp_path / "a").optimizer
    assert again is not None and float(again.states["norm.weight"]["step"].read()) == 3.0


def test_states_that_deepspeed_has_no_place_for_are_refused(tmp_path: Path) -> None:
    model = side.Net()
    config = {"train_micro_batch_size_per_gpu": 2, "harmony": {"device": "cpu"}}
    optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad])
    engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config)
    engine.train_batch(iter([side.batch(0)]))
    engine.save_checkpoint(tmp_path / "a", client_state={"module": 1})
    engine.save_checkpoint(tmp_path / "b")
    engine.destroy()
    with pytest.raises(CheckpointError, match=r"client state has module, which are DeepSpeed's own keys"):
        convert(tmp_path / "a", tmp_path / "c", Layout.UNIVERSAL)
    with pytest.raises(CheckpointError, match=r"mu_product of embed.weight is a tensor of shape \[\]"):
        convert(tmp_path / "b", tmp_path / "c", Layout.UNIVERSAL)
    assert not (tmp_path / "c").exists()
    with pytest.raises(CheckpointError, match=r"exists already: choose another folder"):
        convert(tmp_path / "b", tmp_path / "b", Layout.HARMONY)
    with pytest.raises(CheckpointError, match=r"there is no folder"):
        convert(tmp_path / "nothing", tmp_path / "c", Layout.HF)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no file `latest` that names one: give a tag"):
        convert(tmp_path / "empty", tmp_path / "c", Layout.HF)
    assert data_folder(tmp_path / "b").is_dir()
