"""Regenerate the table of LoRA in docs/estimate.md: three models on an RTX 4090, with bases in 16 bits and quantized.

    python -m benchmarks.estimate.lora [--write]

Nothing is allocated; takes a few minutes.
"""

from __future__ import annotations

import argparse
from itertools import product

from benchmarks.common import GIB, answer_of_command, put_table
from benchmarks.estimate.run import DOCUMENT

BEGIN = "<!-- table: python -m benchmarks.estimate.lora --write -->"
MODELS, BASES = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b"), ("bf16", "int8", "nf4")
OPTIONS = "--machine rtx4090 --host-memory-gib 57.6 --sequence 4096 --accumulation 2 --json --no-advice"
HEAD = (
    "| model | base | device GiB: needs / may use | host GiB: needs / may use | fits | swapped in a step, GiB "
    "| s per step | tokens/s |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/estimate.md")
    options = parser.parse_args()
    table = [HEAD]
    print(HEAD)
    for model, base in product(MODELS, BASES):
        table.append(line(model, base))
        print(table[-1], flush=True)
    if options.write:
        put_table(DOCUMENT, BEGIN, table)


def line(model: str, base: str) -> str:
    """Return one line of the table: what `harmony-ds estimate` says."""
    path = f"benchmarks/models/{model}.json"
    found = answer_of_command(["estimate", path, "--lora", "16", "--base", base, *OPTIONS.split()])
    swaps = found["swaps"]
    cells = [
        model,
        base,
        f"{found['device_peak_bytes'] / GIB:.1f} / {found['device_budget_bytes'] / GIB:.1f}",
        f"{sum(found['host_bytes'].values()) / GIB:.1f} / {found['host_budget_bytes'] / GIB:.1f}",
        "yes" if found["fits"] else "no (host)",
        f"{(swaps['weights_in'] + swaps['gradients_out']) / GIB:.1f}",
        f"{found['step_ms'] / 1e3:.1f}",
        f"{found['tokens_per_s']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
