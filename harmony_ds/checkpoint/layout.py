"""harmony_ds's own layout.

<tag>/manifest.json                    format, and size and checksum of every other file
<tag>/data-<id>/model.safetensors      parameters (tied ones once), in the dtype of compute or as bytes, and buffers
                masters.safetensors    fp32 values of trained parameters, where compute is not in fp32
                optimizer.safetensors  "exp_avg/<parameter>", ...; of a state in 8 bits "exp_avg.codes/<parameter>", ...
                state.pt               everything else, as plain data and tensors: counters, client state, ...
                plan.json              the plan that ran; can be named as harmony.plan
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harmony_ds.checkpoint import tensor_files
from harmony_ds.checkpoint.folders import DATA, LATEST, MANIFEST, put_scripts, replace_text, saving
from harmony_ds.checkpoint.snapshot import (
    ParameterGroup,
    Progress,
    SavedOptimizer,
    Snapshot,
    TensorSource,
    WrapperSource,
    listed,
)
from harmony_ds.checkpoint.tensor_files import FileRecord, find_damage, load_pickle, plain, read_tensors
from harmony_ds.errors import CheckpointError

_FORMAT = "harmony_ds checkpoint 3"
_MODEL, _MASTERS, _OPTIMIZER = "model.safetensors", "masters.safetensors", "optimizer.safetensors"
_STATE, _PLAN = "state.pt", "plan.json"
_IN_STATE = ("tied", "frozen", "packed", "extra", "scheduler", "random", "data", "client_state")
"""Fields of a `Snapshot` that `state.pt` holds as they are."""


def write(snapshot: Snapshot, save_dir: Path, tag: str, save_latest: bool = True) -> Path:
    """Save `snapshot` as `save_dir`/`tag`; that folder is the whole new checkpoint or (after an error) the old one."""
    parts = Path(tag).parts
    if not parts or Path(tag).is_absolute() or ".." in parts or tag == LATEST or tag.startswith("."):
        raise CheckpointError(f"{tag!r} cannot be the tag of a checkpoint: it names a folder inside save_dir.")
    target = save_dir / tag
    if not (target / MANIFEST).exists() and (theirs := sorted(file.name for file in target.glob("*_states.pt"))):
        found = f"{target} holds a checkpoint of DeepSpeed ({listed(theirs, 2)})"
        raise CheckpointError(f"{found}: save under another tag or into another folder.")
    state = _plain_state(snapshot)  # refuses before anything is written
    with saving(target) as staging:
        data = staging / f"{DATA}{uuid.uuid4().hex[:12]}"
        data.mkdir()
        files = {name: asdict(record) for name, record in _write_data(snapshot, data, state).items()}
        body = {"format": _FORMAT, "data": data.name, "files": files}
        manifest = json.dumps({**body, "crc32": _crc(body)}, indent=1)
        tensor_files.write_bytes(staging / MANIFEST, manifest.encode())
    put_scripts(save_dir)
    if save_latest:
        replace_text(save_dir / LATEST, tag)
    return target


def _write_data(snapshot: Snapshot, data: Path, state: dict[str, Any]) -> dict[str, FileRecord]:
    files: dict[str, Mapping[str, TensorSource]] = {_MODEL: snapshot.tensors}
    if snapshot.masters:
        files[_MASTERS] = snapshot.masters
    if snapshot.optimizer is not None:
        files[_OPTIMIZER] = _state_tensors(snapshot.optimizer)
    records = {name: tensor_files.write_tensors(data / name, sources) for name, sources in files.items()}
    records[_STATE] = tensor_files.write_pickle(data / _STATE, state)
    if snapshot.plan is not None:
        records[_PLAN] = tensor_files.write_bytes(data / _PLAN, snapshot.plan.encode())
    return records


def _state_tensors(optimizer: SavedOptimizer) -> dict[str, TensorSource]:
    """Return the tensors of the optimizer's state by their names in the file; a wrapper's are `state.part/parameter`."""
    tensors: dict[str, TensorSource] = {}
    for name, state in optimizer.states.items():
        for key, value in state.items():
            if isinstance(value, TensorSource):
                tensors[f"{key}/{name}"] = value
            elif isinstance(value, WrapperSource):
                tensors.update({f"{key}.{part}/{name}": source for part, source in value.parts.items()})
    return tensors


def _crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _plain_state(snapshot: Snapshot) -> dict[str, Any]:
    """Return what `state.pt` holds, as plain data; CheckpointError: something has no place in it."""
    values = {name: getattr(snapshot, name) for name in _IN_STATE}
    values |= {"buffers": list(snapshot.buffers), "progress": asdict(snapshot.progress), "optimizer": None}
    if (optimizer := snapshot.optimizer) is not None:
        values["optimizer"] = {
            "kind": optimizer.kind,
            "groups": [asdict(group) for group in optimizer.groups],
            "scalars": {
                name: {key: v for key, v in state.items() if not isinstance(v, (TensorSource, WrapperSource))}
                for name, state in optimizer.states.items()
            },
            "wrappers": {
                name: {
                    key: {"kind": v.kind, "context": v.context, "parts": list(v.parts)}
                    for key, v in state.items()
                    if isinstance(v, WrapperSource)
                }
                for name, state in optimizer.states.items()
            },
        }
    return {name: plain(value, name) for name, value in values.items()}


def is_ours(folder: Path) -> bool:
    """Return whether a folder is, or was meant to be, of this layout."""
    return (folder / MANIFEST).exists() or any(folder.glob(f"{DATA}*/{_MODEL}"))


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint, and compare its files with the manifest; other layouts have no checksums."""
    if not is_ours(folder):
        return
    manifest = _read_manifest(folder)
    complaints: list[str] = []
    for name, record in manifest["files"].items():
        damage = find_damage(folder / manifest["data"] / name, FileRecord(**record))
        if damage is not None:
            complaints.append(damage)
    if complaints:
        raise CheckpointError(f"the checkpoint {folder} is torn or was changed: {'; '.join(complaints)}.")


