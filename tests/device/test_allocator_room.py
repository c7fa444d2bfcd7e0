"""What libraries and the caching allocator take beside a plan, by arithmetic."""

from __future__ import annotations

import pytest

from harmony_ds.device import CpuDevice
from harmony_ds.device.allocator_room import SEGMENT_BYTES, fragment_bytes, reserve_bytes
from harmony_ds.device.meta import MetaDevice
from tests.device.test_meta import FakeClock

MIB = 2**20


@pytest.mark.parametrize(("capability", "workspaces"), [((8, 9), 2 * 8320 * 2**10), ((9, 0), 64 * MIB)])
def test_workspaces_and_the_segments_of_two_streams_are_reserved(capability: tuple[int, int], workspaces: int) -> None:
    assert reserve_bytes(capability) == workspaces + 2 * SEGMENT_BYTES == workspaces + 44 * MIB


def test_fragments_are_half_of_the_working_memory_of_one_micro_batch_or_a_twelfth_of_the_budget() -> None:
    assert fragment_bytes(12_000 * MIB, 0) == 0
    assert fragment_bytes(12_000 * MIB, 900 * MIB) == 450 * MIB
    assert fragment_bytes(12_000 * MIB, 9000 * MIB) == 1000 * MIB


def test_a_meta_device_leaves_the_room_of_a_cuda_device_where_it_is_told_to() -> None:
    leaving = MetaDevice(FakeClock(), 12_000 * MIB, "cuda", leaves_room=True)
    assert (leaving.reserve_bytes(), leaving.fragment_bytes(900 * MIB)) == (reserve_bytes((9, 0)), 450 * MIB)
    other = MetaDevice(FakeClock(), 2**30, "cuda")
    assert (other.reserve_bytes(), other.fragment_bytes(1000 * MIB)) == (0, 0)


def test_the_cpu_device_has_no_fragments() -> None:
    assert CpuDevice(2**30).fragment_bytes(1000 * MIB) == 0
