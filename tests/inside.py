"""Private parts of an engine that tests read; only this file knows their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harmony_ds import HarmonyEngine
from harmony_ds.offload.disk import DiskFile
from harmony_ds.optim.updater import Updater
from harmony_ds.reporting.reporter import Reporter
from harmony_ds.scheduler.sizes import WHOLE
from harmony_ds.step.engine_state import EngineState
from harmony_ds.step.loss_scaling import LossScaler
from harmony_ds.step.planner import Planner


def assembly_of(engine: HarmonyEngine) -> EngineState:
    """Return its parts."""
    return engine._state


def reporter_of(engine: HarmonyEngine) -> Reporter:
    """Return what makes its reports, which does not keep the engine alive."""
    return engine._reporter


def planner_of(engine: HarmonyEngine) -> Planner:
    """Return its planner, with measurements and plans."""
    return engine._state.planner


def take_from_host(engine: HarmonyEngine) -> None:
    """Let the engine plan from now on as where nothing fits but with all that is between layers on the host."""
    cuts = planner_of(engine).cuts
    cuts.set(replace(cuts.now, rows=replace(cuts.now.rows or WHOLE, from_host=True)))


def updater_of(engine: HarmonyEngine) -> Updater:
    """Return its thread of updates."""
    return engine._state.runtime.updater


def has_pending(updater: Updater, needed_at: int) -> bool:
    """Return whether an update of what is needed there first is queued or running, and has not failed."""
    return updater.failure is None and updater._pending[needed_at] > 0


def scaler_of(engine: HarmonyEngine) -> LossScaler:
    """Return its loss scaler."""
    return engine._steps.scaler


def moves_of(file: DiskFile) -> Callable[[], tuple[int, int]]:
    """Count from now on; what is returned returns bytes read and written since it was called before."""
    moved: list[tuple[Any, int]] = []  # several threads add to it
    move = file._move

    def moving(call: Any, there: Any, here: Any) -> None:
        move(call, there, here)
        moved.append((call, here.nbytes))

    def since() -> tuple[int, int]:
        seen, moved[:] = moved[:], []
        read, written = (sum(n for one, n in seen if one is call) for call in (os.preadv, os.pwritev))
        return read, written

    file._move = moving  # type: ignore[method-assign]
    return since
