"""The command line of the two comparisons, their tables, and where these are written."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from benchmarks.common import RESULTS, ROOT, quiet, write_results
from benchmarks.trainer.compare import Case, Row, compare

PAGE = ROOT / "docs" / "huggingface.md"
BEGIN, END = "<!-- table: python -m benchmarks.{name}.run --write -->", "<!-- end of table: {name} -->"


def run_cases(about: str | None, name: str, cases: Iterable[Case]) -> None:
    """Compare all cases, print a line for each and the tables; with --write, keep each as it comes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="KIND", help="the cases of these kinds; --write keeps the other rows"
    )
    parser.add_argument("--write", action="store_true", help=f"write results/{name}.json and the table of {PAGE.name}")
    text = f"keep the rows that results/{name}.json holds: those of a --write that was interrupted"
    parser.add_argument("--resume", action="store_true", help=text)
    options = parser.parse_args()
    quiet()
    every = list(cases)
    rows = rows_of(name) if options.only or options.resume else {}
    for case in every:
        key = case.kind, case.name
        if (options.only and case.kind not in options.only) or (options.resume and key in rows):
            continue
        rows[key] = compare(case)
        print(line(rows[key]), flush=True)
        if options.write:
            write(name, in_order(rows, every))
    print(f"\n{tables(in_order(rows, every))}")


def in_order(rows: Mapping[tuple[str, str], Row], cases: Iterable[Case]) -> list[Row]:
    """Return the rows that there are, in the order of the cases."""
    return [rows[case.kind, case.name] for case in cases if (case.kind, case.name) in rows]


def write(name: str, rows: Sequence[Row]) -> None:
    """Write results/NAME.json, and the table of these rows into the page."""
    write_results(name, {"rows": [asdict(row) for row in rows]})
    begin, end = BEGIN.format(name=name), END.format(name=name)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text("\n".join([before + begin, tables(rows), end + after]), encoding="utf-8")


def rows_of(name: str) -> dict[tuple[str, str], Row]:
    """Return the rows of results/NAME.json by kind and name; none, if it has not been written."""
    file = RESULTS / f"{name}.json"
    found = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return {(row["kind"], row["name"]): Row(**row) for row in found}


def line(row: Row) -> str:
    """Return one case in one line."""
    outcome = row.error or row.differs or "equal"
    return f"{row.kind}, {row.name}: {outcome}; {row.steps} steps, ratio {row.ratio:.2f}, {row.seconds:.1f} s"


def tables(rows: Sequence[Row]) -> str:
    """Return a table of what was tried, a line for each kind, and one of what was not equal."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    lines = ["| | tried | equal | ratio |", "|---|---|---|---|"]
    for kind, inside in kinds.items():
        equal = [row for row in inside if row.is_equal]
        most = max((row.ratio for row in equal), default=0.0)
        lines.append(
            f"| {kind} | {_tried(inside)} | {len(equal)} of {len(inside)} | {f'{most:.2f}' if equal else ''} |"
        )
    others = [row for row in rows if not row.is_equal]
    if others:
        lines += ["", "| not equal | |", "|---|---|"]
        for row in others:
            lines.append(f"| {row.kind}, {row.name} | {(row.error or row.differs).replace('|', '/')} |")
    return "\n".join(lines)


def _tried(rows: Sequence[Row]) -> str:
    """Return what was tried, in few words: an option or a choice of losses once, with the number of its values."""
    counts = Counter(_what(row.name) for row in rows)
    return ", ".join(what if count == 1 else f"{what} ({count})" for what, count in counts.items())


def _what(name: str) -> str:
    option, has_value, _ = name.partition("=")
    if has_value:
        return f"`{option}`"
    is_loss = name.startswith("loss ") and len(name.split()) == 2
    return "losses" if is_loss else name.replace(",", "")
