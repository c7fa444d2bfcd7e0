"""From any layout to any other."""

from __future__ import annotations

from pathlib import Path

from harmony_ds.checkpoint.deepspeed.write import to_deepspeed
from harmony_ds.checkpoint.export import export_weights
from harmony_ds.checkpoint.find import find, read_any, recognized
from harmony_ds.checkpoint.layout import write
from harmony_ds.checkpoint.snapshot import Layout, Snapshot
from harmony_ds.errors import CheckpointError


def open_checkpoint(source: Path, tag: str | None = None) -> tuple[Path, Snapshot]:
    """The checkpoint at `source`: a tag's folder, or a folder of several (then `tag`, or the latest).

    Raises:
        CheckpointError: there is none, or it is torn.
    """
    folder = source if tag is None and source.is_dir() and recognized(source) else None
    if folder is None:
        if not source.is_dir():
            raise CheckpointError(f"there is no folder {source}.")
        folder = find(source, tag)
    if folder is None:
        raise CheckpointError(f"{source} is no checkpoint, and has no file `latest` that names one: give a tag.")
    return folder, read_any(folder)


def convert(
    source: Path, target: Path, to: Layout, tag: str | None = None, sub_group_size: int = 1_000_000_000
) -> Path:
    """Writes the checkpoint at `source` into the folder `target`, under the same tag (weights alone: directly there).

    Args:
        sub_group_size: of the ds_config that DeepSpeed will go on with (ZeRO-3).

    Returns:
        The folder that was written.

    Raises:
        CheckpointError: it cannot be read, has no place in the other layout, or cannot be written there.
    """
    folder, snapshot = open_checkpoint(source, tag)
    if to is Layout.HF:
        export_weights(snapshot, target)
        return target
    if (target / folder.name).exists():
        raise CheckpointError(f"{target / folder.name} exists already: choose another folder.")
    if to is Layout.HARMONY:
        return write(snapshot, target, folder.name)
    return to_deepspeed(snapshot, target, folder.name, to, sub_group_size)
