"""Processes of a server that share a file for masters and optimizer state, or for weights, on a disk."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch.distributed as dist

from harmony_ds.errors import HarmonyError
from tests.distributed.processes import run
from tests.distributed.training import Training, build, data_of, engine_of, train_with
from tests.inside import assembly_of, moves_of

BLOCKS = ("offload_optimizer", "offload_param")
ONE = Training(bf16=True, steps=2, disk=BLOCKS)


def moved_bytes() -> tuple[int, int, int, int]:
    """Return what a second step reads and writes: of masters and state, and of weights."""
    engine = engine_of(ONE)
    train_with(engine, ONE)
    store = assembly_of(engine).store
    files = store.disk.file, store.disk_weights.file
    engine.finish_updates()
    moves = [moves_of(file) for file in files]
    engine.train_batch([data_of(ONE, number) for number in range(2)])
    engine.finish_updates()
    (read, written), (weights_read, weights_written) = (since() for since in moves)
    assert engine.swap_report().host_to_device["weights"] == weights_read
    engine.destroy()
    return read, written, weights_read, weights_written


def test_each_process_reads_and_writes_the_masters_and_state_of_its_pieces() -> None:
    told = run(2, moved_bytes)
    count = sum(parameter.numel() for parameter in build("mlp").parameters())
    read, written, _, weights = (sum(numbers) for numbers in zip(*told, strict=True))
    assert (read, written, weights) == (12 * count, 12 * count, 2 * count)


def fails(call: str, rank: int, code: int) -> str:
    """Return the error of a process, where a call of one of them fails."""
    if dist.get_rank() == rank:

        def failing(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        setattr(os, call, failing)
    with pytest.raises((HarmonyError, OSError)) as caught:
        train_with(engine_of(ONE), ONE)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_full_disk_is_told_to_all_before_training() -> None:
    first, second = run(2, fails, "posix_fallocate", 0, errno.ENOSPC)
    assert first.startswith("HostMemoryError") and "No space left" in first
    assert second.startswith("PeerFailedError") and "No space left" in second


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_in_one_process_ends_all(rank: int) -> None:
    told = run(2, fails, "preadv", rank, errno.EIO)
    assert all("Input/output error" in one for one in told)


def what_is_written_after_the_end() -> list[float]:
    engine = engine_of(ONE)
    train_with(engine, ONE)
    model, optimizer = engine.module, engine.optimizer
    engine.destroy()
    weight = next(model.parameters())
    tensors = [weight.detach(), optimizer.state[weight]["exp_avg"]]
    for tensor in tensors:
        tensor.fill_(dist.get_rank())
    dist.barrier()
    return [tensor.max().item() for tensor in tensors] + [tensor.min().item() for tensor in tensors]


def test_after_the_end_each_process_has_tensors_of_its_own() -> None:
    assert run(2, what_is_written_after_the_end) == [[rank] * 4 for rank in range(2)]
