"""Pages of mapped files go when they are asked to, and never with anything that was written into them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harmony_ds.offload.process_memory import MappedFiles, return_freed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_COUNT = 2**20  # 4 MiB in fp32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(_COUNT, dtype=torch.float32), "b": torch.ones(_COUNT)}, path)
    return path


def resident_bytes(file: Path) -> int:
    """Of the mapping of `file` in this process."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def read(file: Path) -> dict[str, Tensor]:
    """Its tensors, all of whose pages are resident."""
    tensors = load_file(file)
    for tensor in tensors.values():
        assert tensor.sum() > 0
    assert resident_bytes(file) >= 2 * 4 * _COUNT
    return tensors


def test_a_mapped_tensor_is_told_from_one_in_memory(file: Path) -> None:
    tensors = load_file(file)
    mapped = MappedFiles()

    assert mapped.holds(tensors["a"])
    assert mapped.holds(tensors["b"][5:])
    assert not mapped.holds(torch.ones(8))
    assert not mapped.holds(tensors["a"].clone())
    assert not mapped.holds(torch.empty(0))


def test_released_pages_are_gone_and_come_back_with_the_same_values(file: Path) -> None:
    tensors = read(file)
    MappedFiles().release(tensors["a"].view(1024, -1).t())
    MappedFiles().release(torch.arange(_COUNT))  # no file: left alone

    assert resident_bytes(file) <= 4 * _COUNT + 2**17
    assert torch.equal(tensors["a"], torch.arange(_COUNT, dtype=torch.float32))
    assert torch.equal(tensors["b"], torch.ones(_COUNT))


def test_what_was_written_stays(file: Path) -> None:
    tensors = read(file)
    tensors["a"][12345] = -1.0
    tensors["b"][-1] = 7.0  # in another page, which belongs to b alone
    mapped = MappedFiles()
    mapped.release(tensors["a"])
    mapped.release(tensors["b"])

    assert tensors["a"][12345] == -1.0
    assert tensors["a"][12346] == 12346.0
    assert tensors["b"][-1] == 7.0


def test_freed_memory_that_the_allocator_kept_is_returned() -> None:
    def anonymous() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))

    pieces = [torch.ones(2**14) for _ in range(1024)]  # 64 MiB in blocks that the allocator does not map one by one
    kept = pieces[::64]
    with_all = anonymous()
    del pieces
    return_freed()

    assert anonymous() < with_all - 48 * 2**20
    assert all(piece.sum() == 2**14 for piece in kept)
