"""`harmony-ds convert`: a checkpoint of DeepSpeed or harmony_ds, in another layout."""

from __future__ import annotations

import json
from pathlib import Path

from harmony_ds.checkpoint import Layout, convert


def command(source: Path, target: Path, to: Layout, tag: str | None = None, as_json: bool = False) -> None:
    """Write the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them."""
    written = convert(source, target, to, tag)
    if as_json:
        print(json.dumps({"written": str(written), "layout": to.value}))
    else:
        print(f"{written} is a checkpoint of the layout {to.value}.")
