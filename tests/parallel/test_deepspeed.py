"""DeepSpeed's engine and ours, each in two processes: the same losses, and each goes on from the other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import harmony_ds
from harmony_ds.checkpoint import Layout, convert
from tests.checkpoint import deepspeed_side as side
from tests.parallel.processes import run

SIZE = 2
RUNS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "optimizer": "cpu"},
    "zero3": {"stage": 3},
    "zero3 offload": {"stage": 3, "optimizer": "cpu"},
}


def _stock(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In one of several processes: what DeepSpeed's engine says to `jobs`."""
    return [side.run(job) for job in jobs]


def _ours(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In one of several processes: what our engine says to `jobs`."""
    found = []
    for job in jobs:
        model = side.Net()
        config = {**side.config(job["stage"], optimizer=job.get("optimizer", "torch")), "harmony": {"device": "cpu"}}
        engine, *_ = harmony_ds.initialize(model=model, model_parameters=side.groups(model), config=config)
        if "load" in job:
            side.train(engine, 50, 51)  # what is there already is replaced
            folder, client_state = engine.load_checkpoint(job["load"])
            assert folder is not None and client_state == {"epoch": 3}
        told = {"losses": side.train(engine, *job["steps"])}
        if "save" in job:
            engine.save_checkpoint(job["save"], client_state={"epoch": 3})
        told["then"] = side.train(engine, *job["then"]) if "then" in job else []
        engine.destroy()
        found.append(told)
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = [{**one, "steps": [0, 3], "save": str(folder / name), "then": [3, 6]} for name, one in RUNS.items()]
    return folder, run(SIZE, _stock, jobs, limit_s=200)


def _same(found: list[list[dict[str, Any]]], key: str, stock: list[list[dict[str, Any]]], theirs: str) -> None:
    for rank in range(SIZE):
        for place, name in enumerate(RUNS):
            assert found[rank][place][key] == pytest.approx(stock[rank][place][theirs], rel=1e-6), (name, rank)


def test_losses_are_those_of_deepspeed(stock: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    found = run(SIZE, _ours, [{**one, "steps": [0, 3], "then": [3, 6]} for one in RUNS.values()], limit_s=200)
    _same(found, "losses", stock[1], "losses")
    _same(found, "then", stock[1], "then")
    assert found[0][0]["losses"] != found[1][0]["losses"]  # each rank has data of its own


def test_harmony_goes_on_from_what_two_processes_of_deepspeed_saved(
    stock: tuple[Path, list[list[dict[str, Any]]]],
) -> None:
    folder, expected = stock
    jobs = [{**one, "steps": [3, 6], "load": str(folder / name)} for name, one in RUNS.items()]
    _same(run(SIZE, _ours, jobs, limit_s=200), "losses", expected, "then")


def test_two_processes_of_deepspeed_go_on_from_what_harmony_saved(
    stock: tuple[Path, list[list[dict[str, Any]]]], tmp_path: Path
) -> None:
    jobs = [{**one, "steps": [0, 3], "save": str(tmp_path / name)} for name, one in RUNS.items()]
    run(SIZE, _ours, jobs, limit_s=200)
    for name, one in RUNS.items():
        layout = Layout.ZERO3 if one["stage"] == 3 else Layout.ZERO2
        convert(tmp_path / name, tmp_path / f"{name} converted", layout, processes=SIZE)
    jobs = [{**one, "steps": [3, 6], "load": str(tmp_path / f"{name} converted")} for name, one in RUNS.items()]
    _same(run(SIZE, _stock, jobs, limit_s=200), "losses", stock[1], "then")
