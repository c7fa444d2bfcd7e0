"""The paper's experiments run at their smallest size, write what they promise, and their claims hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
RESULTS = FOLDER.parent / "results" / "paper"
IMAGES = FOLDER.parents[1] / "docs" / "images" / "paper"
NAMES = ("table1", "fig8", "fig10", "fig12", "fig13", "fig17", "fig21")
PNG = b"\x89PNG"


def content_of(name: str, out: Path) -> dict[str, Any]:
    """What the experiment found at its smallest size."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (out / f"{name}.png").read_bytes().startswith(PNG)
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert found["environment"]["command"].startswith(f"python benchmarks/paper/{name}.py")
    return found


def test_grouped_swaps_do_not_grow_and_those_of_each_alone_do(tmp_path: Path) -> None:
    rows = content_of("fig12", tmp_path)["measured"]

    grouped = [row["grouped"]["weights"] + row["grouped"]["gradients"] for row in rows]
    alone = [row["each_alone"]["weights"] + row["each_alone"]["gradients"] for row in rows]
    groups = [row["micro_batches"] for row in rows]
    assert groups == [1, 4]
    assert grouped == [row["lower_bound"] for row in rows] == [grouped[0]] * 2
    assert alone == [group * grouped[0] for group in groups]


def test_the_schedule_found_is_no_slower_than_the_published_one(tmp_path: Path) -> None:
    (row,) = content_of("table1", tmp_path)["simulated"]

    assert row["published_simulated_s"] == pytest.approx(row["published_estimate_s"], rel=0.01)
    assert row["step_s"] <= row["published_simulated_s"]


@pytest.mark.parametrize("name", NAMES)
def test_results_and_figure_are_kept(name: str) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())

    assert {"command", "date", "cpu", "torch", "seconds"} <= set(content["environment"])
    assert "--quick" not in content["environment"]["command"]
    assert (IMAGES / f"{name}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", ["fig13", "fig21"])
def test_the_kept_training_is_plain_training_bit_for_bit(name: str) -> None:
    content = json.loads((RESULTS / f"{name}.json").read_text())

    assert content["losses"] == content["plain_losses"]
    assert content["largest_weight_difference"] == 0.0
    assert content["device_peak_bytes"] <= content["budget_bytes"] < 4 * content["weight_bytes"]


def test_the_page_is_made_from_the_kept_results(tmp_path: Path) -> None:
    page = tmp_path / "paper.md"
    command = [sys.executable, str(FOLDER / "page.py"), "--out", str(page)]
    subprocess.run(command, check=True, capture_output=True)

    assert page.read_text() == (FOLDER.parents[1] / "docs" / "paper.md").read_text()
