"""Every key of a ds_config, once, in `keys.json`: what it does here, the values it takes, its default.

Defaults of ours are those of `HarmonySettings`; DeepSpeed's keys have the names and defaults of DeepSpeed 0.19.8 (a test
compares them with its models). Dots lead into blocks. Checks, the engine's getters, options of the command line,
ablations and `docs/config.md` are made from this table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from harmony_ds.config.forms import FORMS
from harmony_ds.config.harmony import HarmonySettings
from harmony_ds.config.key import Ablation, Effect, Getter, Key, Option


def _keys() -> Iterator[Key]:
    ours = {f"harmony.{one.name}": one.default for one in fields(HarmonySettings)}
    table = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    for effect, rows in table.items():
        for row in rows:
            if row["path"] in ours:
                row["default"] = ours[row["path"]]
            yield _key(Effect(effect), **row)


def _key(effect: Effect, path: str, values: str = "any", **more: Any) -> Key:
    if "option" in more:
        more["option"] = Option(**more["option"])
    asked = [Getter(name, *question) for name, question in more.pop("asked", {}).items()]
    more["getters"] = (*([Getter(more.pop("getter"))] if "getter" in more else []), *asked)
    more["ablations"] = tuple(Ablation(**row) for row in more.pop("ablations", ()))
    return Key(path, effect, FORMS[values], **more)


KEYS: tuple[Key, ...] = tuple(_keys())
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
BLOCKS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for key in KEYS for parts in [key.path.split(".")] for depth in range(1, len(parts))
)
"""Paths of blocks whose keys are listed."""


def names_in(block: str) -> frozenset[str]:
    """The keys that `block` may hold ("": the top)."""
    prefix = f"{block}." if block else ""
    return frozenset(path[len(prefix) :].split(".")[0] for path in BY_PATH if path.startswith(prefix))
