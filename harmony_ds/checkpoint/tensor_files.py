"""Files of a checkpoint, durable when written: safetensors, tensor by tensor, and torch.save's, read without executing any.

A safetensors file (https://huggingface.co/docs/safetensors) is eight bytes with the length of a JSON header, the header,
and the tensors' bytes without gaps. The checksum is a CRC-32, taken while writing: about 3 GB/s on one core, so it does
not slow a disk down, and it finds torn writes and flipped bits (not malice).

torch's restricted unpickler makes tensors and plain containers. The few classes of DeepSpeed that its files name become
inert records here: their code is neither run nor imported. Any other name in a file is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import _TYPES, load_file
from torch import Tensor

from harmony_ds.checkpoint.snapshot import TensorSource
from harmony_ds.errors import CheckpointError

_CHUNK_BYTES = 4 << 20
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
Record = SimpleNamespace
"""The attributes of an object whose class is not imported."""
_PLAIN = (list, tuple, set, frozenset, bool, int, float, str, bytes, bytearray)
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def _zero_stage(kind: object, name: object) -> int:
    """Return a stage of ZeRO by its name: Python 3.11.0 to 3.11.3 write members of an enum as `getattr(enum, name)`.

    Raises:
        pickle.UnpicklingError: anything else is asked for.
    """
    if kind is not int or not isinstance(name, str) or name not in _ZERO_STAGES:  # a file may ask for anything
        raise pickle.UnpicklingError(f"GLOBAL getattr({kind},{name}) is not known.")
    return _ZERO_STAGES[name]


_INERT: list[Any] = [
    bytes,
    frozenset,
    (Record, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Record, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Record, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_zero_stage, "builtins.getattr"),
]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of a whole file."""

    bytes: int
    crc32: int


class _NewFile(io.FileIO):
    """A new file, which takes the checksum of what is written to it."""

    crc32 = 0

    def write(self, content: Any, /) -> int:
        written = super().write(content)
        self.crc32 = zlib.crc32(memoryview(content)[:written], self.crc32)
        return written


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> FileRecord:
    """Write a new file by `write`, and wait until it is on the disk."""
    with _NewFile(path, "xb") as raw, io.BufferedWriter(raw) as file:
        write(file)
        file.flush()
        os.fsync(raw.fileno())
        return FileRecord(raw.tell(), raw.crc32)


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a small file."""
    return _write(path, lambda file: file.write(content))


def write_pickle(path: Path, value: Any) -> FileRecord:
    """Write a file of `torch.save`."""
    try:
        return _write(path, partial(torch.save, value))
    except RuntimeError as error:  # torch's complaint that its archive is not whole, after the disk's error
        raise error.__context__ or error from None


def write_tensors(path: Path, tensors: Mapping[str, TensorSource]) -> FileRecord:
    """Write a safetensors file; its sources are read one after another."""
    # Large elements first, so that every tensor is aligned to its own; otherwise as given.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)

    def write(file: IO[bytes]) -> None:
        file.write(_header(path, ordered))
        for name, source in ordered:
            tensor = source.read()
            assert tuple(tensor.shape) == source.shape and tensor.dtype == source.dtype, name
            octets: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(octets)

    return _write(path, write)


def _header(path: Path, tensors: list[tuple[str, TensorSource]]) -> bytes:
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


def plain(value: Any, where: str) -> Any:
    """Return `value`, found at `where`, as plain data; subclasses of numbers, text and containers become their base."""
    if isinstance(value, Tensor):
        return TensorSource.from_tensor(value).compact()
    if isinstance(value, Mapping):
        return {plain(key, f"{where}.keys"): plain(item, f"{where}.{key}") for key, item in value.items()}
    if value is None or isinstance(value, torch.dtype):
        return value
    kind: Any = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
    if kind in _PLAIN[:4]:
        return kind(plain(item, f"{where}.{place}") for place, item in enumerate(value))
    if kind is not None:
        return kind(value)
    cls = type(value)
    name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    raise CheckpointError(
        f"{where} is {name}, which a checkpoint cannot hold: it takes None, booleans, numbers, text, bytes, tensors, and "
        "lists, tuples, sets and dictionaries of them. Convert it (.item(), .tolist(), torch.from_numpy(), state_dict()) "
        "before saving, and back after loading."
    )


def find_damage(path: Path, record: FileRecord) -> str | None:
    """Read all of a file, and return how it differs from its record."""
    if not path.is_file():
        return f"{path.name} is missing"
    found, crc = path.stat().st_size, 0
    if found != record.bytes:
        return f"{path.name} has {found} bytes, not {record.bytes}"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    if crc != record.crc32:
        return f"{path.name} has the checksum {crc:08x}, not {record.crc32:08x}: bytes were changed"
    return None


def read_tensors(path: Path) -> dict[str, TensorSource]:
    """Map the tensors of a safetensors file into memory."""
    try:
        return {name: TensorSource.from_tensor(tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def load_pickle(path: Path) -> Any:
    """Return the content of a file of `torch.save`; its tensors are mapped from the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        with torch.serialization.safe_globals(_INERT):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # as torch wrote before version 1.6
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))  # the rest of torch's message advises to execute it
        if named is None:
            raise CheckpointError(f"{path} is no whole file of torch.save.") from error
        raise CheckpointError(
            f"{path} holds an object of {named[1]}, which is not executed here. Allowed are tensors, plain data and what "
            "DeepSpeed itself saves: put such objects into the client state as plain data, or save without them."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole file of torch.save: {error}") from error
