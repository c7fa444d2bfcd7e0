"""A device whose copies take their bytes over a known rate, and compute the time it takes: results are what they were."""

from __future__ import annotations

import time

import torch

from benchmarks.paper.virtual import VirtualDevice
from harmony_ds.device import Stream
from tests.distributed.training import Training, engine_of, train_plainly, train_with

MIB_PER_S = 2**20 / 1e3
FAST = 2.0**40


def test_a_copy_takes_its_bytes_over_the_rate() -> None:
    device = VirtualDevice(MIB_PER_S, MIB_PER_S, computes=True)
    moments = [device.timestamp(Stream.SWAP_IN)]
    with device.on(Stream.SWAP_IN):
        torch.zeros(2**16).copy_(torch.ones(2**16), non_blocking=True)
    moments.append(device.timestamp(Stream.SWAP_IN))
    begin, end = device.read_timestamps(moments)
    assert end - begin >= 0.99 * 250


def test_compute_and_copies_wait_for_what_they_need() -> None:
    device = VirtualDevice(MIB_PER_S, MIB_PER_S, computes=True)
    begin = time.perf_counter()
    with device.on(Stream.SWAP_IN):
        torch.zeros(2**14).copy_(torch.ones(2**14))
    there = device.record(Stream.SWAP_IN)
    device.wait(Stream.SWAP_OUT, there)
    assert not device.record(Stream.SWAP_OUT).query()
    device.wait(Stream.COMPUTE, there)
    assert time.perf_counter() - begin >= 0.99 * 2**16 / 2**20


def test_training_is_what_it_is_without_the_link() -> None:
    for training in (Training(), Training(bf16=True, harmony={"stash": "host"})):
        engine = engine_of(training, device=VirtualDevice(FAST, FAST, 2**30, computes=True))
        ours, plain = train_with(engine, training), train_plainly(training, 1)[0]
        assert ours.losses == plain.losses  # norms are taken on the device, in fp32
        assert all(torch.equal(ours.masters[name], value) for name, value in plain.masters.items())
        engine.destroy()
