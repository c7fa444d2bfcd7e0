"""Checkpoints of several processes: the same files as one process saves, and any number of processes resumes to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import harmony_ds
from harmony_ds import CheckpointError
from harmony_ds.checkpoint import layout, tensor_files
from tests.distributed.processes import run
from tests.distributed.training import (
    Result,
    Training,
    batch,
    build,
    differences,
    engine_of,
    state_tensors,
    train_plainly,
    train_with,
)

SIZES = (1, 2, 3, 4)
Saved = dict[int, tuple[str, list[list[Result]]]]


def setups_of(size: int) -> tuple[Training, ...]:
    """By any number of processes the same 12 micro-batches for a step, in the same order."""
    return (
        Training(clip=0.05, steps=1, accumulation=12 // size),
        Training(bf16=True, steps=1, accumulation=12 // size, optimizer="SGD"),
        Training(bf16=True, steps=1, accumulation=12 // size, optimizer="SGD", harmony={"split_masters": True}),
        Training(bf16=True, steps=1, accumulation=12 // size, disk=("offload_optimizer", "offload_param")),
        Training(steps=1, accumulation=12 // size, harmony={"devices": 2, "pack_layers": 1}),
    )


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


def resume(folders: Sequence[str], setups: tuple[Training, ...]) -> list[list[tuple[Result, Result]]]:
    """From each of the checkpoints: what is there when it has been loaded, and what comes of a step more."""
    found = []
    for folder in folders:
        found.append([])
        for index, setup in enumerate(setups):
            engine = engine_of(setup)
            if folder == folders[0]:
                train_with(engine, replace(setup, begin=20))  # what is there already is replaced
            where, state = engine.load_checkpoint(f"{folder}/{index}")
            assert where is not None and state == {"note": [1, 2]} and engine.global_steps == setup.steps
            loaded = Result([], [], *state_tensors(engine))
            found[-1].append((loaded, train_with(engine, replace(setup, begin=setup.steps))))
            engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By each number of processes: the folder, and what they trained on to."""
    folders = {size: str(tmp_path_factory.mktemp(f"saved_by_{size}")) for size in SIZES}
    return {size: (folder, run(size, save, folder, setups_of(size), limit_s=200)) for size, folder in folders.items()}


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_processes_resumes_from_a_checkpoint_of_any_number(saved: Saved, size: int) -> None:
    """Resume with `size` processes.

    As many as saved train to the bits of an uninterrupted run, others as if they had saved the checkpoint themselves.
    """
    found = run(size, resume, [folder for folder, _ in saved.values()], setups_of(size), limit_s=300)
    # One process takes the norm of norms, several sum squares: clipped by it, weights agree to rounding.
    for index, setup in enumerate(setups_of(size)):
        right = train_plainly(replace(setup, begin=setup.steps), size)
        rounding = 2e-6 if size == 1 else 0.0
        assert not differences([one[index] for one in saved[size][1]], right, rounding)
        for place, saver in enumerate(saved):
            as_saved = [replace(one, losses=[], norms=[]) for one in train_plainly(setups_of(saver)[index], saver)]
            relative = 2e-6 if saver == 1 and setup.clip else 0.0
            assert not differences([one[place][index][0] for one in found], as_saved[:1] * size, relative), saver
            after = [one[place][index][1] for one in found]
            if saver == size:
                assert not differences(after, right, rounding)
            elif not setup.bf16:
                assert not differences(after, right, 1e-5), saver


SETUP = Training(clip=0.05, steps=2)


def fails_to_save(folder: str) -> tuple[str, list[str]]:
    engine = engine_of(SETUP)
    train_with(engine, SETUP)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, client_state={"what": object()})
    train_with(engine, replace(SETUP, begin=2))
    engine.destroy()
    dist.barrier()
    return str(caught.value), sorted(path.name for path in Path(folder).glob("*"))


def test_a_checkpoint_that_cannot_be_written_is_an_error_everywhere(tmp_path: Path) -> None:
    for text, there in run(2, fails_to_save, str(tmp_path / "none")):
        assert "what" in text
        assert not there


