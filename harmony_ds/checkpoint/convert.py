"""Which folder is meant, which layout it has, and from that to any other."""

from __future__ import annotations

import logging
from pathlib import Path

from harmony_ds.checkpoint import layout
from harmony_ds.checkpoint.deepspeed.universal_read import is_universal, read_universal
from harmony_ds.checkpoint.deepspeed.write import to_deepspeed
from harmony_ds.checkpoint.deepspeed.zero_read import is_deepspeeds, read_zero
from harmony_ds.checkpoint.export import export_weights
from harmony_ds.checkpoint.folders import LATEST, MANIFEST
from harmony_ds.checkpoint.snapshot import Layout, Snapshot, listed
from harmony_ds.errors import CheckpointError

_LATEST_UNIVERSAL = "latest_universal"
_logger = logging.getLogger(__name__)
_LAYOUTS = ((layout.is_ours, layout.read), (is_universal, read_universal), (is_deepspeeds, read_zero))


def find(load_dir: Path, tag: str | None) -> Path | None:
    """The folder of `tag`, or of what `latest` names; None, with a warning, where there is no `latest`.

    Raises:
        CheckpointError: that folder does not exist.
    """
    latest = load_dir / LATEST
    universal = load_dir / _LATEST_UNIVERSAL
    if tag is None:
        latest = latest if latest.is_file() or not universal.is_file() else universal
        if not latest.is_file():
            _logger.warning(
                "Unable to find latest file at %s, if trying to load latest checkpoint please ensure this file exists or "
                "pass an explicit checkpoint tag when loading a checkpoint.",
                latest,
            )
            return None
        tag = _tag_in(latest)
    folder = load_dir / str(tag)
    if not folder.is_dir():
        there = sorted(child.name for child in load_dir.glob("*/") if not child.name.startswith("."))
        raise CheckpointError(
            f"there is no checkpoint {folder}; {load_dir} holds {listed(there) if there else 'no folder at all'}."
        )
    return folder


def _tag_in(latest: Path) -> str:
    text = latest.read_bytes()[:4096]
    try:
        tag = text.decode().strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or not tag.isprintable():
        raise CheckpointError(f"{latest} names no tag: it must hold one line of text, not {text[:20]!r}.")
    return tag


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint whose layout has checksums.

    Raises:
        CheckpointError: it is torn, or was changed.
    """
    if layout.is_ours(folder):
        layout.verify(folder)


def read_any(folder: Path, verified: bool = False) -> Snapshot:
    """Open the checkpoint in a tag's folder, of any layout that is known, after `verify` unless it is `verified`.

    Raises:
        CheckpointError: it is of none, or torn.
    """
    if verified and layout.is_ours(folder):
        return layout.read(folder, verified=True)
    for fits, read in _LAYOUTS:
        if fits(folder):
            return read(folder)
    holds = sorted(child.name for child in folder.iterdir())
    raise CheckpointError(
        f"{folder} is no checkpoint: it holds {listed(holds) if holds else 'nothing'}, neither {MANIFEST} of "
        "harmony_ds nor the *_model_states.pt of DeepSpeed. A save that was killed leaves such a folder."
    )


def convert(
    source: Path,
    target: Path,
    to: Layout,
    tag: str | None = None,
    sub_group_size: int = 1_000_000_000,
    processes: int = 1,
) -> Path:
    """Writes the checkpoint at `source` into the folder `target`, under the same tag (weights alone: directly there).

    Args:
        sub_group_size: of the ds_config that DeepSpeed will go on with (ZeRO-3).
        processes: with so many DeepSpeed will go on (ZeRO-2 and 3; the universal layout is for any number).

    Returns:
        The folder that was written.

    Raises:
        CheckpointError: it cannot be read, has no place in the other layout, or cannot be written there.
    """
    folder, snapshot = _opened(source, tag)
    if to is Layout.HF:
        export_weights(snapshot, target)
        return target
    if (target / folder.name).exists():
        raise CheckpointError(f"{target / folder.name} exists already: choose another folder.")
    if to is Layout.HARMONY:
        return layout.write(snapshot, target, folder.name)
    return to_deepspeed(snapshot, target, folder.name, to, sub_group_size, processes)


def _opened(source: Path, tag: str | None = None) -> tuple[Path, Snapshot]:
    """The checkpoint at `source`: a tag's folder, or a folder of several (then `tag`, or the latest)."""
    folder = source if tag is None and source.is_dir() and any(fits(source) for fits, _ in _LAYOUTS) else None
    if folder is None:
        if not source.is_dir():
            raise CheckpointError(f"there is no folder {source}.")
        folder = find(source, tag)
    if folder is None:
        raise CheckpointError(f"{source} is no checkpoint, and has no file `latest` that names one: give a tag.")
    return folder, read_any(folder)
