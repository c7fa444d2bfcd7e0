"""The display of a run: a progress bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import math
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LOGGED_LINES = 20


class Display:
    """A context manager around all steps that shows steps, and the position inside a step."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._done = 0
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._total_task = self._progress.add_task("steps", total=steps, note="")
        self._step_task = self._progress.add_task("tasks", total=None, note="")
        self._step_began = time.perf_counter()

    def __enter__(self) -> Display:
        self._progress.start()
        self._step_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def position(self, done: int, total: int, what: object) -> None:
        """Show that `done` of the step's `total` tasks are done, the last of them `what`."""
        self._progress.update(self._step_task, completed=done, total=total, note=str(what))

    def step(self, loss: float, learning_rate: float, gradient_norm: float) -> None:
        """Show the end of a step; its time is counted from the end of the one before."""
        now = time.perf_counter()
        tokens_per_s = self._tokens_per_step / (now - self._step_began)
        self._step_began = now
        self._done += 1
        speed = f"{tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._total_task, completed=self._done, note=f"loss {loss:.4f}  {speed}")
        if not self._console.is_terminal and self._is_logged():
            detail = f"loss {loss:.4f}  lr {learning_rate:.2e}  norm {gradient_norm:.2f}  {speed}"
            print(f"step {self._done:4d}/{self._steps}  {detail}", flush=True)

    def _is_logged(self) -> bool:
        return self._done in (1, self._steps) or self._done % math.ceil(self._steps / _LOGGED_LINES) == 0