def loads_with_a_changed_byte(folder: str) -> tuple[str, int, int]:
    """Return the error, and how often this process compared files of the bad and of the good checkpoint with checksums."""
    engine = engine_of(SETUP)
    train_with(engine, SETUP)
    engine.save_checkpoint(folder)
    (file,) = Path(folder).rglob("optimizer.safetensors")
    content = file.read_bytes()
    dist.barrier()  # before the first process changes it
    calls = []

    def counted(path: Path, record: Any) -> str | None:
        calls.append(path)
        return tensor_files.find_damage(path, record)

    def load(last: bytes) -> int:
        if engine.global_rank == 0:
            file.write_bytes(content[:-1] + last)
        dist.barrier()
        calls.clear()
        engine.load_checkpoint(folder)
        return len(calls)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "find_damage", counted)
        with pytest.raises(CheckpointError) as caught:
            load(bytes([content[-1] ^ 1]))
        compared = len(calls)
        found = str(caught.value), compared, load(content[-1:])
    train_with(engine, replace(SETUP, begin=2))
    engine.destroy()
    return found


def test_one_process_compares_a_checkpoint_with_its_checksums_and_all_refuse_it(tmp_path: Path) -> None:
    (text, *first), (same, *second) = run(2, loads_with_a_changed_byte, str(tmp_path))
    assert "optimizer.safetensors has the checksum" in text
    assert text == same
    assert min(first) > 0
    assert second == [0, 0]


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return {**{k: v[0] for k, v in batch("mlp", index).items()}, "number": torch.tensor(index)}


class RecordingModel(torch.nn.Module):
    """Records the samples that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build("mlp")

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.net(x, y)


def engine_with_loader(accumulation: int) -> tuple[Any, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "harmony": {"device": "cpu", "pack_layers": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, _, loader, _ = harmony_ds.initialize(model=RecordingModel(), config=config, training_data=Numbers())
    return engine, loader


def with_own_loader(folder: str, accumulation: int, load: bool) -> tuple[list[int], float]:
    """Return the samples of three steps, and a number drawn after them."""
    engine, loader = engine_with_loader(accumulation)
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
    return seen, drawn


def test_data_and_random_numbers_resume(tmp_path: Path) -> None:
    saved = run(2, with_own_loader, str(tmp_path), 2, False)
    again = run(2, with_own_loader, str(tmp_path), 2, True)
    for (seen, drawn), (seen_again, drawn_again) in zip(saved, again, strict=True):
        assert seen_again[: len(seen)] == seen
        assert drawn == drawn_again
    assert saved[0][1] != saved[1][1]
    # One process, and four, are dealt the samples that two would have been.
    for size, steps in ((1, 4), (4, 1)):
        dealt = run(size, with_own_loader, str(tmp_path), steps, True)
        first = {n for seen, _ in dealt for n in seen[: 2 * steps]}
        assert first == {n for seen, _ in saved for n in seen[:4]}


def loads_data() -> tuple[list[int], list[int], Any]:
    engine, loader = engine_with_loader(2)
    seen = [n for one in loader for n in one["number"].tolist()]
    in_order = [n for one in engine.deepspeed_io(Numbers(), route="eval") for n in one["number"].tolist()]
    told = (engine.train_batch_size(), engine.world_size, engine.global_rank, engine.local_rank, engine.dp_world_size)
    engine.set_train_batch_size(16)
    told = (*told, engine.gradient_accumulation_steps())
    with engine.no_sync():
        pass
    return seen, in_order, told


def test_data_is_distributed_as_by_deepspeeds_loaders() -> None:
    found = run(2, loads_data)
    assert sorted(n for seen, _, _ in found for n in seen) == list(range(48))
    assert found[0][1] == list(range(0, 48, 2)) and found[1][1] == list(range(1, 48, 2))
    assert [told for _, _, told in found] == [(8, 2, rank, rank, 2, 4) for rank in range(2)]
