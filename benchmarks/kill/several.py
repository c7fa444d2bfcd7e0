"""Do all processes of a training end well when one fails? Breaks one at every kind of task, and resumes them all.

    OMP_NUM_THREADS=1 python benchmarks/kill/several.py --out benchmarks/results/kill-several.json

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
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - imported once for all processes
import torch
import torch.distributed as dist
from run import _warm_up, batch, digest, engine_from

from harmony_ds.checkpoint import folders, read_any
from harmony_ds.parallel import exchange as exchange_module
from harmony_ds.parallel.slots import GradientSlots
from harmony_ds.scheduler.plan import Task

SIZE = 3
WEIGHTS = "whole"
REDUCE = "device"
STEPS = 8
MICRO_BATCHES = 2
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


@dataclass
class Ended:
    """Result of a process: messages, output, exit code, and the time of its end (by the clock that all share)."""

    told: list[dict[str, Any]]
    printed: str
    code: int
    at: float

    def find(self, key: str) -> Any:
        return next((line[key] for line in self.told if key in line), None)


def train(folder: Path, rank: int, fault: Fault | None, clip: float, told: Callable[[dict[str, Any]], None]) -> None:
    """Resume from `folder`, and end after `STEPS` steps, or by `fault`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(SIZE), LOCAL_WORLD_SIZE=str(SIZE))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # for other libraries; the processes have met
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{os.getppid()}", rank=rank, world_size=SIZE)
    engine = engine_from(folder, clip, profile=str(folder.parent / f"profile{clip}"), weights=WEIGHTS, reduce=REDUCE)
    begin = engine.global_steps
    tasks: list[tuple[int, str]] = []

    def here(where: str) -> None:
        if fault is not None and (fault.rank, fault.where, begin + 1) == (rank, where, engine.global_steps):
            told({"fault": time.monotonic()})
            break_process(fault.what)

    def noted(done: int, _: int, task: Task) -> None:
        if engine.global_steps == begin:
            tasks.append((done, task.kind.value))
            return
        for which, kinds in (("first", places(tasks)[0]), ("last", places(tasks)[1])):
            if kinds.get(task.kind.value) == done:
                here(f"{task.kind.value} {which}")

    _announce_exchanges(here)
    engine.on_progress(noted)
    while engine.global_steps < STEPS:
        step = engine.global_steps
        numbers = [(step * MICRO_BATCHES + i) * SIZE + rank for i in range(MICRO_BATCHES)]
        loss = engine.train_batch(iter([(batch(number),) for number in numbers])).item()
        if step == begin:
            told({"tasks": sorted({kind for _, kind in tasks})})
        engine.finish_updates()
        told({"step": step + 1, "loss": loss, "state": digest(engine)})
        here("save")
        engine.save_checkpoint(folder)
    told({"finished": 1})
    engine.destroy()


def _announce_exchanges(here: Callable[[str], None]) -> None:
    """Call `here` before each exchange, from now on."""
    for module, name in ((dist, "all_to_all_single"), (exchange_module, "_all_gather"), (GradientSlots, "others")):
        setattr(module, name, _announced(getattr(module, name), here))


