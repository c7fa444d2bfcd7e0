"""Is a checkpoint ever lost? Kills training runs (SIGKILL) at pseudo-random moments and lets them go on.

    python benchmarks/kill/run.py --kills 200 --seed 7

A run trains a small network with dropout, clipping and momentum, and saves after every step: under a tag of its own, and
over the tag "again". Half of the kills are the process's own, before the n-th of its moments (a write, an fsync, a
rename, an unlink, a task of a step): all moments have the same chance, and a seed gives the same ones again. The other
half come from outside after a random time. After every kill: what had been saved is there and whole. Every run that
goes on must give, step by step, the losses, weights, optimizer state and generators of an undisturbed run.

Processes are forked from one that has imported torch, so a kill costs a fraction of a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds
from harmony_ds.checkpoint import folders, read_any, tensor_files

STEPS = 6
MICRO_BATCHES = 2
AGAIN = "again"
_PART_BYTES = 1 << 15  # files are torn between parts of this size


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 96)
        self.down = nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.up(self.norm(x))), 0.2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def train(folder: Path, told: Callable[[dict[str, Any]], None], moment: Callable[[], None]) -> None:
    """Run one process: resume from `folder`, and end after `STEPS` steps."""
    engine = engine_from(folder, clip=0.5)
    engine.on_progress(lambda *_: moment())
    while engine.global_steps < STEPS:
        step = engine.global_steps
        batches = [(batch(step * MICRO_BATCHES + i),) for i in range(MICRO_BATCHES)]
        loss = engine.train_batch(iter(batches)).item()
        told({"step": step + 1, "loss": loss, "state": digest(engine)})
        engine.save_checkpoint(folder, client_state={"loss": loss})
        told({"saved": step + 1})
        engine.save_checkpoint(folder, tag=AGAIN, save_latest=False)
        told({"again": step + 1})
    told({"finished": 1})


def engine_from(folder: Path, clip: float, **harmony: Any) -> harmony_ds.HarmonyEngine:
    """Return an engine over the network, resumed from `folder`."""
    torch.manual_seed(1)
    model = Net()
    engine, *_ = harmony_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": clip,
            "harmony": {"device": "cpu", "pack_layers": 1, **harmony},
        },
    )
    if (folder / folders.LATEST).exists():
        engine.load_checkpoint(folder)
    return engine


def batch(index: int) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(100 + index))


def digest(engine: harmony_ds.HarmonyEngine) -> str:
    """Hash everything that later steps depend on."""
    tensors = [*engine.module.parameters(), torch.get_rng_state()]
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        tensors += engine.optimizer.state[parameter].values()
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


class Moments:
    """Counts what a process does in `folder`, and kills it before the chosen one."""

    def __init__(self, folder: Path, fatal: int | None) -> None:
        self.count = 0
        self._folder = str(folder)
        self._fatal = fatal

    def __call__(self) -> None:
        self.count += 1
        if self.count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Count, for the rest of this process."""
        write = tensor_files._NewFile.write
        fsync = os.fsync

        def counted_write(file: Any, content: memoryview) -> None:
            for start in range(0, len(content), _PART_BYTES):
                self()
                write(file, content[start : start + _PART_BYTES])

        def counted_fsync(handle: int) -> None:
            self()
            fsync(handle)

        tensor_files._NewFile.write = counted_write  # type: ignore[method-assign]
        os.fsync = counted_fsync
        sys.addaudithook(self._audited)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        named = event in ("open", "os.rename", "os.mkdir") and any(self._folder in str(a) for a in arguments)
        if named or event in ("os.remove", "os.rmdir"):  # these get names relative to an open folder
            self()


@dataclass(frozen=True)
class Life:
    """Result of a process: messages, the number of its moments (if it was not killed), and its duration."""

    told: list[dict[str, Any]]
    moments: int
    seconds: float

    def last(self, what: str) -> int:
        return max((line[what] for line in self.told if what in line), default=0)


