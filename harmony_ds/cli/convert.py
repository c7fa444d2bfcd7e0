"""`harmony-ds convert`: a checkpoint of DeepSpeed or harmony_ds, in another layout."""

from __future__ import annotations

import json
from pathlib import Path

from harmony_ds.checkpoint import Layout, convert


def command(  # noqa: PLR0913, PLR0917 - an option each
    source: Path,
    target: Path,
    to: Layout,
    tag: str | None = None,
    sub_group_size: int = 10**9,
    processes: int = 1,
    as_json: bool = False,
) -> None:
    """Writes the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them."""
    written = convert(source, target, to, tag, sub_group_size, processes)
    if as_json:
        print(json.dumps({"written": str(written), "layout": to.value}))
    else:
        print(f"{written} is a checkpoint of the layout {to.value}.")
