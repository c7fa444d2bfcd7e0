"""Kill a save before each of its file operations in turn: the previous checkpoint must survive every time.

    python -m benchmarks.kill.sweep

Saves a small state over a tag that exists, and under a new one, once for every write, fsync, rename and unlink that such
a save is made of (a new process each time). After each kill the tag is the old checkpoint or the new one, whole, `latest`
names one that is there, and the next save removes what was left.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

import torch

from benchmarks.kill.forked import Forked, Moments, Tell
from benchmarks.kill.run import check_tidy, warm_up
from harmony_ds.checkpoint import Progress, Snapshot, folders, read_any, write
from harmony_ds.checkpoint.snapshot import ParameterGroup, SavedOptimizer, TensorSource


def state(number: int) -> Snapshot:
    """Make a state that is told apart by its number."""
    values = {f"layer{i}": TensorSource.from_tensor(torch.full((40, 30), float(number + i))) for i in range(4)}
    optimizer = SavedOptimizer(
        "SGD", (ParameterGroup(tuple(values), {"lr": 0.1}),), {n: {"m": v} for n, v in values.items()}
    )
    return Snapshot(Progress(number, number, 0), values, {}, optimizer=optimizer)


def number_in(folder: Path) -> int:
    """Return the number of the state that is there; raise if it is not whole."""
    found = read_any(folder)
    number = found.progress.global_steps
    assert all((source.read() == number + i).all() for i, source in enumerate(found.parameters.values()))
    return number


def save(folder: Path, tag: str, fatal: int, tell: Tell) -> None:
    """Save state 2 in a process that ends before the moment `fatal`."""
    moments = Moments(folder, fatal)
    write(state(2), folder, tag)
    tell({"moments": moments.count})


def main() -> None:
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        for tag, what in (("first", "over a tag that exists"), ("second", "under a new tag")):
            folder, killed = Path(scratch) / tag, True
            for fatal in count(1):
                write(state(1), folder, "first")
                ended = Forked(partial(save, folder, tag, fatal)).end()
                killed = ended.killed
                assert killed or ended.code == 0, ended
                newest = (folder / folders.LATEST).read_text()
                assert number_in(folder / newest) in (1, 2)
                assert number_in(folder / "first") in ((1, 2) if tag == "first" else (1,))
                assert not (folder / tag).exists() or number_in(folder / tag) in ((1, 2) if tag == "first" else (2,))
                assert killed or (newest, number_in(folder / tag)) == (tag, 2)
                write(state(3), folder, "later")
                check_tidy(folder)
                shutil.rmtree(folder)
                if not killed:
                    break
            print(f"{fatal - 1} kills of a save {what}: nothing was lost.")


if __name__ == "__main__":
    main()
