"""Every key of a ds_config, once: what it does here, the values it takes, its default.

Ours are the fields of `harmony.py`. DeepSpeed's stand in `deepspeed_keys.json`, by what becomes of them, with the names
and defaults of DeepSpeed 0.19.8 (a test compares them with its models). Dots lead into blocks. Checks, the engine's
getters, options of the command line, ablations and `docs/config.md` are made from this table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harmony_ds.config.forms import FORMS
from harmony_ds.config.harmony import OURS
from harmony_ds.config.key import Ablation, Effect, Getter, Key, Option


def _deepspeeds() -> Iterator[Key]:
    table = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_text(encoding="utf-8"))
    for effect, rows in table.items():
        for row in rows:
            yield _key(Effect(effect), **row)


def _key(effect: Effect, path: str, values: str = "any", **more: Any) -> Key:
    if "option" in more:
        more["option"] = Option(**more["option"])
    asked = [Getter(name, *question) for name, question in more.pop("asked", {}).items()]
    more["getters"] = (*([Getter(more.pop("getter"))] if "getter" in more else []), *asked)
    more["ablations"] = tuple(Ablation(**row) for row in more.pop("ablations", ()))
    return Key(path, effect, FORMS[values], **more)


KEYS: tuple[Key, ...] = (*OURS, *_deepspeeds())
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
BLOCKS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for key in KEYS for parts in [key.path.split(".")] for depth in range(1, len(parts))
)
"""Paths of blocks whose keys are listed."""


def names_in(block: str) -> frozenset[str]:
    """The keys that `block` may hold ("": the top)."""
    prefix = f"{block}." if block else ""
    return frozenset(path[len(prefix) :].split(".")[0] for path in BY_PATH if path.startswith(prefix))
