"""The CPU device behind a link of a known rate: what is late is ordered by events, and changes no result."""

from __future__ import annotations

import torch

from benchmarks.prediction.slow_link import SlowLinkDevice
from harmony_ds.device import Stream
from tests.parallel.training import Training, engine_of, train_plainly, train_with

FAST = 2.0**40


def test_an_event_passes_behind_the_copies_before_it() -> None:
    device = SlowLinkDevice(2.0**24)
    host, there, back = torch.arange(2.0**16), torch.zeros(2**16), torch.zeros(2**16)
    with device.on(Stream.SWAP_IN):
        there.copy_(host, non_blocking=True)
    device.wait(Stream.SWAP_OUT, device.record(Stream.SWAP_IN))
    with device.on(Stream.SWAP_OUT):
        back.copy_(there, non_blocking=True)
    device.record(Stream.SWAP_OUT).synchronize()
    assert torch.equal(back, host)


def test_a_copy_takes_its_bytes_over_the_rate() -> None:
    device = SlowLinkDevice(2.0**24)
    moments = [device.timestamp(Stream.SWAP_IN)]
    with device.on(Stream.SWAP_IN):
        torch.zeros(2**16).copy_(torch.ones(2**16), non_blocking=True)
    moments.append(device.timestamp(Stream.SWAP_IN))
    begin, end = device.read_timestamps(moments)
    assert end - begin >= 0.99 * 2**18 / 2**24 * 1e3  # ms; a busy machine makes it longer


def test_what_is_no_copy_comes_behind_the_copies_of_its_stream() -> None:
    device = SlowLinkDevice(2.0**24)
    there = torch.zeros(2**16)
    with device.on(Stream.SWAP_IN):
        there.copy_(torch.ones(2**16), non_blocking=True)
        total = there.sum()
    assert total == 2**16


def test_training_is_what_it_is_without_the_link() -> None:
    for training in (Training(), Training(bf16=True, harmony={"stash": "host"})):
        engine = engine_of(training, device=SlowLinkDevice(FAST, 2**30))
        ours, plain = train_with(engine, training), train_plainly(training, 1)[0]
        assert ours.losses == plain.losses  # norms are taken on the device, in fp32
        assert all(torch.equal(ours.masters[name], value) for name, value in plain.masters.items())
        engine.destroy()
