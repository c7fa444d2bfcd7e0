"""Compares the answers of both engines: the same, or different for a reason that docs/compatibility.md gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.compatibility.record import brief, same
from tests.compatibility.scenes_names import PUBLIC

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WHY = dict(re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8").partition("|---|")[2], re.MULTILINE))
"""Each row that differs, with its reason. A row that is not on the page is the same, or the test fails."""


def split(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of rows that are the same and that differ. Lists of public names are neither: see `left_out`."""
    assert theirs.keys() == ours.keys()
    rows = [name for name in theirs if not name.startswith(PUBLIC)]
    equal = [name for name in rows if same(theirs[name], ours[name])]
    return equal, [name for name in rows if name not in equal]


def left_out(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return a line for each list of public names, with DeepSpeed's that are missing here."""
    lines = []
    for row in (name for name in theirs if name.startswith(PUBLIC)):
        missing = [f"`{name}`" for name in theirs[row] if name not in ours[row]]
        lines.append(f"- {row.removeprefix(PUBLIC).strip()} ({len(missing)}): {', '.join(missing)}")
    return lines


def document(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return a page with every row and both answers."""
    equal, different = split(theirs, ours)
    lines = ["# Every answer", "", f"{len(equal)} rows are the same, {len(different)} differ.", ""]
    lines += ["## Different, and why", "", "| row | DeepSpeed | harmony_ds | why |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {_cell(theirs[name])} | {_cell(ours[name])} | {WHY.get(name, '**unexplained**')} |"
        for name in different
    ]
    lines += ["", "## Names that are left out", "", *left_out(theirs, ours)]
    lines += ["", "## Same", "", "| row | both |", "|---|---|"]
    lines += [f"| {name} | {_cell(ours[name])} |" for name in equal]
    return "\n".join(lines) + "\n"


def _cell(outcome: Any) -> str:
    return "`" + brief(outcome).replace("|", "/").replace("\n", " ").replace("`", "'") + "`"
