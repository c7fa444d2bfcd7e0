"""Runs cases, prints their outcomes, and writes them to outcomes.md beside this file.

python -m tests.exactness.run              all of them; the document is written anew
python -m tests.exactness.run --new        those that the document does not have; they are written into it
python -m tests.exactness.run NAME...      those whose name or cause begins so, with details; nothing is written
"""

from __future__ import annotations

import sys

from tests.exactness import table
from tests.exactness.judge import judging, load_cases


def main() -> None:
    cases = load_cases()
    known = table.read() if sys.argv[1:] == ["--new"] else {}
    wanted = () if known else tuple(sys.argv[1:])
    chosen = {
        name: one
        for name, one in cases.items()
        if name not in known
        if not wanted or (name + " " + one.cause).startswith(wanted) or one.cause in wanted
    }
    cells = {}
    with judging() as judge:
        for name, one in chosen.items():
            outcomes = judge.outcomes(one)
            cells[name] = table.cell(one, outcomes)
            print(f"{name:32} {cells[name]}\n{'':32} {one.what}", flush=True)
            for setting, outcome in zip(one.settings, outcomes, strict=True):
                if wanted and outcome.detail:
                    print(f"--- {setting}\n{outcome.detail}")
    wrong = sum("WRONG" in said for said in cells.values())
    print(f"{len(cells)} cases, {wrong} wrong")
    if not wanted:
        table.write(cases, known | cells)


if __name__ == "__main__":
    main()
