"""Stashed tensors move to the host and back unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harmony_ds import ModelError
from harmony_ds.device import CpuDevice
from harmony_ds.offload.ledger import Ledger, TrafficKind
from harmony_ds.offload.stash import Stash, StashEntry


def stash() -> tuple[Stash, Ledger]:
    ledger = Ledger()
    return Stash(CpuDevice(), ledger), ledger


def round_trip(one: Stash, tensor: Tensor) -> StashEntry:
    entry = one.put(tensor, "block")
    one.swap_out([entry])
    assert entry.device_tensor is None
    one.swap_in([entry])
    return entry


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.tensor(2.5),
        torch.arange(6).bool(),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_round_trip_keeps_values_and_strides(tensor: Tensor) -> None:
    one, ledger = stash()
    back = one.tensor(round_trip(one, tensor))
    traffic = ledger.drain()

    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert back.dtype == tensor.dtype
    assert (
        traffic.device_to_host[TrafficKind.ACTIVATIONS]
        == traffic.host_to_device[TrafficKind.ACTIVATIONS]
        == tensor.nbytes
    )


def test_what_several_calls_share_comes_back_once() -> None:
    one, ledger = stash()
    tensor = torch.randn(3, 4)
    entry = one.put(tensor, "first")
    assert one.put(tensor, "second") is entry
    one.swap_out([entry, entry])
    one.swap_in([entry, entry])
    traffic = ledger.drain()
    assert traffic.device_to_host[TrafficKind.ACTIVATIONS] == tensor.nbytes
    assert traffic.host_to_device[TrafficKind.ACTIVATIONS] == tensor.nbytes


def test_on_the_device_nothing_is_copied() -> None:
    one, ledger = stash()
    tensor = torch.randn(3, 4)
    entry = one.put(tensor, "block")
    assert one.tensor(entry).data_ptr() == tensor.data_ptr()
    assert ledger.drain().device_to_host[TrafficKind.ACTIVATIONS] == one.host_bytes == 0
    assert entry.nbytes == 48


def test_a_tensor_that_several_calls_use_is_stashed_once_and_stays_to_the_last() -> None:
    one, ledger = stash()
    tensor = torch.randn(5)
    first, second = one.put(tensor, "a"), one.put(tensor, "b")
    assert first is second
    one.swap_out([first, second])
    one.swap_out([first])

    assert ledger.drain().device_to_host[TrafficKind.ACTIVATIONS] == one.host_bytes == 20
    assert torch.equal(one.tensor(first), tensor)
    one.release(first)
    assert torch.equal(one.tensor(first), tensor)
    one.release(first)
    assert first.device_tensor is first.host_tensor is None
    one.destroy()
    assert one.host_bytes == 0


def test_reading_a_tensor_on_the_host_swaps_it_in() -> None:
    one, ledger = stash()
    tensor = torch.randn(5)
    entry = one.put(tensor, "block")
    other, kept = one.put(torch.randn(5), "block"), tensor.clone()
    one.swap_out([entry, other])
    tensor.add_(1)  # what happens on the device changes no host copy

    assert torch.equal(one.tensor(entry), kept)
    one.swap_in([entry])
    assert ledger.drain().host_to_device[TrafficKind.ACTIVATIONS] == 20


def test_a_tensor_that_changed_in_place_is_an_error_that_names_the_layer() -> None:
    one, _ = stash()
    tensor = torch.ones(5)
    entry = one.put(tensor, "model.layers.3")
    tensor.add_(1)
    with pytest.raises(ModelError, match=r"input of layer model.layers.3 was changed in place.*harmony.layers"):
        one.tensor(entry)
    with pytest.raises(ModelError, match=r"model.layers.3"):
        one.swap_out([entry])
    assert one.put(tensor, "model.layers.4") is not entry
