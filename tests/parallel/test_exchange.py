"""Exchanges on a device, with a process that is gone: here the device, its events and the process groups are made up."""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import pytest
import torch

from harmony_ds.device import CpuDevice
from harmony_ds.device.base import Event, Stream
from harmony_ds.errors import PeerFailedError
from harmony_ds.parallel import heart
from harmony_ds.parallel.board import Board
from harmony_ds.parallel.exchange import Exchange, Groups
from harmony_ds.parallel.shared_memory import make_file

GONE = PeerFailedError(1, "gone")


class Kernel:
    """One that runs on the device until it is ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def synchronize(self) -> None:
        assert self.ended.wait(20)

    def query(self) -> bool:
        return self.ended.is_set()


class Group:
    """A process group of the device's, whose `abort` ends its kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1
        self._kernel.ended.set()


class Late(CpuDevice):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def record(self, stream: Stream) -> Event:
        return self._kernel


def exchanging(monkeypatch: pytest.MonkeyPatch) -> tuple[Exchange, Group, Kernel]:
    """In the middle of a `gather`, which has returned."""
    kernel = Kernel()
    group = Group(kernel)
    exchange = Exchange(Groups(cast(Any, group), None, cast(Any, group)), 0, 2)
    monkeypatch.setattr("harmony_ds.parallel.exchange._all_gather", lambda *tensors, group: None)
    exchange.gather(Late(kernel), torch.zeros(4))
    return exchange, group, kernel


def test_an_exchange_that_never_ends_is_cut_off_once_and_its_group_is_used_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange, group, kernel = exchanging(monkeypatch)
    exchange.cut_off(GONE)
    exchange.cut_off(PeerFailedError(0, "another"))

    assert kernel.query() and group.aborted == 1
    assert exchange.cut is GONE and not exchange.process_groups


def test_an_exchange_that_has_ended_is_whole_whoever_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, group, kernel = exchanging(monkeypatch)
    kernel.ended.set()
    exchange.cut_off(GONE)

    assert exchange.cut is None and not group.aborted and exchange.process_groups == [group]


def test_who_waits_for_the_device_is_released_when_another_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "BEAT_S", 0.001)
    exchange, _, kernel = exchanging(monkeypatch)
    file = make_file()
    boards = [Board(file, rank, [os.getpid()] * 2, 0, timeout_s=20.0, numbers=[4, 7]) for rank in range(2)]
    boards[0].heart.cut_off = exchange.cut_off
    boards[1].give_up("it is out of memory")
    kernel.synchronize()

    assert isinstance(exchange.cut, PeerFailedError) and exchange.cut.rank == 7
    for board in boards:
        board.close()
    os.close(file)
