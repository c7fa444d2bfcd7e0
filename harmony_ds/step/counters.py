"""DeepSpeed's counters of one engine, and what its last step did."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from harmony_ds.optim.schedules import ScheduleStep
from harmony_ds.optim.updater import GradientNorm


@dataclass(slots=True)
class Counters:
    """DeepSpeed's counters of one engine: steps, samples, micro-batches; and the result of its last step.

    Attributes:
        global_steps: optimizer steps, skipped ones included.
        global_samples: samples of all processes.
        skipped_steps: optimizer steps that were skipped for inf or NaN in their gradients.
        micro_steps: micro-batches so far, as DeepSpeed counts them: one for each call of `engine.step()`, and as many as a
            group has that is handed over at once, or that `optimizer.step()` uses.
        group_began: `micro_steps` when the open step began.
        backwards: backward passes of the open step.
        frozen_passes: backward passes through a frozen model, which has no steps; each has its own random numbers.
        was_applied: whether the last call of `engine.step()` updated the weights.
        has_overflowed: whether the last optimizer step was skipped.
        norm: the norm of all gradients of the last step, which may not be known yet; None before the first step.
        undoable_schedule_step: the scheduler's last step, while it is not known whether the optimizer step was skipped.
    """

    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0
    group_began: int = 0
    backwards: int = 0
    frozen_passes: int = 0
    was_applied: bool = False
    has_overflowed: bool = False
    norm: Future[GradientNorm] | None = None
    undoable_schedule_step: ScheduleStep | None = None

    @property
    def step_number(self) -> int:
        """The number of the open step, from which its random numbers are drawn."""
        return self.global_steps + self.frozen_passes

    def count_call(self) -> None:
        """Count a call of `engine.step()` before the boundary, which updates nothing."""
        self.micro_steps += 1
        self.was_applied = False

    def begin_step(self, micro_steps: int) -> None:
        """Begin the next step after `micro_steps` calls of `engine.step()`."""
        self.begin_group(micro_steps)
        self.backwards = 0

    def begin_group(self, micro_steps: int) -> None:
        """Begin the next group of the open step after `micro_steps` calls of `engine.step()`."""
        self.micro_steps = self.group_began = micro_steps

    def rewind(self) -> None:
        """Forget the calls of a step that failed, so that the program can hand its micro-batches over again."""
        self.micro_steps = self.group_began
        self.backwards = 0
        self.was_applied = False

    def forget_last_step(self) -> None:
        """Forget the last step and the open one, when weights have been loaded in their place."""
        self.norm = self.undoable_schedule_step = None
        self.was_applied = self.has_overflowed = False
        self.rewind()
