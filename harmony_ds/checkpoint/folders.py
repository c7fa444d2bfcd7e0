"""Writing a checkpoint's folder so that a kill at any moment leaves the last good one whole.

    save_dir/
      .saving-<tag>/         a save under way, or the rest of a killed one, which the next save removes
      zero_to_fp32.py, ...   scripts that make plain weights of what is here (see `zero_to_fp32`)
      latest                 the tag of the newest checkpoint; replaced in one rename, last of all
      <tag>/manifest.json    names the data folder and records its files
      <tag>/data-<id>/       never changed once it is here

A new tag is one rename of the finished folder. Where the tag exists already, the new data folder is put beside the old
one and the manifest replaced in one rename: at every moment the tag is the old checkpoint or the new one. What a rename
names is on disk (fsync of files and folders) before the next one happens. One training at a time saves into a save_dir.
Where the disk refuses, a CheckpointError names the file or folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harmony_ds.checkpoint.tensor_files import write_bytes
from harmony_ds.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_SAVING = ".saving-"
DATA = "data-"
_SCRIPT = '''#!/usr/bin/env python
"""Make plain weights of the checkpoints beside this file: `python zero_to_fp32.py . OUTPUT_DIR`, or `--help`."""
from harmony_ds.checkpoint.zero_to_fp32 import *

if __name__ == "__main__":
    main()
'''


@contextmanager
def saving(target: Path) -> Iterator[Path]:
    """Yield a folder, and publish it as `target` unless the block raises; remove the rests of killed saves beside it.

    If `target` exists, the folder must hold a manifest and a data folder.
    """
    parent = target.parent
    staging = parent / (_SAVING + target.name)
    with _complaining(target):
        for rest in parent.glob(_SAVING + "*"):
            shutil.rmtree(rest, ignore_errors=True)
        for manifest in parent.glob(f"*/{MANIFEST}"):
            _remove_old_data(manifest.parent)
        staging.mkdir()
        try:
            yield staging
            _publish(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write a file at, and rename that to `path`: always the old file or the whole new one."""
    fresh = path.with_name(f".{path.name}-new")
    with _complaining(path):
        fresh.unlink(missing_ok=True)  # of a save that was killed
        try:
            yield fresh
            _move(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)


@contextmanager
def _complaining(path: Path) -> Iterator[None]:
    """Make the folder of `path`, and name `path` where the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        told = f"{path} could not be saved: {error}. What was saved before is untouched."
        raise CheckpointError(told) from error


def put_scripts(save_dir: Path) -> None:
    """Write the scripts that DeepSpeed puts beside its checkpoints, unless they are there already."""
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        path = save_dir / name
        if not path.is_file() or path.read_text(encoding="utf-8") != _SCRIPT:
            replace_text(path, _SCRIPT, executable=True)


def replace_text(path: Path, content: str, executable: bool = False) -> None:
    """Write a small text file in the place of `path`, in one rename."""
    with replacing(path) as fresh:
        write_bytes(fresh, content.encode())
        if executable:
            fresh.chmod(fresh.stat().st_mode | 0o100)


def _publish(staging: Path, target: Path) -> None:
    for folder in (*(part for part in staging.rglob("*") if part.is_dir()), staging):
        _sync_folder(folder)
    if not target.exists():
        _move(staging, target)
        return
    data = next(staging.glob(DATA + "*"))
    _move(data, target / data.name)
    _move(staging / MANIFEST, target / MANIFEST)
    _remove_old_data(target)


def _move(source: Path, target: Path) -> None:
    """Rename, durably."""
    os.replace(source, target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_old_data(target: Path) -> None:
    """Remove the data folders of a tag that its manifest does not name."""
    text = (target / MANIFEST).read_bytes()
    for folder in target.glob(DATA + "*"):
        if folder.name.encode() not in text:
            shutil.rmtree(folder, ignore_errors=True)
