"""DeepSpeed's keys that are refused, differ or mean nothing here: `keys.json`. All others mean what DeepSpeed says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Rule:
    """The effect of a key or a block ("refused", "differs" or "ignored"), and the reason, or what is done instead."""

    effect: str
    note: str
    switch: tuple[str, object] = ("enabled", True)  # of a refused block: the key that turns it on, and its default

    def refuses(self, value: object) -> bool:
        """Return whether `value` asks for what is refused."""
        if isinstance(value, Mapping):
            value = value.get(*self.switch)
        return value is True if isinstance(value, bool) or value is None else value not in (0, 1, "auto")


RULES: dict[str, Rule] = {
    key: Rule(effect, note, tuple(_TABLE["switched on by, and without it"].get(key, ("enabled", True))))
    for effect in ("refused", "differs", "ignored")
    for note, keys in _TABLE[effect].items()
    for key in keys
}
"""By path; the rule of a block holds for all keys in it that have none of their own."""
REFUSED_VALUES: dict[str, tuple[object, str]] = {path: tuple(row) for path, row in _TABLE["refused values"].items()}
"""Values that DeepSpeed takes and that are refused here, each with the reason."""


def rule_of(path: str) -> Rule | None:
    """Return the rule of the key at `path`, under any of its names, or of the block around it."""
    path = path.replace("bfloat16.", "bf16.").replace(".stage3_", ".")
    while path not in RULES and "." in path:
        path = path.rpartition(".")[0]
    return RULES.get(path)
