"""A ds_config from a dict, a file or an encoded string, as DeepSpeed reads it.

Files are Hjson, as DeepSpeed's are: JSON in which comments, and trailing commas, are allowed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from harmony_ds.errors import ConfigError

_EXPECTED = "Expected a string path to an existing deepspeed config, or a dictionary or a valid base64."


def read_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return the object in `source`: a mapping, the path of a file, or url-safe base64 of JSON."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"{_EXPECTED} Received: {source!r}, which is of type {type(source).__name__}.")
    path = Path(source)
    if _is_file(path):
        return _parse(path.read_text(encoding="utf-8"), str(path))
    try:
        text = base64.urlsafe_b64decode(str(source)).decode("utf-8")
    except (UnicodeDecodeError, ValueError):
        text = ""
    if not text.lstrip().startswith("{"):
        raise ConfigError(f"{_EXPECTED} Received: {source}")
    return _parse(text, "the base64 string")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # an encoded string is too long for a name
        return False


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        data = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must hold a JSON object, not {type(data).__name__}.")
    return data


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise ConfigError(f"Duplicate keys in DeepSpeed config: {duplicates}")
    return dict(pairs)
