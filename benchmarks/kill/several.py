"""Do all processes of a training end well when one fails? Breaks one at every kind of task, and resumes them all.

    OMP_NUM_THREADS=1 python -m benchmarks.kill.several --out benchmarks/results/kill-several.json

Three processes train one small network, and save after every step. In the second step of their life one of them is
killed (SIGKILL), loses its connections, or raises an exception: after the first and the last task of
every kind, in the exchange of gradients, and where a save begins; each rank in its turn, with clipping and without. Then:

    all others have ended within the limit, with an error that names the rank
    no process of the training is left, and nothing in /dev/shm
    the next three, which go on from what was saved, take one step with the losses, weights, optimizer state and
    generators of an unbroken run, before one of them is broken in its turn
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import stat
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - imported once for all processes
import torch.distributed as dist

from benchmarks.kill.forked import Ended, Forked, Tell
from benchmarks.kill.run import MICRO_BATCHES, batch, check_same, digest, engine_from, saved_steps, steps_of, warm_up
from harmony_ds.distributed import exchange as exchange_module
from harmony_ds.distributed.slots import GradientSlots
from harmony_ds.scheduler.plan import Task

STEPS = 8
LIMIT_S = 20.0
FAULTS = ("kill", "sockets", "exception")
CLIPS = (0.0, 0.5)


@dataclass(frozen=True)
class Fault:
    """A failure of `rank` in its second step; `where`: after a task ("R last"), in an "exchange", or in a "save"."""

    what: str
    where: str
    rank: int
    clip: float


def train(trial: Trial, folder: Path, rank: int, clip: float, fault: Fault | None, tell: Tell) -> None:
    """Resume from `folder`, and end after `STEPS` steps, or by `fault`."""
    size = trial.processes
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # for other libraries; the processes have met
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{os.getppid()}", rank=rank, world_size=size)
    engine = engine_from(folder, clip, profile=str(folder.parent / f"profile{clip}"), **trial.harmony)
    begin = engine.global_steps
    first: dict[str, int] = {}  # by kind: the number of the first task in a step, and of the last
    last: dict[str, int] = {}

    def here(where: str) -> None:
        if fault is not None and (fault.rank, fault.where, begin + 1) == (rank, where, engine.global_steps):
            tell({"fault": time.monotonic()})
            break_process(fault.what)

    def noted(done: int, _: int, task: Task) -> None:
        kind = task.kind.value
        if engine.global_steps == begin:
            first.setdefault(kind, done)
            last[kind] = done
            return
        for which, places in (("first", first), ("last", last)):
            if places.get(kind) == done:
                here(f"{kind} {which}")

    for module, name in ((dist, "all_to_all_single"), (exchange_module, "_all_gather"), (GradientSlots, "wait_filled")):
        setattr(module, name, _announced(getattr(module, name), here))
    engine.on_progress(noted)
    while engine.global_steps < STEPS:
        step = engine.global_steps
        numbers = [(step * MICRO_BATCHES + i) * size + rank for i in range(MICRO_BATCHES)]
        loss = engine.train_batch(iter([(batch(number),) for number in numbers])).item()
        if step == begin:
            tell({"tasks": sorted(first)})
        engine.finish_updates()
        tell({"step": step + 1, "loss": loss, "state": digest(engine)})
        here("save")
        engine.save_checkpoint(folder)
    tell({"finished": 1})
    engine.destroy()


def _announced(function: Callable[..., Any], here: Callable[[str], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        here("exchange")
        return function(*args, **kwargs)

    return announced


def break_process(what: str) -> None:
    """Break this process."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exception":
        raise RuntimeError("it has burst")
    for name in [link.name for link in Path("/proc/self/fd").iterdir()]:
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the listing's own descriptor, or a socket that is not connected


def check_ended(fault: Fault, ended: list[Ended]) -> tuple[float, list[str]]:
    """Check that all ended in time and name the rank that failed; return the seconds of the last, and how each ended."""
    began = ended[fault.rank].last("fault")
    assert began is not None, (fault, "did not happen", [one.told[-1] for one in ended])
    assert all(one.code != 0 and not one.all("finished") for one in ended), (fault, ended)
    how = []
    others = [one for rank, one in enumerate(ended) if rank != fault.rank]
    for one in others:
        error = one.last("error")
        said = error or one.printed
        assert one.at - began < LIMIT_S, (fault, one.at - began, one)
        # A connection has two ends: what broke is named, and by some the rank that noticed it first.
        named = f"rank {fault.rank}" in said or (fault.what == "sockets" and "Connection" in said)
        assert named, (fault, one.code, said[-2000:])
        how.append(said.split(":")[0] if error else f"exit code {one.code}")
    return round(max(one.at - began for one in others), 2), how


