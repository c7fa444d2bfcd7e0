"""harmony_ds's own layout: safetensors and JSON, no pickle.

<tag>/manifest.json                  format, and size and checksum of every other file
<tag>/data-<id>/model.safetensors    parameters (tied ones once) and buffers, in the dtype of compute
                masters.safetensors  fp32 values of trained parameters, where compute is not in fp32
                optimizer.safetensors   "exp_avg/<parameter>", ...
                state.json           everything else: hyper-parameters, counters, scheduler, client state, ...
                state.safetensors    tensors in that
                plan.json            the plan that ran; can be named as harmony.plan
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from harmony_ds.checkpoint.folders import LATEST, MANIFEST, new_data_name, point_latest, saving
from harmony_ds.checkpoint.scripts import put_scripts
from harmony_ds.checkpoint.snapshot import (
    OptimizerState,
    ParameterGroup,
    Progress,
    SchedulerState,
    Snapshot,
    Source,
    listed,
    state_tensors,
)
from harmony_ds.checkpoint.tensor_files import FileRecord, complaint_about, read_tensors, write_bytes, write_tensors
from harmony_ds.checkpoint.tree import decode, encode
from harmony_ds.errors import CheckpointError

_FORMAT = "harmony_ds checkpoint"
_VERSION = 1
_MODEL, _MASTERS, _OPTIMIZER = "model.safetensors", "masters.safetensors", "optimizer.safetensors"
_AS_THEY_ARE = ("tied", "extra", "random", "data", "client_state")  # fields of a snapshot that are nested values
_STATE, _STATE_TENSORS, _PLAN = "state.json", "state.safetensors", "plan.json"


# ---- writing


def write(snapshot: Snapshot, save_dir: Path, tag: str, save_latest: bool = True) -> Path:
    """Saves `snapshot` as `save_dir`/`tag`; that folder is the whole new checkpoint or (after an error) the old one.

    Raises:
        CheckpointError: something in it cannot be held, or it cannot be written there.
    """
    target = save_dir / _checked(tag)
    _refuse_foreign(target)
    tensors: dict[str, Tensor] = {}
    state = json.dumps(_state_of(snapshot, tensors), indent=1).encode()  # refuses before anything is written
    try:
        with saving(target) as staging:
            data = staging / new_data_name()
            data.mkdir()
            records = _write_data(snapshot, data, state, tensors)
            write_bytes(staging / MANIFEST, _manifest(data.name, snapshot, records))
        put_scripts(save_dir, ours=True)
        if save_latest:
            point_latest(save_dir, tag)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {target} could not be saved: {error}. What was saved before is untouched."
        ) from error
    return target


def _checked(tag: str) -> str:
    parts = Path(tag).parts
    if not parts or Path(tag).is_absolute() or ".." in parts or tag == LATEST or tag.startswith("."):
        raise CheckpointError(f"{tag!r} cannot be the tag of a checkpoint: it names a folder inside save_dir.")
    return tag


def _refuse_foreign(target: Path) -> None:
    theirs = sorted(file.name for file in target.glob("*_states.pt"))
    if theirs and not (target / MANIFEST).exists():
        raise CheckpointError(
            f"{target} holds a checkpoint of DeepSpeed ({listed(theirs, 2)}): save under another tag or into another "
            "folder."
        )


def _write_data(snapshot: Snapshot, data: Path, state: bytes, tensors: dict[str, Tensor]) -> dict[str, FileRecord]:
    files: dict[str, Mapping[str, Source]] = {_MODEL: snapshot.tensors}
    if snapshot.masters:
        files[_MASTERS] = snapshot.masters
    if snapshot.optimizer is not None:
        files[_OPTIMIZER] = state_tensors(snapshot.optimizer.states)
    files[_STATE_TENSORS] = {name: Source.of(tensor) for name, tensor in tensors.items()}
    records = {name: write_tensors(data / name, sources) for name, sources in files.items()}
    records[_STATE] = write_bytes(data / _STATE, state)
    if snapshot.plan is not None:
        records[_PLAN] = write_bytes(data / _PLAN, snapshot.plan.encode())
    return records


def _manifest(data: str, snapshot: Snapshot, records: Mapping[str, FileRecord]) -> bytes:
    body: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": snapshot.origin,
        "global_steps": snapshot.progress.global_steps,
        "data": data,
        "files": {name: asdict(record) for name, record in records.items()},
    }
    return json.dumps({**body, "crc32": _crc(body)}, indent=1).encode()


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _state_of(snapshot: Snapshot, tensors: dict[str, Tensor]) -> dict[str, Any]:
    optimizer, scheduler = snapshot.optimizer, snapshot.scheduler
    values = {
        "progress": asdict(snapshot.progress),
        **{name: getattr(snapshot, name) for name in _AS_THEY_ARE},
        **{name: list(getattr(snapshot, name)) for name in ("buffers", "frozen", "excluded")},
        "optimizer": None if optimizer is None else _optimizer_values(optimizer),
        "scheduler": None if scheduler is None else {"kind": scheduler.kind, "state": scheduler.state},
    }
    return {name: encode(value, name, tensors) for name, value in values.items()}


def _optimizer_values(optimizer: OptimizerState) -> dict[str, Any]:
    return {
        "kind": optimizer.kind,
        "groups": [{"parameters": list(group.parameters), "values": group.values} for group in optimizer.groups],
        "keys": {name: list(state) for name, state in optimizer.states.items()},
        "scalars": {
            name: {key: value for key, value in state.items() if not isinstance(value, Source)}
            for name, state in optimizer.states.items()
        },
    }


# ---- reading


def is_ours(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, of this layout."""
    return (folder / MANIFEST).exists() or any(folder.glob("data-*/" + _STATE))


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint, and compare its files with the manifest.

    Raises:
        CheckpointError: it is torn, was changed, or is of another version; says which file and why.
    """
    manifest = _read_manifest(folder)
    data, records = folder / manifest["data"], _records(manifest)
    complaints = [complaint for name, record in records.items() if (complaint := complaint_about(data / name, record))]
    if complaints:
        raise CheckpointError(f"the checkpoint {folder} is torn or was changed: {'; '.join(complaints)}.")


def read(folder: Path, verified: bool = False) -> Snapshot:
    """Open a checkpoint, after `verify` unless the caller has `verified` it.

    Raises:
        CheckpointError: as `verify`.
    """
    if not verified:
        verify(folder)
    manifest = _read_manifest(folder)
    data, records = folder / manifest["data"], _records(manifest)
    laid_aside = {name: source.read() for name, source in read_tensors(data / _STATE_TENSORS).items()}
    state = json.loads((data / _STATE).read_bytes())
    values = {name: decode(value, laid_aside) for name, value in state.items()}
    model = read_tensors(data / _MODEL)
    buffers = values["buffers"]
    scheduler = values["scheduler"]
    return Snapshot(
        origin=manifest["origin"],
        progress=Progress(**values["progress"]),
        parameters={name: source for name, source in model.items() if name not in set(buffers)},
        buffers={name: model[name] for name in buffers},
        masters=read_tensors(data / _MASTERS) if _MASTERS in records else {},
        frozen=tuple(values["frozen"]),
        excluded=tuple(values["excluded"]),
        optimizer=None if values["optimizer"] is None else _optimizer(values["optimizer"], data / _OPTIMIZER),
        scheduler=None if scheduler is None else SchedulerState(**scheduler),
        **{name: values[name] for name in _AS_THEY_ARE},
        plan=(data / _PLAN).read_text(encoding="utf-8") if _PLAN in records else None,
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"the checkpoint {folder} has no {MANIFEST}: its save was never finished, or it was moved."
        )
    try:
        manifest = json.loads(file.read_bytes())
        crc = manifest.pop("crc32")
        form, version = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not the manifest of a checkpoint of harmony_ds: {error!r}") from error
    if form != _FORMAT:
        raise CheckpointError(f"{file} says {form!r}, not {_FORMAT!r}: it is of another program.")
    if version != _VERSION:
        raise CheckpointError(f"{file} is of version {version}; this harmony_ds reads version {_VERSION}.")
    if crc != _crc(manifest):
        raise CheckpointError(f"{file} was changed: its checksum is {_crc(manifest):08x}, not {crc:08x}.")
    return dict(manifest)


def _records(manifest: dict[str, Any]) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in manifest["files"].items()}


def _optimizer(values: dict[str, Any], file: Path) -> OptimizerState:
    tensors = read_tensors(file)
    scalars = values["scalars"]
    return OptimizerState(
        kind=values["kind"],
        groups=tuple(ParameterGroup(tuple(group["parameters"]), group["values"]) for group in values["groups"]),
        states={
            name: {key: scalars[name][key] if key in scalars[name] else tensors[f"{key}/{name}"] for key in keys}
            for name, keys in values["keys"].items()
        },
    )
