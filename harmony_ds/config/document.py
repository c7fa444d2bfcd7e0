"""Writes the table of keys into docs/config.md, between two marks:

python -m harmony_ds.config.document docs/config.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harmony_ds.config.keys import KEYS, Effect, Key
from harmony_ds.config.optimizers import NOT_RUN

BEGIN = "<!-- made by python -m harmony_ds.config.document -->"
END = "<!-- end of what is made -->"
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


def tables() -> str:
    """Every key, by what becomes of it."""
    parts = []
    for effect, title in _TITLES.items():
        keys = [key for key in KEYS if key.effect is effect]
        parts += [f"## {title}", ""]
        parts += [_LEADS[effect], ""] if effect in _LEADS else []
        parts += ["| key | values | default | |", "|---|---|---|---|"]
        parts += [_row(key) for key in keys]
        parts.append("")
    parts += ["## Optimizers that are not run", "", "| `optimizer.type` | reason |", "|---|---|"]
    parts += [f"| `{name}` | {reason} |" for name, reason in NOT_RUN.items()]
    return "\n".join(parts) + "\n"


def _row(key: Key) -> str:
    default = "" if key.older else f"`{json.dumps(key.default)}`"
    note = f"{key.note} (of an older DeepSpeed)" if key.older and "older" not in key.note else key.note
    return f"| `{key.path}` | {key.kind.name} | {default} | {note} |"


def with_tables(text: str) -> str:
    """`text` with what stands between the marks made anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
