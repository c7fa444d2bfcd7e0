"""What is said while a model is measured: to whom, and how often."""

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harmony_ds.profiling import progress
from harmony_ds.profiling.progress import Progress

REQUEST: Any = None  # which layer is called is of no interest


def handle_no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the handlers of pytest away, which it adds before each test, as if the program had none."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_to_standard_error_if_the_program_handles_no_logs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle_no_logs(monkeypatch)
    with Progress(is_on=True).measuring(2):
        pass
    assert capsys.readouterr() == ("", "[harmony_ds] measuring 2 layers with one micro-batch\n")


def test_warnings_say_whose_they_are_if_the_program_handles_no_logs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle_no_logs(monkeypatch)
    logging.getLogger("harmony_ds.step.call_cuts").warning("layer %s runs whole", "head")
    assert capsys.readouterr() == ("", "[harmony_ds] layer head runs whole\n")


@pytest.mark.parametrize("name", ["", "harmony_ds"])
def test_lines_go_to_the_programs_own_handler_alone(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle_no_logs(monkeypatch)
    written = io.StringIO()
    monkeypatch.setattr(logging.getLogger(name), "handlers", [logging.StreamHandler(written)])
    with Progress(is_on=True).measuring(1):
        pass
    assert written.getvalue() == "measuring 1 layer with one micro-batch\n"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_a_level_that_the_program_has_set_is_kept(level: int, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("harmony_ds").setLevel(level)
    with Progress(is_on=True).measuring(1):
        pass
    assert caplog.records == []


def test_a_long_measurement_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 3))  # a layer call takes three seconds
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    told = Progress(is_on=True)
    with told.measuring(8):
        for _ in range(8):
            told.call_reached(REQUEST)
    assert [record.getMessage() for record in caplog.records] == [
        "measuring 8 layers with one micro-batch",
        "measuring: 4 layer calls so far",
        "measuring: 8 layer calls so far",
    ]


def test_a_terminal_counts_layer_calls_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    handle_no_logs(monkeypatch)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    told = Progress(is_on=True)
    with told.measuring(2):
        told.call_reached(REQUEST)
    assert "so far" in terminal.getvalue()
    assert sys.stderr is terminal


def test_nothing_is_said_if_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    handle_no_logs(monkeypatch)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    told = Progress(is_on=False)
    with told.measuring(2), told.searching(2):
        told.call_reached(REQUEST)
    told.first_step_done(1.0, 2.0, "")
    assert terminal.getvalue() == ""


def test_a_plan_that_replaces_the_first_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Progress(is_on=True)
    for peak_bytes in (1024, 1024, 2048, 2048):
        packing, policy = SimpleNamespace(backward=(0, 1)), SimpleNamespace(joined_count=1)
        plan = SimpleNamespace(peak_bytes=peak_bytes, packing=packing, micro_batches=4, policy=policy)
        choice: Any = SimpleNamespace(plan=plan, prediction=SimpleNamespace(step_ms=1.0))
        told.planned(choice, 4, 0, None)
    assert caplog.messages == [
        "2 packs, 1.0 KiB of device memory, 1.0 ms a step predicted (4 micro-batches); measured 4 layer calls in 0.0 ms, "
        "searched in 0.0 ms",
        "planned anew, for a micro-batch unlike those before: 2 packs, 2.0 KiB of device memory, 1.0 ms a step predicted "
        "(4 micro-batches)",
    ]
