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
    """What becomes of a key or a block that does not do what it does in DeepSpeed.

    Attributes:
        effect: "refused", "differs" or "ignored".
        note: the reason, or what is done instead.
        switch: of a refused block, the key that turns it on, and the value of that key where it is left out.
    """

    effect: str
    note: str
    switch: tuple[str, object] = ("enabled", True)

    def refuses(self, value: object) -> bool:
        """Return whether `value` asks for what is refused: a flag that is set, or a number or text that is no default."""
        if isinstance(value, Mapping):
            switch, default = self.switch
            value = value.get(switch, default)
        if value is None or isinstance(value, bool):
            return value is True
        return value not in (0, 1, "auto")


def _read_rules() -> dict[str, Rule]:
    switches = _TABLE["switched on by, and without it"]
    rules: dict[str, Rule] = {}
    for effect in ("refused", "differs", "ignored"):
        for note, keys in _TABLE[effect].items():
            for key in keys:
                rules[key] = Rule(effect, note, tuple(switches.get(key, ("enabled", True))))
    return rules


RULES = _read_rules()
"""By path; the rule of a block holds for all keys in it that have none of their own."""


def rule_of(path: str) -> Rule | None:
    """Return the rule of the key at `path`, under any of its names, or of the block around it."""
    path = path.replace("bfloat16.", "bf16.").replace(".stage3_", ".")
    while path not in RULES and "." in path:
        path = path.rpartition(".")[0]
    return RULES.get(path)
