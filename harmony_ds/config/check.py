"""Checking of every key of a ds_config. Errors name the key, what it takes, and the way out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harmony_ds.config.harmony import HARMONY_KEYS, HarmonySettings, help_of
from harmony_ds.config.hints import all_at_once, refuse_files_of_accelerate, still_automatic, unknown_keys
from harmony_ds.config.keys import RULES, rule_of
from harmony_ds.config.read import value_at
from harmony_ds.errors import ConfigError

_PARAMS = ("optimizer.params", "scheduler.params")
"""Blocks whose keys are those of a class that the ds_config names."""
MICRO_BATCH, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(slots=True)
class Checked:
    """A ds_config that was checked.

    Attributes:
        model: the value of every key, as `harmony_ds.config.model.DsConfig`.
        values: the same by path.
        known: the part of the JSON that DeepSpeed takes.
        ignored: paths of keys that mean nothing here.
        unknown: paths of keys that neither DeepSpeed nor harmony_ds has.
        used: paths of all others.
        automatic: paths of keys that still say "auto", and must not.
        refused: what is wrong with keys that are refused, for people.
    """

    model: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    automatic: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def without_meaning(self) -> tuple[str, ...]:
        """Unknown and ignored keys; a block's own name where all that was given of it is ignored."""
        used_blocks = {path.split(".")[0] for path in self.used}
        found = set(self.unknown)
        for path in self.ignored:
            block = path.split(".")[0]
            found.add(path if block in used_blocks else block)
        return tuple(sorted(found))


def check(raw: Mapping[str, Any]) -> Checked:
    """Check every key of `raw`.

    Raises:
        ConfigError: keys are unknown or refused, or do not take their values: all of them are named.
    """
    ds_config = ds_config_type()
    checked = Checked()
    if isinstance(raw.get("zero_optimization"), bool):  # a deprecated form
        raw = {**raw, "zero_optimization": {"stage": int(raw["zero_optimization"])}}
    checked.known = _known_part(raw, ds_config, "", checked)
    refuse_files_of_accelerate(checked.unknown)
    lenient = value_at(raw, "harmony.unknown_keys") == "warn"
    not_let_pass = [path for path in checked.unknown if not lenient or path.startswith("harmony.")]
    wrong = [*checked.refused, *unknown_keys(not_let_pass, (*RULES, *paths_of(ds_config)))]
    if checked.automatic:
        wrong.append(still_automatic(checked.automatic))
    try:
        checked.model = model = ds_config(**checked.known)
    except ValidationError as error:
        wrong += _wrong_values(error, raw, set(".".join(paths_of(ds_config)).split(".")))
    if wrong:
        raise ConfigError(all_at_once(wrong))
    model.bf16 = model.bf16 or model.bfloat16
    checked.values = dict(_flat(model.model_dump()))
    checked.known.pop("harmony", None)
    return checked


def automatic_paths(raw: Mapping[str, Any]) -> list[str]:
    """Return the paths of keys in `raw` that say "auto", and must not when an engine is made."""
    checked = Checked()
    _known_part(raw, ds_config_type(), "", checked)
    return checked.automatic


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
    found: dict[str, Any] = {}
    for name, info in (HARMONY_KEYS if model is HarmonySettings else model.model_fields).items():
        found[name] = info
        found[info.alias or name] = info
    return found


def block_of(info: Any) -> Any:
    """Return the model of a field that is a block; None for one that is a value."""
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and (issubclass(kind, BaseModel) or kind is HarmonySettings):
            return kind
    return None


def paths_of(model: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all keys of `model` and of the blocks in it."""
    for name, info in fields_of(model).items():
        inner = block_of(info)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from paths_of(inner, f"{prefix}{name}.")


def _known_part(block: Mapping[str, Any], model: Any, prefix: str, checked: Checked) -> dict[str, Any]:
    """Return the part of `block`, whose keys' paths begin with `prefix`, that `model` is to check.

    Left out are refused keys that are off, unknown keys, and ignored keys that say "auto". What each key is, is noted in
    `checked`.
    """
    known: dict[str, Any] = {}
    fields = fields_of(model)
    for name, value in block.items():
        path = f"{prefix}{name}"
        rule = rule_of(path)
        if rule is not None and rule.effect == "refused":
            if rule.refuses(value):
                checked.refused.append(f'"{path}": {rule.note}.')
            continue
        if name not in fields:
            checked.unknown.append(path)
            continue
        inner = block_of(fields[name])
        if inner is not None and isinstance(value, Mapping):
            known[name] = _known_part(value, inner, f"{path}.", checked)
            continue
        if inner is not None and value is None:
            continue  # a block that is left empty
        is_ignored = rule is not None and rule.effect == "ignored"
        if is_ignored:
            checked.ignored.append(path)
        else:
            checked.used.append(path)
        if value == "auto" and path != MICRO_BATCH and prefix != "harmony.":
            if not is_ignored:
                checked.automatic.append(path)
            continue
        if path in _PARAMS and isinstance(value, Mapping):
            checked.automatic += [f"{path}.{key}" for key, given in value.items() if given == "auto"]
        alias = fields[name].alias
        if alias in (None, name) or alias not in block:  # where both names of a key are given, DeepSpeed's alias counts
            known[name] = value
    return known


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each key, those of blocks in blocks, too."""
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_BETTER = {"2, 3 or 3": "2 or 3", "a valid dictionary": "an object", "a dictionary": "an object", "valid tuple": "list"}


def _wrong_values(error: ValidationError, raw: Mapping[str, Any], names: set[str]) -> list[str]:
    """Return pydantic's errors as ours, one for each key. `names` are those of keys."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for one in error.errors():
        is_deepspeeds = one["type"] in ("assertion_error", "value_error")
        path = "" if is_deepspeeds else ".".join(n for n in one["loc"] if isinstance(n, str) and n in names)
        by_key.setdefault(path or one["msg"], []).append(one)
    return [_wrong_value(key, several, raw) for key, several in by_key.items()]


def _wrong_value(path: str, errors: Sequence[ErrorDetails], raw: Mapping[str, Any]) -> str:
    """Return what is wrong with the value at `path`: the key, what it takes, what was given.

    Args:
        errors: pydantic's, of one key; several: it takes values of several types.
    """
    first = errors[0]
    if first["type"] in ("assertion_error", "value_error"):  # DeepSpeed's own words
        return first["msg"].partition(", ")[2]
    given = value_at(raw, path)
    takes, hint = first["msg"].partition(" or instance")[0].partition(" or an instance")[0], ""
    for theirs, better in _BETTER.items():
        takes = takes.replace(theirs, better)
    if path.startswith("harmony."):
        hint = f" {help_of(path.removeprefix('harmony.'))}"
        if any(other["loc"][:2] == first["loc"][:2] for other in errors[1:]):  # of several types, which the help lists
            return f'"{path}" cannot be {given!r}.{hint}'
    elif path.startswith(("optimizer", "scheduler")):
        hint = ' Write {"type": "AdamW", "params": {...}}, for example.'
    return f'"{path}": {takes}, not {given!r}.{hint}'
