"""The paper's experiments run at their smallest size, write what they promise, and their claims hold."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
RESULTS = FOLDER.parent / "results" / "paper"
IMAGES = FOLDER.parents[1] / "docs" / "images" / "paper"
NAMES = ("fig8", "fig10", "fig12", "devices", "fig13", "fig17", "fig21")
PNG = b"\x89PNG"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """A script of the folder, in this process: its imports would take longer than it does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for module in FOLDER.glob("*.py"):  # examples have modules of the same names
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
    script = str(FOLDER / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *options])
    runpy.run_path(script, run_name="__main__")


def content_of(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the experiment found at its smallest size."""
    run(name, monkeypatch, "--quick", "--out", str(out))
    assert (out / f"{name}.png").read_bytes().startswith(PNG)
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["environment"]["command"].startswith(f"python benchmarks/paper/{name}.py")
    return found


def test_grouped_swaps_do_not_grow_and_those_of_each_alone_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = content_of("fig12", tmp_path, monkeypatch)["measured"]

    grouped = [row["grouped"]["weights"] + row["grouped"]["gradients"] for row in rows]
    alone = [row["each_alone"]["weights"] + row["each_alone"]["gradients"] for row in rows]
    groups = [row["micro_batches"] for row in rows]
    assert groups == [1, 4]
    assert grouped == [row["lower_bound"] for row in rows] == [grouped[0]] * 2
    assert alone == [group * grouped[0] for group in groups]


@pytest.mark.parametrize("name", NAMES)
def test_results_and_figure_are_kept(name: str) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())

    assert {"command", "date", "cpu", "seconds"} <= set(content["environment"])
    assert "--quick" not in content["environment"]["command"]
    assert (IMAGES / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["fig13", "fig21"])
def test_the_kept_training_is_plain_training_bit_for_bit(name: str) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())

    assert content["losses"] == content["plain_losses"]
    assert content["largest_weight_difference"] == 0.0
    assert content["device_peak_bytes"] <= content["budget_bytes"] < 4 * content["weight_bytes"]


def test_the_page_is_made_from_the_kept_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("page", monkeypatch, "--out", str(tmp_path))

    assert (tmp_path / "paper.md").read_text() == (FOLDER.parents[1] / "docs" / "paper.md").read_text()
    assert {path.stem for path in tmp_path.glob("*.png")} == set(NAMES)
