"""One model's training: what all parts of its engine know of it, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from harmony_ds.checkpoint import Progress
from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.engine.optimizer import TrainedBy
from harmony_ds.engine.settings import Settings
from harmony_ds.engine.training_data import TrainingData


@dataclass
class Counts:
    """DeepSpeed's counters.

    Attributes:
        micro_steps: calls of `step()`, at a boundary or not.
        group_began: `micro_steps` when the group that is queued now began.
        backwards: backward passes of the group that is queued now.
    """

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    group_began: int = 0
    backwards: int = 0

    def rewind(self) -> None:
        """A group has failed: the loop may hand it over again."""
        self.micro_steps = self.group_began

    def begin_group(self, micro_steps: int) -> None:
        """The next group begins behind `micro_steps`."""
        self.micro_steps = self.group_began = micro_steps

    def take_backwards(self) -> int:
        """How many there were, from none on."""
        backwards, self.backwards = self.backwards, 0
        return backwards

    def go_on_from(self, progress: Progress, accumulation: int) -> None:
        """Those of a checkpoint, in groups of `accumulation` micro-batches from now on."""
        self.global_steps = progress.global_steps
        self.global_samples = progress.global_samples
        self.skipped_steps = progress.skipped_steps
        self.begin_group(progress.micro_steps_with(accumulation))


@dataclass(frozen=True, slots=True)
class Training:
    """What an engine's parts are made over."""

    model: nn.Module
    assembly: Assembly
    settings: Settings
    counts: Counts
    scaler: LossScaler
    trained_by: TrainedBy
    data: TrainingData
