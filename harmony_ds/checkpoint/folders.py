"""How a checkpoint's folder comes to be, so that a kill at any moment leaves the last good one whole.

    save_dir/
      .saving-<id>/          a save under way, or what a kill left of one; the next save removes it
      zero_to_fp32.py, ...   DeepSpeed's scripts, which read what is here (see `scripts`)
      latest                 the tag of the newest checkpoint; replaced in one rename, last of all
      <tag>/
        manifest.json        which data folder is meant, and what its files must be
        data-<id>/           never changed once it is here

A new tag is one rename of the finished folder. Where the tag exists already, the new data folder is put beside the old
one and the manifest replaced in one rename: at every moment the tag is the old checkpoint or the new one. What an
earlier rename names is on disk (fsync of files and folders) before the next one happens.

A folder under way is locked by its process; a lock ends with its process, so what is not locked was left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harmony_ds.checkpoint.tensor_files import write_bytes

MANIFEST = "manifest.json"
LATEST = "latest"
_SAVING = ".saving-"
_DATA = "data-"


def new_data_name() -> str:
    """A name for a data folder that no other has."""
    return _DATA + uuid.uuid4().hex[:12]


@contextmanager
def saving(target: Path) -> Iterator[Path]:
    """A locked folder to put a manifest and a data folder in; published as `target` if nothing is raised.

    Left-overs of earlier saves beside `target` are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(target.parent)
    with _staged(target.parent) as staging:
        yield staging
        _publish(staging, target)


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """A folder to write any layout in; it becomes `target`, which must not exist, if nothing is raised."""
    if target.exists():
        raise FileExistsError(errno.EEXIST, "it exists already", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _staged(target.parent) as staging:
        yield staging
        for part in (*staging.rglob("*"), staging):
            sync_folder(part)
        os.rename(staging, target)  # noqa: PTH104
        sync_folder(target.parent)


@contextmanager
def _staged(parent: Path) -> Iterator[Path]:
    """A locked folder for a save under way; what is still there afterwards goes."""
    staging = parent / (_SAVING + uuid.uuid4().hex[:12])
    staging.mkdir()
    try:
        with _locked(staging, wait=True):
            yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file at that takes the place of `path`, which is the old file or the whole new one always."""
    fresh = path.parent / f".{path.name}-{uuid.uuid4().hex[:12]}"
    try:
        yield fresh
        os.replace(fresh, path)
        sync_folder(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def _publish(staging: Path, target: Path) -> None:
    data = next(staging.glob(_DATA + "*"))
    sync_folder(data)
    sync_folder(staging)
    if not target.exists():
        os.rename(staging, target)  # noqa: PTH104
        sync_folder(target.parent)
        return
    with _locked(target, wait=True):
        os.rename(data, target / data.name)  # noqa: PTH104
        sync_folder(target)
        os.replace(staging / MANIFEST, target / MANIFEST)
        sync_folder(target)
    _remove_data(target, keep=data.name)


def point_latest(save_dir: Path, tag: str, name: str = LATEST) -> None:
    """Makes `tag` the one that is loaded by default; `name` is the file that says so."""
    with replacing(save_dir / name) as fresh:
        write_bytes(fresh, tag.encode())


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable (or, of a file, its content)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Holds a folder's lock; False if another process has it and we do not `wait`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _clean(parent: Path) -> None:
    for pattern in (f".{LATEST}*-*", ".zero_to_*.py-*"):
        for fresh in parent.glob(pattern):
            fresh.unlink(missing_ok=True)
    for staging in parent.glob(_SAVING + "*"):
        with _locked(staging) as ours:
            if ours:
                shutil.rmtree(staging, ignore_errors=True)
    for manifest in parent.glob(f"*/{MANIFEST}"):
        _remove_data(manifest.parent, keep=None)


def _remove_data(target: Path, keep: str | None) -> None:
    """Removes data folders that a tag's manifest does not mean (`keep`: it is known which it means)."""
    folders = [folder for folder in target.glob(_DATA + "*") if folder.name != keep]
    if keep is None and len(folders) < 2:
        return
    with _locked(target) as ours:
        if not ours:
            return
        if keep is None:
            text = (target / MANIFEST).read_bytes()
            folders = [folder for folder in folders if folder.name.encode() not in text]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
