"""The CPU device counts every byte against its budget, and its probe counts what a block of code keeps alive."""

from __future__ import annotations

import pytest
import torch

from harmony_ds import ConfigError
from harmony_ds.device import CpuDevice, make_device
from harmony_ds.device.live_bytes import LiveBytes

# ---- the budget


def test_device_buffers_are_counted_from_empty_to_free_and_host_buffers_are_not() -> None:
    device = CpuDevice(46)
    first = device.empty(10, torch.float32)
    second = device.empty(3, torch.bfloat16)
    assert (first.shape, first.dtype, second.dtype) == ((10,), torch.float32, torch.bfloat16)
    assert device.allocated_bytes() == 46
    host = device.host_empty(5, torch.float16)
    device.host_free(host)
    assert (host.shape, host.dtype, device.peak_bytes()) == ((5,), torch.float16, 46)

    device.free(first)
    assert device.allocated_bytes() == 6
    device.free(second)
    assert (device.allocated_bytes(), device.peak_bytes()) == (0, 46)
    device.reset_peak()
    assert device.peak_bytes() == 0


def test_bytes_above_the_budget_are_not_charged_and_the_error_says_what_to_change() -> None:
    device = CpuDevice(4000)
    device.charge(1000, "something")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.empty(1000, torch.float32)
    message = str(caught.value)

    assert (
        "4,000 bytes more for a device buffer do not fit into the device budget of 4,000 bytes: 1,000 are in use"
        in message
    )
    assert "harmony.device_memory_gib" in message
    assert "harmony.pack_layers" in message
    assert device.allocated_bytes() == device.peak_bytes() == 1000
    device.charge(3000, "all of it")
    device.discharge(4000)
    CpuDevice(None).charge(2**60, "a lot")


# ---- streams and random state


def test_a_random_state_is_restored() -> None:
    device = CpuDevice()
    with torch.random.fork_rng(devices=[]):
        device.seed(3)
        state = device.random_state()
        drawn = torch.rand(4)
        device.set_random_state(state)
        assert torch.equal(torch.rand(4), drawn)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(4), drawn)


# ---- devices by name


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cpu", "auto"):
        device = make_device(name, 123)
        assert isinstance(device, CpuDevice)
        assert (device.name, device.budget_bytes, device.torch_device) == ("cpu", 123, torch.device("cpu"))


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:0", "", "cuda:-1"])
def test_an_unknown_device_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f'harmony.device is "{name}": it must be "auto", "cpu", "cuda" or "cuda:N"'):
        make_device(name, None)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_on_a_machine_without_is_an_error_with_the_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f'harmony.device is "{name}" but this machine has 0 CUDA devices'):
        make_device(name, None)


# ---- the probe


def test_the_probe_counts_living_bytes_and_their_peak() -> None:
    with CpuDevice().probe() as probe:
        kept = (torch.ones(100) + 1) * 2  # a temporary is in the peak
        assert (probe.allocated_bytes(), probe.peak_bytes()) == (400, 800)
        probe.reset_peak()
        assert (probe.allocated_bytes(), probe.peak_bytes()) == (400, 400)
        del kept
        assert (probe.allocated_bytes(), probe.peak_bytes()) == (0, 400)


def test_views_and_in_place_operations_count_nothing_and_views_keep_their_storage_alive() -> None:
    with LiveBytes() as probe:
        base = torch.ones(10, 10)
        view = base[2:4].t()
        base.add_(1).mul_(3)
        base[3] = 7
        torch.add(base, 1, out=base)
        assert (probe.allocated_bytes(), probe.peak_bytes()) == (400, 400)
        del base
        assert probe.allocated_bytes() == 400
        del view
        assert probe.allocated_bytes() == 0


def test_tensors_from_outside_and_of_other_devices_are_not_counted() -> None:
    outside = torch.ones(100)
    with LiveBytes() as probe:
        view = outside[10:]
        outside.mul_(2)
        assert torch.ones(1000, device="meta").shape == (1000,)
        assert probe.allocated_bytes() == probe.peak_bytes() == 0
    assert view[0] == 2


def test_an_operation_with_several_results_counts_each_storage() -> None:
    with LiveBytes() as probe:
        values, indices = torch.arange(10.0).max(dim=0, keepdim=True)
        assert probe.allocated_bytes() == 4 + 8
        parts = torch.ones(8).split(4)
        assert probe.allocated_bytes() == 4 + 8 + 32
    assert len(parts) + values.numel() + indices.numel() == 4


def test_tensors_that_autograd_keeps_are_counted_until_backward() -> None:
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as probe:
        loss = weight.exp().sum()
        assert probe.allocated_bytes() == 400 + 4
        loss.backward()
        assert probe.allocated_bytes() == 400 + 4  # the gradient now, and the loss
    assert weight.grad is not None
