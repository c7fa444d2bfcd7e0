"""From JSON to the checked values of all keys, or to an error that names the key, what it takes and the way out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harmony_ds.config.harmony import HARMONY_KEYS, HarmonySettings, help_of
from harmony_ds.config.hints import AUTO, unknown_key
from harmony_ds.config.keys import REFUSED_VALUES, RULES, rule_of
from harmony_ds.config.read import value_at
from harmony_ds.errors import ConfigError

MICRO_BATCH, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(slots=True)
class Checked:
    """A ds_config that was checked.

    Attributes:
        model: the value of every key, as `harmony_ds.config.model.DsConfig`.
        values: the same by path.
        known: the part of the JSON that DeepSpeed takes.
        ignored, unknown: paths of keys without a meaning here, and of unknown ones; the others are `used`.
    """

    model: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    @property
    def without_meaning(self) -> tuple[str, ...]:
        """Unknown and ignored keys; a block's own name where all that was given of it is ignored."""
        whole = {path.split(".")[0] for path in self.ignored} - {path.split(".")[0] for path in self.used}
        single = {path for path in self.ignored if path.split(".")[0] not in whole}
        return tuple(sorted(whole | single | {*self.unknown}))


def check(raw: Mapping[str, Any]) -> Checked:
    """Check every key of `raw`.

    Raises:
        ConfigError: a key is unknown or refused, or does not take its value.
    """
    ds_config = ds_config_type()
    checked = Checked()
    if isinstance(raw.get("zero_optimization"), bool):  # a deprecated form
        raw = {**raw, "zero_optimization": {"stage": int(raw["zero_optimization"])}}
    checked.known = _sorted(raw, ds_config, "", checked)
    lenient = value_at(raw, "harmony.unknown_keys") == "warn"
    for path in checked.unknown:
        if not lenient or path.startswith("harmony."):
            raise ConfigError(unknown_key(path, checked.unknown, (*RULES, *paths_of(ds_config))))
    try:
        checked.model = model = ds_config(**checked.known)
    except ValidationError as error:
        raise _error_of(error, raw, set(".".join(paths_of(ds_config)).split("."))) from None
    model.bf16 = model.bf16 or model.bfloat16
    checked.values = dict(_flat(model.model_dump()))
    for path, (value, reason) in REFUSED_VALUES.items():
        if checked.values.get(path) == value:
            raise ConfigError(f'"{path}" is {json.dumps(value)}: {reason}.')
    checked.known.pop("harmony", None)
    return checked


def ds_config_type() -> Any:
    """Import the pydantic model; without DeepSpeed's line on standard output about the device that it finds."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from harmony_ds.config.model import DsConfig
    finally:
        logging.disable(disabled)
    return DsConfig


def fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of a pydantic model or dataclass by name and by alias."""
    own = HARMONY_KEYS if model is HarmonySettings else model.model_fields
    return {name: info for key, info in own.items() for name in (key, info.alias or key)}


def block_of(info: Any) -> Any:
    """Return the model of a field that is a block; None of one that is a value."""
    kinds = (info.annotation, *get_args(info.annotation))
    return next((k for k in kinds if isinstance(k, type) and (issubclass(k, BaseModel) or k is HarmonySettings)), None)


def paths_of(model: Any, at: str = "") -> Iterator[str]:
    """Yield the paths of all keys of `model` and of the blocks in it."""
    for name, info in fields_of(model).items():
        inner = block_of(info)
        yield from [f"{at}{name}"] if inner is None else paths_of(inner, f"{at}{name}.")


def _sorted(block: Mapping[str, Any], model: Any, at: str, checked: Checked) -> dict[str, Any]:
    """Return a copy of `block` with what `model` is to check: no refused key that is off, no unknown one, no "auto"."""
    known: dict[str, Any] = {}
    fields = fields_of(model)
    for name, value in block.items():
        path, rule = f"{at}{name}", rule_of(f"{at}{name}")
        inner = block_of(fields[name]) if name in fields else None
        if rule is not None and rule.effect == "refused":
            if rule.refuses(value):
                raise ConfigError(f'"{path}": {rule.note}.')
        elif name not in fields:
            checked.unknown.append(path)
        elif inner is not None and isinstance(value, Mapping):
            known[name] = _sorted(value, inner, f"{path}.", checked)
        elif inner is None or value is not None:
            ignored = rule is not None and rule.effect == "ignored"
            (checked.ignored if ignored else checked.used).append(path)
            automatic = value == "auto" and path != MICRO_BATCH and at != "harmony."
            if automatic and not ignored:
                raise ConfigError(f'"{path}" still says "auto": {AUTO}')
            if not automatic and (fields[name].alias in (None, name) or fields[name].alias not in block):
                known[name] = value  # where both names of a key are given, DeepSpeed's alias counts
    return known


def _flat(block: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        yield from _flat(value, f"{at}{name}.") if isinstance(value, dict) else [(f"{at}{name}", value)]


_BETTER = {"2, 3 or 3": "2 or 3", "a valid dictionary": "an object", "a dictionary": "an object", "valid tuple": "list"}


def _error_of(error: ValidationError, raw: Mapping[str, Any], names: set[str]) -> ConfigError:
    """Return pydantic's first error as ours: the key, what it takes, what was given. `names` are those of keys."""
    first, *others = error.errors()
    if first["type"] in ("assertion_error", "value_error"):  # DeepSpeed's own words
        return ConfigError(first["msg"].partition(", ")[2])
    path = ".".join(one for one in first["loc"] if isinstance(one, str) and one in names)
    takes, hint = first["msg"].partition(" or instance")[0].partition(" or an instance")[0], ""
    for theirs, better in _BETTER.items():
        takes = takes.replace(theirs, better)
    if path.startswith("harmony."):
        hint = f" {help_of(path.removeprefix('harmony.'))}"
        if any(other["loc"][:2] == first["loc"][:2] for other in others):  # of several types, which the help lists
            takes = "Input should be something else"
    elif path.startswith(("optimizer", "scheduler")):
        hint = ' Write {"type": "AdamW", "params": {...}}, for example.'
    return ConfigError(f'"{path}": {takes}, not {value_at(raw, path)!r}.{hint}')
