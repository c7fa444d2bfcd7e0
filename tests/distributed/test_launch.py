"""Under torchrun: a single-device script on several devices, shared memory, and nothing left over afterwards."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import harmony_ds
from tests.distributed.processes import run

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(size: int, script: Path, *arguments: str, restarts: int = 0) -> list[str]:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(size)]
    return [*launcher, "--max-restarts", str(restarts), "--master_port", str(port), str(script), *arguments]


def run_under_torchrun(script: Path, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = torchrun(2, script, *arguments, restarts=restarts)
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT, check=False)


ENGINE = """
import os, signal, sys, time, torch, harmony_ds
from pathlib import Path
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "harmony": {"device": "cpu"}}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = harmony_ds.initialize(model=model, optimizer=optimizer, config=config)
"""
WITHOUT_CPU = (
    "import torch\ntorch.distributed.init_process_group('cuda:gloo')"  # as accelerate makes one of NCCL's alone
)
HANGS = """
os.write(1, f"pid {os.getpid()} {engine.global_rank};\\n".encode())
end = time.time() + 120
while time.time() < end:
    engine.train_batch([(torch.ones(2, 8),)] * 2, lambda out: out.sum())
"""


def test_a_killed_process_ends_the_others_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(WITHOUT_CPU + ENGINE + HANGS)
    pipe = subprocess.PIPE
    with subprocess.Popen(torchrun(3, script), stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        pids: dict[int, int] = {}
        while len(pids) < 3:
            line = launcher.stdout.readline()
            assert line, "they have ended"
            pids |= {int(rank): int(pid) for pid, rank in re.findall(r"pid (\d+) (\d);", line)}
        before = shared_files()
        time.sleep(1)
        os.kill(pids[1], signal.SIGKILL)
        told = launcher.communicate(timeout=200)[1]
        assert launcher.returncode != 0
    assert before >= 1 and shared_files(pids.values()) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert "rank 1" in told.lower() or "rank      : 1" in told


RESTARTS = """
folder, killed = Path(sys.argv[1]), sys.argv[2] == "killed"
engine.load_checkpoint(folder)
where = engine.global_steps
losses = []

def killed_in_a_step(done, total, task):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if killed and first and engine.global_rank == 1 and engine.global_steps == 3 and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

engine.on_progress(killed_in_a_step)
while engine.global_steps < 6:
    seeds = [(engine.global_steps * 2 + i) * engine.world_size + engine.global_rank for i in range(2)]
    batches = [(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)),) for seed in seeds]
    losses.append(engine.train_batch(batches, lambda out: out.square().mean()).item())
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(folder)
torch.save((where, losses, model.state_dict(), optimizer.state_dict()), folder / f"end{engine.global_rank}.pt")
"""


def test_a_restarted_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    script = tmp_path / "restarts.py"
    script.write_text(ENGINE + RESTARTS)
    ends = {}
    for how in ("killed", "whole"):
        folder = tmp_path / how
        folder.mkdir()
        ended = run_under_torchrun(script, str(folder), how, restarts=1)
        assert ended.returncode == 0, ended.stderr[-3000:]
        ends[how] = [torch.load(folder / f"end{rank}.pt", weights_only=False) for rank in range(2)]
    for killed, whole in zip(ends["killed"], ends["whole"], strict=True):
        assert (killed[0], whole[0]) == (2, 0), "it was killed after the checkpoint of step 2"
        assert killed[1] == whole[1][2:]
        assert all(torch.equal(killed[2][name], value) for name, value in whole[2].items())
        for index, state in whole[3]["state"].items():
            assert all(torch.equal(killed[3]["state"][index][key], value) for key, value in state.items())


ENDS = """
import atexit, sys, time
from pathlib import Path

def threads_of_gloo():
    return sum("gloo_run" in (thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir())

def settled():  # they get their names when they first run, which a busy machine puts off
    counts = [-1]
    while len(set(counts[-5:])) > 1 or len(counts) < 5:
        counts.append(threads_of_gloo())
        time.sleep(0.1)
    return counts[-1]

# The first one registered is the last one run.
atexit.register(lambda: print(f"{threads_of_gloo()} left;", flush=True))
import harmony_ds, torch
from torch import distributed
harmony_ds.init_distributed()
distributed.all_gather([torch.zeros(4) for _ in range(2)], torch.ones(4))
of_program = settled()
ENGINE
engine.train_batch([(torch.ones(2, 8),)] * 2, lambda out: out.sum())
assert engine.data_parallel_group.size() == 2
assert threads_of_gloo() > of_program
if sys.argv[1] == "destroys":
    engine.destroy()
    assert settled() == of_program
    distributed.destroy_process_group()
if sys.argv[1] == "fails":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["ends", "destroys", "fails"])
def test_no_thread_of_a_process_group_outlives_the_program(tmp_path: Path, how: str) -> None:
    """One that let go of a tensor then would abort the process (pytorch/pytorch#179291)."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS.replace("ENGINE", ENGINE))
    ended = run_under_torchrun(script, how)
    assert (ended.returncode == 0) == (how != "fails"), ended.stderr[-3000:]
    assert re.findall(r"\d+ left;", ended.stdout) == ["0 left;"] * 2, ended.stdout + ended.stderr[-3000:]


def shared_files(pids: Iterable[int] | None = None) -> int:
    """Files of shared memory that processes (all) have open."""
    wanted = None if pids is None else {str(pid) for pid in pids}
    count = 0
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            count += "memfd:harmony_ds" in str(link.readlink()) and (wanted is None or link.parts[2] in wanted)
    return count


def memory_of_one(megabytes: int) -> tuple[int, int]:
    """Bytes that this process has for itself, and those that it has of what all share (a part for each)."""
    width = int((megabytes * 2**20 / 4 / 8) ** 0.5)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "harmony": {"device": "cpu", "pack_layers": 1, "reduce": "device"},
    }
    engine, *_ = harmony_ds.initialize(model=model, config=config)
    for _ in range(2):
        engine.train_batch([(torch.ones(1, width),)], lambda out: out.sum())
    engine.finish_updates()
    dist.barrier() if dist.get_world_size() > 1 else None
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    numbers = {row.split(":")[0]: int(row.split()[1]) * 1024 for row in rows[1:]}
    shared = sum(
        int(row.split()[1]) * 1024
        for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        if "memfd:harmony_ds" in part.splitlines()[0]
        for row in part.splitlines()
        if row.startswith("Pss:")
    )
    dist.barrier() if dist.get_world_size() > 1 else None
    engine.destroy()
    return numbers["Pss"], shared


def test_weights_and_state_exist_once_on_a_server() -> None:
    megabytes = 64
    state = 3 * megabytes * 2**20  # weights and two moments
    found = {size: run(size, memory_of_one, megabytes) for size in (2, 3)}
    for results in found.values():
        assert abs(sum(shared for _, shared in results) - state) < 0.1 * state
    own = {size: max(pss - shared for pss, shared in results) for size, results in found.items()}
    assert own[3] < own[2] + 48 * 2**20, own
