"""Scripts of the GPU suite run to their ends without a GPU, at a small size."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run_program(monkeypatch: pytest.MonkeyPatch, out: Path, name: str, *words: str) -> None:
    """Run a program of the kit in this process, with a folder for its results."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "suite", raising=False)
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_one_step_is_measured_and_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    run_program(monkeypatch, tmp_path, "one_step.py", "--tokens", "128")

    (found,) = (one for one in tmp_path.glob("gpu-dry-run/step-*.json") if not one.name.endswith(".trace.json"))
    content = json.loads(found.read_text())
    assert content["tokens_per_s"] > 0
    assert json.loads(found.with_suffix(".trace.json").read_text())["traceEvents"]


def test_device_memory_is_told_beside_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_program(monkeypatch, tmp_path, "device_memory.py")

    content = json.loads((tmp_path / "gpu-dry-run" / "device-memory.json").read_text())
    assert [step["retries"] for step in content["steps"]] == [0] * 5
    assert content["modelled"]["planned_peak_bytes"] <= content["modelled"]["budget_bytes"]
    said = capsys.readouterr().out
    assert "reserved nothing (no caching allocator)" in said and "the model, under" in said


def test_adapters_on_a_quantized_base_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_program(monkeypatch, tmp_path, "qlora.py")

    (found,) = tmp_path.glob("gpu-dry-run/qlora-small-*.json")
    content = json.loads(found.read_text())
    assert content["ratio"] == 1.0 and content["swapped_in_bytes"] > content["packed_bytes"]
    assert content["device_peak_bytes"] <= content["planned_peak_bytes"] <= content["cap_gib"] * 2**30
    assert all(0 < loss < 20 for loss in content["losses"])
    assert "tokens_per_s" in capsys.readouterr().out


def test_the_scripts_of_all_calls_are_in_the_kit_and_no_step_may_take_more_than_a_call() -> None:
    calls = runpy.run_path(str(FOLDER / "calls.py"))
    for steps in calls["CALLS"].values():
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
        for step in steps:
            assert (FOLDER.parents[1] / step.script.split()[0]).is_file(), step.name
            assert step.least_s <= step.limit_s < calls["BUDGET_S"] < 600


@pytest.mark.parametrize("name", ["one_step.py", "head_to_head.py", "qlora.py"])
def test_the_options_of_all_steps_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    arguments = runpy.run_path(str(FOLDER / name))["_arguments"]
    steps = [step for steps in runpy.run_path(str(FOLDER / "calls.py"))["CALLS"].values() for step in steps]
    own = [step.script.format(left=1, kit="kit", work="work").split() for step in steps if name in step.script]
    assert own
    for _, *options in own:
        monkeypatch.setattr(sys, "argv", [name, *options])
        arguments()


def test_a_call_says_first_which_commit_it_is_of_and_does_not_repeat_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "kit" / "source"
    source.mkdir(parents=True)
    (source / "COMMIT").write_text("1a2b3c4d of 2026-11-30\n")
    (source / "good.py").write_text("print('it went well')")
    (source / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("OUT", str(tmp_path / "results"))
    monkeypatch.setattr(sys, "argv", ["calls.py", "1", "--kit", str(tmp_path / "kit")])
    calls = runpy.run_path(str(FOLDER / "calls.py"))
    step = calls["Step"]
    calls["main"].__globals__["CALLS"] = {1: (step("good", "good.py", 20, 0), step("bad", "bad.py", 20, 0))}

    assert calls["main"]() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "harmony_ds 1a2b3c4d of 2026-11-30"
    assert "it went well" in said and any(line.split()[:2] == ["bad", "failed"] for line in said)

    (source / "COMMIT").write_text("5e6f7a8b of 2026-12-01\n")
    calls["main"]()
    again = capsys.readouterr().out
    assert again.startswith("harmony_ds 5e6f7a8b of 2026-12-01\nbad: at most")
    assert "(of 1a2b3c4d of 2026-11-30)" in again  # the step that was not run again


def test_the_readmes_figure_is_drawn_from_committed_results(tmp_path: Path) -> None:
    figure = runpy.run_path(str(FOLDER / "figure.py"))
    bars = figure["bars"]()
    assert {"harmony", "deepspeed-zero3-offload"} <= set.intersection(*(set(row) for row in bars.values()))
    figure["draw"](bars, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
