"""The report of a plan that a page shows is like those that engines give today."""

from __future__ import annotations

import re

from benchmarks.prediction.report import BEGIN, PAGE
from tests.engine.drive import config_of, engine_for, family, groups_of, sgd, train_groups

LLAMA = family("llama")


def masked(report: str) -> list[str]:
    """Return the lines of a report that each plan has, without numbers, and without what names its packs and streams."""
    without_numbers = re.sub(r"[\d.,]*\d( [KMG]iB| B| ms| s|%)?", "N", report)
    same = re.sub(r"; .* works most", "; X works most", without_numbers)
    return [line.strip() for line in same.splitlines() if re.match(r"  (step|device peak|swapped) ", line)]


def test_the_page_shows_the_lines_that_a_report_has() -> None:
    sample = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition("<!-- end")[0].replace("\n    ", "\n")
    with engine_for(LLAMA.build(0.0), sgd, config_of(2, None, {"pack_layers": 1})) as engine:
        train_groups(engine, groups_of(LLAMA, 3, 2))
        report = str(engine.plan_report())
    assert len(masked(report)) == 3 and masked(sample) == masked(report)
    assert "\nplan: " in sample and "\n  instead " in sample
