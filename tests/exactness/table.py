"""The table of cases in outcomes.md beside this file: written from outcomes, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.exactness.case import Case
from tests.exactness.judge import Outcome
from tests.exactness.sides import Setting

DOCUMENT = Path(__file__).with_name("outcomes.md")
HEADING = "# Programs that people write"
INTRODUCTION = """\
Each of these programs is run in plain PyTorch and on the engine, in fp32 unless it says otherwise, with
`gradient_clipping` 0 (layers are updated as their gradients arrive) and 1 (updates wait for the norm), with packs that are
swapped, packs that stay on the device from step to step ("resident"), and packs that stay there from forward to backward
with their autograd graphs ("graphs kept"), in packs of one layer. "equal": every
tensor that the program's user looks at has the same bits, or is as close as stated. "not grouped": its last step, or that
of one of its engines, swapped more than its plan needs for a whole group of micro-batches. "refused": an error of
`harmony_ds.errors` says what was seen and what to do, and no weight has changed since the last completed step. Written by
`python -m tests.exactness.run`; `tests/exactness/test_table.py` holds the engine to it.
"""


def cell(case: Case, outcomes: Sequence[Outcome]) -> str:
    """The outcomes of all settings of a case, as the table says them."""
    said = [outcome.says for outcome in outcomes]
    if len(set(said)) == 1:
        return said[0]
    return "; ".join(f"{setting}: {says}" for setting, says in zip(case.settings, said, strict=True))


def said_of(cell: str, setting: Setting) -> str:
    """Return the words of `cell` for one setting."""
    marks = [part.removeprefix(f"{setting}: ") for part in cell.split("; ") if part.startswith(f"{setting}: ")]
    return marks[0] if marks else cell


def write(cases: Mapping[str, Case], cells: Mapping[str, str]) -> None:
    """Writes the document."""
    lines = [HEADING, "", INTRODUCTION]
    cause = None
    for name, one in cases.items():
        if one.cause != cause:
            cause = one.cause
            lines += [
                "" if lines[-1].startswith("|") else None,
                f"## {cause.capitalize()}",
                "",
                "| case | what the user does | outcome |",
                "|---|---|---|",
            ]
        lines.append(f"| `{name}` | {one.what} | {cells[name]} |")
    DOCUMENT.write_text("\n".join(line for line in lines if line is not None) + "\n", encoding="utf-8")


def read() -> dict[str, str]:
    """The outcome of each case, as committed."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(HEADING)[2]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[-1] for row in rows}
