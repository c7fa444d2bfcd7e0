"""Finding a checkpoint, opening it in the layout that it has, and writing it in another."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from harmony_ds.checkpoint import layout
from harmony_ds.checkpoint.deepspeed.universal import is_universal, read_universal, write_universal
from harmony_ds.checkpoint.deepspeed.zero_read import is_zero, read_zero
from harmony_ds.checkpoint.folders import LATEST, MANIFEST, replace_text, replacing
from harmony_ds.checkpoint.snapshot import Snapshot, TensorSource, listed
from harmony_ds.checkpoint.tensor_files import write_pickle, write_tensors
from harmony_ds.errors import CheckpointError

_logger = logging.getLogger(__name__)
_LAYOUTS = ((layout.is_ours, layout.read), (is_universal, read_universal), (is_zero, read_zero))


class Layout(StrEnum):
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


def open_checkpoint(source: Path, tag: str | None) -> tuple[Path, Snapshot]:
    """Open a tag's folder, or a folder of several checkpoints: `tag`, or the latest."""
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}.")
    folder = source if tag is None and any(fits(source) for fits, _ in _LAYOUTS) else find(source, tag)
    if folder is None:
        raise CheckpointError(f"{source} is no checkpoint, and has no file `latest` that names one: give a tag.")
    layout.verify(folder)
    return folder, read_any(folder)


def convert(source: Path, target: Path, to: Layout, tag: str | None = None) -> Path:
    """Write the checkpoint at `source` into `target`, under the same tag (weights alone: directly), and return the folder.

    Raises:
        CheckpointError: it cannot be read, has no place in the other layout, or cannot be written there.
    """
    folder, snapshot = open_checkpoint(source, tag)
    if to is not Layout.HARMONY:
        snapshot.check_plain(f"the layout {to.value}")
    if to is Layout.HF:
        export_weights(snapshot.tensors, target)
        return target
    if (target / folder.name).exists():
        raise CheckpointError(f"{target / folder.name} exists already: choose another folder.")
    write = layout.write if to is Layout.HARMONY else write_universal
    return write(snapshot, target, folder.name)


def export_weights(
    tensors: Mapping[str, TensorSource], folder: Path, shard_size: int | str = "5GB", whole: str = "model.safetensors"
) -> list[Path]:
    """Write the file `whole` into `folder`, or shards and their index; remove what an earlier export left there.

    Args:
        tensors: torch.save writes a source that has several names (tied weights) once; safetensors takes one name of it.
        shard_size: bytes, or text as Hugging Face reads it ("500MB").
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    stem, suffix = Path(whole).stem, Path(whole).suffix
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda source: source.nbytes,
        get_storage_id=id,
        filename_pattern=f"{stem}{{suffix}}{suffix}",
        max_shard_size=shard_size,
    )
    shards = split.filename_to_tensors.items()
    written = [write_weights({key: tensors[key] for key in keys}, folder / name) for name, keys in shards]
    index = folder / f"{whole}.index.json"
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        replace_text(index, json.dumps(content, indent=2))
        written.append(index)
    for pattern in (whole, index.name, f"{stem}-?????-of-?????{suffix}"):  # an older whole file would be preferred
        for path in set(folder.glob(pattern)).difference(written):
            path.unlink()
    return written


def write_weights(tensors: Mapping[str, TensorSource], path: Path) -> Path:
    """Write one file: safetensors by its suffix, else a state dict by `torch.save`, a source of several names once."""
    with replacing(path) as fresh:
        if path.suffix == ".safetensors":
            write_tensors(fresh, tensors)
        else:
            values = {source: source.compact() for source in set(tensors.values())}
            write_pickle(fresh, {name: values[source] for name, source in tensors.items()})
    return path
