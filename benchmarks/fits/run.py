"""Regenerate the README's table of what fits a card of 24 GiB: `python -m benchmarks.fits.run [--write]`.

Each row is what `harmony-ds estimate` says, with host memory as it needs it. Nothing is allocated; takes some minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks.common import GIB, ROOT, answer_of_command, put_table

README = ROOT / "README.md"
MODELS = ROOT / "benchmarks" / "models"
BEGIN = "<!-- table: python -m benchmarks.fits.run --write -->"
HEAD = "| what is trained | tokens a row | tokens a step | GiB: device | host | tokens/s |\n|---|---|---|---|---|---|"
MACHINE, HOST_GIB = "rtx4090/pcie4/desktop-ddr5", 2000


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained: micro-batches of one row of `tokens`, `accumulation` of them in a step."""

    title: str
    model: str
    tokens: int
    accumulation: int
    adapters: str = ""

    @property
    def command(self) -> str:
        """The command that prints the row's numbers."""
        rows = f"--sequence {self.tokens} --micro-batch 1 --accumulation {self.accumulation}"
        more = f" {self.adapters}" if self.adapters else ""
        model = (MODELS / self.model).relative_to(ROOT)
        return f"estimate {model} --machine {MACHINE} {rows}{more} --host-memory-gib {HOST_GIB} --no-advice --json"


CASES = (
    Case("Llama-3.1-8B, all weights", "llama-3.1-8b.json", 4096, 16),
    Case("Llama-3.1-8B, all weights", "llama-3.1-8b.json", 32768, 8),
    Case("Llama-3.1-8B, all weights", "llama-3.1-8b.json", 131072, 4),
    Case("Qwen3-32B, LoRA of a bf16 base", "qwen3-32b.json", 4096, 16, "--lora 16 --base bf16"),
    Case("Llama-3.1-70B, LoRA of an NF4 base", "llama-3.1-70b.json", 4096, 4, "--lora 16 --base nf4"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    table = [HEAD]
    print(HEAD)
    for case in CASES:
        table.append(line(case, answer_of_command(case.command.split())))
        print(table[-1], flush=True)
    if options.write:
        put_table(README, BEGIN, table)


def line(case: Case, found: dict[str, Any]) -> str:
    """Return the case's line of the table.

    Raises:
        ValueError: it does not fit, so that the table must not name it.
    """
    if "step_ms" not in found:
        raise ValueError(f"{case.title} at {case.tokens} tokens a row does not fit: {found}")
    tokens = case.tokens * case.accumulation
    device, host = found["device_peak_bytes"] / GIB, sum(found["host_bytes"].values()) / GIB
    rate = tokens / found["step_ms"] * 1e3
    return f"| {case.title} | {case.tokens:,} | {tokens:,} | {device:.1f} | {host:.0f} | {rate:,.0f} |"


if __name__ == "__main__":
    main()
