"""Host memory: needs against the limits of machine and cgroups; mapped files; freed memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harmony_ds.errors import HostMemoryError
from harmony_ds.offload import host_memory
from harmony_ds.offload.host_memory import (
    HostNeed,
    HostRoom,
    MappedFiles,
    check_host_memory,
    free_host_bytes,
    host_rooms,
    trim_allocator,
)

MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nSwapTotal: 500 kB\nSwapFree: 200 kB\n"
NEED = HostNeed({"weights": 300, "masters": 600, "optimizer": 1200, "gradients": 0}, there_bytes=100)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def free_bytes(root: Path) -> list[int]:
    return [room.free_bytes for room in host_rooms(root)]


def test_the_machines_room_is_available_memory_and_swap(tmp_path: Path) -> None:
    assert host_rooms(tmp_path) == []  # a system without /proc
    (room,) = host_rooms(write(tmp_path, {"proc/meminfo": MEMINFO}))
    assert (room.free_bytes, room.swap_bytes) == (600 * 1024, 200 * 1024)
    assert "1,024,000" in room.source


def test_cgroup_2_counts_at_every_level_without_pages_of_files(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            f"{top}/job/step/memory.max": "max\n",
            f"{top}/job/step/memory.current": "50\n",
            f"{top}/job/memory.max": "1000\n",
            f"{top}/job/memory.current": "700\n",
            f"{top}/job/memory.stat": "anon 100\ninactive_file 400\nactive_file 100\nshmem 5\n",
        },
    )

    (room,) = host_rooms(root)

    assert room.free_bytes == 1000 - (700 - 500)
    assert room.swap_bytes == 0
    assert "job/memory.max allows 1,000, of which 200 are in use" in room.source


def test_cgroup_1_and_its_large_number_for_unlimited(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
            f"{top}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{top}/memory.usage_in_bytes": "12345\n",
            f"{top}/docker/abc/memory.limit_in_bytes": "900\n",
            f"{top}/docker/abc/memory.usage_in_bytes": "500\n",
            f"{top}/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n",
        },
    )

    assert free_bytes(root) == [900 - 450]


def test_in_a_container_without_its_own_path_the_root_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/memory.max": "100\n"}
    current = "sys/fs/cgroup/memory.current"
    assert free_bytes(write(tmp_path, {**files, current: "30\n"})) == [70]
    assert free_bytes(write(tmp_path, {current: "130\n"})) == [0]  # more is in use than is allowed


def test_a_need_that_fits_is_not_refused() -> None:
    check_host_memory(NEED, [HostRoom(2000, 0, "exactly")])
    check_host_memory(NEED, [HostRoom(1500, 500, "with swap")])
    check_host_memory(NEED, [])


def test_one_byte_too_little_is_refused_with_both_numbers_and_what_helps() -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(NEED, [HostRoom(10**6, 0, "enough"), HostRoom(1499, 500, "the smaller one")])

    text = str(caught.value)
    assert text.startswith(
        "training needs at least 2,100 bytes of host memory (weights 300, masters 600, optimizer 1,200), 100 of them in "
        "use by the model already: 2,000 more, but 1,499 bytes are free and 500 of swap (the smaller one). What helps: 1."
    )


def test_page_locked_memory_has_to_fit_without_swap() -> None:
    need = HostNeed({"weights": 1000, "optimizer": 1000}, there_bytes=0, page_locked_bytes=1000)
    check_host_memory(need, [HostRoom(1000, 1000, "just")])

    with pytest.raises(
        HostMemoryError, match=r"1,000 more are page-locked.*999 bytes are free.*harmony\.pin_memory to f"
    ):
        check_host_memory(need, [HostRoom(999, 5000, "mostly swap")])


def test_free_bytes_are_those_of_the_tightest_limit_without_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = [HostRoom(700, 10**6, "machine"), HostRoom(600, 0, "cgroup")]
    monkeypatch.setattr(host_memory, "host_rooms", lambda: rooms)
    assert free_host_bytes() == 600
    rooms.clear()
    assert free_host_bytes() is None


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
_COUNT = 2**20  # 4 MiB in fp32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(_COUNT, dtype=torch.float32), "b": torch.ones(_COUNT)}, path)
    return path


@linux
def test_a_mapped_tensor_is_told_from_one_in_memory(file: Path) -> None:
    tensors = load_file(file)
    mapped = MappedFiles()

    assert mapped.holds(tensors["a"])
    assert mapped.holds(tensors["b"][5:])
    assert not mapped.holds(torch.ones(8))
    assert not mapped.holds(tensors["a"].clone())
    assert not mapped.holds(torch.empty(0))


@linux
def test_freed_memory_that_the_allocator_kept_is_returned() -> None:
    def anonymous() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))

    pieces = [torch.ones(2**14) for _ in range(1024)]  # 64 MiB in blocks that the allocator does not map one by one
    kept = pieces[::64]
    with_all = anonymous()
    del pieces
    trim_allocator()

    assert anonymous() < with_all - 48 * 2**20
    assert all(piece.sum() == 2**14 for piece in kept)
