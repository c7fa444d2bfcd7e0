"""Runs that are killed, on disks that fill up. `python -m benchmarks.kill.run --kills 200` does more of the former."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harmony_ds import CheckpointError
from harmony_ds.checkpoint import tensor_files
from tests.checkpoint.runs import Setup, assert_equal, engine_of, state_of, train

ROOT = Path(__file__).parents[2]
SCRIPTS = ["zero_to_fp32.py", "zero_to_torch.py"]


def run(module: str, folder: Path, *options: str) -> str:
    """Return the output of a module of `benchmarks`, run in memory: a kill takes no page that was written to a disk."""
    memory = Path("/dev/shm")
    scratch = memory if os.access(memory, os.W_OK) else folder
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    return ended.stdout


def test_runs_that_are_killed_at_any_moment_go_on_bit_for_bit(tmp_path: Path) -> None:
    said = run("kill.run", tmp_path, "--kills", "6", "--seed", "5")
    assert said.startswith("6 kills, ")
    assert "0 of them during a save" not in said


def test_a_save_that_is_killed_before_any_of_its_moments_loses_nothing(tmp_path: Path) -> None:
    counts = [int(line.split()[0]) for line in run("kill.sweep", tmp_path).splitlines()]
    assert len(counts) == 2 and min(counts) > 20


def test_saving_takes_less_memory_than_two_layers(tmp_path: Path) -> None:
    """With two of four layers' state on the device."""
    said = run("save_peak.run", tmp_path, "--layers", "4", "--width", "384", "--residency", "2")
    assert len(re.findall(r"host memory grew by [0-9.]+ MiB", said)) == 3


@pytest.fixture(params=["a new tag", "the same tag"])
def saved(request: Any, tmp_path: Path) -> Any:
    """An engine with one checkpoint, about to save another: (engine, folder, tag of the next, state of the first)."""
    setup = Setup()
    with engine_of(setup) as engine:
        train(engine, setup, range(1))
        engine.save_checkpoint(tmp_path, tag="first")
        before = state_of(engine)
        train(engine, setup, range(1, 2))
        yield engine, tmp_path, ("second" if request.param == "a new tag" else "first"), before


def assert_only_the_first_is_there(folder: Path, before: dict[str, Any]) -> None:
    assert sorted(child.name for child in folder.iterdir()) == ["first", "latest", *SCRIPTS]
    assert len(list((folder / "first").glob("data-*"))) == 1
    with engine_of(Setup(), fresh=False) as engine:
        assert engine.load_checkpoint(folder)[0] == str(folder / "first")
        assert_equal(state_of(engine), before)


@pytest.mark.parametrize("room_bytes", [0, 30_000, 200_000])
def test_a_full_disk_leaves_the_last_checkpoint(saved: Any, room_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, folder, tag, before = saved
    room = [room_bytes]
    write = tensor_files._NewFile.write

    def full(file: Any, content: memoryview) -> int:
        written = write(file, content[: room[0]])
        room[0] -= len(content)
        if room[0] < 0:
            room[0] = 0
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    monkeypatch.setattr(tensor_files._NewFile, "write", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*saved before is untouched"):
        engine.save_checkpoint(folder, tag=tag)
    monkeypatch.undo()

    assert_only_the_first_is_there(folder, before)
    engine.save_checkpoint(folder, tag=tag)  # the engine goes on
    assert (folder / "latest").read_text() == tag


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    setup = Setup()
    with engine_of(setup) as engine:
        with pytest.raises(
            CheckpointError, match=r"file/global_step0 could not be saved: .*(Not a directory|File exists)"
        ):
            engine.save_checkpoint(tmp_path / "file")
        with pytest.raises(ValueError, match="save_dir must be a non-empty string, got ''"):
            engine.save_checkpoint("")


def test_a_save_removes_what_killed_ones_left(tmp_path: Path) -> None:
    setup = Setup()
    with engine_of(setup) as engine:
        engine.save_checkpoint(tmp_path, tag="a")
        (tmp_path / ".saving-dead").mkdir()
        (tmp_path / ".saving-dead" / "half").write_bytes(b"x")
        (tmp_path / "a" / "data-dead").mkdir()
        (tmp_path / ".latest-new").write_text("b")
        engine.save_checkpoint(tmp_path, tag="b")
        assert sorted(child.name for child in tmp_path.iterdir()) == ["a", "b", "latest", *SCRIPTS]
        assert len(list((tmp_path / "a").iterdir())) == 2
        engine.load_checkpoint(tmp_path, tag="a")


def test_everything_is_on_disk_before_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename follows the fsync of every file and folder that it makes visible."""
    events: list[tuple[str, str]] = []
    for call in ("rename", "replace"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda a, b, real=real: (events.append(("rename", str(b))), real(a, b))[1])
    fsync = os.fsync

    def synced(handle: int) -> None:
        events.append(("fsync", str(Path(f"/proc/self/fd/{handle}").readlink())))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    setup = Setup()
    with engine_of(setup) as engine:
        engine.save_checkpoint(tmp_path, tag="t")
    first = events.index(("rename", str(tmp_path / "t")))
    before = [Path(path).name for kind, path in events[:first] if kind == "fsync"]
    files = {child.name for child in (tmp_path / "t").rglob("*") if child.is_file()}
    data = next((tmp_path / "t").glob("data-*")).name
    assert files <= set(before)
    assert data in before
    assert any(name.startswith(".saving-") for name in before)
    assert events[first + 1] == ("fsync", str(tmp_path))
    assert events[-2:] == [("rename", str(tmp_path / "latest")), ("fsync", str(tmp_path))]
