"""The paper's planner (Harmony, VLDB'22): task graphs, byte volumes, simulated times and the search, for any number of
devices. A reproduction: the library plans with `harmony_ds.scheduler`, of which this uses the event kernel and the best
cuts.

Profile -> PackCosts ;  Setup, Schedule -> compose -> TaskGraph -> count_volumes, lower -> jobs -> simulate
Question -> search -> Answer
"""

from benchmarks.vldb22.planner.compose import compose, split_samples
from benchmarks.vldb22.planner.graph import (
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
from benchmarks.vldb22.planner.lowering import lower
from benchmarks.vldb22.planner.machine import HARMONY_VLDB22, Machine
from benchmarks.vldb22.planner.profile import LayerCost, PackCosts, PassCosts, Profile
from benchmarks.vldb22.planner.search import Answer, Effort, Question, search
from benchmarks.vldb22.planner.simulate import Simulated, simulate
from benchmarks.vldb22.planner.volumes import Volumes, count_volumes

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
