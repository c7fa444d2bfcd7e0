"""Does anybody wait for ever? Breaks one of several processes at pseudo-random tasks, and looks at the others.

    python benchmarks/kill/several.py --faults 200 --seed 7

Two or three processes train a small network, saving after every step. At a task drawn at random (of any kind, in any
step after the first) one of them

    kill     is killed (SIGKILL)
    stop     is stopped (SIGSTOP); a process counts as stopped here after 2 s without a sign of life, not 60
    error    raises an exception
    socket   closes all its sockets: its connections to the others are gone

The others have to end: with `PeerFailedError`, the exception that torch's collective raises, or the exit code of who was
left in an exchange; within the limit; naming the rank where it can be known. No process and no shared memory may be left.
Then the training goes on from its last checkpoint, in as many new processes, and has to end with the weights of one that
nobody broke.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent.parent / "results" / "faults-several-processes.json"
STEPS, MICRO_BATCHES = 4, 2
LIMIT_S = 30.0
KINDS = ("kill", "stop", "error", "socket")
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Fault:
    """What happens to rank `rank` of `size` behind task number `task` of step `step` (a share of its tasks)."""

    kind: str
    size: int
    rank: int
    step: int
    task: float
    clipping: bool


@dataclass(frozen=True)
class Seen:
    """What became of it: `at`, the task it happened at; by rank, how the others ended; until the last of them had."""

    fault: Fault
    at: str
    others: dict[int, str]
    seconds: float
    named: bool
    left: int
    same_bits: bool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def train(folder: str, clipping: bool, fault: Fault | None) -> dict[str, Tensor]:
    """In one of several processes: from the last checkpoint in `folder`, if there is one, to the end. Its weights."""
    import torch.distributed as dist

    import harmony_ds
    from harmony_ds.parallel import heart

    heart.SILENCE_S = 2.0
    torch.manual_seed(1)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.1 if clipping else 0.0,
        "harmony": {"device": "cpu", "seed": 3, "pack_layers": 1},
    }
    engine, *_ = harmony_ds.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.load_checkpoint(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(engine.global_steps, STEPS):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(MICRO_BATCHES * size, 2, 24, generator=generator)
        if fault is not None and fault.step == step and fault.rank == rank:
            _break(engine, fault, folder)
        engine.train_batch([(data[index * size + rank],) for index in range(MICRO_BATCHES)])
        engine.save_checkpoint(folder)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return weights


def _break(engine: Any, fault: Fault, folder: str) -> None:
    def told(done: int, total: int, task: object) -> None:
        if done - 1 != int(fault.task * total):
            return
        (Path(folder) / "at").write_text(str(task), encoding="utf-8")
        if fault.kind == "error":
            raise RuntimeError("a fault that was asked for")
        if fault.kind == "socket":
            _close_sockets()
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    engine.on_progress(told)


def _close_sockets() -> None:
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "socket:" in str(link.readlink()):
                open_socket = socket.socket(fileno=os.dup(int(link.name)))
                with suppress(OSError):  # not one that is connected
                    if open_socket.family in (socket.AF_INET, socket.AF_INET6):
                        open_socket.shutdown(socket.SHUT_RDWR)
                open_socket.close()


def _process(pipe: Connection, rank: int, size: int, meeting: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        pipe.send_bytes(pickle.dumps(("", train(*arguments))))
    except BaseException as error:  # noqa: BLE001 - how it ended
        pipe.send_bytes(pickle.dumps((f"{type(error).__name__}: {error}", None)))
    pipe.close()
    os._exit(0)


def run(size: int, folder: str, clipping: bool, fault: Fault | None) -> tuple[dict[int, str], list[Any], float, int]:
    """How each rank ended that was not stopped or killed; their results; seconds until the last had ended; what is left."""
    pipes: dict[Connection, int] = {}
    children = []
    meeting = tempfile.mktemp(dir=folder)
    for rank in range(size):
        here, there = _context.Pipe(duplex=False)
        child = _context.Process(target=_process, args=(there, rank, size, meeting, (folder, clipping, fault)))
        child.start()
        there.close()
        children.append(child)
        pipes[here] = rank
    ends, results, broken_at = {}, [None] * size, None
    mark = Path(folder) / "at"
    waiting = dict(pipes)
    while waiting and not (fault and fault.kind == "stop" and set(waiting.values()) == {fault.rank}):
        if broken_at is None and fault is not None and mark.exists():
            broken_at = time.monotonic()
        if broken_at is not None and time.monotonic() - broken_at > LIMIT_S:
            break
        for pipe in wait(list(waiting), timeout=0.02):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ends[rank], results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                children[rank].join(10)
                ends[rank] = f"exit code {children[rank].exitcode}"
    seconds = 0.0 if broken_at is None else time.monotonic() - broken_at
    for rank in waiting.values():
        if fault is None or rank != fault.rank:
            ends[rank] = "still waits"
    pids = [child.pid for child in children]
    for child in children:
        child.kill()
        child.join()
    left = sum(Path(f"/proc/{pid}").exists() for pid in pids) + _shared_files()
    return ends, results, seconds, left


def _shared_files() -> int:
    """Shared memory of an engine that any process still has open."""
    count = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            count += "memfd:harmony_ds" in str(link.readlink())
    return count


def try_fault(fault: Fault, wanted: dict[str, Tensor]) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        ends, _, seconds, left = run(fault.size, folder, fault.clipping, fault)
        mark = Path(folder) / "at"
        at = mark.read_text(encoding="utf-8") if mark.exists() else "never"
        mark.unlink(missing_ok=True)
        others = {rank: end for rank, end in ends.items() if rank != fault.rank}
        named = all(re.search(rf"rank {fault.rank}\b|exit code 75", end) for end in others.values())
        again, results, _, _ = run(fault.size, folder, fault.clipping, None)
        same = not any(again.values()) and all(
            torch.equal(value, wanted[name]) for result in results for name, value in result.items()
        )
    return Seen(fault, at, others, seconds, named, left, same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    _context.set_forkserver_preload(["torch", "deepspeed", "harmony_ds"])
    draw = random.Random(arguments.seed)
    wanted = {}
    for size in (2, 3):
        for clipping in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                wanted[size, clipping] = run(size, folder, clipping, None)[1][0]
    began, seen = time.monotonic(), []
    for number in range(arguments.faults):
        size = draw.choice((2, 3))
        kind, step = KINDS[number % len(KINDS)], draw.randrange(1, STEPS)
        fault = Fault(kind, size, draw.randrange(size), step, draw.random(), draw.random() < 0.5)
        one = try_fault(fault, wanted[fault.size, fault.clipping])
        seen.append(one)
        bad = one.at == "never" or one.left or not one.same_bits or "still waits" in one.others.values()
        if bad or not one.named:
            print(f"{'WRONG' if bad else 'not named'}: {one}", flush=True)
        if number % 20 == 19:
            print(f"{number + 1} faults, {time.monotonic() - began:.0f} s", flush=True)
    summary = summarized(seen)
    print(json.dumps(summary, indent=1))
    content = {"command": f"several.py --faults {arguments.faults} --seed {arguments.seed}", "torch": torch.__version__}
    content |= {"summary": summary, "faults": [asdict(one) for one in seen]}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(bool(summary["wrong"]))


def summarized(seen: list[Seen]) -> dict[str, Any]:
    ended = [one for one in seen if "still waits" not in one.others.values()]
    return {
        "faults": len(seen),
        "by kind": dict(Counter(one.fault.kind for one in seen)),
        "kinds of tasks": dict(Counter(one.at[0] for one in seen)),
        "all others ended": len(ended),
        "seconds until they had": {
            kind: {"most": max(times), "median": sorted(times)[len(times) // 2]}
            for kind in KINDS
            if (times := [one.seconds for one in ended if one.fault.kind == kind])
        },
        "rank named": sum(one.named for one in seen),
        "something left": sum(one.left > 0 for one in seen),
        "same bits after going on": sum(one.same_bits for one in seen),
        "wrong": sum(
            one.at == "never" or one.left > 0 or not one.same_bits or "still waits" in one.others.values()
            for one in seen
        ),
    }


if __name__ == "__main__":
    raise SystemExit(main())