def read(folder: Path) -> Snapshot:
    """Open a checkpoint that the caller has verified."""
    manifest = _read_manifest(folder)
    data, files = folder / manifest["data"], manifest["files"]
    values, model = load_pickle(data / _STATE), read_tensors(data / _MODEL)
    buffers = {name: model.pop(name) for name in values["buffers"]}
    optimizer: SavedOptimizer | None = None
    if _OPTIMIZER in files:
        states, sources = values["optimizer"]["scalars"], read_tensors(data / _OPTIMIZER)
        for name, wrappers in values["optimizer"].get("wrappers", {}).items():  # older checkpoints have none
            for key, saved in wrappers.items():
                parts = {part: sources.pop(f"{key}.{part}/{name}") for part in saved["parts"]}
                states[name][key] = WrapperSource(saved["kind"], parts, saved["context"])
        for place, source in sources.items():
            key, name = place.split("/", 1)
            states.setdefault(name, {})[key] = source
        groups = tuple(ParameterGroup(**group) for group in values["optimizer"]["groups"])
        optimizer = SavedOptimizer(values["optimizer"]["kind"], groups, states)
    return Snapshot(
        progress=Progress(**values["progress"]),
        parameters=model,
        buffers=buffers,
        masters=read_tensors(data / _MASTERS) if _MASTERS in files else {},
        optimizer=optimizer,
        **{name: values[name] for name in _IN_STATE if name in values},  # older checkpoints have no "packed"
        plan=(data / _PLAN).read_text(encoding="utf-8") if _PLAN in files else None,
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        unfinished = "its save was never finished, or it was moved"
        raise CheckpointError(f"the checkpoint {folder} has no {MANIFEST}: {unfinished}.")
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        crc, found = manifest.pop("crc32"), manifest["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not the manifest of a checkpoint of harmony_ds: {error!r}") from error
    if found != _FORMAT:
        raise CheckpointError(f"{file} says {found!r}, of another program or version: here, {_FORMAT!r} is read.")
    if crc != _crc(manifest):
        raise CheckpointError(f"{file} was changed: its checksum is {_crc(manifest):08x}, not {crc:08x}.")
    return manifest
