"""`harmony-ds convert`: a checkpoint of DeepSpeed or harmony_ds, in another layout."""

from __future__ import annotations

import json
from pathlib import Path

from harmony_ds.checkpoint import Layout, convert
from harmony_ds.config.hints import did_you_mean
from harmony_ds.errors import ConfigError


def command(
    source: Path, target: Path, to: str, tag: str | None = None, sub_group_size: int = 10**9, as_json: bool = False
) -> None:
    """Writes the checkpoint SRC into DST in another layout. Pickles of DeepSpeed are read without executing them."""
    layouts = {one.value: one for one in Layout}
    if to not in layouts:
        raise ConfigError(f'there is no layout "{to}". {did_you_mean(to, layouts)}')
    written = convert(source, target, layouts[to], tag, sub_group_size)
    if as_json:
        print(json.dumps({"written": str(written), "layout": to}))
    else:
        print(f"{written} is a checkpoint of the layout {to}.")
