"""A ds_config from a dict, a file or an encoded string, as DeepSpeed reads it; values in it by their paths.

Files are Hjson, as DeepSpeed's are: JSON in which comments, and trailing commas, are allowed.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
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
    if os.path.isfile(source):  # noqa: PTH113 - Path refuses names as long as an encoded string
        return _parse(Path(source).read_text(encoding="utf-8"), str(source))
    try:
        text = base64.urlsafe_b64decode(str(source)).decode("utf-8")
    except (UnicodeDecodeError, ValueError):
        text = ""
    if not text.lstrip().startswith("{"):
        raise ConfigError(f"there is no file {source}. {_EXPECTED} Received: {source}")
    return _parse(text, "the base64 string")


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


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at `path`; None if it is not there."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def with_values(config: Mapping[str, Any], values: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `config` in which `values`, by path, replace its own."""
    changed = dict(config)
    for path, value in values.items():
        first, _, rest = path.partition(".")
        changed[first] = with_values(changed.get(first) or {}, {rest: value}) if rest else value
    return changed


def without(config: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `config` without the values at `paths`."""
    left = dict(config)
    for path in paths:
        first, _, rest = path.partition(".")
        if rest and isinstance(left.get(first), Mapping):
            left[first] = without(left[first], [rest])
        elif not rest:
            left.pop(first, None)
    return left