def shared_memory() -> set[str]:
    """Return files in /dev/shm, except those of multiprocessing and of DeepSpeed, which no training here uses."""
    return {file.name for file in Path("/dev/shm").iterdir() if not file.name.startswith(("sem.mp-", "deepspeed_"))}


class Trial:
    """Faults one after the other, of trainings that go on where the one before was broken."""

    def __init__(self, processes: int, harmony: dict[str, str], scratch: Path) -> None:
        self.steps = 0
        self.faults: list[Fault] = []
        self.processes, self.harmony = processes, harmony
        self._scratch, self._shared = scratch, shared_memory()
        self._folders: dict[float, Path] = {}
        self._expected = {clip: self._unbroken(clip) for clip in CLIPS}

    def _unbroken(self, clip: float) -> list[dict[int, Any]]:
        """Return the steps of a training that nothing breaks, by rank, and note where it could be broken."""
        whole = self._live(self._scratch / f"whole{clip}", clip)
        assert all(one.last("finished") for one in whole), [one.told[-1] for one in whole]
        where = [f"{kind} {which}" for kind in whole[0].last("tasks") for which in ("first", "last")]
        for place, rank, what in product((*where, "exchange", "save"), range(self.processes), FAULTS):
            self.faults.append(Fault(what, place, rank, clip))
        self._folders[clip] = self._scratch / f"run{clip}"
        return [steps_of(one) for one in whole]

    def _live(self, folder: Path, clip: float, fault: Fault | None = None) -> list[Ended]:
        """Fork the processes of a training, and wait for them."""
        folder.mkdir(exist_ok=True)
        (folder / f"store{os.getpid()}").unlink(missing_ok=True)
        children = [Forked(partial(train, self, folder, rank, clip, fault)) for rank in range(self.processes)]
        with ThreadPoolExecutor(len(children)) as pool:
            return list(pool.map(lambda child: child.end(2 * LIMIT_S), children))

    def row(self, number: int, fault: Fault) -> dict[str, Any]:
        """Return what became of a fault."""
        if saved_steps(self._folders[fault.clip]) > STEPS - 2:
            self._folders[fault.clip] = self._scratch / f"run{number}"
        row: dict[str, Any] = {**asdict(fault), "seconds": None, "others": [], "wrong": None}
        try:
            ended = self._live(self._folders[fault.clip], fault.clip, fault)
            row["seconds"], row["others"] = check_ended(fault, ended)
            left = shared_memory() - self._shared
            assert not left, left
            both = zip(ended, self._expected[fault.clip], strict=True)
            self.steps += sum(check_same(one, expected) for one, expected in both)
        except AssertionError as error:
            row["wrong"] = str(error)
            print(f"{fault}: {error}", file=sys.stderr, flush=True)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="so many of them, chosen by chance (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--weights", choices=("whole", "share"), default="whole", help="what each process swaps in")
    parser.add_argument("--reduce", choices=("device", "host"), default="device", help="where gradients are added up")
    parser.add_argument("--out", type=Path, help="a file (JSON) for what was seen")
    options = parser.parse_args()
    harmony = {"weights": options.weights, "reduce": options.reduce}
    warm_up()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        trial = Trial(options.processes, harmony, Path(scratch))
        random.Random(options.seed).shuffle(trial.faults)
        for number, fault in enumerate(trial.faults[: options.faults]):
            rows.append(trial.row(number, fault))
            if options.out:
                options.out.write_text(json.dumps({"processes": options.processes, **harmony, "faults": rows}) + "\n")
    for what in FAULTS:
        right = [row for row in rows if row["what"] == what and row["wrong"] is None]
        times, ends = [row["seconds"] for row in right], Counter(end for row in right for end in row["others"])
        if times:
            print(f"{what:>9}: {len(times)}, the others end after {statistics.median(times)} s, at most {max(times)} s")
            print(" " * 11 + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    wrong = sum(row["wrong"] is not None for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} of {len(rows)} faults ended otherwise than they should")
    print(
        f"{len(rows)} faults: all ended, the rank was named, nothing was left, and all {trial.steps} steps were bit for "
        "bit those of the unbroken run."
    )


if __name__ == "__main__":
    main()
