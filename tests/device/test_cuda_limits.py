"""What CUDA devices do to their process, seen without one: the share of memory that the allocator may reserve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harmony_ds.device import CudaDevice

TOTAL = 1_000


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Of each device's memory, what this process may have."""
    now = {0: 1.0, 1: 0.8}

    def limit(share: float, index: int) -> None:
        now[index] = share

    def stream(*_: Any) -> None:
        return None

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: now[index])
    return now


def test_a_budget_holds_the_process_while_it_is_limited_and_not_before_or_after(shares: dict[int, float]) -> None:
    device = CudaDevice(0, 250)
    assert shares == {0: 1.0, 1: 0.8}
    device.limit_process()
    device.limit_process()
    assert shares == {0: 0.25, 1: 0.8}
    device.unlimit_process()
    device.unlimit_process()
    assert shares == {0: 1.0, 1: 0.8}


def test_a_device_without_a_budget_of_its_own_limits_nothing(shares: dict[int, float]) -> None:
    device = CudaDevice(1)
    device.limit_process()
    device.unlimit_process()
    assert shares == {0: 1.0, 1: 0.8}


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)])
def test_the_last_of_several_budgets_is_in_force_until_all_have_ended(
    ends: tuple[int, int], shares: dict[int, float]
) -> None:
    devices = [CudaDevice(1, 500), CudaDevice(1, 800)]
    for device in devices:
        device.limit_process()
    assert shares[1] == 0.8
    devices[ends[0]].unlimit_process()
    assert shares[1] == (0.8, 0.5)[ends[0]]
    devices[ends[1]].unlimit_process()
    assert shares == {0: 1.0, 1: 0.8}