def live(folder: Path, fatal: int | None = None, delay: float | None = None) -> Life:
    """Fork a process that trains; it ends by itself, before moment `fatal`, or after `delay` seconds."""
    read_end, write_end = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        _be(folder, fatal, write_end)
    os.close(write_end)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read_end) as pipe:
        lines = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not killed and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"a process failed: {lines[-1] if lines else status}")
    moments = next((line["moments"] for line in lines if "moments" in line), 0)
    return Life(lines, moments, time.perf_counter() - began)


def _be(folder: Path, fatal: int | None, write_end: int) -> None:
    def told(what: dict[str, Any]) -> None:
        os.write(write_end, (json.dumps(what) + "\n").encode())

    code = 1
    try:
        moments = Moments(folder, fatal)
        moments.watch()
        train(folder, told, moments)
        told({"moments": moments.count})
        code = 0
    except BaseException as error:  # noqa: BLE001 - told to the parent
        told({"error": repr(error)})
    finally:
        os._exit(code)


def fates(seed: int, whole: Life) -> Iterator[dict[str, Any]]:
    """Yield how each process ends."""
    chance = random.Random(seed)
    while True:
        yield {"fatal": chance.randint(1, whole.moments)}
        yield {"delay": chance.uniform(0.0, whole.seconds)}


def check_whole(folder: Path, life: Life, kept: dict[str, int]) -> None:
    """Check that everything that had been saved when the process was killed is there, and whole."""
    for what in ("saved", "again"):
        kept[what] = max(kept[what], life.last(what))
    if kept["saved"]:
        latest = read_any(folder / (folder / folders.LATEST).read_text())
        assert latest.progress.global_steps >= kept["saved"], (latest.progress, kept)
        for step in range(1, kept["saved"] + 1):
            assert read_any(folder / f"global_step{step}").progress.global_steps == step
    if kept["again"]:
        assert read_any(folder / AGAIN).progress.global_steps >= kept["again"]


def check_same(life: Life, expected: dict[int, dict[str, Any]]) -> int:
    """Check that every step reported is the uninterrupted run's; return how many there were."""
    steps = [line for line in life.told if "step" in line]
    for line in steps:
        assert line == expected[line["step"]], (line, expected[line["step"]])
    return len(steps)


def check_tidy(folder: Path) -> None:
    """Check that a save that ran to its end has removed the rests of killed ones."""
    assert not list(folder.glob(".*")), list(folder.glob(".*"))
    for tag in (child for child in folder.iterdir() if child.is_dir()):
        assert len(list(tag.glob("data-*"))) == 1, tag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        whole = live(Path(scratch) / "whole")
        expected = {line["step"]: line for line in whole.told if "step" in line}
        assert len(expected) == STEPS
        tally = {"kills": 0, "runs": 0, "steps": 0, "in a save": 0}
        ways = fates(options.seed, whole)
        while tally["kills"] < options.kills:
            _one_run(Path(scratch) / f"run{tally['runs']}", ways, options.kills, expected, tally)
    print(
        f"{tally['kills']} kills, {tally['in a save']} of them during a save, over {tally['runs']} runs: every "
        f"checkpoint that had been saved was whole, and all {tally['steps']} steps were bit for bit those of an "
        f"undisturbed run ({whole.moments} moments)."
    )


def _warm_up() -> None:
    """Import, once for all processes, what the first engine and the first optimizer import."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    assert harmony_ds.HarmonyEngine


def _one_run(folder: Path, ways: Iterator[dict[str, Any]], kills: int, expected: Any, tally: dict[str, int]) -> None:
    """Kill the processes of one run until one lives to the end."""
    kept = {"saved": 0, "again": 0}
    folder.mkdir()
    while True:
        life = live(folder, **(next(ways) if tally["kills"] < kills else {}))
        tally["steps"] += check_same(life, expected)
        check_whole(folder, life, kept)
        if life.last("finished"):
            break
        tally["kills"] += 1
        tally["in a save"] += bool(life.told) and "again" not in life.told[-1]
    tally["runs"] += 1
    if life.last("saved"):
        check_tidy(folder)


if __name__ == "__main__":
    main()
