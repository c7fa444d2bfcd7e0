"""`torch.distributed` and `deepspeed.comm` for one process: no launcher, no environment variables, no MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import distributed as dist

from harmony_ds.errors import UnsupportedError


def init_distributed(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: ARG001
    distributed_port: int = 29500,  # noqa: ARG001
    verbose: bool = True,  # noqa: ARG001
    timeout: Any = None,  # noqa: ARG001
    init_method: str | None = None,  # noqa: ARG001
    dist_init_required: bool | None = None,  # noqa: ARG001
    config: Any = None,  # noqa: ARG001
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Makes this process a world of its own, for `torch.distributed` and for `deepspeed.comm`.

    The signature is that of `deepspeed.init_distributed`. Nothing happens to what is initialized already.

    Raises:
        UnsupportedError: a launcher, or the caller, speaks of more than one process.
    """
    refuse_several_processes(world_size, rank)
    if not dist.is_initialized():
        backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        # A store in memory: no port, no address, nobody else who could join.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    from deepspeed.comm import comm

    if comm.cdb is None or not comm.cdb.is_initialized():
        with _without_shared_memory():
            comm.init_distributed(dist_backend=dist_backend, auto_mpi_discovery=False, verbose=False)


def refuse_several_processes(world_size: int = 1, rank: int = 0) -> None:
    """Raises UnsupportedError if a launcher (WORLD_SIZE), or the caller, speaks of more than one process."""
    asked = max(world_size, int(os.environ.get("WORLD_SIZE") or 1))
    if asked > 1 or rank > 0:
        raise UnsupportedError(
            f"{asked} processes were asked for: harmony_ds trains in one process, and several would train several models. "
            "Start the script once, without a launcher or with one process (WORLD_SIZE=1)."
        )


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """Keeps DeepSpeed from compiling (for a minute) what lets several processes on one host exchange tensors."""
    backend = import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.build_shm_op = build  # type: ignore[attr-defined]
