"""The README's table and figure are what benchmarks/results/gpu holds; and it is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.gpu.figure import bars, draw
from tests.docs.pages import ROOT

README = ROOT / "README.md"
ENGINES = {
    "harmony_ds": "harmony",
    "ZeRO-3 offload": "deepspeed-zero3-offload",
    "ZeRO-3 offload, its best": "best",
    "plain PyTorch": "torch-checkpoint, uncapped",
}
TOKENS = {"32,768": "4 micro-batches", "131,072": "16 micro-batches"}


def test_the_table_is_what_was_measured() -> None:
    rows = re.findall(r"^\|(.*)\|(.*)\|.*\| ([\d.]+) s \| ([\d,]+) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 7
    tokens = ""
    for first, engine, seconds, rate in rows:
        tokens = first.strip() or tokens
        (comparison,) = (row for name, row in bars().items() if name.startswith(TOKENS[tokens]))
        bar = comparison[ENGINES[engine.partition("(")[0].strip()]]
        assert float(seconds) == pytest.approx(bar.seconds, abs=0.005)
        assert float(rate.replace(",", "")) == pytest.approx(float(tokens.replace(",", "")) / bar.seconds, rel=1e-3)


def test_the_figure_can_be_drawn(tmp_path: Path) -> None:
    draw(bars(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_readme_has_at_most_700_words() -> None:
    assert len(README.read_text().split()) <= 700
