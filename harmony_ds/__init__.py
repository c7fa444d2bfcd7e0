"""harmony_ds: DeepSpeed's API over Harmony's schedule, for models much larger than the device's memory."""

# ruff: noqa: F403, PLE0604 - what is imported here is exported

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harmony_ds import utils as utils
    from harmony_ds import zero as zero
    from harmony_ds.distributed.process_group import init_distributed as init_distributed
    from harmony_ds.engine import HarmonyEngine as HarmonyEngine
    from harmony_ds.engine import add_config_arguments as add_config_arguments
    from harmony_ds.engine import initialize as initialize
    from harmony_ds.errors import *
    from harmony_ds.integrations.as_deepspeed import install_as_deepspeed as install_as_deepspeed
    from harmony_ds.model.random_streams import micro_batch_seed as micro_batch_seed
    from harmony_ds.reporting.reports import MemoryReport as MemoryReport
    from harmony_ds.reporting.reports import PlanReport as PlanReport
    from harmony_ds.reporting.reports import SwapReport as SwapReport
    from harmony_ds.scheduler.grid import format_plan as format_plan
    from harmony_ds.scheduler.plan import Plan as Plan
    from harmony_ds.scheduler.plan import Task as Task
    from harmony_ds.scheduler.plan import TaskKind as TaskKind
    from harmony_ds.scheduler.trace import ExecutedStep as ExecutedStep

__version__ = "0.2.0"

_NAMES = {
    "model.random_streams": "micro_batch_seed",
    "engine": "HarmonyEngine add_config_arguments initialize",
    "errors": "BatchError CheckpointError ConfigError DoesNotFitError EngineFailedError HarmonyError HostMemoryError "
    "ModelError OptimizerError PeerFailedError ProfileError UnsupportedError UsageError",
    "integrations.as_deepspeed": "install_as_deepspeed",
    "distributed.process_group": "init_distributed",
    "reporting.reports": "MemoryReport PlanReport SwapReport",
    "scheduler.grid": "format_plan",
    "scheduler.plan": "Plan Task TaskKind",
    "scheduler.trace": "ExecutedStep",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", "utils", "zero", *_HOMES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Loaded when asked for: importing the package stays quick.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
