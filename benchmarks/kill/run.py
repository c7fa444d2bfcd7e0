"""Is a checkpoint ever lost? Kills training runs (SIGKILL) at pseudo-random moments and lets them go on.

    python -m benchmarks.kill.run --kills 200 --seed 7

A run trains a small network with dropout, clipping and momentum, and saves after every step: under a tag of its own, and
over the tag "again". Half of the kills are the process's own, before the n-th of its moments (a write, an fsync, a
rename, an unlink, a task of a step): all moments have the same chance, and a seed gives the same ones again. The other
half come from outside after a random time. After every kill: what had been saved is there and whole. Every run that
goes on must give, step by step, the losses, weights, optimizer state and generators of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harmony_ds
from benchmarks.common import Stack
from benchmarks.kill.forked import LONG_S, Ended, Forked, Message, Moments, Tell
from harmony_ds.checkpoint import folders, read_any

STEPS = 6
MICRO_BATCHES = 2
AGAIN = "again"
WIDTH = 48


def train(folder: Path, fatal: int | None, tell: Tell) -> None:
    """Run one process: resume from `folder`, and end after `STEPS` steps or before the moment `fatal`."""
    moments = Moments(folder, fatal)
    engine = engine_from(folder, clip=0.5)
    engine.on_progress(lambda *_: moments())
    while engine.global_steps < STEPS:
        step = engine.global_steps
        batches = [(batch(step * MICRO_BATCHES + i),) for i in range(MICRO_BATCHES)]
        loss = engine.train_batch(iter(batches)).item()
        tell({"step": step + 1, "loss": loss, "state": digest(engine)})
        engine.save_checkpoint(folder, client_state={"loss": loss})
        tell({"saved": step + 1})
        engine.save_checkpoint(folder, tag=AGAIN, save_latest=False)
        tell({"again": step + 1})
    tell({"moments": moments.count})


def engine_from(folder: Path, clip: float, **harmony: Any) -> harmony_ds.HarmonyEngine:
    """Return an engine over the network, resumed from `folder`."""
    torch.manual_seed(1)
    model = Stack(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Tanh(), nn.Dropout(0.2), nn.Linear(96, WIDTH))
        for _ in range(4)
    )
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
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 + index))


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


def check_whole(folder: Path, ended: Ended, kept: Message) -> None:
    """Check that everything that had been saved when the process was killed is there, and whole."""
    for what in kept:
        kept[what] = ended.last(what) or kept[what]
    if kept["saved"]:
        assert saved_steps(folder) >= kept["saved"], kept
        for step in range(1, kept["saved"] + 1):
            assert read_any(folder / f"global_step{step}").progress.global_steps == step
    if kept["again"]:
        assert read_any(folder / AGAIN).progress.global_steps >= kept["again"]


def saved_steps(folder: Path) -> int:
    """Return the number of steps in the last checkpoint of a run."""
    latest = folder / folders.LATEST
    return read_any(folder / latest.read_text()).progress.global_steps if latest.exists() else 0


def check_same(ended: Ended, expected: dict[int, Message]) -> int:
    """Check that every step reported is the undisturbed run's; return how many there were."""
    steps = ended.all("step")
    for line in steps:
        assert line == expected[line["step"]], (line, expected[line["step"]])
    return len(steps)


def steps_of(ended: Ended) -> dict[int, Message]:
    return {line["step"]: line for line in ended.all("step")}


def check_tidy(folder: Path) -> None:
    """Check that a save that ran to its end has removed the rests of killed ones."""
    assert not list(folder.glob(".*")), list(folder.glob(".*"))
    assert all(len(list(tag.glob("data-*"))) == 1 for tag in folder.iterdir() if tag.is_dir())


def warm_up() -> None:
    """Import, once for all processes, what the first engine and the first optimizer import."""
    torch.set_num_threads(1)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    assert harmony_ds.HarmonyEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warm_up()
    tally = Counter(kills=0)
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.monotonic()
        whole = Forked(partial(train, Path(scratch) / "whole", None)).end()
        expected, chance = steps_of(whole), random.Random(options.seed)
        assert len(expected) == STEPS, whole
        moments, seconds = whole.last("moments"), whole.at - begin
        ways = _by_chance(chance, moments, seconds)
        while tally["kills"] < options.kills:
            folder, kept = Path(scratch) / f"run{tally['runs']}", {"saved": 0, "again": 0}
            folder.mkdir()
            killed = True
            while killed:
                fatal, after_s = next(ways) if tally["kills"] < options.kills else (None, LONG_S)
                ended = Forked(partial(train, folder, fatal)).end(after_s)
                killed = ended.killed
                assert killed or ended.code == 0, ended
                tally["steps"] += check_same(ended, expected)
                check_whole(folder, ended, kept)
                tally["kills"] += killed
                tally["in a save"] += killed and bool(ended.told) and "again" not in ended.told[-1]
            tally["runs"] += 1
            if ended.all("again"):  # not where the last kill came after the last step
                check_tidy(folder)
    print(
        f"{tally['kills']} kills, {tally['in a save']} of them during a save, over {tally['runs']} runs: every "
        f"checkpoint that had been saved was whole, and all {tally['steps']} steps were bit for bit those of an "
        f"undisturbed run ({moments} moments)."
    )


def _by_chance(chance: random.Random, moments: int, seconds: float) -> Iterator[tuple[int | None, float]]:
    """Yield how each process ends: before which of its moments, or after so many seconds."""
    while True:
        yield chance.randint(1, moments), LONG_S
        yield None, chance.uniform(0.0, seconds)


if __name__ == "__main__":
    main()
