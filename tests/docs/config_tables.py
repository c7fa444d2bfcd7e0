"""The tables of ds_config keys: `python -m tests.docs.config_tables` writes those in docs/config.md anew."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from harmony_ds.config import load_config
from harmony_ds.config.check import ds_config_type, paths_of
from harmony_ds.config.harmony import HARMONY_KEYS
from harmony_ds.config.keys import RULES, rule_of
from harmony_ds.config.optimizers import NOT_RUN

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
_BEGIN, _END = "<!-- {part}: made by python -m tests.docs.config_tables -->", "<!-- end of what is made -->"
_UNLESS_GIVEN = {
    "device_memory_gib": "",
    "pack_layers": "searched",
    "layers": "found",
    "seed": "",
    "plan": "",
    "profile": "",
}


def tables() -> dict[str, str]:
    """Return the tables on the page: our keys, and DeepSpeed's that differ or are refused."""
    return {"ours": _ours(), "differs": _by_rule("differs"), "refused": _by_rule("refused") + "\n" + _optimizers()}


def all_keys() -> str:
    """Return a page of every key, with its default and what becomes of it."""
    defaults = load_config({"train_micro_batch_size_per_gpu": 1}).values
    rows = ["# All keys of a ds_config", "", "| key | default | |", "|---|---|---|"]
    for path in sorted({*paths_of(ds_config_type()), *RULES}):
        rule = rule_of(path)
        default = f"`{json.dumps(defaults[path], default=str)}`" if path in defaults else ""
        rows.append(f"| `{path}` | {default} | {f'{rule.effect}: {rule.note}' if rule else 'as in DeepSpeed'} |")
    return "\n".join([*rows, "", "Ours, under `harmony`:", "", _ours()])


def _ours() -> str:
    rows = ["| key | values | default | |", "|---|---|---|---|"]
    for name, info in HARMONY_KEYS.items():
        default = _UNLESS_GIVEN.get(name, f"`{json.dumps(info.default)}`")
        rows.append(f"| `{name}` | {_kind(info.annotation)} | {default} | {' '.join(info.description.split())} |")
    return "\n".join(rows) + "\n"


def _kind(annotation: Any) -> str:
    """Return the values of a type, as JSON has them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in inner)
    if origin in (Union, UnionType):
        return ", ".join(_kind(one) for one in inner)
    if origin is tuple:
        return "names" if inner[-1] is ... else "an object of two integers"
    return {bool: "flag", int: "integer", float: "number", str: "text", NoneType: "null"}[annotation]


def _by_rule(effect: str) -> str:
    notes: dict[str, list[str]] = {}
    for path, rule in RULES.items():
        if rule.effect == effect:
            notes.setdefault(rule.note, []).append(f"`{path}`")
    return (
        "\n".join(["| key | |", "|---|---|", *(f"| {', '.join(keys)} | {note} |" for note, keys in notes.items())])
        + "\n"
    )


def _optimizers() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in NOT_RUN.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(["| `optimizer.type` | |", "|---|---|", *rows]) + "\n"


def with_tables(text: str) -> str:
    """Return `text` with the tables between the marks made anew."""
    for part, made in tables().items():
        begin = _BEGIN.format(part=part)
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(_END)
        text = f"{head}{begin}\n\n{made}\n{_END}{tail}"
    return text


def main() -> None:
    """Write the tables into docs/config.md."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
