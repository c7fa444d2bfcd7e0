"""Finding a checkpoint, opening it in the layout that it has, and writing it in another."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from harmony_ds.checkpoint import layout
from harmony_ds.checkpoint.deepspeed.universal import is_universal, read_universal, write_universal
from harmony_ds.checkpoint.deepspeed.zero_read import is_zero, read_zero
from harmony_ds.checkpoint.folders import LATEST, MANIFEST, complaining, replace_text, replacing
from harmony_ds.checkpoint.snapshot import Snapshot, Source, listed
from harmony_ds.checkpoint.tensor_files import write_pickle, write_tensors
from harmony_ds.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
_logger = logging.getLogger(__name__)
_LAYOUTS = ((layout.is_ours, layout.read), (is_universal, read_universal), (is_zero, read_zero))


class Layout(str, Enum):
    """Layouts that a checkpoint can be converted to. DeepSpeed reads a universal one with any ZeRO stage."""

    HARMONY = "harmony"
    UNIVERSAL = "universal"
    HF = "hf"


def find(load_dir: Path, tag: str | None) -> Path | None:
    """Return the folder of `tag`, or of the tag in `latest`; None, with a warning, where there is no `latest`."""
    if tag is None:
        names = (load_dir / LATEST, load_dir / "latest_universal")
        latest = next((name for name in names if name.is_file()), None)
        if latest is None:
            _logger.warning(
                "Unable to find latest file at %s, if trying to load latest checkpoint please ensure this file exists or "
                "pass an explicit checkpoint tag when loading a checkpoint.",
                names[0],
            )
            return None
        text = latest.read_bytes()[:4096]
        tag = text.decode(errors="replace").strip()
        if not tag.isprintable() or not tag or "\ufffd" in tag:
            raise CheckpointError(f"{latest} names no tag: it must hold one line of text, not {text[:20]!r}.")
    folder = load_dir / str(tag)
    if not folder.is_dir():
        there = listed(sorted(child.name for child in load_dir.glob("*/") if not child.name.startswith(".")))
        raise CheckpointError(f"there is no checkpoint {folder}; {load_dir} holds {there or 'no folder at all'}.")
    return folder


def verify(folder: Path) -> None:
    """Read every byte of a checkpoint whose layout has checksums."""
    if layout.is_ours(folder):
        layout.verify(folder)


def read_any(folder: Path) -> Snapshot:
    """Open the checkpoint in a tag's folder, of any layout that is known; the caller has verified it."""
    for fits, read in _LAYOUTS:
        if fits(folder):
            return read(folder)
    holds = listed(sorted(child.name for child in folder.iterdir())) or "nothing"
    raise CheckpointError(
        f"{folder} is no checkpoint: it holds {holds}, neither {MANIFEST} of harmony_ds nor the *_model_states.pt of "
        "DeepSpeed. A save that was killed leaves such a folder."
    )


def open_checkpoint(source: Path, tag: str | None = None) -> tuple[Path, Snapshot]:
    """Open a tag's folder, or a folder of several checkpoints: `tag`, or the latest."""
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}.")
    folder = source if tag is None and any(fits(source) for fits, _ in _LAYOUTS) else find(source, tag)
    if folder is None:
        raise CheckpointError(f"{source} is no checkpoint, and has no file `latest` that names one: give a tag.")
    verify(folder)
    return folder, read_any(folder)


def convert(source: Path, target: Path, to: Layout, tag: str | None = None) -> Path:
    """Write the checkpoint at `source` into `target`, under the same tag (weights alone: directly), and return the folder.

    Raises:
        CheckpointError: it cannot be read, has no place in the other layout, or cannot be written there.
    """
    folder, snapshot = open_checkpoint(source, tag)
    if to is Layout.HF:
        export_weights(snapshot.tensors, target)
        return target
    if (target / folder.name).exists():
        raise CheckpointError(f"{target / folder.name} exists already: choose another folder.")
    write = layout.write if to is Layout.HARMONY else write_universal
    return write(snapshot, target, folder.name)


def export_weights(
    tensors: Mapping[str, Source],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    whole: str = "model.safetensors",
    tied: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the file `whole` into `folder`, or shards and their index; remove what an earlier export left there.

    `tied` maps other names of tensors to those in `tensors`; torch.save's files have them too.
    """
    stem, suffix = Path(whole).stem, Path(whole).suffix
    shards: list[dict[str, Source]] = [{}]
    for name, source in tensors.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + source.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = source
    names = [whole]
    if len(shards) > 1:
        names = [f"{stem}-{place:05d}-of-{len(shards):05d}{suffix}" for place in range(1, len(shards) + 1)]
    written = [write_weights(shard, folder / name, tied) for name, shard in zip(names, shards, strict=True)]
    index = folder / f"{whole}.index.json"
    with complaining(index):
        if len(shards) > 1:
            total = sum(source.nbytes for source in tensors.values())
            places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            if suffix != ".safetensors":
                places |= {name: places[first] for name, first in (tied or {}).items() if first in places}
            replace_text(index, json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))
            written.append(index)
        for pattern in (whole, index.name, f"{stem}-?????-of-?????{suffix}"):  # an older whole file would be preferred
            for path in set(folder.glob(pattern)).difference(written):
                path.unlink()
    return written


def write_weights(tensors: Mapping[str, Source], path: Path, tied: Mapping[str, str] | None = None) -> Path:
    """Write one file: safetensors by its suffix, else a state dict by `torch.save`, with `tied` names too."""
    with complaining(path), replacing(path) as fresh:
        if path.suffix == ".safetensors":
            write_tensors(fresh, tensors)
        else:
            values = {name: source.compact() for name, source in tensors.items()}
            values |= {name: values[first] for name, first in (tied or {}).items() if first in values}
            write_pickle(fresh, values)
    return path
