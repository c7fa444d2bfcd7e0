"""How a process finds the others of its training: through `torch.distributed`, which a launcher has told of them."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from harmony_ds.errors import ProcessesDifferError, UnsupportedError
from harmony_ds.parallel.alone import Alone
from harmony_ds.parallel.board import Board, board_bytes
from harmony_ds.parallel.exchange import Exchange
from harmony_ds.parallel.shared_memory import SharedMemory, make_file, open_file
from harmony_ds.parallel.world import World

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 32
_SIZE_LIMIT = 64


@dataclass(frozen=True, slots=True)
class _Card:
    """What a process says of itself."""

    host: str
    pid: int
    file: int
    token: bytes
    digest: Mapping[str, Any]


def join_world(parameters: Sequence[str], digest: Mapping[str, Any], on_cuda: bool, reproducible: bool = True) -> Alone:
    """The processes that train with this one; itself alone where `torch.distributed` knows of no others.

    Args:
        parameters: the names of the model's.
        digest: what must be the same in all processes, by what it is called.
        on_cuda: gradients are on CUDA devices.
        reproducible: they are added up in the order of the ranks.

    Raises:
        UnsupportedError: the processes are on several servers, or cannot share memory.
        ProcessesDifferError: `digest` is not the same everywhere.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = dist.new_group(backend="gloo")
    file = make_file() if rank == 0 else -1
    token = secrets.token_bytes(_TOKEN_BYTES)
    if rank == 0:
        os.pwrite(file, token, 0)
    cards: list[Any] = [None] * size
    dist.all_gather_object(cards, _Card(_host(), os.getpid(), file, token, dict(digest)), group=objects)
    _check_hosts(cards)
    _check_digests(cards)
    if rank != 0:
        file = _opened(cards[0])
    _check_opened(file, size, objects)
    board = Board(file, rank, [card.pid for card in cards], len(parameters), _timeout_s())
    if rank == 0:
        os.pwrite(file, bytes(_TOKEN_BYTES), 0)
    dist.barrier(group=objects)
    exchange = Exchange(dist.new_group(backend="nccl") if on_cuda else objects, rank, size, reproducible)
    memory = SharedMemory(file, board_bytes(size, len(parameters)))
    world = World(board, memory, objects, exchange, int(os.environ.get("LOCAL_RANK", rank)))
    world.name_parameters(parameters)
    return world


def _host() -> str:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{platform.node()} {boot}"


def _check_hosts(cards: Sequence[_Card]) -> None:
    hosts = list(dict.fromkeys(card.host for card in cards))
    if len(hosts) > 1:
        names = ", ".join(host.split(" ")[0] for host in hosts)
        raise UnsupportedError(
            f"the processes of this training are on {len(hosts)} servers ({names}): several devices of one server are "
            "supported, several servers are not. Start all processes on one (torchrun --nnodes 1)."
        )


def _check_digests(cards: Sequence[_Card]) -> None:
    for what, value in cards[0].digest.items():
        others = {rank: card.digest.get(what) for rank, card in enumerate(cards) if card.digest.get(what) != value}
        if others:
            told = "; ".join(f"rank {rank}: {_difference(value, other)}" for rank, other in others.items())
            raise ProcessesDifferError(
                f"{what} is not the same in all processes of this training. Against rank 0, {told}."
            )


def _difference(ours: object, theirs: object) -> str:
    """Where two values differ, by their first keys."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in (*ours, *theirs) if ours.get(key, ...) != theirs.get(key, ...)]
        key = keys[0]
        return f"{key} is {_short(theirs.get(key))} and not {_short(ours.get(key))}"
    return f"{_short(theirs)} and not {_short(ours)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SIZE_LIMIT else f"{text[:_SIZE_LIMIT]}..."


def _opened(card: _Card) -> int:
    try:
        file = open_file(card.pid, card.file)
    except OSError:
        return -1
    return file if os.pread(file, _TOKEN_BYTES, 0) == card.token else -1


def _check_opened(file: int, size: int, objects: dist.ProcessGroup) -> None:
    files: list[Any] = [None] * size
    dist.all_gather_object(files, file, group=objects)
    failed = [rank for rank, opened in enumerate(files) if opened < 0]
    if failed:
        raise UnsupportedError(
            f"ranks {failed} cannot share memory with rank 0 (through /proc/<pid>/fd): they are in other containers, or "
            "run as another user. Start all processes of a training in one container, as one user."
        )


def _timeout_s() -> float:
    """How long `torch.distributed` was told to wait."""
    group = dist.group.WORLD
    options = getattr(group and group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())
