"""Limits that CUDA devices set on their process, tested without one: the allocator's share of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harmony_ds.device import CpuDevice, CudaDevice, DeviceGroup, devices_of_process, make_devices
from harmony_ds.errors import ConfigError

TOTAL = 1_000
MIB = 2**20


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "_growing", 0)
    monkeypatch.setattr(CudaDevice, "_memory_fractions", {})


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Replace torch's calls; return the memory fraction of this process by device."""
    now = {0: 1.0, 1: 0.8}

    def limit(share: float, index: int) -> None:
        now[index] = share

    def stream(*_: Any) -> None:
        return None

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index // 2}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: now[index])
    return now


def test_a_budget_limits_the_process_only_while_it_is_in_force(shares: dict[int, float]) -> None:
    device = CudaDevice(0, 250)
    assert shares == {0: 1.0, 1: 0.8}
    device.limit_process()
    device.limit_process()
    assert shares == {0: 0.25, 1: 0.8}
    device.unlimit_process()
    device.unlimit_process()
    assert shares == {0: 1.0, 1: 0.8}


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's calls; return all settings of the caching allocator, the last of which is in force."""
    given = [""]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: given[-1], raising=False)
    return given


@pytest.mark.parametrize(
    ("variable", "grows"), [("PYTORCH_ALLOC_CONF", False), ("PYTORCH_CUDA_ALLOC_CONF", False), ("PATH", True)]
)
def test_the_allocators_segments_grow_unless_the_program_has_configured_it(
    variable: str,
    grows: bool,
    shares: dict[int, float],
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setenv(variable, "max_split_size_mb:64")
    without, device = CudaDevice(0), CudaDevice(0, 500)
    # Segments that do not grow may have a tenth of the budget in fragments; others have what the model's layers make.
    assert device.reserve_bytes() - without.reserve_bytes() == (0 if grows else 50)
    assert device.fragment_bytes(60) == (30 if grows else 0)
    assert without.fragment_bytes(1000) == 0
    device.limit_process()
    assert settings == ["", *["expandable_segments:True"] * grows]
    device.unlimit_process()


@pytest.mark.parametrize(("capability", "workspaces"), [((8, 0), 2 * 8320 * 2**10), ((9, 0), 64 * 2**20)])
def test_segments_are_set_aside_for_streams_that_allocate(
    capability: tuple[int, int],
    workspaces: int,
    shares: dict[int, float],
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For compute and inputs; and between devices, where there are several."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = CudaDevice(0)
    assert device.reserve_bytes() == workspaces + 2 * 22 * 2**20
    assert device.peer_reserve_bytes() == 22 * 2**20
    assert DeviceGroup([device, CudaDevice(1)]).peer_reserve_bytes() == 22 * 2**20


class Allocator:
    """Stand-in for torch's allocator: what is taken is held until it is reset; one more byte than `there` is refused."""

    def __init__(self, there: int) -> None:
        self.there = there
        self.reserved = 30 * MIB
        self.free = 10 * MIB  # of what is reserved
        self.requests: list[int] = []

    def empty(self, nbytes: int, **_: Any) -> None:
        self.requests.append(nbytes)
        grown = max(0, nbytes - self.free)
        if self.reserved + grown > self.there:
            raise torch.OutOfMemoryError
        self.free = max(0, self.free - nbytes)
        self.reserved += grown


@pytest.fixture
def allocator(shares: dict[int, float], settings: list[str], monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator(1000 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: made.reserved)
    monkeypatch.setattr(torch, "empty", made.empty)
    return made


def test_the_pool_is_filled_to_the_budget_but_for_three_segments(allocator: Allocator) -> None:
    device = CudaDevice(0, 500 * MIB)
    device.limit_process()
    device.fill_pool(0)
    assert 500 - 66 - 22 < allocator.reserved / MIB <= 500 - 66
    taken = len(allocator.requests)
    device.fill_pool(0)
    device.fill_pool(100 * MIB)
    assert len(allocator.requests) == taken  # nothing is left to take


def test_what_inputs_take_is_left_to_their_pool(allocator: Allocator) -> None:
    device = CudaDevice(0, 500 * MIB)
    device.limit_process()
    device.fill_pool(100 * MIB)
    assert 400 - 66 - 22 < allocator.reserved / MIB <= 400 - 66


def test_the_pool_is_filled_as_far_as_the_device_has_memory(allocator: Allocator) -> None:
    allocator.there = 200 * MIB
    device = CudaDevice(0, 500 * MIB)
    device.limit_process()
    device.fill_pool(0)
    assert allocator.reserved <= 200 * MIB


def test_no_pool_is_filled_without_a_budget_or_with_fixed_segments_or_for_logical_devices(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, logical = CudaDevice(0), CudaDevice(0, 250 * MIB, logical=2)
    for device in (without, logical):
        device.limit_process()
        device.fill_pool(0)
        device.unlimit_process()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    fixed = CudaDevice(0, 500 * MIB)
    fixed.limit_process()
    fixed.fill_pool(0)
    assert allocator.requests == []


@pytest.mark.parametrize("budget_bytes", [None, 500])
def test_segments_grow_until_the_last_engine_ends(
    budget_bytes: int | None, shares: dict[int, float], settings: list[str]
) -> None:
    first, second = CudaDevice(0, budget_bytes), CudaDevice(1, budget_bytes)
    assert settings == [""]  # a device without an engine changes nothing
    for device in (first, second):
        device.limit_process()
    assert settings == ["", "expandable_segments:True"]
    first.unlimit_process()
    first.unlimit_process()
    assert settings == ["", "expandable_segments:True"]
    second.unlimit_process()
    assert settings[2:] == ["expandable_segments:False", ""]
    CudaDevice(0).limit_process()
    assert settings[4:] == ["expandable_segments:True"]


def test_settings_that_a_program_has_made_stay(shares: dict[int, float], settings: list[str]) -> None:
    settings.append("max_split_size_mb:64")
    device = CudaDevice(0, 500)
    device.limit_process()
    device.unlimit_process()
    assert settings == ["", "max_split_size_mb:64"]
    settings.append("")
    device = CudaDevice(0, 500)
    device.limit_process()
    settings.append("garbage_collection_threshold:0.8")
    device.unlimit_process()
    assert settings[-1] == "garbage_collection_threshold:0.8"


def test_a_step_resets_no_peak_that_the_program_reads(
    shares: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = 700  # of the process

    def reset(_: Any) -> None:
        nonlocal peak
        peak = 100

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    device = CudaDevice(0)
    device.watch_peak()
    assert peak == 700 and not device.peak_has_risen() and device.peak_bytes() == 700
    peak = 800
    assert device.peak_has_risen() and device.peak_bytes() == 800
    device.watch_peak()
    assert not device.peak_has_risen()
    device.reset_peak()  # measuring cannot do without
    assert device.peak_bytes() == 100
    device.watch_peak()
    peak = 300
    assert device.peak_has_risen() and device.peak_bytes() == 300


def test_retries_of_the_allocator_are_counted_from_the_engine_on(
    shares: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = {0: 5, 1: 0}  # of the process, by GPU
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device: {"num_alloc_retries": retries[torch.device(device).index]},
    )
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 100 * (1 + torch.device(device).index))
    device = CudaDevice(0)
    logical = DeviceGroup([CudaDevice(0, logical=2), CudaDevice(0, logical=2)])
    both = DeviceGroup([CudaDevice(0), CudaDevice(1)])
    assert device.allocator_retries() == 0 and both.allocator_retries() == 0
    retries |= {0: 7, 1: 3}
    assert device.allocator_retries() == 2
    assert logical.allocator_retries() == 2  # they have one allocator
    assert both.allocator_retries() == 5
    assert [one.reserved_bytes() for one in (device, logical, both)] == [100, 50, 200]
    retries[0] = 1  # the program has set the count to zero
    assert device.allocator_retries() == 0
    retries[0] = 2
    assert device.allocator_retries() == 1
    assert CpuDevice().reserved_bytes() is None and CpuDevice().allocator_retries() == 0


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


def test_the_devices_of_a_pipeline_exist_and_are_of_one_model(shares: dict[int, float]) -> None:
    wrong: dict[Any, str] = {
        5: r"asks for 5 CUDA devices, and this process sees 4 \(cuda:0, cuda:1, cuda:2, cuda:3\)",
        ("cuda:0", "cuda:7"): '"cuda:7" but this machine has 4',
        ("cuda:1", "cuda:2"): r"differ \(cuda:1 is a card 0, cuda:2 is a card 1\)",
        ("cpu", "cuda:0"): "differ",
        "all": "differ",
    }
    for devices, said in wrong.items():
        with pytest.raises(ConfigError, match=said):
            make_devices("auto", devices, None)
    assert [one.name for one in make_devices("auto", 2, None).members] == ["cuda:0", "cuda:1"]
    assert DeviceGroup([CpuDevice(300), CpuDevice(200)]).budget_bytes == 200  # what all of them have


def test_logical_devices_share_the_memory_of_their_gpu(shares: dict[int, float]) -> None:
    group = make_devices("cuda", ("cuda:0", "cuda:0"), None)
    assert isinstance(group, DeviceGroup) and not group.has_distinct_devices and group.budget_bytes == 450
    make_devices("cuda", ("cuda:0", "cuda:0"), 200).limit_process()
    assert shares[0] == 0.4


def test_processes_drive_devices_side_by_side(shares: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_of_process("auto", 2, 1, 2) == ("cuda:2", "cuda:3")
    assert devices_of_process("auto", "all", 0, 2) == ("cuda:0", "cuda:1")
    assert devices_of_process("cuda", 1, 3, 4) == ("cuda:3",)
    assert devices_of_process("cpu", 2, 1, 2) == ()
    with pytest.raises(
        ConfigError, match=r"2 processes of 3 devices each .* need 6 CUDA devices, and this machine has 4"
    ):
        devices_of_process("auto", 3, 1, 2)
    for name, devices in (("cuda:0", 1), ("auto", ("cuda:0",))):
        with pytest.raises(ConfigError, match="for all 2 processes"):
            devices_of_process(name, devices, 0, 2)


def stays_out_of_forks(address: int) -> bool:
    """Return whether Linux leaves the memory at `address` out of forked processes ("dc": do not copy)."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    spans = {range(*(int(end, 16) for end in block.split()[0].split("-"))): block for block in blocks if block}
    return any(address in span and " dc" in block.partition("VmFlags:")[2] for span, block in spans.items())


def test_page_locked_memory_stays_out_of_forked_processes_until_it_is_freed(
    shares: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "host_lock", lambda *_: None)
    device, unlocked = CudaDevice(0), CudaDevice(0, pin=False)
    buffers = [device.host_empty(numel, torch.float32) for numel in (0, 3, 5000)]
    assert [buffer.shape for buffer in buffers] == [(0,), (3,), (5000,)]
    assert [stays_out_of_forks(buffer.data_ptr()) for buffer in buffers] == [False, True, True]
    assert not stays_out_of_forks(unlocked.host_empty(5000, torch.float32).data_ptr())
    for buffer in buffers:
        buffer.fill_(1.0)
        device.host_free(buffer)
        assert not stays_out_of_forks(buffer.data_ptr())
