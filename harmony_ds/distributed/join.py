"""How a process joins the others of its training, which it finds through `torch.distributed`."""

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

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 32
_SIZE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _ProcessInfo:
    """Description of a process for the others."""

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
    card = _ProcessInfo(_host(), os.getpid(), make_file(), secrets.token_bytes(_TOKEN_BYTES), dict(digest))
    os.pwrite(card.file, card.token, 0)
    cards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(cards, card, group=objects)
    _check_digests(cards)
    ranks = _by_server(cards)
    mine = next(of_server for of_server in ranks if rank in of_server)
    file = card.file
    if rank != mine[0]:
        os.close(card.file)
        file = _open_shared(cards[mine[0]])
    _check_opened(file, ranks, objects)
    pids = [cards[r].pid for r in mine]
    board = Board(file, mine.index(rank), pids, len(parameters), _timeout().total_seconds(), mine)
    dist.barrier(group=objects)
    if rank == mine[0]:
        os.pwrite(file, bytes(_TOKEN_BYTES), 0)
    dist.barrier(group=objects)
    exchange = Exchange(_groups(ranks, rank, on_cuda, objects), board.rank, board.size, reproducible)
    memory = SharedMemory(file, board_bytes(len(mine), len(parameters)))
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
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{platform.node()} {boot}"


def _by_server(cards: Sequence[_ProcessInfo]) -> list[list[int]]:
    """Return the ranks of each server's processes; the servers in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        found.setdefault(card.host, []).append(rank)
    if len({len(ranks) for ranks in found.values()}) > 1:
        told = ", ".join(f"{host.split(' ')[0]} {len(ranks)}" for host, ranks in found.items())
        raise UnsupportedError(
            f"the processes of this training are spread unevenly over {len(found)} servers ({told}): start as many on each "
            "(torchrun --nnodes, and the same --nproc_per_node everywhere)."
        )
    return list(found.values())


def _check_digests(cards: Sequence[_ProcessInfo]) -> None:
    for what, value in cards[0].digest.items():
        others = {rank: card.digest.get(what) for rank, card in enumerate(cards) if card.digest.get(what) != value}
        if others:
            told = "; ".join(f"rank {rank}: {_difference(value, other)}" for rank, other in others.items())
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
    return text if len(text) <= _SIZE_LIMIT else f"{text[:_SIZE_LIMIT]}..."


def _open_shared(card: _ProcessInfo) -> int:
    try:
        file = open_file(card.pid, card.file)
    except OSError:
        return -1
    return file if os.pread(file, _TOKEN_BYTES, 0) == card.token else -1


def _check_opened(file: int, ranks: Sequence[Sequence[int]], objects: dist.ProcessGroup) -> None:
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
    group = dist.group.WORLD
    # A group of NCCL's alone has no backend for the CPU.
    options = getattr(group and group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout
