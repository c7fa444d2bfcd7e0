"""Private parts of an engine that tests read; only this file knows their names."""

from __future__ import annotations

from harmony_ds import HarmonyEngine
from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.offload.updater import Updater
from harmony_ds.stepping.planner import Planner


def assembly_of(engine: HarmonyEngine) -> Assembly:
    """Return its parts."""
    return engine._assembly


def planner_of(engine: HarmonyEngine) -> Planner:
    """Return its planner, with measurements and plans."""
    return engine._assembly.runner.planner


def updater_of(engine: HarmonyEngine) -> Updater:
    """Return its thread of updates."""
    return engine._assembly.parts.updater


def scaler_of(engine: HarmonyEngine) -> LossScaler:
    """Return its loss scaler."""
    return engine._training.scaler
