"""The README's figures can be drawn and its numbers are those of its commands; and it is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.common import END_OF_TABLE
from benchmarks.fits.run import BEGIN, CASES, HEAD
from benchmarks.gpu.figure import bars, draw
from tests.docs.pages import ROOT

README = ROOT / "README.md"
BENCH = ROOT / "docs" / "bench.md"
ENGINES = {
    "harmony": "harmony",
    "deepspeed-zero3-offload": "deepspeed-zero3-offload",
    "torch-checkpoint, uncapped": "torch-checkpoint, uncapped",
}
TOKENS = {"32,768": "4 micro-batches", "131,072": "16 micro-batches"}


def test_the_table_of_the_h200_is_what_was_measured() -> None:
    page = BENCH.read_text().partition("## On one H200")[2]
    rows = re.findall(r"^\|(.*?)\|(.*?)\| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    assert len(rows) == 6
    tokens = ""
    for first, engine, milliseconds, rate in rows:
        tokens = first.strip() or tokens
        (comparison,) = (row for name, row in bars().items() if name.startswith(TOKENS[tokens]))
        bar = comparison[ENGINES[engine.strip()]]
        assert _number(milliseconds) == pytest.approx(bar.seconds * 1e3, abs=1)
        assert _number(rate) == pytest.approx(_number(tokens) / bar.seconds, rel=1e-3)


def test_the_readme_says_who_won_on_the_gpu() -> None:
    comparison = next(row for name, row in bars().items() if name.startswith("4 micro-batches"))
    best, ours = f"{comparison['best'].seconds:.2f}", f"{comparison['harmony'].seconds:.2f}"
    assert f"ZeRO-3's best micro-batch wins at 32,768 tokens, {best} s to {ours}" in " ".join(
        README.read_text().split()
    )


def test_the_table_of_what_fits_has_the_rows_of_its_command() -> None:
    table = README.read_text().partition(BEGIN)[2].partition(END_OF_TABLE)[0].strip().splitlines()
    assert table[:2] == HEAD.splitlines()
    for case, row in zip(CASES, table[2:], strict=True):
        assert row.startswith(f"| {case.title} | {case.tokens:,} | {case.tokens * case.accumulation:,} |")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def test_the_figure_can_be_drawn(tmp_path: Path) -> None:
    draw(bars(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_readme_has_at_most_900_words() -> None:
    assert len(README.read_text().split()) <= 900
