"""Check that training fits into the host's memory: what it needs, against what the system lets this process have.

The limits are the machine's memory and the cgroups that this process is in (containers, batch systems). `ulimit -l`
(RLIMIT_MEMLOCK) is no limit: CUDA's driver page-locks by taking references on pages (os_lock_user_pages in
NVIDIA/open-gpu-kernel-modules), not by mlock. But page-locked memory cannot be swapped out, so it must fit without swap.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from harmony_ds.errors import HostMemoryError

_UNLIMITED = 1 << 60
"""A limit above this is no limit: cgroup v1 writes a number like 2**63 - 4096 where there is none."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes of host memory that training needs.

    Attributes:
        by_kind: such as weights, masters and gradients.
        there_bytes: the part that is in use already: the model's own tensors, which setup frees. Mapped files are no part.
        page_locked_bytes: the part that the system cannot swap out.
    """

    by_kind: Mapping[str, int]
    there_bytes: int
    page_locked_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())

    @property
    def more_bytes(self) -> int:
        """Bytes that have to be free now, beside those that are in use already."""
        return max(0, self.total_bytes - self.there_bytes)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in self.by_kind.items() if nbytes)
        there = f", {self.there_bytes:,} of them in use by the model already" if self.there_bytes else ""
        return f"training needs at least {self.total_bytes:,} bytes of host memory ({kinds}){there}"


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Bytes that one limit lets this process still get.

    Attributes:
        free_bytes: of memory.
        swap_bytes: of swap, for what is not page-locked.
        source: where the numbers are from, for errors.
    """

    free_bytes: int
    swap_bytes: int
    source: str


def check_host_memory(need: HostNeed, rooms: list[HostRoom] | None = None) -> None:
    """Raise HostMemoryError, which names ways out, if `need` exceeds one of `rooms` (None: those of this system)."""
    for room in host_rooms() if rooms is None else rooms:
        if need.more_bytes > room.free_bytes + room.swap_bytes:
            swap = f" and {room.swap_bytes:,} of swap" if room.swap_bytes else ""
            raise HostMemoryError(
                f"{need}: {need.more_bytes:,} more, but {room.free_bytes:,} bytes are free{swap} ({room.source}). "
                + _WAYS_OUT
            )
        page_locked = min(need.page_locked_bytes, need.more_bytes)
        if page_locked > room.free_bytes:
            raise HostMemoryError(
                f"{need}. Of them {page_locked:,} more are page-locked, which keeps them out of swap, but "
                f"{room.free_bytes:,} bytes are free without it ({room.source}). Set harmony.pin_memory to false. "
                + _WAYS_OUT
            )


_WAYS_OUT = (
    'What helps: 1. {"bf16": {"enabled": true}} with "data_types": {"grad_accum_dtype": "bf16"} (smaller gradients). '
    '2. "bf16_master_weights_and_grads" and "bf16_optimizer_states" in the block "bf16" (6 to 8 bytes a parameter where '
    "there are 16 to 18; updates are rounded to it). 3. An optimizer with less state (Lion, SGD). 4. Fewer trainable "
    'parameters (freeze some, LoRA). 5. Without clipping ("gradient_clipping": 0, and "check_grad_overflow": false in '
    'bf16), gradients do not wait on the host. 6. Masters and optimizer state, or weights, on a disk ("offload_optimizer", '
    '"offload_param": {"device": "nvme", "nvme_path": "/folder"}). 7. A smaller model, or more memory.'
)


def free_host_bytes() -> int | None:
    """Return the bytes that this process can still get without swap; None: not known."""
    return min((room.free_bytes for room in host_rooms()), default=None)


def host_rooms(root: Path = Path("/")) -> list[HostRoom]:
    """Return the room that the machine and every cgroup of this process leave; `root`: the folder of /proc and /sys."""
    machine = _machine(root)
    return [*([] if machine is None else [machine]), *_cgroups(root)]


def _machine(root: Path) -> HostRoom | None:
    rows = _numbers(root / "proc/meminfo")
    if "MemAvailable:" not in rows:
        return None
    free, swap = rows["MemAvailable:"] * 1024, rows.get("SwapFree:", 0) * 1024
    return HostRoom(free, swap, f"MemAvailable in /proc/meminfo, of {rows.get('MemTotal:', 0) * 1024:,} bytes in all")


def _cgroups(root: Path) -> Iterator[HostRoom]:
    file = root / "proc/self/cgroup"
    for line in _lines(file):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts: tuple[Path, ...] = (root / "sys/fs/cgroup/unified", root / "sys/fs/cgroup")
            names = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mounts = (root / "sys/fs/cgroup/memory",)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        mount = next((mount for mount in mounts if mount.is_dir()), mounts[-1])
        # A limit may be set at any level. In a container the path may be the host's, and only the root exists.
        cgroup = mount.joinpath(*(part for part in path.split("/") if part and part != ".."))
        yield from filter(None, (_cgroup(folder, *names) for folder in (cgroup, *cgroup.parents)))


def _cgroup(folder: Path, limit_file: str, usage_file: str, prefix: str) -> HostRoom | None:
    limit = next(iter(_lines(folder / limit_file)), "max")
    usage = next(iter(_lines(folder / usage_file)), "")
    if limit == "max" or not usage or int(limit) >= _UNLIMITED:
        return None
    # Pages of files count as used, but are freed when memory is needed.
    rows = _numbers(folder / "memory.stat")
    files = rows.get(f"{prefix}inactive_file", 0) + rows.get(f"{prefix}active_file", 0)
    used = max(0, int(usage) - files)
    source = f"{folder / limit_file} allows {int(limit):,}, of which {used:,} are in use"
    return HostRoom(max(0, int(limit) - used), 0, source)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _numbers(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


# ---- memory of this process (Linux only; elsewhere nothing happens)


def trim_allocator() -> None:
    """Return freed memory to the system; glibc keeps blocks of up to 32 MiB, once some have been freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MappedFiles:
    """The files that this process has mapped to memory at the time of construction."""

    def __init__(self) -> None:
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []
        rows = [line.split(maxsplit=5) for line in lines]
        spans = [row[0].split("-") for row in rows if row[4] != "0"]  # files have an inode
        self._ranges = [range(int(begin, 16), int(end, 16)) for begin, end in spans]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of `tensor` is that of a mapped file."""
        return tensor.numel() > 0 and any(tensor.data_ptr() in addresses for addresses in self._ranges)
