"""Threads of updates: a core is left to each thread that feeds an accelerator; other threads' numbers stay."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from harmony_ds.offload.cores import computing_with, update_threads
from harmony_ds.offload.host_gradients import HostGradients
from harmony_ds.offload.host_optimizer import HostOptimizer
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.updater import Updater
from tests.offload.examples import odd_sizes, stored


@pytest.mark.parametrize(
    ("torchs", "cores", "processes", "expected"),
    [(16, 16, 1, 14), (8, 16, 1, 8), (16, 16, 4, 2), (2, 2, 1, 1), (1, 64, 8, 1), (64, 64, 8, 6)],
)
def test_two_cores_are_left(
    monkeypatch: pytest.MonkeyPatch, torchs: int, cores: int, processes: int, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert update_threads(processes) == expected


def seen_on_another_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_the_number_of_threads_is_that_of_the_update_thread_alone() -> None:
    one = stored(odd_sizes(), torch.float32)
    optimizer = HostOptimizer(torch.optim.SGD(list(one.store.masters.values()), lr=0.5), one.store.masters)
    gradients = HostGradients(one.device, Ledger(), torch.float32, None, optimizer.trains)
    with computing_with(3):
        updater = Updater(one.store, optimizer, gradients, threads=2)
        counts = [updater._answer(torch.get_num_threads), torch.get_num_threads(), seen_on_another_thread()]
        updater.stop()
    assert counts == [2, 3, 3]
