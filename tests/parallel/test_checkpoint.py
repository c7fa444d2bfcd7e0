"""Checkpoints of several processes: the same files, whoever saved them, and the same bits, whoever goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harmony_ds
from tests.parallel.processes import run
from tests.parallel.training import (
    Result,
    Training,
    batch,
    build,
    differences,
    engine_of,
    held,
    train_plainly,
    train_with,
)

SIZES = (1, 2, 3, 4)
SETUPS = (Training(clip=0.05, steps=2), Training(bf16=True, steps=2, optimizer="SGD"))


def save(folder: str, setups: tuple[Training, ...]) -> list[Result]:
    """Trains, saves, and trains on."""
    results = []
    for index, setup in enumerate(setups):
        engine = engine_of(setup)
        train_with(engine, setup)
        engine.save_checkpoint(f"{folder}/{index}", client_state={"note": [1, 2]})
        results.append(train_with(engine, replace(setup, begin=setup.steps)))
        engine.destroy()
    return results


def resume(folder: str, setups: tuple[Training, ...]) -> list[Result]:
    results = []
    for index, setup in enumerate(setups):
        engine = engine_of(setup)
        train_with(engine, replace(setup, steps=1, begin=20))  # what is there already is replaced
        where, state = engine.load_checkpoint(f"{folder}/{index}")
        assert where is not None and state == {"note": [1, 2]} and engine.global_steps == setup.steps
        results.append(train_with(engine, replace(setup, begin=setup.steps)))
        engine.destroy()
    return results


def loaded(folders: Sequence[str], setups: tuple[Training, ...]) -> list[list[Result]]:
    """What is there when each of the checkpoints has been loaded, before any step."""
    found = []
    for folder in folders:
        found.append([])
        for index, setup in enumerate(setups):
            engine = engine_of(setup)
            engine.load_checkpoint(f"{folder}/{index}")
            found[-1].append(Result([], [], *held(engine)))
            engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, list[list[Result]]]]:
    """By each number of processes: the folder, and what they trained on to."""
    folders = {size: str(tmp_path_factory.mktemp(f"saved_by_{size}")) for size in SIZES}
    return {size: (folder, run(size, save, folder, SETUPS, limit_s=200)) for size, folder in folders.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_as_many_processes_go_on_to_the_bits_of_an_uninterrupted_run(
    saved: dict[int, tuple[str, list[list[Result]]]], size: int
) -> None:
    folder, went_on = saved[size]
    found = run(size, resume, folder, SETUPS)
    for index, setup in enumerate(SETUPS):
        right = train_plainly(replace(setup, begin=setup.steps), size)
        assert not differences([one[index] for one in went_on], right)
        assert not differences([one[index] for one in found], right)


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_processes_goes_on_from_what_any_other_saved(
    saved: dict[int, tuple[str, list[list[Result]]]], size: int
) -> None:
    found = run(size, loaded, [folder for folder, _ in saved.values()], SETUPS, limit_s=200)
    for place, saver in enumerate(saved):
        for index, setup in enumerate(SETUPS):
            right = [replace(one, losses=[], norms=[]) for one in train_plainly(setup, saver)][:1] * size
            # One process takes the norm of norms, several sum squares: clipped by it, weights agree to rounding.
            relative = 2e-6 if saver == 1 and setup.clip else 0.0
            assert not differences([one[place][index] for one in found], right, relative), (saver, size)


def of_one_size(folder: str, accumulation: int) -> Result:
    """The same micro-batches in the same order, by any number of processes: 12 for a step."""
    setup = Training(accumulation=accumulation, steps=1)
    engine = engine_of(setup)
    engine.load_checkpoint(folder)
    result = train_with(engine, replace(setup, begin=1))
    engine.destroy()
    return result


def save_one(folder: str, accumulation: int) -> None:
    setup = Training(accumulation=accumulation, steps=1)
    engine = engine_of(setup)
    train_with(engine, setup)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_all_sizes_go_on_from_all_sizes_as_if_they_had_saved_themselves(tmp_path: Path) -> None:
    """The step behind the load is that of plain PyTorch over the same micro-batches, summed by the ranks that are there."""
    sizes = {1: 12, 2: 6, 3: 4, 4: 3}
    right = train_plainly(Training(accumulation=12, steps=1, begin=1), 1)[0]
    for size, accumulation in sizes.items():
        run(size, save_one, str(tmp_path / str(size)), accumulation)
    for saved_by in sizes:
        by_size = {n: run(n, of_one_size, str(tmp_path / str(saved_by)), steps) for n, steps in sizes.items()}
        for results in by_size.values():
            assert all(not differences([one], [results[0]]) for one in results[1:])
            assert not differences([results[0]], [right], 1e-5)


def fails_to_save(folder: str) -> tuple[str, str, list[str]]:
    engine = engine_of(SETUPS[0])
    train_with(engine, SETUPS[0])
    try:
        engine.save_checkpoint(folder, client_state={"what": object()})
    except Exception as error:  # noqa: BLE001
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "", ""
    train_with(engine, replace(SETUPS[0], begin=2))
    engine.destroy()
    dist.barrier()
    return kind, text, sorted(path.name for path in Path(folder).glob("*"))


def test_a_checkpoint_that_cannot_be_written_is_an_error_everywhere(tmp_path: Path) -> None:
    for kind, text, there in run(2, fails_to_save, str(tmp_path / "none")):
        assert kind == "CheckpointError" and "what" in text
        assert not there


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return {**{k: v[0] for k, v in batch("mlp", index).items()}, "number": torch.tensor(index)}


class Seen(torch.nn.Module):
    """Notes the samples that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("mlp")

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.net(x, y)


