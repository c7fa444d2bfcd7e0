"""Regenerate the table in docs/estimate.md: Llama configurations on two machines.

    python -m benchmarks.estimate.run [--write]

Nothing is allocated; takes a few minutes, most of it searching for plans.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import GIB, ROOT, answer_of_command, put_table

DOCUMENT = ROOT / "docs" / "estimate.md"
BEGIN = "<!-- table: python -m benchmarks.estimate.run --write -->"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
MACHINES = {"rtx4090": (1, 32), "h100": (4, 8)}
"""Rows of a micro-batch, and micro-batches of a step: 65,536 tokens in all."""
HEAD = (
    "| model | machine | device GiB: needs / may use | host GiB: needs / may use | fits | s per step | tokens/s |"
    "\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/estimate.md")
    options = parser.parse_args()
    table = [HEAD]
    print(HEAD)
    for model, machine in product(MODELS, MACHINES):
        table.append(line(model, machine))
        print(table[-1], flush=True)
    if options.write:
        put_table(DOCUMENT, BEGIN, table)


def line(model: str, machine: str) -> str:
    """Return one line of the table: what `harmony-ds estimate` says."""
    path = Path(__file__).parent / "models" / f"{model}.json"
    rows, steps = MACHINES[machine]
    options = f"--machine {machine} --sequence 2048 --micro-batch {rows} --accumulation {steps} --json --no-advice"
    return f"| {model} | {' | '.join(cells(answer_of_command(['estimate', str(path), *options.split()])))} |"


def cells(found: dict[str, Any]) -> list[str]:
    if "step_ms" not in found:
        lack = found["lack"]
        needs = f"{lack['needed_bytes'] / GIB:.1f} / {lack['budget_bytes'] / GIB:.1f}"
        return [found["machine"], needs, "", "no (device)", "", ""]
    return [
        found["machine"],
        f"{found['device_peak_bytes'] / GIB:.1f} / {found['device_budget_bytes'] / GIB:.1f}",
        f"{sum(found['host_bytes'].values()) / GIB:.0f} / {found['host_budget_bytes'] / GIB:.0f}",
        "yes" if found["fits"] else "no (host)",
        f"{found['step_ms'] / 1e3:.1f}",
        f"{found['tokens_per_s']:,.0f}",
    ]


if __name__ == "__main__":
    main()
