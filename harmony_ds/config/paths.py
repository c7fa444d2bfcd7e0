"""Values in a ds_config by their paths: names from the top, joined by dots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
