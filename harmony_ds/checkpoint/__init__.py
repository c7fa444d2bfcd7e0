"""Checkpoints: one noun, `Snapshot`, captured from an engine, read from files, written to files, restored to an engine."""

from harmony_ds.checkpoint.capture import Trained, capture
from harmony_ds.checkpoint.data_position import ResumableLoader
from harmony_ds.checkpoint.find import find, read_any
from harmony_ds.checkpoint.layout import write
from harmony_ds.checkpoint.restore import Wanted, restore
from harmony_ds.checkpoint.snapshot import Progress, Snapshot

__all__ = [
    "Progress",
    "ResumableLoader",
    "Snapshot",
    "Trained",
    "Wanted",
    "capture",
    "find",
    "read_any",
    "restore",
    "write",
]
