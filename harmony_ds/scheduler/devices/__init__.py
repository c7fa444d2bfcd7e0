"""Harmony on several devices: task graphs, byte volumes, simulated times and the search. Never imports torch.

Profile -> PackCosts ;  Setup, Schedule -> compose -> TaskGraph -> count_volumes, lower -> jobs -> simulate
Question -> search -> Answer
"""

from harmony_ds.scheduler.devices.compose import compose, split_samples
from harmony_ds.scheduler.devices.graph import (
    Content,
    DeviceTask,
    Medium,
    Mode,
    Port,
    Schedule,
    Setup,
    TaskGraph,
    TaskKind,
)
from harmony_ds.scheduler.devices.lowering import lower
from harmony_ds.scheduler.devices.machine import HARMONY_VLDB22, Machine
from harmony_ds.scheduler.devices.profile import LayerCost, PackCosts, PassCosts, Profile
from harmony_ds.scheduler.devices.search import Answer, Effort, Question, search
from harmony_ds.scheduler.devices.simulate import Simulated, simulate
from harmony_ds.scheduler.devices.volumes import Volumes, count_volumes

__all__ = [
    "HARMONY_VLDB22",
    "Answer",
    "Content",
    "DeviceTask",
    "Effort",
    "LayerCost",
    "Machine",
    "Medium",
    "Mode",
    "PackCosts",
    "PassCosts",
    "Port",
    "Profile",
    "Question",
    "Schedule",
    "Setup",
    "Simulated",
    "TaskGraph",
    "TaskKind",
    "Volumes",
    "compose",
    "count_volumes",
    "lower",
    "search",
    "simulate",
    "split_samples",
]
