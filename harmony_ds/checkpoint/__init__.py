"""Checkpoints: one noun, `Snapshot`, captured from an engine, read from files, written to files, restored to an engine."""

from harmony_ds.checkpoint.capture import Trained, capture
from harmony_ds.checkpoint.convert import convert, find, read_any, verify
from harmony_ds.checkpoint.data_position import ResumableLoader
from harmony_ds.checkpoint.export import export_weights, save_16bit
from harmony_ds.checkpoint.layout import write
from harmony_ds.checkpoint.random_state import capture_random, random_of
from harmony_ds.checkpoint.restore import LoadOptions, restore
from harmony_ds.checkpoint.snapshot import Layout, Progress, Snapshot

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
    "export_weights",
    "find",
    "random_of",
    "read_any",
    "restore",
    "save_16bit",
    "verify",
    "write",
]
