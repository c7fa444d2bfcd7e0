"""The late device itself: unordered accesses go wrong and are reported, ordered ones are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harmony_ds.device import Stream
from tests.simdevice.late import LateCpuDevice


@pytest.fixture(params=[None, 1], ids=["latest", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[LateCpuDevice]:
    device = LateCpuDevice(request.param)
    with device.watched():
        yield device


def reported(device: LateCpuDevice, words: str) -> bool:
    return any(words in report for report in device.order.reports)


def page_locked(device: LateCpuDevice, values: list[float]) -> Tensor:
    return device.host_empty(len(values), torch.float32).copy_(torch.tensor(values))


def swap_in(device: LateCpuDevice, host: Tensor) -> Tensor:
    """A copy into memory that the swap-in stream allocates itself."""
    with device.on(Stream.SWAP_IN):
        buffer = torch.empty(host.numel(), dtype=host.dtype, device=device.torch_device)
        return buffer.copy_(host, non_blocking=True)


def swap_out(device: LateCpuDevice, tensor: Tensor) -> Tensor:
    host = device.host_empty(tensor.numel(), tensor.dtype)
    with device.on(Stream.SWAP_OUT):
        host.copy_(tensor, non_blocking=True)
    return host


def test_a_round_trip_that_events_order_is_exact_and_not_reported(device: LateCpuDevice) -> None:
    host = page_locked(device, [1.0, 2.0])
    weights = swap_in(device, host)
    device.wait(Stream.COMPUTE, device.record(Stream.SWAP_IN))
    doubled = weights * 2
    device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
    back = swap_out(device, doubled)
    device.record(Stream.SWAP_OUT).synchronize()
    assert back.tolist() == [2.0, 4.0]
    for buffer in (host, back):
        device.host_free(buffer)
    device.assert_in_order()


def test_a_copy_that_was_not_waited_for_has_not_happened() -> None:
    device = LateCpuDevice()
    with device.watched():
        host = page_locked(device, [1.0])
        weights = swap_in(device, host)
        assert weights.isnan().all()
        assert reported(device, "isnan.default on COMPUTE reads")
        back = swap_out(device, torch.ones(3))
        assert back.isnan().all()
        assert reported(device, "a copy on SWAP_OUT reads (3,) of aten.ones.default on COMPUTE, which COMPUTE")
        assert reported(
            device, "on the host reads a page-locked buffer of 12 bytes, which SWAP_OUT may not have written"
        )


def test_both_ends_of_a_copy_to_the_host_must_outlive_it() -> None:
    device = LateCpuDevice()
    with device.watched():
        gradient = torch.ones(3)
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        host = swap_out(device, gradient)
        arrived = device.record(Stream.SWAP_OUT)
        del gradient
        arrived.synchronize()
        assert host.isnan().all()
        assert reported(device, "source of a copy (device to host) was freed")
        swap_out(device, torch.ones(1))
        device.record(Stream.SWAP_OUT).synchronize()
        assert reported(device, "target of a copy (device to host) was freed before it ran")


def test_memory_is_reused_after_its_last_use_on_every_stream(device: LateCpuDevice) -> None:
    host = page_locked(device, [1.0])
    for _ in range(3):  # a stream may take its own memory again at once
        weights = swap_in(device, host)
        device.wait(Stream.COMPUTE, device.record(Stream.SWAP_IN))
        weights.add(1)
        device.wait(Stream.SWAP_IN, device.record(Stream.COMPUTE))
    view = weights[:1]
    used = device.record(Stream.COMPUTE)
    device.wait(Stream.SWAP_IN, used)
    view.add(1)  # issued after the event
    del weights, view
    assert not device.order.reports
    swap_in(device, host)
    assert reported(device, "was given back to SWAP_IN and may be handed out again, while COMPUTE may still use it")


def test_a_host_write_under_a_queued_copy_is_reported(device: LateCpuDevice) -> None:
    host = page_locked(device, [1.0])
    weights = swap_in(device, host)
    host.fill_(5.0)
    assert reported(device, "on the host writes a page-locked buffer of 4 bytes, which SWAP_IN may not have read yet")
    device.synchronize()
    assert weights.tolist() in ([1.0], [5.0])


def test_a_host_write_that_nothing_sees_is_found_when_the_copy_runs() -> None:
    device = LateCpuDevice()
    with device.watched():
        host = page_locked(device, [1.0])
        weights = swap_in(device, host)
    host.fill_(5.0)
    device.synchronize()
    assert weights.tolist() == [5.0]
    assert reported(device, "source of a copy (host to device) was overwritten before it ran")


def test_a_copy_to_the_host_on_the_compute_stream_is_late_for_the_host_alone() -> None:
    device = LateCpuDevice()
    with device.watched():
        host, source = device.host_empty(1, torch.float32), torch.ones(1)
        host.copy_(source, non_blocking=True)
        source.add_(1)
        done = device.record(Stream.COMPUTE)
        with device.watched(None):
            assert host.isnan().all()
        done.synchronize()
        assert host.tolist() == [1.0]


def test_the_host_gathers_what_lies_in_several_pieces_when_its_copy_is_issued(device: LateCpuDevice) -> None:
    for waits in (True, False):
        values = torch.arange(4.0)
        device.wait(Stream.SWAP_OUT, device.record(Stream.COMPUTE))
        columns = swap_out(device, values).view(2, 2)[:, :1]
        left = device.record(Stream.SWAP_OUT)
        device.wait(Stream.COMPUTE, left)  # orders what streams do, not the host
        if waits:
            left.synchronize()
        there = torch.empty(2, 1).copy_(columns, non_blocking=True)
        assert reported(device, "gathers on the host reads a page-locked buffer") is not waits
        assert not waits or there.flatten().tolist() == [0.0, 2.0]


def test_page_locked_memory_is_given_back_once_and_before_it_is_dropped(device: LateCpuDevice) -> None:
    host = page_locked(device, [1.0])
    with pytest.raises(AssertionError, match="1 buffers are still page-locked"):
        device.assert_in_order()
    device.host_free(host)
    device.assert_in_order()
    device.host_free(host)
    assert reported(device, "were given back as if they were")
    page_locked(device, [1.0, 2.0])
    assert reported(device, "a page-locked buffer of 8 bytes was dropped and is still page-locked")


def test_allocations_and_waits_are_reported_but_not_when_memory_is_reused() -> None:
    device = LateCpuDevice()
    host = device.host_empty(1, torch.float32)
    with device.watched():
        for _ in range(2):
            swap_in(device, host)
            device.wait(Stream.COMPUTE, device.record(Stream.SWAP_IN))
        kept = [torch.ones(300)]
        kept.append(torch.ones(300))
        device.record(Stream.SWAP_IN).synchronize()
        torch.ones(1).item()
    device.host_free(host)
    assert [what.partition(" (")[0] for what in device.waste[:2]] == [
        "4 bytes page-locked",
        "4 bytes of device memory for",
    ]
    assert sum(what.startswith("1200 bytes of device memory") for what in device.waste) == 2
    waits = [what for what in device.waste if what.startswith("the host waits for")]
    assert [what.split()[4] for what in waits] == ["SWAP_IN", "COMPUTE", *(stream.name for stream in Stream)]


# ---- inputs


def test_an_upload_waits_for_no_kernel_and_kernels_wait_for_it() -> None:
    device = LateCpuDevice()
    with device.watched():
        torch.ones(2) * 2  # a kernel
        host = torch.ones(2)
        here = device.upload(host)
        host.fill_(3.0)
        assert (0, Stream.COMPUTE) not in device.order.snapshot((0, Stream.UPLOAD))
        assert here.tolist() == [1.0, 1.0]
    device.assert_in_order()


def test_an_upload_that_kernels_do_not_wait_for_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateCpuDevice()
    with device.watched():
        monkeypatch.setattr(device, "wait", lambda *_: None)
        assert device.upload(torch.ones(2)).isnan().all()
    assert reported(device, "which UPLOAD may not have written yet")


def test_an_uploads_memory_is_not_handed_out_before_kernels_have_read_it(device: LateCpuDevice) -> None:
    here = device.upload(torch.ones(2))
    doubled = here * 2
    del here
    there = device.upload(torch.zeros(2))
    assert doubled.tolist() == [2.0, 2.0] and there.tolist() == [0.0, 0.0]
    device.assert_in_order()
