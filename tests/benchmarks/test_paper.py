"""The paper's experiments run at their smallest size, write what they promise, and their claims hold."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
RESULTS = FOLDER.parent / "results" / "paper"
IMAGES = FOLDER.parents[1] / "docs" / "images" / "paper"
NAMES = ("table1", "fig8", "fig10", "fig12", "fig13", "fig17", "fig21")
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


def test_the_schedule_found_is_no_slower_than_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = content_of("table1", tmp_path, monkeypatch)["simulated"]

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


def test_the_page_is_made_from_the_kept_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "paper.md"
    run("page", monkeypatch, "--out", str(page))

    assert page.read_text() == (FOLDER.parents[1] / "docs" / "paper.md").read_text()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("machine")


def test_packs_of_merged_layers_cost_what_packs_of_their_layers_cost(machine: ModuleType) -> None:
    profile = machine.published_profile("GPT2-10B")
    layers, merged = machine.PackCosts(profile), machine.PackCosts(machine.merged(profile, 6))
    places = [0, 1, *range(7, 52, 6), 52, 53, 54]

    assert merged.count == len(places) - 1
    for a, b in combinations(range(len(places)), 2):
        first, last = places[a], places[b]
        assert merged.state_bytes(a, b) == layers.state_bytes(first, last)
        assert merged.input_bytes(a) == layers.input_bytes(first)
        assert merged.backward_ms(2, a, b) == pytest.approx(layers.backward_ms(2, first, last))
        assert merged.memory(True, 2)(a, b) == layers.memory(True, 2)(first, last)
        assert merged.memory(False, 2)(a, b) == layers.memory(False, 2)(first, last)


def test_a_deeper_profile_has_the_published_bytes_of_twenty_billion_parameters(machine: ModuleType) -> None:
    profile = machine.deeper(machine.published_profile("GPT2-10B"), {3: 50})
    deeper = machine.PackCosts(profile)

    assert deeper.count == 104
    assert sum(layer.weight_bytes for layer in profile.layers) / 2**30 == pytest.approx(76.57, abs=0.01)
    assert deeper.forward_ms(1, 0, 104) == pytest.approx(5408, abs=1)
    assert deeper.backward_ms(1, 0, 104) == pytest.approx(17098, abs=1)
