"""What the engine says of itself while it measures a model and searches for a plan, and when its first step is done.

It is said once for each engine (see `config/status_log.py`). In a terminal, a line that is overwritten counts layer calls
meanwhile, if rich is installed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from harmony_ds.config.status_log import STATUS, say
from harmony_ds.model.intercept import Request
from harmony_ds.runtime.streaming import LayerCallObserver
from harmony_ds.scheduler.grid import amount, counted, duration
from harmony_ds.scheduler.search import Choice

_LINE_EVERY_S = 10.0
_SHOWN_EVERY_S = 0.5


class Progress(LayerCallObserver):
    """Tells what one engine measures, searches and predicts. Nothing here is called in a step."""

    def __init__(self, is_on: bool) -> None:
        """`is_on`: whether anything is said: the ds_config may switch it off, and one process speaks for all."""
        self._is_on = is_on
        self._said: set[str] = set()
        self._has_planned = False
        self._calls = 0  # of layers, while the model is measured
        self._next_line_s = 0.0
        self._next_shown_s = 0.0
        self._live: Any = None  # rich's line, while it is shown
        self._measured_s = 0.0
        self._searched_s = 0.0

    # ---- while it is busy

    @contextmanager
    def measuring(self, layers: int) -> Iterator[None]:
        """Tell that the model's layers are measured in this context."""
        begin = time.monotonic()
        self._next_line_s = begin + _LINE_EVERY_S
        self._say_once("measuring", f"measuring {counted(layers, 'layer')} with one micro-batch")
        try:
            with self._line():
                yield
        finally:
            self._measured_s += time.monotonic() - begin

    def call_reached(self, request: Request) -> None:
        """Count a layer call that is measured."""
        self._calls += 1
        now = time.monotonic()
        if now >= self._next_line_s:
            self._next_line_s = now + _LINE_EVERY_S
            self._say(f"measuring: {counted(self._calls, 'layer call')} so far")
        if self._live is not None and now >= self._next_shown_s:
            self._next_shown_s = now + _SHOWN_EVERY_S
            self._live.update(f"measuring: {counted(self._calls, 'layer call')} so far", refresh=True)

    @contextmanager
    def searching(self, calls: int) -> Iterator[None]:
        """Tell that a plan for so many layer calls is searched for in this context."""
        begin = time.monotonic()
        self._say_once("searching", f"searching for a plan for {counted(calls, 'layer call')}")
        try:
            yield
        finally:
            self._searched_s += time.monotonic() - begin

    # ---- what came of it

    def planned(self, choice: Choice, calls: int, beside_bytes: int, budget_bytes: int | None) -> None:
        """Tell of the engine's first plan, and of each one that replaces it and differs in packs or memory.

        Args:
            calls: of layers in a micro-batch.
            beside_bytes: of the budget, but of no plan.
            budget_bytes: of device memory; None: there is no bound.
        """
        plan, used_bytes = choice.plan, choice.plan.peak_bytes + beside_bytes
        packs = counted(len(plan.packing.backward), "pack")
        micro_batches = counted(plan.micro_batches * plan.policy.joined_count, "micro-batch")
        memory = f"{amount(used_bytes)} of device memory"
        if budget_bytes is not None:
            memory = f"{amount(used_bytes)} of {amount(budget_bytes)} device memory"
        plan_text = f"{packs}, {memory}"
        text = f"{plan_text}, {duration(choice.prediction.step_ms)} a step predicted ({micro_batches})"
        if not self._has_planned:
            self._has_planned = True
            text += (
                f"; measured {counted(calls, 'layer call')} in {duration(self._measured_s * 1e3)}, searched in "
                f"{duration(self._searched_s * 1e3)}"
            )
        else:
            text = f"planned anew, for a micro-batch unlike those before: {text}"
        self._say_once(plan_text, text)

    def first_step_done(self, step_ms: float, predicted_ms: float, deviation: str) -> None:
        """Tell how long the engine's first step took.

        Args:
            deviation: how it differed from what was predicted; "": not at all.
        """
        differs = f"; not as planned: {deviation}" if deviation else ""
        self._say_once(
            "first step",
            f"first step done in {duration(step_ms)}, {step_ms / predicted_ms:.1f} x the prediction (it checks the model, "
            f"and touches memory for the first time{differs}); engine.plan_report() compares later steps",
        )

    # ---- how it is said

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(text)

    def _say(self, text: str) -> None:
        if self._is_on:
            say(text)

    @contextmanager
    def _line(self) -> Iterator[None]:
        """Show a line that is overwritten as layer calls are counted, in a terminal, with rich."""
        shows = self._is_on and self._live is None and sys.stderr.isatty() and STATUS.isEnabledFor(logging.INFO)
        if not shows or find_spec("rich") is None:
            yield
            return
        from rich.console import Console
        from rich.live import Live

        # A thread that redraws would take time from what is measured.
        with Live("", console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
