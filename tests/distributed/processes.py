"""Runs of a function in several processes, which know of each other as under a launcher; their results are returned."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "transformers", "harmony_ds", "tests.distributed.preload"])
LIMIT_S = 300  # seconds on a machine that does nothing else: only what hangs takes so long


@dataclass
class Outcome:
    """Outcome of one process: its result, or its exception's name and text; its exit code."""

    result: Any = None
    error: str | None = None
    code: int | None = None


def run(size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """`function(*arguments)` in `size` processes; its results by rank. An error in any is an error here."""
    ended = run_to_end(size, function, *arguments, limit_s=limit_s)
    for rank, one in enumerate(ended):
        assert one.error is None and one.code in (0, None), f"rank {rank}: {one.error or one.code}"
    return [one.result for one in ended]


def run_to_end(size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Outcome]:
    """Run like `run`, and return every outcome, of failed processes too."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        children = []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            child = _context.Process(target=_child, args=(there, rank, size, folder, function, arguments))
            child.start()
            there.close()
            children.append(child)
            pipes[here] = rank
        ended = [Outcome() for _ in range(size)]
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, began + limit_s - time.monotonic()))
            if not ready:
                for child in children:
                    if child.pid is not None and child.is_alive():
                        os.kill(child.pid, signal.SIGUSR1)  # says where it is
                time.sleep(2)
                for child in children:
                    child.kill()
                raise TimeoutError(f"ranks {sorted(pipes.values())} are still running after {limit_s} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                with suppress(EOFError):
                    ended[rank].result, ended[rank].error = pickle.loads(pipe.recv_bytes())
        for one, child in zip(ended, children, strict=True):
            child.join(30)
            one.code = child.exitcode
            child.kill()
        return ended


def _child(
    pipe: Connection, rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from tests import patches

    patches.check_every_step()
    patches.leave_collections()
    patches.fix_times()  # processes that share two cores take one another's
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # for who asks; the processes have met
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size
    )
    try:
        answer = (function(*arguments), None)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        answer = (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
