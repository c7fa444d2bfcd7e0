"""Joining the other processes of a training, which `torch.distributed` has let meet.

Each process describes itself to all others: its server, its process id, and a file in memory that it has made. Processes
with the same host name and boot are on one server; its first process's file becomes the memory that they share, which the
others open through /proc and recognize by a random token at its beginning.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from harmony_ds.distributed.board import Board, board_bytes
from harmony_ds.distributed.exchange import Exchange, ProcessGroups
from harmony_ds.distributed.shared_memory import SharedMemory, make_file, open_file
from harmony_ds.distributed.world import World
from harmony_ds.errors import UnsupportedError, UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 32
_SHOWN_LETTERS = 64
"""Letters of a value that differs between processes, in an error."""


@dataclass(frozen=True, slots=True)
class _ProcessInfo:
    """Description of a process for the others.

    Attributes:
        host: the same for all processes of a server.
        file: the descriptor, in that process, of the memory that it offers to share.
        token: random bytes at the beginning of that memory.
        digest: values that must be the same in all processes, by name.
    """

    host: str
    pid: int
    file: int
    token: bytes
    digest: Mapping[str, Any]


def join_world(parameters: Sequence[str], digest: Mapping[str, Any], on_cuda: bool, reproducible: bool) -> World:
    """Join the processes of `torch.distributed`, which train one model.

    Args:
        parameters: names of the model's parameters.
        digest: values that must be the same in all processes, by name.
        on_cuda: gradients are on CUDA devices.
        reproducible: gradients are added up in the order of the ranks.

    Raises:
        UnsupportedError: servers have other numbers of processes, or processes of a server cannot share memory.
        UsageError: `digest` is not the same everywhere.
    """
    rank = dist.get_rank()
    objects = _new_group(None, "gloo")
    own = _ProcessInfo(_host(), os.getpid(), make_file(), secrets.token_bytes(_TOKEN_BYTES), dict(digest))
    os.pwrite(own.file, own.token, 0)
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, own, group=objects)
    _check_digests(processes)
    ranks = _ranks_by_server(processes)
    own_server = next(of_server for of_server in ranks if rank in of_server)
    file = own.file
    if rank != own_server[0]:
        os.close(own.file)
        file = _open_shared(processes[own_server[0]])
    _check_opened(file, ranks, objects)
    pids = [processes[other].pid for other in own_server]
    board = Board(file, own_server.index(rank), pids, len(parameters), _timeout().total_seconds(), own_server)
    dist.barrier(group=objects)  # all have read the token, which lies where the board begins
    if rank == own_server[0]:
        os.pwrite(file, bytes(_TOKEN_BYTES), 0)
    dist.barrier(group=objects)  # the board is empty
    exchange = Exchange(_groups(ranks, rank, on_cuda, objects), board.rank, board.size, reproducible)
    memory = SharedMemory(file, board_bytes(len(own_server), len(parameters)))
    return World(board, memory, objects, exchange, ranks, parameters)


def _groups(ranks: Sequence[Sequence[int]], rank: int, on_cuda: bool, objects: dist.ProcessGroup) -> ProcessGroups:
    """Make the process groups but `objects`; all processes make all groups in the same order."""
    if len(ranks) == 1:
        everyone = _new_group(None, "nccl") if on_cuda else objects
        return ProcessGroups(everyone, None, everyone)
    backend = "nccl" if on_cuda else "gloo"
    everyone = _new_group(None, backend)
    server = _group_of(ranks, rank, backend)
    column = _group_of([*zip(*ranks, strict=True)], rank, backend)
    assert server is not None
    first = _group_of([[of_server[0] for of_server in ranks]], rank, "gloo")
    return ProcessGroups(server, column, everyone, first, len(ranks))


def _group_of(several: Sequence[Sequence[int]], rank: int, backend: str) -> dist.ProcessGroup | None:
    """Make a process group for each of `several` lists of ranks, and return the one that has `rank`."""
    made = [_new_group(list(ranks), backend) for ranks in several]
    return next((group for group, ranks in zip(made, several, strict=True) if rank in ranks), None)


def _host() -> str:
    """Return a name of this server, and of no other: host names may be alike, but then the boots are not."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{platform.node()} {boot}"


def _ranks_by_server(processes: Sequence[_ProcessInfo]) -> list[list[int]]:
    """Return the ranks of each server's processes; the servers in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        found.setdefault(process.host, []).append(rank)
    if len({len(ranks) for ranks in found.values()}) > 1:
        told = ", ".join(f"{host.split(' ')[0]} {len(ranks)}" for host, ranks in found.items())
        raise UnsupportedError(
            f"the processes of this training are spread unevenly over {len(found)} servers ({told}): start as many on each "
            "(torchrun --nnodes, and the same --nproc_per_node everywhere)."
        )
    return list(found.values())


def _check_digests(processes: Sequence[_ProcessInfo]) -> None:
    """Raise UsageError if a process's digest is not that of rank 0."""
    for what, value in processes[0].digest.items():
        differences = []
        for rank, process in enumerate(processes):
            other = process.digest.get(what)
            if other != value:
                differences.append(f"rank {rank}: {_difference(value, other)}")
        if differences:
            told = "; ".join(differences)
            raise UsageError(f"{what} is not the same in all processes of this training. Against rank 0, {told}.")


def _difference(ours: object, theirs: object) -> str:
    """Describe where two values differ, by their first such key."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in (*ours, *theirs) if ours.get(key, ...) != theirs.get(key, ...)]
        key = keys[0]
        return f"{key} is {_short(theirs.get(key))} and not {_short(ours.get(key))}"
    return f"{_short(theirs)} and not {_short(ours)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}..."


def _open_shared(process: _ProcessInfo) -> int:
    """Return a descriptor of the memory that a process offers; -1: it cannot be opened, or is another process's."""
    try:
        file = open_file(process.pid, process.file)
    except OSError:
        return -1
    return file if os.pread(file, _TOKEN_BYTES, 0) == process.token else -1


def _check_opened(file: int, ranks: Sequence[Sequence[int]], objects: dist.ProcessGroup) -> None:
    """Raise UnsupportedError, in all processes, if any of them could not open its server's memory."""
    files: list[Any] = [None] * sum(map(len, ranks))
    dist.all_gather_object(files, file, group=objects)
    for of_server in ranks:
        failed = [rank for rank in of_server if files[rank] < 0]
        if failed:
            raise UnsupportedError(
                f"ranks {failed} cannot share memory with rank {of_server[0]} of their server (through /proc/<pid>/fd): "
                "start all processes of a server in one container, as one user."
            )


def _new_group(ranks: list[int] | None, backend: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=_timeout(), backend=backend)
    return group


def _timeout() -> timedelta:
    """Return the time-out of the default process group, which ours get, too."""
    group = dist.group.WORLD
    # A group of NCCL's alone has no backend for the CPU.
    options = getattr(group and group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout
