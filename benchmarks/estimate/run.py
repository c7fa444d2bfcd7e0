"""Regenerate the table in docs/estimate.md: Llama configurations on two machines.

    python benchmarks/estimate/run.py [--write]

Nothing is allocated; takes a few minutes, most of it searching for plans.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from harmony_ds.cli.answer import Answer, Case, answer
from harmony_ds.cli.estimate import survey_on
from harmony_ds.cli.options import DEFAULT
from harmony_ds.config import load_config
from harmony_ds.estimate.subject import BatchShape
from harmony_ds.profiler.hardware import hardware_of

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "estimate.md"
BEGIN, END = "<!-- table: python benchmarks/estimate/run.py --write -->", "<!-- end of table -->"
MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
MACHINES = ("rtx4090", "h100")
SEQUENCE = 2048
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """Rows of a micro-batch, and micro-batches of a step: 65,536 tokens in all."""

    rows: int
    steps: int


SETTINGS = {"rtx4090": Setting(1, 32), "h100": Setting(4, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/estimate.md")
    write = parser.parse_args().write
    rows = []
    for model in MODELS:
        for machine in MACHINES:
            rows.append(row(model, machine))
            print(rows[-1], flush=True)
    if write:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join([HEAD, *rows])
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


HEAD = (
    "| model | machine | device GiB: needs / may use | host GiB: needs / may use | fits | s per step | tokens/s |"
    "\n|---|---|---|---|---|---|---|"
)


def row(model: str, machine: str) -> str:
    """Return one line of the table."""
    hardware, setting = hardware_of(machine), SETTINGS[machine]
    spec = str(HERE / "models" / f"{model}.json")
    batch = {"train_micro_batch_size_per_gpu": setting.rows, "gradient_accumulation_steps": setting.steps}
    config = load_config({**DEFAULT, **batch})
    subject, survey = survey_on(hardware, spec, BatchShape(setting.rows, SEQUENCE), config)
    case = Case(subject, config, survey, hardware.host_budget_bytes)
    found = answer(case, lambda rows: survey_on(hardware, spec, BatchShape(rows, SEQUENCE), config)[1], advise=False)
    return f"| {model} | {hardware.name} | {' | '.join(cells(found))} |"


def cells(found: Answer) -> list[str]:
    now, lack = found.forecast, found.lack
    if now is None:
        assert lack is not None
        return [f"{lack.needed_bytes / GIB:.1f} / {lack.budget_bytes / GIB:.1f}", "", "no (device)", "", ""]
    return [
        f"{now.plan.peak_bytes / GIB:.1f} / {(now.device_budget_bytes or 0) / GIB:.1f}",
        f"{now.host_total_bytes / GIB:.0f} / {(now.host_budget_bytes or 0) / GIB:.0f}",
        "yes" if found.fits else "no (host)",
        f"{now.prediction.step_ms / 1e3:.1f}",
        f"{now.items_per_s:,.0f}",
    ]


if __name__ == "__main__":
    main()
