"""Weights alone, for whoever loads models: safetensors as `from_pretrained` reads them, or one file of `torch.save`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from harmony_ds.checkpoint.folders import replacing
from harmony_ds.checkpoint.snapshot import Snapshot, Source
from harmony_ds.checkpoint.tensor_files import write_bytes, write_tensors
from harmony_ds.errors import CheckpointError

_SHARD_BYTES = 5_000_000_000
_WHOLE, _INDEX, _SHARDS = "model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"


def export_weights(snapshot: Snapshot, folder: Path, shard_bytes: int = _SHARD_BYTES) -> list[Path]:
    """Write model.safetensors into `folder`, or shards and their index, and remove what an earlier export left there.

    Tied weights are there once.

    Raises:
        CheckpointError: it cannot be written.
    """
    written = _exported(snapshot, folder, shard_bytes)
    for pattern in (_WHOLE, _INDEX, _SHARDS):  # `from_pretrained` would prefer an older whole file to new shards
        for path in set(folder.glob(pattern)).difference(written):
            with _complaining(path):
                path.unlink()
    return written


def _exported(snapshot: Snapshot, folder: Path, shard_bytes: int) -> list[Path]:
    shards: list[dict[str, Source]] = [{}]
    for name, source in snapshot.tensors.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + source.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = source
    if len(shards) == 1:
        return [_replaced(folder / _WHOLE, shards[0])]
    names = [f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    paths = [_replaced(folder / name, shard) for name, shard in zip(names, shards, strict=True)]
    index = {
        "metadata": {"total_size": sum(source.nbytes for shard in shards for source in shard.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    return [*paths, _replaced(folder / _INDEX, json.dumps(index, indent=2).encode())]


def save_16bit(snapshot: Snapshot, path: Path) -> None:
    """Writes one file with the weights: safetensors by its suffix, else a state dict by `torch.save`.

    Raises:
        CheckpointError: it cannot be written.
    """
    if path.suffix == ".safetensors":
        _replaced(path, snapshot.tensors)
        return
    values = {name: source.alone() for name, source in snapshot.tensors.items()}
    with _complaining(path), replacing(path) as fresh, fresh.open("xb") as file:
        torch.save(snapshot.with_tied(values), file)
        file.flush()
        os.fsync(file.fileno())


def _replaced(path: Path, content: Mapping[str, Source] | bytes) -> Path:
    with _complaining(path), replacing(path) as fresh:
        if isinstance(content, bytes):
            write_bytes(fresh, content)
        else:
            write_tensors(fresh, content)
    return path


@contextmanager
def _complaining(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
