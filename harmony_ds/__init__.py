"""harmony_ds: DeepSpeed's API over Harmony's schedule, for models much larger than the device's memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harmony_ds.engine import HarmonyEngine, initialize
    from harmony_ds.errors import (
        BatchError,
        CheckpointError,
        CompilerMissingError,
        ConfigError,
        DeviceOutOfMemoryError,
        DoesNotFitError,
        EngineFailedError,
        HarmonyError,
        LossScaleError,
        ModelError,
        OptimizerError,
        ParameterOutsideLayerError,
        ProfileError,
    )
    from harmony_ds.reports import MemoryReport, PlanReport, SwapReport
    from harmony_ds.runtime.random_streams import micro_batch_seed
    from harmony_ds.scheduler.plan import Plan, Task, TaskKind

__version__ = "0.1.0"

_HOMES = {
    "HarmonyEngine": "engine",
    "MemoryReport": "reports",
    "Plan": "scheduler.plan",
    "PlanReport": "reports",
    "SwapReport": "reports",
    "Task": "scheduler.plan",
    "TaskKind": "scheduler.plan",
    "initialize": "engine",
    "micro_batch_seed": "runtime.random_streams",
}

__all__ = [
    "BatchError",
    "CheckpointError",
    "CompilerMissingError",
    "ConfigError",
    "DeviceOutOfMemoryError",
    "DoesNotFitError",
    "EngineFailedError",
    "HarmonyEngine",
    "HarmonyError",
    "LossScaleError",
    "MemoryReport",
    "ModelError",
    "OptimizerError",
    "ParameterOutsideLayerError",
    "Plan",
    "PlanReport",
    "ProfileError",
    "SwapReport",
    "Task",
    "TaskKind",
    "__version__",
    "initialize",
    "micro_batch_seed",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: importing the package stays quick.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