def with_own_loader(folder: str, accumulation: int, load: bool) -> tuple[list[int], float, Any]:
    """The samples of three steps, and a number drawn behind them."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "harmony": {"device": "cpu", "pack_layers": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, _, loader, _ = harmony_ds.initialize(model=Seen(), config=config, training_data=Numbers())
    torch.manual_seed(77 + engine.global_rank)
    if load:
        engine.load_checkpoint(folder)
    seen: list[int] = []
    batches = iter(loader)
    for step in range(3):
        if step == 1 and not load:
            torch.rand(3)
            engine.save_checkpoint(folder)
            seen.clear()
        group = [next(batches) for _ in range(accumulation)]
        seen += [n for one in group for n in one["number"].tolist()]
        engine.train_batch(group)
    drawn = torch.rand(()).item()
    engine.destroy()
    return seen, drawn, None


def test_data_and_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    saved = run(2, with_own_loader, str(tmp_path), 2, False)
    again = run(2, with_own_loader, str(tmp_path), 2, True)
    for (seen, drawn, _), (seen_again, drawn_again, _) in zip(saved, again, strict=True):
        assert seen_again[: len(seen)] == seen
        assert drawn == drawn_again
    assert saved[0][1] != saved[1][1]
    # One process, and four, are dealt the samples that two would have been.
    for size, steps in ((1, 4), (4, 1)):
        dealt = run(size, with_own_loader, str(tmp_path), steps, True)
        first = {n for seen, _, _ in dealt for n in seen[: 2 * steps]}
        assert first == {n for seen, _, _ in saved for n in seen[:4]}


def loads_data() -> tuple[list[list[int]], list[int], Any]:
    model = Seen()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "harmony": {"device": "cpu", "pack_layers": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, _, loader, _ = harmony_ds.initialize(model=model, config=config, training_data=Numbers())
    seen = [one["number"].tolist() for one in loader]
    in_order = [n for one in engine.deepspeed_io(Numbers(), route="eval") for n in one["number"].tolist()]
    told = (engine.train_batch_size(), engine.world_size, engine.global_rank, engine.local_rank, engine.dp_world_size)
    engine.set_train_batch_size(16)
    told = (*told, engine.gradient_accumulation_steps())
    with engine.no_sync():
        pass
    return seen, in_order, told


def test_data_is_dealt_as_deepspeeds_loaders_do() -> None:
    found = run(2, loads_data)
    assert sorted(n for seen, _, _ in found for one in seen for n in one) == list(range(48))
    assert found[0][1] == list(range(0, 48, 2)) and found[1][1] == list(range(1, 48, 2))
    assert [told for _, _, told in found] == [(8, 2, rank, rank, 2, 4) for rank in range(2)]
