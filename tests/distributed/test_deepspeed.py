"""DeepSpeed's engine and ours, each in two processes: the same losses, and each goes on from the other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import harmony_ds
from harmony_ds.checkpoint import Layout, convert
from tests.checkpoint import deepspeed_side as side
from tests.distributed.processes import run

SIZE = 2
Stock = tuple[Path, list[list[dict[str, Any]]]]
"""A folder of checkpoints, and by rank what each job said."""
RUNS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "optimizer": "cpu"},
    "zero2 without clipping": {"stage": 2, "clip": 0.0},
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
        config = side.config(job["stage"], optimizer=job.get("optimizer", "torch"), clip=job.get("clip", 0.5))
        config["harmony"] = {"device": "cpu"}
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


def _to_universal(folders: list[tuple[str, str]]) -> None:
    """In one process: DeepSpeed's own converter, from each folder to the other."""
    from deepspeed.checkpoint.ds_to_universal import main

    for source, target in folders:
        main(side.argparse_of(source, target))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs = [{**one, "steps": [0, 3], "save": str(folder / name), "then": [3, 6]} for name, one in RUNS.items()]
    return folder, run(SIZE, _stock, jobs, limit_s=200)


@pytest.fixture(scope="module")
def ours(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """In turn: trainings from the start, from what DeepSpeed saved, and from what it made universal of that."""
    folder, (saved, _) = tmp_path_factory.mktemp("ours"), stock
    tag = "global_step3"
    universal = [(str(saved / name / tag), str(folder / "universal" / name / tag)) for name in RUNS]
    run(1, _to_universal, universal, limit_s=200)
    jobs = [{**one, "steps": [0, 3], "save": str(folder / name), "then": [3, 6]} for name, one in RUNS.items()]
    for source in (saved, folder / "universal"):
        jobs += [{**one, "steps": [3, 6], "load": str(source / name)} for name, one in RUNS.items()]
    return folder, run(SIZE, _ours, jobs, limit_s=300)


@pytest.mark.parametrize(
    ("what", "key", "theirs"),
    [(0, "losses", "losses"), (0, "then", "then"), (1, "losses", "then"), (2, "losses", "then")],
    ids=["the first steps", "the next", "from DeepSpeed's checkpoint", "from a universal one"],
)
def test_losses_are_those_of_deepspeed(ours: Stock, stock: Stock, what: int, key: str, theirs: str) -> None:
    for rank in range(SIZE):
        for place, name in enumerate(RUNS):
            found = ours[1][rank][what * len(RUNS) + place][key]
            assert found == pytest.approx(stock[1][rank][place][theirs], rel=1e-6), (name, rank)
    assert ours[1][0][0]["losses"] != ours[1][1][0]["losses"]  # each rank has data of its own


def test_two_processes_of_deepspeed_resume_from_a_checkpoint_of_harmony(
    ours: Stock, stock: Stock, tmp_path: Path
) -> None:
    for name in RUNS:
        convert(ours[0] / name, tmp_path / name, Layout.UNIVERSAL)
    job = {"steps": [3, 6], "universal": True}
    jobs = [{**one, **job, "load": str(tmp_path / name)} for name, one in RUNS.items()]
    for one in jobs:
        if one["stage"] == 3:  # torch's Adam would count steps in one tensor of all groups; DeepSpeed's own does not
            one["optimizer"] = "cpu"
    for rank, found in enumerate(run(SIZE, _stock, jobs, limit_s=200)):
        for place, name in enumerate(RUNS):
            assert found[place]["losses"] == pytest.approx(stock[1][rank][place]["then"], rel=1e-6), (name, rank)
