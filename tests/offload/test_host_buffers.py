from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from harmony_ds.device import CpuDevice, Stream
from harmony_ds.offload.host_buffers import HostBuffers, size_class


class BufferUser:
    """BufferUser of a buffer."""


class CountingDevice(CpuDevice):
    """Counts page-locked allocations, all and living ones."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.locked = 0

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.made += 1
        self.locked += numel * dtype.itemsize
        return super().host_empty(numel, dtype)

    def host_free(self, buffer: Tensor) -> None:
        self.locked -= buffer.nbytes


def step(buffers: HostBuffers, device: CountingDevice, sizes: list[int]) -> None:
    users = [BufferUser() for _ in sizes]
    taken = [buffers.acquire(user, size) for user, size in zip(users, sizes, strict=True)]
    for buffer in taken:
        buffers.release(buffer, device.record(Stream.SWAP_IN))


@pytest.mark.parametrize("nbytes", [0, 1, 15, 17, 96, 1000, 2**20, 2**20 + 1, 5 * 2**18, 10**9 + 7])
def test_a_size_class_is_less_than_an_eighth_larger(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= nbytes * 9 / 8
    assert size_class(size_class(nbytes)) == size_class(nbytes)


def test_varying_lengths_do_not_accumulate_buffers_or_page_locking() -> None:
    device, chance = CountingDevice(), random.Random(1)
    buffers = HostBuffers(device)
    most, made = 0, []
    for _ in range(300):
        length = chance.randrange(1, 513)
        most = max(most, 8 * size_class(1024 * length))
        step(buffers, device, [1024 * length] * 8)
        assert device.locked == buffers.nbytes <= most
        made.append(device.made)
    assert made[-1] == made[99]


@pytest.mark.parametrize("sizes", [[64, 8, 32, 8], [64, 64, 64]])
def test_reserved_buffers_suffice_in_any_order(sizes: list[int]) -> None:
    device = CountingDevice()
    buffers = HostBuffers(device, exact=True)
    buffers.reserve(sizes)
    for order in itertools.permutations([64, 8, 32, 8][: len(sizes)]):
        step(buffers, device, list(order))
    assert (device.made, device.locked) == (len(sizes), sum(sizes))


def test_reserving_follows_the_sizes_and_keeps_buffers_in_use() -> None:
    device = CountingDevice()
    buffers = HostBuffers(device, exact=True)
    buffers.reserve([64, 64])
    user = BufferUser()
    used = buffers.acquire(user, 64)
    buffers.reserve([64, 16])
    buffers.reserve([64, 16])
    assert (device.made, device.locked) == (3, 80)
    buffers.release(used, device.record(Stream.SWAP_IN))
    step(buffers, device, [16, 64])
    assert device.made == 3


def test_the_buffer_of_a_dropped_user_is_reused() -> None:
    device = CountingDevice()
    buffers = HostBuffers(device)

    def fail() -> None:
        user = BufferUser()
        buffers.acquire(user, 64)

    fail()
    step(buffers, device, [64])
    assert (device.made, device.locked) == (1, 64)
    user = BufferUser()
    buffers.acquire(user, 32)  # in use until the end
    buffers.destroy()
    assert device.locked == buffers.nbytes == 0
