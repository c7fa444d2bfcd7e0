"""The tables in docs/config.md are made from the table of keys: `python -m tests.docs.config_tables` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

from harmony_ds.config.key import Effect, Key
from harmony_ds.config.keys import KEYS
from harmony_ds.config.optimizers import NOT_RUN

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
_BEGIN, _END = "<!-- {part}: made by python -m tests.docs.config_tables -->", "<!-- end of what is made -->"
_TITLES = {
    Effect.SAME: "Honoured, same meaning",
    Effect.DIFFERENT: "Honoured differently",
    Effect.NONE: "Not applicable",
    Effect.REFUSED: "Refused",
}
_LEADS = {
    Effect.NONE: "Accepted, checked, and named once in the log. What the last column calls *several processes* or "
    "*DeepSpeed's own buffers* has nothing here that it could steer.",
    Effect.REFUSED: "An error, unless switched off. The last column is what it says.",
}


def tables() -> dict[str, str]:
    """Every key, by what becomes of it: ours and DeepSpeed's."""
    parts: list[str] = []
    for effect, title in _TITLES.items():
        parts += [f"## {title}", "", *([_LEADS[effect], ""] if effect in _LEADS else []), *_table(effect), ""]
    parts += ["## Optimizers that are not run", "", "| `optimizer.type` | reason |", "|---|---|"]
    parts += [f"| `{name}` | {reason} |" for name, reason in NOT_RUN.items()]
    return {"ours": "\n".join(_table(Effect.OURS)) + "\n", "DeepSpeed's": "\n".join(parts) + "\n"}


def _table(effect: Effect) -> list[str]:
    rows = [_row(key) for key in KEYS if key.effect is effect]
    return ["| key | values | default | |", "|---|---|---|---|", *rows]


def _row(key: Key) -> str:
    name = key.path.removeprefix("harmony.")
    default = "" if key.older else key.shown or f"`{json.dumps(key.default)}`"
    note = f"{key.note} (of an older DeepSpeed)" if key.older and "older" not in key.note else key.note
    return f"| `{name}` | {key.form.name} | {default} | {note} |"


def with_tables(text: str) -> str:
    """`text` with what stands between the marks made anew."""
    for part, made in tables().items():
        begin = _BEGIN.format(part=part)
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(_END)
        text = f"{head}{begin}\n\n{made}\n{_END}{tail}"
    return text


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
