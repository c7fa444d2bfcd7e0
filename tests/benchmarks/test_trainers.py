"""What `benchmarks/trainer` and `benchmarks/trl` compare: some of their cases, and that a difference is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import common
from benchmarks.common import RESULTS
from benchmarks.trainer import options, report
from benchmarks.trainer.compare import Case, Row, compare, difference_of_logs, largest_difference
from benchmarks.trainer.report import BEGIN, END, PAGE, tables
from benchmarks.trainer.tiny import llama

pytestmark = pytest.mark.fixed_times

OPTIONS = {case.name: case for case in options.cases()}


def test_every_option_is_tried_or_said_not_to_be() -> None:
    untried = {name for names in options.UNTRIED.values() for name in names.split()}

    assert options.tried() | untried == options.every_option()
    assert options.tried() & untried == set()


@pytest.mark.parametrize("name", ["optim=adafactor", "eval_strategy=steps", "save_steps=2", "num_train_epochs=1.5"])
def test_an_option_means_what_it_means_without_harmony(name: str) -> None:
    row = compare(OPTIONS[name])

    assert row.is_equal, row
    assert row.steps > 2
    assert row.ratio <= 1.0


TRL = [("SFT", "packing, bfd"), ("DPO", "padding-free"), ("KTO", "precomputed reference"), ("Reward", "pairs")]
TRL += [("GRPO", "loss sapo"), ("RLOO", "two rewards"), ("ORPO", "pairs"), ("CPO", "loss simpo")]


@pytest.mark.parametrize(("kind", "name"), TRL)
def test_a_trainer_of_trl_trains_as_without_harmony(kind: str, name: str) -> None:
    pytest.importorskip("trl")
    from benchmarks.trl.cases import cases

    row = compare(next(case for case in cases() if (case.kind, case.name) == (kind, name)))

    assert row.is_equal, row
    assert row.ratio <= 1.0


def test_the_error_of_a_trainer_is_its_row() -> None:
    case = OPTIONS["max_steps=5"]

    (kind,) = compare(replace(case, settings={"optim": "lomo"})).error.split(":")[:1]
    assert kind == "stock"  # it is not installed
    row = compare(replace(case, make=without_data))
    assert row.error.startswith("stock: ValueError")


def without_data() -> dict[str, object]:
    return {"model": llama()}


def test_a_difference_of_one_bit_is_found() -> None:
    one, other = llama(), llama()
    assert largest_difference(one, other) == 0.0
    with torch.no_grad():
        weight = other.model.norm.weight
        weight[0] = torch.nextafter(weight[0], weight[0] + 1)
    assert 0.0 < largest_difference(one, other) < 1e-6


def test_logs_are_compared_to_the_bit_for_losses_and_to_rounding_for_metrics() -> None:
    entry = {"loss": 1.0, "reward": 2.0, "train_runtime": 3.0, "step": 1}
    assert difference_of_logs([entry], [{**entry, "reward": 2.000001, "train_runtime": 9.0}]) == ""
    assert "loss of step 1" in difference_of_logs([entry], [{**entry, "loss": 1.0000001}])
    assert "reward of step 1" in difference_of_logs([entry], [{**entry, "reward": 2.1}])
    assert "reward of step 1" in difference_of_logs([entry], [{"loss": 1.0, "step": 1}])
    assert "2 entries" in difference_of_logs([entry, entry], [entry])


def test_an_interrupted_comparison_goes_on_with_what_it_has_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, cases = tmp_path / "page.md", [replace(OPTIONS["max_steps=5"], kind="", name=name) for name in "abc"]
    page.write_text(f"before\n{BEGIN.format(name='some')}\n{END.format(name='some')}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(report, "PAGE", page)
    for module in (report, common):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    outcomes: list[Row | BaseException] = [Row("", "a", steps=1), KeyboardInterrupt()]
    tried: list[str] = []

    def compare(case: Case) -> Row:
        tried.append(case.name)
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(report, "compare", compare)
    monkeypatch.setattr("sys.argv", ["run", "--write"])
    with pytest.raises(KeyboardInterrupt):
        report.run_cases("", "some", cases)
    outcomes += [Row("", "b", steps=2), Row("", "c", steps=3)]
    monkeypatch.setattr("sys.argv", ["run", "--write", "--resume"])
    report.run_cases("", "some", cases)

    assert tried == ["a", "b", "b", "c"]
    rows = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))["rows"]
    assert [row["steps"] for row in rows] == [1, 2, 3]
    assert tables([Row(**row) for row in rows]) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["trainer", "trl"])
def test_the_page_shows_the_results(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN.format(name=name))
    shown, _, _ = rest.partition(END.format(name=name))

    assert shown.strip() == tables([Row(**row) for row in rows])


def test_no_two_cases_have_one_name() -> None:
    pytest.importorskip("trl")
    from benchmarks.trl.cases import cases

    names = [(case.kind, case.name) for case in [*options.cases(), *cases()]]
    assert len(set(names)) == len(names)
