"""Tensors in mapped files are told from others, and freed memory is returned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harmony_ds.offload.process_memory import MappedFiles, trim_allocator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_COUNT = 2**20  # 4 MiB in fp32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.arange(_COUNT, dtype=torch.float32), "b": torch.ones(_COUNT)}, path)
    return path


def test_a_mapped_tensor_is_told_from_one_in_memory(file: Path) -> None:
    tensors = load_file(file)
    mapped = MappedFiles()

    assert mapped.holds(tensors["a"])
    assert mapped.holds(tensors["b"][5:])
    assert not mapped.holds(torch.ones(8))
    assert not mapped.holds(tensors["a"].clone())
    assert not mapped.holds(torch.empty(0))


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
