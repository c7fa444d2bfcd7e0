"""Safetensors files, written tensor by tensor: no more than one of them is in memory for it.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header, and the
tensors' bytes without gaps. Files are read by the stock library. The checksum is a CRC-32, taken while writing: about
3 GB/s on one core, so it does not slow a disk down, and it finds torn writes and flipped bits (not malice).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harmony_ds.checkpoint.snapshot import Source
from harmony_ds.errors import CheckpointError

_CHUNK_BYTES = 4 << 20
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What tells a whole file from a torn or a changed one."""

    bytes: int
    crc32: int


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """A small file, durable when this returns."""
    with _NewFile(path) as file:
        file.write(memoryview(content))
    return file.record


def write_tensors(path: Path, tensors: Mapping[str, Source]) -> FileRecord:
    """A safetensors file, durable when this returns. Sources are read one after another.

    Raises:
        CheckpointError: safetensors has no name for a dtype.
    """
    # Large elements first, so that every tensor is aligned to its own; otherwise as given.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    with _NewFile(path) as file:
        file.write(memoryview(_header(path, ordered)))
        for name, source in ordered:
            tensor = source.read()
            assert tuple(tensor.shape) == source.shape and tensor.dtype == source.dtype, name
            file.write(_bytes_of(tensor))
    return file.record


def _header(path: Path, tensors: list[tuple[str, Source]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in tensors:
        if source.dtype not in _NAMES:
            raise CheckpointError(f"{path.name}: {name} is {source.dtype}, which safetensors cannot hold.")
        begin, end = end, end + source.nbytes
        entries[name] = {"dtype": _NAMES[source.dtype], "shape": list(source.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class _NewFile:
    """A new file that is written from front to end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0
        self._crc = 0

    def __enter__(self) -> _NewFile:
        self._file = self._path.open("xb", buffering=0)
        return self

    def write(self, content: memoryview) -> None:
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            self._crc = zlib.crc32(chunk, self._crc)
            self._written += len(chunk)
            while chunk:
                chunk = chunk[self._file.write(chunk) or 0 :]

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._written, self._crc)


# ---- reading


def complaint_about(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file, if anything is. Reads all of it."""
    if not path.is_file():
        return f"{path.name} is missing"
    found = path.stat().st_size
    with path.open("rb") as file:
        if found != record.bytes:
            what = _pickled(file.read(2))
            return f"{path.name} {what or f'has {found} bytes, not {record.bytes}'}"
        crc, first = 0, b""
        while chunk := file.read(_CHUNK_BYTES):
            first = first or chunk[:2]
            crc = zlib.crc32(chunk, crc)
    if crc != record.crc32:
        what = _pickled(first)
        return f"{path.name} {what or f'has the checksum {crc:08x}, not {record.crc32:08x}: bytes were changed'}"
    return None


def _pickled(first: bytes) -> str | None:
    """Whether a file begins as Python's pickles do, or as torch.save's archives."""
    if first == b"PK" or (first[:1] == b"\x80" and first[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return "is a pickle, which is never read here"
    return None


def read_tensors(path: Path) -> dict[str, Source]:
    """The tensors of a safetensors file, mapped into memory.

    Raises:
        CheckpointError: it is none.
    """
    try:
        file: Any = safe_open(path, framework="pt")
        forms = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    unknown = {form.get_dtype() for form in forms.values()} - _DTYPES.keys()
    if unknown:
        raise CheckpointError(f"{path} holds tensors of {', '.join(sorted(unknown))}, which torch does not have.")
    return {
        name: Source(tuple(form.get_shape()), _DTYPES[form.get_dtype()], partial(file.get_tensor, name))
        for name, form in forms.items()
    }
