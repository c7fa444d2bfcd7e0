"""The test device "simdev" itself."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import simdevice
from tests.simdevice import DEVICE


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Usage:
    """Bytes held, peak and traffic since its construction."""

    def __init__(self) -> None:
        gc.collect()  # what an earlier test left in a cycle must not be freed later
        self._held = simdevice.allocated_bytes()
        self._traffic = simdevice.traffic()
        simdevice.reset_peak()

    @property
    def bytes(self) -> int:
        return simdevice.allocated_bytes() - self._held

    @property
    def peak(self) -> int:
        return simdevice.peak_bytes() - self._held

    @property
    def traffic(self) -> tuple[int, int]:
        now = simdevice.traffic()
        return now[0] - self._traffic[0], now[1] - self._traffic[1]


# ---- memory


def test_a_storage_counts_its_bytes_until_its_last_view_is_freed() -> None:
    held = Usage()
    x = torch.empty(1000, device=DEVICE)
    y = torch.empty(10, 10, dtype=torch.bfloat16, device=DEVICE)
    row, part = x[3:7], x.view(10, 100).t().narrow(0, 1, 2)
    assert held.bytes == 4200
    del x, row
    assert held.bytes == 4200
    del y, part
    assert (held.bytes, held.peak) == (0, 4200)


# ---- the limit


def test_the_limit_raises_out_of_memory_and_says_how_much() -> None:
    x = torch.empty(1000, device=DEVICE)
    used = simdevice.allocated_bytes()
    simdevice.set_limit(used + 100)
    with pytest.raises(
        torch.OutOfMemoryError, match=f"asked for 404 bytes, in use {used} bytes, limit {used + 100} bytes"
    ):
        torch.empty(101, device=DEVICE)
    y = torch.empty(25, device=DEVICE)
    assert simdevice.allocated_bytes() == used + 100
    del x, y


# ---- traffic


def test_copies_between_host_and_device_are_counted_by_direction() -> None:
    x = torch.randn(1000)
    held = Usage()
    y = x.to(DEVICE)
    assert held.traffic == (4000, 0)
    y.cpu()
    assert held.traffic == (4000, 4000)
    x[:10].copy_(y[:10])
    y[:5].copy_(x[:5])
    y[0].item()
    assert held.traffic == (4020, 4044)
    held = Usage()
    y = x.to(DEVICE, torch.bfloat16)  # changed on the host
    assert held.traffic == (2000, 0)
    torch.empty(1000).copy_(y)  # changed after the copy was issued
    assert held.traffic == (2000, 2000)


# ---- a device that is not the host


@pytest.mark.parametrize("other", ["cpu", "simdev:1"])
def test_operands_on_two_devices_are_refused_but_for_a_single_number_of_the_cpu(other: str) -> None:
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=other)
    attempts: list[Callable[[], Tensor]] = [
        lambda: x + y,
        lambda: y.add_(x),
        lambda: F.linear(x, y.expand(2, 3)),
        lambda: torch.cat([x, y]),
        lambda: torch.add(x, x, out=y),
        lambda: F.embedding(torch.tensor([0], device=other), x.view(3, 1)),
        lambda: F.conv1d(x.view(1, 1, 3), y[:1].view(1, 1, 1)),
    ]
    if other != "cpu":
        attempts.append(lambda: y * torch.tensor(2.0, device=DEVICE))
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="same device"):
            attempt()
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2]


# ---- several devices


def test_each_device_counts_its_own_bytes_up_to_its_own_limit() -> None:
    before = [simdevice.allocated_bytes(index) for index in range(4)]
    simdevice.set_limit(before[2] + 100, index=2)
    held = torch.empty(200, device="simdev:1"), torch.empty(20, device="simdev:2")
    with pytest.raises(torch.OutOfMemoryError, match="at index 2: asked for 80 bytes"):
        held[1] + 1
    assert [simdevice.allocated_bytes(index) - before[index] for index in range(4)] == [0, 800, 80, 0]
    simdevice.reset_peak(1)
    held[0].resize_(300)
    assert simdevice.allocated_bytes(1) == before[1] + 1200
    assert simdevice.peak_bytes(1) == torch.accelerator.max_memory_allocated(1) == before[1] + 2000


def test_tensors_lie_on_the_device_asked_for_or_on_the_current_one_of_the_thread() -> None:
    seen: list[torch.device] = []
    with torch.accelerator.device_index(2), torch.Stream(device="simdev:3"):
        assert torch.accelerator.current_device_index() == 3
        assert [torch.accelerator.current_stream(index).stream_id == 0 for index in (2, 3)] == [True, False]
        assert (torch.ones(2, device="simdev:1") + 1).argmax().device.index == 1
        assert torch.randperm(2, device="simdev:1").device.index == 1
        assert torch.ones(2, device=DEVICE).device.index == 3
        thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device=DEVICE).device))
        thread.start()
        thread.join()
    assert [device.index for device in seen] == [0]
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="4 devices, not index 4"):
        torch.ones(2, device="simdev:4")
