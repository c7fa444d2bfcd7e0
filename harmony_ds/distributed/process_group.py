"""Initialization of `torch.distributed` and `deepspeed.comm`.

A launcher (torchrun, deepspeed, accelerate) sets WORLD_SIZE and the like, by which processes meet; without one, a process
initializes both for itself alone.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from harmony_ds.errors import UnsupportedError


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: ARG001
    distributed_port: int = 29500,  # noqa: ARG001
    verbose: bool = True,  # noqa: ARG001
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,  # noqa: ARG001
    config: Any = None,  # noqa: ARG001
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the processes that a launcher has started or the caller asks for; else initialize for this one alone.

    The signature is that of `deepspeed.init_distributed`. What the program has initialized already is left as it is.

    Raises:
        UnsupportedError: several processes are asked for, but `torch.distributed` or accelerate knows another number.
    """
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    asked = max(world_size, launched_size())
    if not dist.is_initialized():
        _leave_at_exit()
        if asked > 1:
            ranks: dict[str, Any] = {"rank": rank, "world_size": world_size} if world_size > 0 else {}
            _join_others(asked, backend, init_method, timeout, ranks)
        else:  # a store in memory needs no port or address, and no other process can join
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if asked > 1 and dist.get_world_size() == 1:
        raise UnsupportedError(
            f"{asked} processes were asked for, but torch.distributed has been initialized for this one alone: each would "
            "train a model of its own. Leave that to harmony_ds.initialize, or initialize it for all."
        )
    _check_accelerate_count()
    _init_deepspeed_comm(dist_backend)


def _join_others(asked: int, backend: str, init_method: str | None, timeout: Any, ranks: dict[str, Any]) -> None:
    """Join `asked` processes; raise UnsupportedError if they cannot be found."""
    try:
        if init_method is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            ranks = _restarted_rendezvous()
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, **ranks)
    except ValueError as error:
        raise UnsupportedError(
            f"{asked} processes were asked for (WORLD_SIZE), and they cannot be found: {error}. Start the script with "
            "a launcher (torchrun --nproc_per_node), or unset WORLD_SIZE."
        ) from error


def _leave_at_exit() -> None:
    """Destroy the process groups when the program exits, after its engines and before the interpreter ends.

    Threads of gloo may still hold tensors of the program's own collectives (see `World.leave`).
    """
    global _leaving  # noqa: PLW0603 - once in a process
    for name in ("torch.distributed.nn", "deepspeed.comm.torch"):
        import_module(name)  # before there is a group, which defaults of their functions would keep alive
    if _leaving is None:
        # Not `atexit`: finalizers run in reverse order of their creation, so that an engine's comes first.
        _leaving = weakref.finalize(dist, _leave)


_leaving: weakref.finalize[..., Any] | None = None


def _leave() -> None:
    # After an error others may be in a collective call, whose end destroying would wait for.
    failed = hasattr(sys, "last_value")
    if dist.is_initialized() and not failed:
        dist.destroy_process_group()


def _check_accelerate_count() -> None:
    """Raise UnsupportedError if accelerate, which distributes data, counts other processes than `torch.distributed`.

    Without CUDA, and unless it is told a backend, accelerate counts one process.
    """
    accelerate = sys.modules.get("accelerate.state")
    counted = accelerate.PartialState._shared_state.get("num_processes") if accelerate else None
    if counted not in (None, dist.get_world_size()):
        raise UnsupportedError(
            f"accelerate counts {counted} processes, torch.distributed {dist.get_world_size()}: it would deal the data "
            "among the wrong number. On a CPU tell it of them, by "
            'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]) or TrainingArguments(use_cpu=True).'
        )


def _restarted_rendezvous() -> dict[str, Any]:
    """Return a fresh store after a restart by torchrun, whose store still has the addresses of the former processes."""
    store, rank, world_size = next(rendezvous("env://"))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return {"store": PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": world_size}


def _init_deepspeed_comm(backend: str | None) -> None:
    """Initialize `deepspeed.comm` on top of `torch.distributed`, for programs that call it."""
    from deepspeed.comm import comm

    if comm.cdb is None or not comm.cdb.is_initialized():
        with _without_shared_memory():
            comm.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def launched_size() -> int:
    """Return how many processes a launcher has started (WORLD_SIZE); 0: there was none."""
    return int(os.environ.get("WORLD_SIZE") or 0)


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Keep DeepSpeed from compiling its shared-memory collectives, which takes a minute and is not needed."""
    backend = import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.build_shm_op = build  # type: ignore[attr-defined]