def _announced(function: Callable[..., Any], here: Callable[[str], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        here("exchange")
        return function(*args, **kwargs)

    return announced


def places(tasks: list[tuple[int, str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of the first task in a step, and of the last, by kind."""
    return {kind: done for done, kind in reversed(tasks)}, {kind: done for done, kind in tasks}


def break_process(what: str) -> None:
    """Break this process."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exception":
        raise RuntimeError("it has burst")
    else:
        for name in [link.name for link in Path("/proc/self/fd").iterdir()]:
            try:
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the listing's own descriptor, or a socket that is not connected


def live(folder: Path, clip: float, fault: Fault | None = None) -> list[Ended]:
    """Fork the processes of a training, and wait for them; one that is left after the limit is an error."""
    folder.mkdir(exist_ok=True)
    (folder / f"store{os.getpid()}").unlink(missing_ok=True)
    children: dict[int, int] = {}
    pipes: list[int] = []
    for rank in range(SIZE):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            _be(folder, rank, fault, clip, write_end)
        os.close(write_end)
        pipes.append(read_end)
        children[child] = rank
    codes: dict[int, int] = {}
    at: dict[int, float] = {}
    began = time.monotonic()
    late = False
    while len(codes) < SIZE:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children[pid]], at[children[pid]] = os.waitstatus_to_exitcode(status), time.monotonic()
            continue
        late = time.monotonic() - began > 2 * LIMIT_S
        if late:
            for child, rank in children.items():
                if rank not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    ended = []
    for rank, pipe in enumerate(pipes):
        with os.fdopen(pipe) as lines:
            told = [json.loads(line) for line in lines.read().splitlines()]
        ended.append(Ended(told, (folder / f"printed{rank}").read_text(), codes[rank], at[rank]))
    assert not late, (fault, [(one.code, one.told[-1:], one.printed[-2000:]) for one in ended])
    return ended


def _be(folder: Path, rank: int, fault: Fault | None, clip: float, write_end: int) -> None:
    def told(what: dict[str, Any]) -> None:
        os.write(write_end, (json.dumps(what) + "\n").encode())

    code = 1
    try:
        printed = os.open(folder / f"printed{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        train(folder, rank, fault, clip, told)
        code = 0
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        told({"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def check_ended(fault: Fault, ended: list[Ended]) -> tuple[float, list[str]]:
    """Check that all ended in time and name the rank that failed; return the seconds of the last, and how each ended."""
    began = ended[fault.rank].find("fault")
    assert began is not None, (fault, "did not happen", [one.told[-1] for one in ended])
    how = []
    for rank, one in enumerate(ended):
        assert one.code != 0 and one.find("finished") is None, (fault, rank, one)
        if rank == fault.rank:
            continue
        said = one.find("error") or one.printed
        assert one.at - began < LIMIT_S, (fault, rank, one.at - began)
        # A connection has two ends: what broke is named, and by some the rank that noticed it first.
        named = f"rank {fault.rank}" in said or (fault.what == "sockets" and "Connection" in said)
        assert named, (fault, rank, one.code, said[-2000:])
        how.append(said.split(":")[0] if one.find("error") else f"exit code {one.code}")
    return round(max(one.at - began for rank, one in enumerate(ended) if rank != fault.rank), 2), how


def shared_memory() -> set[str]:
    """Return files in /dev/shm, except those of multiprocessing and of DeepSpeed, which no training here uses."""
    return {file.name for file in Path("/dev/shm").iterdir() if not file.name.startswith(("sem.mp-", "deepspeed_"))}


def saved_steps(folder: Path) -> int:
    """Return the number of steps in the last checkpoint of a run."""
    latest = folder / folders.LATEST
    return read_any(folder / latest.read_text()).progress.global_steps if latest.exists() else 0


def check_same(ended: list[Ended], expected: list[dict[int, Any]]) -> int:
    """Check that every step reported is that of the unbroken run; return how many there were."""
    count = 0
    for rank, one in enumerate(ended):
        for line in one.told:
            if "step" in line:
                assert line == expected[rank][line["step"]], (rank, line, expected[rank][line["step"]])
                count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, help="so many of them, chosen by chance (default: all)")
    parser.add_argument("--skip", type=int, default=0, help="leaves the first so many to another run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=SIZE)
    parser.add_argument("--weights", choices=("whole", "share"), default="whole", help="what each process swaps in")
    parser.add_argument("--reduce", choices=("device", "host"), default="device", help="where gradients are added up")
    parser.add_argument("--out", type=Path, help="a file (JSON) for what was seen")
    options = parser.parse_args()
    globals().update(SIZE=options.processes, WEIGHTS=options.weights, REDUCE=options.reduce)
    torch.set_num_threads(1)
    _warm_up()
    shared = shared_memory()
    with tempfile.TemporaryDirectory() as scratch:
        expected: dict[float, list[dict[int, Any]]] = {}
        faults: list[Fault] = []
        for clip in CLIPS:
            whole = live(Path(scratch) / f"whole{clip}", clip)
            assert all(one.find("finished") for one in whole), [one.told[-1] for one in whole]
            expected[clip] = [{line["step"]: line for line in one.told if "step" in line} for one in whole]
            where = [f"{kind} {which}" for kind in whole[0].find("tasks") for which in ("first", "last")]
            faults += [
                Fault(what, place, rank, clip)
                for place in (*where, "exchange", "save")
                for rank in range(SIZE)
                for what in FAULTS
            ]
        random.Random(options.seed).shuffle(faults)
        rows, steps = [], 0
        folders_of = {clip: Path(scratch) / f"run{clip}" for clip in CLIPS}
        for number, fault in enumerate(faults[options.skip :][: options.faults]):
            folder = folders_of[fault.clip]
            if saved_steps(folder) > STEPS - 2:
                folder = folders_of[fault.clip] = Path(scratch) / f"run{number}"
            row: dict[str, Any] = {**asdict(fault), "seconds": None, "others": [], "wrong": None}
            try:
                ended = live(folder, fault.clip, fault)
                row["seconds"], row["others"] = check_ended(fault, ended)
                left = shared_memory() - shared
                assert not left, left
                steps += check_same(ended, expected[fault.clip])
            except AssertionError as error:
                row["wrong"] = str(error)
                print(f"{fault}: {error}", file=sys.stderr, flush=True)
            rows.append(row)
            if options.out:
                options.out.write_text(
                    json.dumps({"processes": SIZE, "weights": WEIGHTS, "reduce": REDUCE, "faults": rows}) + "\n"
                )
    for what in FAULTS:
        times = [row["seconds"] for row in rows if row["what"] == what and row["wrong"] is None]
        ends = Counter(end for row in rows if row["what"] == what for end in row["others"])
        if times:
            print(
                f"{what:>9}: {len(times)}, others end after {statistics.median(times):.1f} s, at most {max(times):.1f} s"
            )
            print(" " * 11 + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    wrong = sum(row["wrong"] is not None for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} of {len(rows)} faults ended otherwise than they should")
    print(
        f"{len(rows)} faults: all ended, the rank was named, nothing was left, and all {steps} steps were bit for bit "
        "those of the unbroken run."
    )


if __name__ == "__main__":
    main()
