"""One model's training: what the parts of its engine share, and how far it has come."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

from torch import nn

from harmony_ds.checkpoint import Progress
from harmony_ds.engine.assembly import Assembly
from harmony_ds.engine.loss_scaling import LossScaler
from harmony_ds.engine.one_time_warnings import NOT_FINITE, SKIPPED, OneTimeWarnings
from harmony_ds.engine.schedules import build_scheduler
from harmony_ds.engine.settings import Settings
from harmony_ds.engine.training_data import TrainingData
from harmony_ds.engine.zero_optimizer import ZeroOptimizer, note_overflow
from harmony_ds.errors import UsageError
from harmony_ds.offload.optimizer_chain import parts_of
from harmony_ds.offload.updater import GradientNorm
from harmony_ds.runtime.updates import Outcome


class Training:
    """A model, its optimizer and schedule, DeepSpeed's counters, and the result of the last step.

    Attributes:
        optimizer: the optimizer under DeepSpeed's names; None without one.
        lr_scheduler: the user's, else the ds_config's, else None.
        micro_steps: calls of `step()`, at a boundary or not.
        group_began: `micro_steps` when the group that is queued now began.
    """

    def __init__(
        self, model: nn.Module, assembly: Assembly, settings: Settings, data: TrainingData, lr_scheduler: Any
    ) -> None:
        """`lr_scheduler`: the user's, or a callable that makes it from the optimizer."""
        self.model, self.assembly, self.settings, self.data = model, assembly, settings, data
        self.scaler = LossScaler(settings.now.loss_scale)
        optimizer = assembly.optimizer
        self.optimizer: Any = None if optimizer is None else ZeroOptimizer(optimizer, settings, self.scaler.own)
        self.lr_scheduler = build_scheduler(settings.now.scheduler, lr_scheduler, optimizer)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.group_began = 0
        self._backwards = 0  # backward passes of the group that is queued now
        self._norm: Future[GradientNorm] | None = None
        self._applied = False
        self.warnings = OneTimeWarnings()

    # ---- optimizer

    def require_optimizer(self, what: str) -> None:
        """Raise UsageError if there is no optimizer for `what`."""
        if self.optimizer is None:
            raise UsageError(
                f"must provide optimizer during init in order to use {what}: name one in the ds_config or pass one"
            )

    def check_can_propagate(self) -> None:
        """Raise UsageError if parameters would get gradients, and there is no optimizer for them.

        A frozen model needs none: gradients go through it to what its inputs are made of.
        """
        if self.optimizer is None and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError(
                "must provide optimizer during init in order to use backward: name one in the ds_config or pass one, or "
                "freeze the whole model (requires_grad_(False)) before initialize if gradients are to go through it alone. "
                "Gradients are gathered for the optimizer's parameters alone."
            )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        return self._of_groups("momentum" if self.settings.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        """Return the "type" of each parameter group."""
        return self._of_groups("type")

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    # ---- the last step

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the weights: not without a boundary, or with an overflow."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of all gradients of the last step, before clipping, unscaled; None before the first."""
        return None if self._norm is None else self._norm.result().total

    def finish_step(self, outcome: Outcome, schedule: dict[str, Any] | None) -> None:
        """Count an optimizer step, and step the scheduler with `schedule` (None: the caller does) and the loss scale."""
        self._norm, self._applied = outcome.norm, not outcome.overflow
        self._warn_if_not_finite(outcome)
        if outcome.overflow:
            self.skipped_steps += 1
        else:
            assert self.assembly.optimizer is not None
            for optimizer in (self.optimizer, *parts_of(self.assembly.optimizer)):
                optimizer._opt_called = True  # torch's schedulers warn without it
            if schedule is not None and self.lr_scheduler is not None:
                self.lr_scheduler.step(**schedule)
        self.scaler.update(outcome.overflow)
        self.global_steps += 1
        if self.settings.now.values["managed_gradient_accumulation"]:
            self.global_samples += self.settings.train_batch_size()
        else:
            self.global_samples += self._backwards * self.settings.train_micro_batch_size_per_gpu()
        note_overflow(self.optimizer, outcome.overflow)

    def _warn_if_not_finite(self, outcome: Outcome) -> None:
        warnings, step = self.warnings, self.global_steps + 1

        def check(norm: Future[GradientNorm]) -> None:
            if not norm.cancelled() and norm.exception() is None and not math.isfinite(norm.result().total):
                warnings.log(NOT_FINITE, step, norm.result().total)

        if outcome.overflow:
            warnings.log(SKIPPED, step)
        elif outcome.norm is not None:  # without clipping it is known later
            outcome.norm.add_done_callback(check)

    # ---- counters

    def count_call(self) -> None:
        """Count a call of `step()` within a group, which updates nothing."""
        self.micro_steps, self._applied = self.micro_steps + 1, False

    def count_backwards(self, count: int = 1) -> None:
        """Count backward passes of the group that is queued now."""
        self._backwards += count

    def rewind(self) -> None:
        """Forget the calls of a group that has failed, so that the loop can hand it over again."""
        self.micro_steps, self._backwards, self._applied = self.group_began, 0, False

    def begin_group(self, micro_steps: int) -> None:
        """Begin the next group after `micro_steps` calls of `step()`."""
        self.micro_steps, self.group_began, self._backwards = micro_steps, micro_steps, 0

    def resume(self, progress: Progress | None) -> None:
        """Go on from a checkpoint's `progress` (None: from its weights alone, counting on)."""
        self._norm, self._applied = None, False
        if self.optimizer is not None:
            note_overflow(self.optimizer, False)
        if progress is None:
            self.rewind()
            return
        self.global_steps = progress.global_steps
        self.global_samples = progress.global_samples
        self.skipped_steps = progress.skipped_steps
        self.begin_group(progress.micro_steps_with(self.settings.gradient_accumulation_steps()))
        self.scaler.load_state_dict(progress.loss_scaler)
