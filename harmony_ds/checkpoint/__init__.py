"""Checkpoints: a `Snapshot` is captured from an engine, written to files, read from files, restored into an engine."""

from harmony_ds.checkpoint.capture import Trained, capture, capture_random, random_of
from harmony_ds.checkpoint.convert import Layout, convert, find, read_any, write_weights
from harmony_ds.checkpoint.data_position import ResumableLoader
from harmony_ds.checkpoint.layout import verify, write
from harmony_ds.checkpoint.restore import LoadOptions, restore
from harmony_ds.checkpoint.snapshot import Progress, Snapshot

__all__ = [
    "Layout",
    "LoadOptions",
    "Progress",
    "ResumableLoader",
    "Snapshot",
    "Trained",
    "capture",
    "capture_random",
    "convert",
    "find",
    "random_of",
    "read_any",
    "restore",
    "verify",
    "write",
    "write_weights",
]
