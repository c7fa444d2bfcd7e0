"""A ds_config from a dict or a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harmony_ds.errors import ConfigError


def read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"Expected a string path to an existing deepspeed config, or a dictionary. Received: {str(source)!r}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(data).__name__}.")
    return data


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise ConfigError(f"Duplicate keys in DeepSpeed config: {duplicates}")
    return dict(pairs)
