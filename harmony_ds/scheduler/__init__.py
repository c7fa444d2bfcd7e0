"""From measured costs to a `Plan`: packs, tasks, memory, validation. Never imports torch."""

from harmony_ds.scheduler.choose import Request, make_plan
from harmony_ds.scheduler.compose import Group, compose_forward, compose_step
from harmony_ds.scheduler.grid import format_plan
from harmony_ds.scheduler.memory import MemoryProfile, walk_memory
from harmony_ds.scheduler.packing import ElementBytes, Packer
from harmony_ds.scheduler.partition import uniform_bounds
from harmony_ds.scheduler.plan import ALL_PACKS, Pack, Packing, Plan, Policy, Task, TaskKind
from harmony_ds.scheduler.search import Choice
from harmony_ds.scheduler.simulate import Prediction
from harmony_ds.scheduler.validate import PlanError, validate

__all__ = [
    "ALL_PACKS",
    "Choice",
    "ElementBytes",
    "Group",
    "MemoryProfile",
    "Pack",
    "Packer",
    "Packing",
    "Plan",
    "PlanError",
    "Policy",
    "Prediction",
    "Request",
    "Task",
    "TaskKind",
    "compose_forward",
    "compose_step",
    "format_plan",
    "make_plan",
    "uniform_bounds",
    "validate",
    "walk_memory",
]
