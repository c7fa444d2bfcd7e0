"""Kills a save before each of its moments, one after another: none may lose the checkpoint that was there.

    python benchmarks/kill/sweep.py

Saves a small state over a tag that exists, and under a new one, once for every write, fsync, rename and unlink that such
a save is made of (a new process each time). After each kill the tag is the old checkpoint or the new one, whole, `latest`
names one that is there, and the next save removes what was left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from run import Moments

from harmony_ds.checkpoint import Progress, Snapshot, folders, read_any, write
from harmony_ds.checkpoint.snapshot import OptimizerState, ParameterGroup, Source


def state(number: int) -> Snapshot:
    """Make a state that is told apart by its number."""
    values = {f"layer{i}": Source.of(torch.full((40, 30), float(number + i))) for i in range(4)}
    optimizer = OptimizerState(
        "SGD", (ParameterGroup(tuple(values), {"lr": 0.1}),), {n: {"m": v} for n, v in values.items()}
    )
    return Snapshot("sweep", Progress(number, number, 0), values, {}, optimizer=optimizer)


def number_in(folder: Path) -> int:
    """Return the number of the state that is there; raise if it is not whole."""
    found = read_any(folder)
    number = found.progress.global_steps
    for i, source in enumerate(found.parameters.values()):
        assert (source.read() == number + i).all()
    return number


def save(folder: Path, tag: str, fatal: int | None) -> int | None:
    """Save state 2 in a process that ends before moment `fatal`; return its moments, if it was not killed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            moments = Moments(folder, fatal)
            moments.watch()
            write(state(2), folder, tag)
            os.write(write_end, str(moments.count).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        count = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
    return int(count) if count else None


def sweep(scratch: Path, tag: str) -> int:
    """Kill a save under `tag` before each moment; return how many there are."""
    good = scratch / "good"
    write(state(1), good, "first")
    fatal = 0
    while True:
        fatal += 1
        folder = scratch / "run"
        shutil.copytree(good, folder)
        lived = save(folder, tag, fatal)
        newest = (folder / folders.LATEST).read_text()
        assert number_in(folder / newest) in (1, 2)
        assert number_in(folder / "first") in (1, 2)
        if tag != "first":
            assert number_in(folder / "first") == 1
            assert not (folder / tag).exists() or number_in(folder / tag) == 2
        if lived is not None:
            assert (newest, number_in(folder / tag)) == (tag, 2)
        write(state(3), folder, "later")
        assert not list(folder.glob(".*")), list(folder.glob(".*"))
        assert all(len(list(one.glob("data-*"))) == 1 for one in folder.iterdir() if one.is_dir())
        shutil.rmtree(folder)
        if lived is not None:
            shutil.rmtree(good)
            return fatal - 1


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for tag, what in (("first", "over a tag that exists"), ("second", "under a new tag")):
            print(f"{sweep(Path(scratch), tag)} kills of a save {what}: nothing was lost.")


if __name__ == "__main__":
    main()
