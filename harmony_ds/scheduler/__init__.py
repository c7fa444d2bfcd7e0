"""From measured costs to a `Plan`: packs, tasks, memory, validation. Never imports torch."""

from harmony_ds.scheduler.choose import Request, choose_plan, make_plan
from harmony_ds.scheduler.compose import Group, Policy, compose_forward, compose_step
from harmony_ds.scheduler.memory import MemoryProfile, walk_memory
from harmony_ds.scheduler.packing import ElementBytes, pack_uniformly
from harmony_ds.scheduler.plan import Pack, Plan, Task, TaskKind
from harmony_ds.scheduler.validate import PlanError, validate

__all__ = [
    "ElementBytes",
    "Group",
    "MemoryProfile",
    "Pack",
    "Plan",
    "PlanError",
    "Policy",
    "Request",
    "Task",
    "TaskKind",
    "choose_plan",
    "compose_forward",
    "compose_step",
    "make_plan",
    "pack_uniformly",
    "validate",
    "walk_memory",
]
