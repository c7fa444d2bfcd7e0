"""The CPU device counts every byte against its budget, and its probe counts what a block of code keeps alive."""

from __future__ import annotations

import pytest
import torch

from harmony_ds import ConfigError, DeviceOutOfMemoryError
from harmony_ds.device import CpuDevice, Stream, make_device
from harmony_ds.device.live_bytes import LiveBytes

# ---- the budget


def test_buffers_count_from_empty_to_free() -> None:
    device = CpuDevice()
    first = device.empty(10, torch.float32)
    second = device.empty(3, torch.bfloat16)
    assert (first.shape, first.dtype, second.dtype) == ((10,), torch.float32, torch.bfloat16)
    assert device.allocated_bytes() == 46

    device.free(first)
    assert device.allocated_bytes() == 6
    device.free(second)
    assert device.allocated_bytes() == 0


def test_buffers_are_not_aliases() -> None:
    device = CpuDevice()
    buffers = [device.empty(4, torch.float32) for _ in range(3)]

    assert len({buffer.data_ptr() for buffer in buffers}) == 3


def test_a_budget_holds_exactly_its_bytes() -> None:
    device = CpuDevice(100)
    device.empty(25, torch.float32)
    assert device.allocated_bytes() == 100
    with pytest.raises(
        DeviceOutOfMemoryError, match="100 bytes does not hold 1 bytes more for one byte: 100 are in use"
    ):
        device.charge(1, "one byte")


def test_what_exceeds_the_budget_is_not_charged_and_the_error_says_what_to_change() -> None:
    device = CpuDevice(4000)
    device.charge(1000, "something")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        device.empty(1000, torch.float32)
    message = str(caught.value)

    assert (
        "the device budget of 4,000 bytes does not hold 4,000 bytes more for a device buffer: 1,000 are in use"
        in message
    )
    assert "harmony.device_memory_gib" in message
    assert "harmony.pack_layers" in message
    assert device.allocated_bytes() == device.peak_bytes() == 1000


def test_out_of_memory_is_torchs_own_error_too() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        CpuDevice(0).charge(1, "one byte")


def test_what_is_discharged_can_be_charged_again() -> None:
    device = CpuDevice(10)
    for _ in range(3):
        device.charge(10, "all of it")
        device.discharge(10)

    assert device.allocated_bytes() == 0


def test_the_peak_is_the_most_since_it_was_reset() -> None:
    device = CpuDevice()
    device.charge(70, "a")
    device.discharge(50)
    device.charge(10, "b")
    assert device.peak_bytes() == 70

    device.reset_peak()
    assert device.peak_bytes() == 30
    device.charge(5, "c")
    device.discharge(35)
    assert device.peak_bytes() == 35


def test_without_a_budget_nothing_is_too_much() -> None:
    device = CpuDevice(None)
    device.charge(2**60, "a lot")

    assert device.peak_bytes() == 2**60


def test_host_buffers_are_not_counted() -> None:
    device = CpuDevice(0)
    buffer = device.host_empty(5, torch.float16)
    device.host_free(buffer)

    assert (buffer.shape, buffer.dtype, device.peak_bytes()) == ((5,), torch.float16, 0)


# ---- streams and random state


def test_streams_run_at_once() -> None:
    device = CpuDevice()
    with device.on(Stream.SWAP_IN):
        done = torch.ones(2) + 1
    event = device.record(Stream.SWAP_IN)
    device.wait(Stream.COMPUTE, event)
    event.synchronize()

    assert done.tolist() == [2.0, 2.0]


def test_a_random_state_comes_back() -> None:
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


def test_devices_by_name() -> None:
    device = make_device("cpu", 123)

    assert isinstance(device, CpuDevice)
    assert (device.name, device.budget_bytes, device.torch_device) == ("cpu", 123, torch.device("cpu"))


def test_auto_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert make_device("auto", None).name == "cpu"


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


def test_the_probe_counts_what_is_alive_and_the_most_that_was() -> None:
    with CpuDevice().probe() as probe:
        kept = torch.ones(100)
        assert probe.live_bytes() == 400
        del kept
        assert (probe.live_bytes(), probe.peak_bytes()) == (0, 400)


def test_temporaries_are_in_the_peak() -> None:
    with LiveBytes() as probe:
        result = (torch.ones(100) + 1) * 2
        assert probe.live_bytes() == 400
        assert probe.peak_bytes() == 800
    assert result.sum() == 400


def test_resetting_forgets_the_peak_but_not_what_is_alive() -> None:
    with LiveBytes() as probe:
        kept = torch.ones(10)
        _ = torch.ones(1000) + 1
        del _
        probe.reset()
        assert (probe.live_bytes(), probe.peak_bytes()) == (40, 40)
    assert kept.numel() == 10


def test_views_count_nothing_and_keep_their_storage_alive() -> None:
    with LiveBytes() as probe:
        base = torch.ones(10, 10)
        view = base[2:4].t()
        flat = base.view(-1)
        assert probe.live_bytes() == 400
        del base, flat
        assert probe.live_bytes() == 400
        del view
        assert probe.live_bytes() == 0


def test_in_place_operations_count_nothing() -> None:
    with LiveBytes() as probe:
        tensor = torch.zeros(50)
        tensor.add_(1).mul_(3)
        tensor[3] = 7
        torch.add(tensor, 1, out=tensor)
        assert probe.live_bytes() == 200
    assert tensor[3] == 8


def test_tensors_from_outside_are_not_counted() -> None:
    outside = torch.ones(100)
    with LiveBytes() as probe:
        view = outside[10:]
        outside.mul_(2)
        assert probe.live_bytes() == probe.peak_bytes() == 0
    assert view[0] == 2


def test_an_operation_with_several_results_counts_each_storage() -> None:
    with LiveBytes() as probe:
        values, indices = torch.arange(10.0).max(dim=0, keepdim=True)
        assert probe.live_bytes() == 4 + 8
        parts = torch.ones(8).split(4)
        assert probe.live_bytes() == 4 + 8 + 32
    assert len(parts) + values.numel() + indices.numel() == 4


def test_what_autograd_keeps_is_counted_until_backward() -> None:
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as probe:
        loss = weight.exp().sum()
        assert probe.live_bytes() == 400 + 4
        loss.backward()
        assert probe.live_bytes() == 400 + 4  # the gradient now, and the loss
    assert weight.grad is not None


def test_tensors_of_other_devices_are_not_counted() -> None:
    with LiveBytes() as probe:
        assert torch.ones(1000, device="meta").shape == (1000,)
        assert probe.peak_bytes() == 0
