"""What tests look at inside an engine that it does not say itself: the one place that knows the names of its parts."""

from __future__ import annotations

from harmony_ds import HarmonyEngine
from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.offload.updater import Updater
from harmony_ds.stepping.planner import Planner


def assembly_of(engine: HarmonyEngine) -> Assembly:
    """What it is made of."""
    return engine._assembly


def planner_of(engine: HarmonyEngine) -> Planner:
    """What it has measured, and planned."""
    return engine._assembly.runner.planner


def updater_of(engine: HarmonyEngine) -> Updater:
    """Its thread of updates."""
    updater = engine._assembly.parts.updater
    assert updater is not None
    return updater


def scaler_of(engine: HarmonyEngine) -> LossScaler:
    """How its loss scale has come about."""
    return engine._training.scaler
