"""harmony_ds: DeepSpeed's API over Harmony's schedule, for models much larger than the device's memory."""

# ruff: noqa: F403, F405 - errors are named once, in __all__

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harmony_ds import utils, zero
    from harmony_ds.calls.random_streams import micro_batch_seed
    from harmony_ds.checkpoint.weights import load_weights
    from harmony_ds.engine import HarmonyEngine, initialize
    from harmony_ds.engine.reports import MemoryReport, PlanReport, SwapReport
    from harmony_ds.engine.start import add_config_arguments
    from harmony_ds.errors import *
    from harmony_ds.integrations.as_deepspeed import install_as_deepspeed
    from harmony_ds.parallel.distributed import init_distributed
    from harmony_ds.scheduler.grid import format_plan
    from harmony_ds.scheduler.plan import Plan, Task, TaskKind
    from harmony_ds.scheduler.trace import ExecutedStep

__version__ = "0.2.0"

_MODULES = (
    "errors", "engine", "engine.start", "engine.reports", "scheduler.plan", "scheduler.grid", "scheduler.trace",
    "parallel.distributed", "calls.random_streams", "checkpoint.weights", "integrations.as_deepspeed",
)  # fmt: skip

__all__ = [
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "DoesNotFitError",
    "EngineFailedError",
    "ExecutedStep",
    "HarmonyEngine",
    "HarmonyError",
    "HostMemoryError",
    "MemoryReport",
    "ModelError",
    "OptimizerError",
    "PeerFailedError",
    "Plan",
    "PlanReport",
    "ProfileError",
    "SwapReport",
    "Task",
    "TaskKind",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "add_config_arguments",
    "format_plan",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
    "load_weights",
    "micro_batch_seed",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: importing the package stays quick.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("utils", "zero"):
        return import_module(f"{__name__}.{name}")
    homes = (import_module(f"{__name__}.{home}") for home in _MODULES)
    return next(vars(home)[name] for home in homes if name in vars(home))
