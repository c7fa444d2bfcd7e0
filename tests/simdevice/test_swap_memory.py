"""Memory that swap-ins fill is the compute stream's: neither stream overwrites what the other one still uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harmony_ds.decomposer import find_layers
from harmony_ds.device import Stream
from harmony_ds.offload.device_copies import DeviceCopies
from harmony_ds.offload.host_store import HostStore
from harmony_ds.offload.ledger import Ledger
from harmony_ds.offload.stash import Stash, StashEntry
from tests.offload.examples import odd_sizes
from tests.simdevice.late import LateCpuDevice

NAMES = ("0.weight", "0.bias")


@pytest.fixture
def device() -> LateCpuDevice:
    """A device whose copies run as late as events allow."""
    return LateCpuDevice()


@pytest.fixture
def device_copies(device: LateCpuDevice) -> DeviceCopies:
    model = odd_sizes()
    store = HostStore(model, find_layers(model), torch.float32, device)
    return DeviceCopies(device, store, Ledger(), torch.float32)


@pytest.fixture(autouse=True)
def _watched(device: LateCpuDevice, device_copies: DeviceCopies) -> Iterator[None]:
    with device.watched():  # but what is made on the host before
        yield


def returned(stash: Stash, values: Tensor) -> StashEntry:
    """Return the entry of a stash that is on its way back from the host."""
    entry = stash.put(values, "block")
    stash.swap_out([entry])
    stash.swap_in([entry])
    return entry


def compute() -> Tensor:
    """Run kernels that take memory which compute has given back."""
    return torch.ones(64) * 2


def assert_in_order(device: LateCpuDevice) -> None:
    assert not device.order.reports, "\n".join(device.order.reports)


def test_weights_are_copied_after_the_work_that_may_still_use_their_memory(
    device: LateCpuDevice, device_copies: DeviceCopies
) -> None:
    for _ in range(3):
        copy = device_copies.swap_in(NAMES)
        copy.wait(device)
        (copy.leaves[NAMES[0]] * 2).sum()
        device_copies.evict(copy)
    assert_in_order(device)


def test_weights_that_nothing_waited_for_are_freed_after_their_copy(
    device: LateCpuDevice, device_copies: DeviceCopies
) -> None:
    device_copies.evict(device_copies.swap_in(NAMES))
    compute()
    assert_in_order(device)


def test_a_failed_swap_in_is_freed_after_the_copies_that_were_issued(
    device: LateCpuDevice, device_copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("after the first copy")

    monkeypatch.setattr(Ledger, "book_in", fail)
    with pytest.raises(torch.OutOfMemoryError, match="after the first copy"):
        device_copies.swap_in(NAMES)
    compute()
    assert_in_order(device)


def test_a_stash_comes_back_after_the_work_that_may_still_use_its_memory(device: LateCpuDevice) -> None:
    stash = Stash(device, Ledger())
    for _ in range(3):
        entry = returned(stash, compute())
        assert stash.tensor(entry).sum() == 128
        stash.release(entry)
    assert_in_order(device)
    stash.destroy()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_of_a_stash_on_the_host_is_read_after_it_has_come_there(device: LateCpuDevice, dim: int) -> None:
    stash = Stash(device, Ledger())
    entry = stash.put(torch.arange(12.0).view(4, 3), "block")
    stash.swap_out([entry])
    whole = stash.tensor_to_cut(entry)
    there = stash.copy_slice(entry, whole.narrow(dim, 1, 2))
    assert torch.equal(there, torch.arange(12.0).view(4, 3).narrow(dim, 1, 2))
    assert_in_order(device)
    stash.destroy()


def _drop_by_release(stash: Stash, entry: StashEntry) -> None:
    stash.release(entry)


def _drop_by_swap_out(stash: Stash, entry: StashEntry) -> None:
    stash.swap_out([entry])


def _drop_by_ordering_streams(stash: Stash, entry: StashEntry) -> None:
    stash.order_streams()
    entry.device_tensor = None


@pytest.mark.parametrize("drop", [_drop_by_release, _drop_by_swap_out, _drop_by_ordering_streams])
def test_a_stash_that_came_back_for_nothing_is_freed_after_its_copy(
    device: LateCpuDevice, drop: Callable[[Stash, StashEntry], None]
) -> None:
    stash = Stash(device, Ledger())
    drop(stash, returned(stash, compute()))
    compute()
    assert_in_order(device)
    stash.destroy()


def test_a_layer_may_keep_what_came_back(device: LateCpuDevice) -> None:
    stash = Stash(device, Ledger())
    entry = returned(stash, compute())
    kept = stash.tensor(entry)
    stash.release(entry)
    doubled = kept * 2
    del kept
    stash.tensor(returned(stash, compute()))
    assert doubled.sum() == 256
    assert_in_order(device)
    stash.destroy()


def test_missing_waits_are_reported(
    device: LateCpuDevice, device_copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other tests rest on."""
    wait = device.wait

    def wait_but_for_compute(stream: Stream, event: Any) -> None:
        if stream is not Stream.SWAP_IN:
            wait(stream, event)

    monkeypatch.setattr(device, "wait", wait_but_for_compute)
    device_copies.swap_in(NAMES).wait(device)
    assert any("a copy on SWAP_IN writes" in report for report in device.order.reports)
